"""The stream of training rows: its order, where it resumes, and what is left out."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tiny import MASK

from d3d_ray.records import Finish
from d3d_ray.training.answers_store import AnsweredRow, AnswersStore, to_table
from d3d_ray.training.config import DataConfig
from d3d_ray.training.data import (
    Position,
    RowStream,
    is_heldout,
    is_looping,
    read_heldout,
)
from d3d_ray.training.layout import BlockShape, Document

SHAPE = BlockShape(block_size=4, label_shift=True, mask_token_id=MASK)


def make_records(first: int, count: int) -> list[dict[str, object]]:
    return [
        {
            "id": f"d/{i}",
            "dataset": "d",
            "prompt_ids": [10 + i, 11, 12],
            "answer_ids": list(range(100 + i, 105 + i + i % 7)),
        }
        for i in range(first, first + count)
    ]


def write(file: Path, records: Sequence[dict[str, object]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode()))
    elif file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    else:
        file.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(3):
        write(tmp_path / f"{shard}.jsonl.gz", make_records(10 * shard, 10))
    return tmp_path


def make_config(folder: Path, **changes: object) -> DataConfig:
    settings = {"files": f"{folder}/*", "row_tokens": 30, "num_anchors": 6, "heldout_share": 0.0}
    return DataConfig(**{**settings, "shards_in_memory": 2, **changes})  # type: ignore[arg-type]


def make_stream(config: DataConfig, seed: int = 0, **options: object) -> RowStream:
    return RowStream(config, SHAPE, seed=seed, **options)  # type: ignore[arg-type]


def take(stream: RowStream, count: int) -> list[list[Document]]:
    return [stream.take() for _ in range(count)]


def first_epoch(stream: RowStream) -> list[Document]:
    documents: list[Document] = []
    while stream.position.epoch == 0 and len(documents) < 30:
        documents += stream.take()
    return documents


def test_every_document_comes_once_an_epoch_in_an_order_of_its_own(folder: Path) -> None:
    config = make_config(folder)
    stream = make_stream(config)
    one, two = first_epoch(stream), first_epoch(make_stream(config, seed=1))
    expected = {(10 + i, 11, 12) for i in range(30)}
    for documents in (one, two):
        assert {d.prompt for d in documents[:30]} == expected
    assert [d.prompt for d in one[:30]] != [d.prompt for d in two[:30]]
    assert first_epoch(make_stream(config)) == one
    later = [d.prompt for row in take(stream, 20) for d in row][:20]
    assert later != [d.prompt for d in one[:20]]


@pytest.mark.parametrize("done", [1, 5, 17, 40])
def test_a_stream_resumes_at_the_row_where_it_stopped(folder: Path, done: int) -> None:
    config = make_config(folder)
    stream = make_stream(config)
    take(stream, done)
    position = Position(**json.loads(json.dumps(asdict(stream.position))))
    again = make_stream(config, position=position)
    for _ in range(25):
        number = stream.position.row
        assert again.position == stream.position
        ours, theirs = stream.take(), again.take()
        assert ours == theirs
        rows = [s.lay_out(ours, number) for s in (stream, again)]
        assert torch.equal(rows[0].token_ids, rows[1].token_ids)
        assert torch.equal(rows[0].end_column, rows[1].end_column)


def test_rows_are_filled_and_never_over_the_limit(folder: Path) -> None:
    rows = take(make_stream(make_config(folder)), 30)
    sizes = [sum(len(d.prompt) + len(d.answer) for d in row) for row in rows]
    assert max(sizes) <= 30 and sum(sizes) / len(sizes) > 20


def test_anchors_differ_from_row_to_row(folder: Path) -> None:
    stream = make_stream(make_config(folder))
    documents = stream.take()
    one, two = stream.lay_out(documents, 0), stream.lay_out(documents, 1)
    assert one.end_column.tolist() != two.end_column.tolist()


def test_long_answers_are_cut_and_long_prompts_left_out(tmp_path: Path) -> None:
    records = [
        {"id": "a", "prompt_ids": [5, 6], "answer_ids": list(range(100, 160))},
        {"id": "b", "prompt_ids": list(range(100, 140)), "answer_ids": [7, 8]},
        {"id": "c", "prompt_ids": [5], "answer_ids": []},
    ]
    write(tmp_path / "a.jsonl", records)
    stream = make_stream(make_config(tmp_path))
    assert take(stream, 2) == [[Document((5, 6), tuple(range(100, 128)))]] * 2
    assert stream.counts["too long"] >= 1 and stream.counts["empty"] >= 1


def test_looping_answers_are_left_out_when_asked(tmp_path: Path) -> None:
    loop = [20, 21, 22, 23] * 12
    assert is_looping(loop)
    assert not is_looping(list(range(60))) and not is_looping([1, 2, 3])
    records = [{"id": "a", "prompt_ids": [5], "answer_ids": loop}, *make_records(0, 2)]
    write(tmp_path / "a.jsonl", records)
    kept = {
        has_filter: {
            d.prompt
            for row in take(make_stream(make_config(tmp_path, loop_filter=has_filter)), 12)
            for d in row
        }
        for has_filter in (True, False)
    }
    assert kept[False] - kept[True] == {(5,)}


def test_documents_held_out_are_never_trained_on(folder: Path) -> None:
    config = make_config(folder, heldout_share=0.3)
    heldout = {d.prompt for d in read_heldout(config, MASK, 30)}
    trained = {d.prompt for row in take(make_stream(config), 60) for d in row}
    assert 3 < len(heldout) < 18
    assert heldout | trained == {(10 + i, 11, 12) for i in range(30)}
    assert not heldout & trained
    assert [is_heldout(f"d/{i}", 0.0) for i in range(30)] == [False] * 30
    with pytest.raises(ValueError, match="no document is held out"):
        read_heldout(make_config(folder), MASK, 5)


def test_parquet_gives_the_same_rows_as_json(tmp_path: Path) -> None:
    records = [r for shard in range(3) for r in make_records(10 * shard, 10)]
    write(tmp_path / "x.jsonl", records)
    write(tmp_path / "y.parquet", records)
    one = make_stream(make_config(tmp_path, files=str(tmp_path / "x.jsonl")))
    two = make_stream(make_config(tmp_path, files=str(tmp_path / "y.parquet")))
    assert take(one, 12) == take(two, 12)


def test_soft_targets_are_read_and_cut_with_their_answer(tmp_path: Path) -> None:
    records = [
        {
            **record,
            "top_ids": [[t, t + 1] for t in record["answer_ids"]],  # type: ignore[attr-defined]
            "top_log_probs": [[-0.5, -1.5] for _ in record["answer_ids"]],  # type: ignore[attr-defined]
        }
        for record in make_records(0, 4)
    ]
    write(tmp_path / "a.parquet", records)
    stream = make_stream(make_config(tmp_path, row_tokens=7), with_soft_targets=True)
    (document,) = stream.take()
    assert document.top_ids is not None and document.top_log_probs is not None
    assert len(document.answer) == 4
    assert document.top_ids.tolist() == [[t, t + 1] for t in document.answer]
    assert document.top_log_probs.tolist() == [[-0.5, -1.5]] * 4


def test_soft_targets_are_read_from_shards_of_answers(tmp_path: Path) -> None:
    top_ids = np.array([[5, 9], [6, 8], [7, 1]], dtype=np.int32)
    row = AnsweredRow(
        id="a",
        dataset="d",
        prompt_ids=(4, 5),
        answer_ids=(5, 6, 7),
        finish=Finish.LENGTH,
        top_ids=top_ids,
        top_log_probs=np.array([[-0.5, -1.0]] * 3, dtype=np.float32),
    )
    with AnswersStore(tmp_path, {}) as store:
        store.write(to_table([row]))
    stream = make_stream(make_config(tmp_path), with_soft_targets=True)
    document = stream.take()[0]
    assert document.top_ids is not None and document.top_log_probs is not None
    assert document.top_ids.tolist() == top_ids.tolist()
    assert document.top_log_probs.tolist() == [[-0.5, -1.0]] * 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "a", "prompt_ids": [1]}', "a.jsonl:1 lacks 'answer_ids'"),
        ("[1]", "a.jsonl:1 is not a JSON object"),
        ("{", "a.jsonl:1 is not a JSON object"),
        (f'{{"id": "a", "prompt_ids": [1], "answer_ids": [{MASK}]}}', "the mask token 3"),
        ('{"id": "a", "prompt_ids": [1], "answer_ids": []}', "no document to train on"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        make_stream(make_config(tmp_path)).take()


def test_missing_files_and_soft_targets_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.jsonl.* matches '/nowhere/\*'"):
        make_stream(make_config(folder, files="/nowhere/*"))
    with pytest.raises(ValueError, match="lacks 'top_ids'"):
        make_stream(make_config(folder), with_soft_targets=True).take()
