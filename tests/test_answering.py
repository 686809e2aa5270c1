"""Answers by the target: batches, seeds, soft targets, shards, workers and the job."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from loops import make_request, run
from tiny import END, FAMILIES, save_tiny, tiny_model, tiny_tokenizer

from d3d_ray.config import TargetConfig
from d3d_ray.models.target import Target
from d3d_ray.records import Finish, Mode
from d3d_ray.training.answer_options import AnswerSettings, parse_options
from d3d_ray.training.answering import Answerer
from d3d_ray.training.answers_ray import answer_on_workers
from d3d_ray.training.answers_store import (
    AnsweredRow,
    AnswersStore,
    list_shards,
    read_answers,
    read_shard,
    to_rows,
    to_table,
)
from d3d_ray.training.questions import (
    Question,
    Task,
    make_batches,
    read_answered,
    read_tasks,
    render,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from jobs.answer import main  # noqa: E402

VOCAB = 64
LENGTHS = (1, 9, 4, 17, 2, 9, 30, 5)
SAMPLED = AnswerSettings(max_tokens=24, temperature=0.9, top_k=20, seed=5)


def make_questions(lengths: Sequence[int] = LENGTHS) -> list[Question]:
    generator = torch.Generator().manual_seed(11)
    return [
        Question(
            id=str(index),
            dataset="d",
            prompt_ids=tuple(torch.randint(4, VOCAB - 8, (length,), generator=generator).tolist()),
        )
        for index, length in enumerate(lengths)
    ]


def make_target(
    family: str = "llama", stop_ids: Sequence[int] = (), max_context: int | None = None
) -> Target:
    model = tiny_model(family, vocab=VOCAB)
    # Fewer ids than rows of the head: the rest is padding that must not come up.
    return Target(
        model, vocab_size=VOCAB - 8, stop_ids=frozenset(stop_ids), max_context=max_context
    )


def facts(row: AnsweredRow) -> tuple[object, ...]:
    return (*row.key, row.prompt_ids, row.answer_ids, row.finish)


# --- answering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [AnswerSettings(max_tokens=24), SAMPLED], ids=["0", "0.9"])
def test_a_batch_gives_the_answers_of_one_by_one(family: str, settings: AnswerSettings) -> None:
    questions = make_questions()
    free = Answerer(make_target(family), settings).answer(questions)
    stop_ids = [free[1].answer_ids[3], free[3].answer_ids[9], free[5].answer_ids[15]]
    answerer = Answerer(make_target(family, stop_ids), settings)
    together = answerer.answer(questions)
    alone = [row for question in questions for row in answerer.answer([question])]
    assert list(map(facts, together)) == list(map(facts, alone))
    # Otherwise the test would not see how a batch shrinks.
    assert len({len(row.answer_ids) for row in together}) > 1
    assert max(max(row.answer_ids) for row in free) < VOCAB - 8


def test_an_answer_is_that_of_the_engine_with_the_rows_seed() -> None:
    target = make_target(stop_ids=[END])
    rows = Answerer(target, SAMPLED).answer(make_questions())
    for row in rows:
        sampling = SAMPLED.sampling(*row.key)
        request = make_request(
            prompt=row.prompt_ids,
            mode=Mode.AR,
            max_tokens=SAMPLED.max_tokens,
            stop_ids=target.stop_ids,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=sampling.seed,
        )
        results = run(target, None, [request], vocab_size=target.vocab_size)
        assert results.tokens("a") == row.answer_ids
        assert results.last("a").finish == row.finish


def test_rows_with_the_same_prompt_draw_differently_and_another_seed_changes_all() -> None:
    prompt_ids = make_questions()[3].prompt_ids
    questions = [Question(id=str(i), dataset="d", prompt_ids=prompt_ids) for i in range(4)]
    rows = Answerer(make_target(), SAMPLED).answer(questions)
    other = Answerer(make_target(), AnswerSettings(max_tokens=24, temperature=0.9, seed=6))
    answers = [row.answer_ids for row in (*rows, *other.answer(questions))]
    assert len(set(answers)) == 8


def test_an_answer_ends_with_its_stop_token_or_at_the_limit() -> None:
    free = Answerer(make_target(), AnswerSettings(max_tokens=12)).answer(make_questions())
    stop = free[2].answer_ids[5]
    rows = Answerer(make_target(stop_ids=[stop]), AnswerSettings(max_tokens=12)).answer(
        make_questions()
    )
    for row, before in zip(rows, free, strict=True):
        end = before.answer_ids.index(stop) + 1 if stop in before.answer_ids else 12
        assert row.answer_ids == before.answer_ids[:end]
        assert row.finish == (Finish.STOP if stop in before.answer_ids else Finish.LENGTH)


def test_the_context_ends_an_answer_and_refuses_a_prompt_that_fills_it() -> None:
    answerer = Answerer(make_target(max_context=20), AnswerSettings(max_tokens=12))
    rows = answerer.answer(make_questions([17, 2]))
    assert [len(row.answer_ids) for row in rows] == [3, 12]
    with pytest.raises(ValueError, match="d/0 has 20 tokens; the context of 20"):
        answerer.answer(make_questions([20]))


def test_a_model_that_breaks_down_is_named_with_its_row() -> None:
    target = make_target()
    with torch.no_grad():
        target.model.get_input_embeddings().weight[50] = torch.nan
    questions = [
        Question(id=name, dataset="d", prompt_ids=ids) for name, ids in (("a", (4,)), ("b", (50,)))
    ]
    with pytest.raises(RuntimeError, match="d/b at position 1"):
        Answerer(target, AnswerSettings(max_tokens=2)).answer(questions)


def test_top_log_probs_are_those_of_a_teacher_forced_forward() -> None:
    target = make_target(stop_ids=range(6))
    settings = AnswerSettings(max_tokens=16, temperature=0.9, num_top=5)
    for row in Answerer(target, settings).answer(make_questions()):
        ids = torch.tensor([row.prompt_ids + row.answer_ids])
        with torch.inference_mode():
            logits = target.model(ids).logits[0, len(row.prompt_ids) - 1 : -1, : target.vocab_size]
        wanted = logits.log_softmax(-1).topk(5, dim=-1)
        assert row.top_ids is not None and row.top_log_probs is not None
        np.testing.assert_array_equal(row.top_ids, wanted.indices)
        np.testing.assert_allclose(row.top_log_probs, wanted.values, atol=1e-5)


def test_answers_that_are_there_are_scored_as_they_would_have_been() -> None:
    answerer = Answerer(make_target(stop_ids=range(6)), AnswerSettings(max_tokens=16, num_top=5))
    rows = answerer.answer(make_questions())
    for row, scored in zip(rows, answerer.answer(with_answers(rows)), strict=True):
        assert facts(scored) == facts(row)
        assert scored.top_ids is not None and scored.top_log_probs is not None
        np.testing.assert_array_equal(scored.top_ids, row.top_ids)
        np.testing.assert_allclose(scored.top_log_probs, row.top_log_probs, atol=1e-5)


def with_answers(rows: Sequence[AnsweredRow]) -> list[Question]:
    questions = {question.key: question for question in make_questions()}
    return [replace(questions[row.key], answer_ids=row.answer_ids) for row in rows]


# --- the folder ----------------------------------------------------------------------------------


def make_row(id_: str, num_answer: int = 3, num_top: int = 0) -> AnsweredRow:
    top = np.arange(num_answer * num_top).reshape(num_answer, num_top)
    return AnsweredRow(
        id=id_,
        dataset="d",
        prompt_ids=(1, 2, 70_000),
        answer_ids=tuple(range(num_answer)),
        finish=Finish.STOP,
        top_ids=top.astype(np.int32) if num_top else None,
        top_log_probs=-top.astype(np.float32) if num_top else None,
    )


def fill(folder: Path, *shards: Sequence[AnsweredRow]) -> None:
    with AnswersStore(folder, {"target": "t"}) as store:
        for rows in shards:
            store.write(to_table(rows))


@pytest.mark.parametrize("num_top", [0, 4])
def test_rows_come_back_as_they_were_written(tmp_path: Path, num_top: int) -> None:
    rows = [make_row("a", 3, num_top), make_row("b", 1, num_top)]
    fill(tmp_path, rows[:1], rows[1:])
    for row, back in zip(rows, read_answers(tmp_path), strict=True):
        assert facts(row) == facts(back)
        if num_top:
            np.testing.assert_array_equal(row.top_ids, back.top_ids, strict=True)
            np.testing.assert_array_equal(row.top_log_probs, back.top_log_probs, strict=True)
        else:
            assert back.top_ids is None and back.top_log_probs is None


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, [make_row("a")], [make_row("b")])
    file = list_shards(tmp_path)[1]
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[len(data) // 3] ^= 1
    file.write_bytes(data[: {"flipped": None, "cut": -1, "empty": 0}[damage]])
    for attempt in (lambda: list(read_answers(tmp_path)), lambda: fill(tmp_path)):
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            attempt()
    file.unlink()
    assert [row.id for row in read_answers(tmp_path)] == ["a"]


def test_a_write_that_is_killed_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [make_row("a")])

    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path, [make_row("b")])
    assert [row.id for row in read_answers(tmp_path)] == ["a"]
    fill(tmp_path, [make_row("b")])
    assert [row.id for row in read_answers(tmp_path)] == ["a", "b"]
    assert list(tmp_path.glob(".writing*")) == []


def test_a_folder_refuses_other_settings_other_prompts_and_a_second_writer(tmp_path: Path) -> None:
    fill(tmp_path, [make_row("a")])
    with pytest.raises(ValueError, match="begun with target = 't', not 'u'"):
        AnswersStore(tmp_path, {"target": "u"})
    with AnswersStore(tmp_path, {"target": "t"}) as store:
        assert store.holds(("d", "a"), (1, 2, 70_000))
        assert not store.holds(("e", "a"), (1, 2, 70_000))
        with pytest.raises(ValueError, match=r"'d/a' in .* is of another prompt or answer"):
            store.holds(("d", "a"), (1, 2))
        with pytest.raises(ValueError, match="another run is writing"):
            AnswersStore(tmp_path, {"target": "t"})
        with pytest.raises(ValueError, match="'d/a' is answered twice"):
            store.write(to_table([make_row("a")]))
    assert len(list_shards(tmp_path)) == 1
    with pytest.raises(ValueError, match="there are no answers in"):
        list(read_answers(tmp_path / "elsewhere"))


# --- questions -----------------------------------------------------------------------------------


def test_tasks_are_put_into_templates_and_repeated_lines_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "dataset": "math", "turns": ["{x} \u2028 y", "later"]},
        {"id": "1", "turns": ["hi"]},
        {"id": "1", "turns": ["hi"]},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert read_tasks([file], {"math": "Q: {turn} {{}}"}) == [
        Task(id="1", dataset="math", text="Q: {x} \u2028 y {}"),
        Task(id="1", dataset="mine", text="hi"),
    ]


def test_thinking_reaches_the_chat_template_and_is_refused_without_one() -> None:
    tokenizer = tiny_tokenizer()
    tasks = [Task(id="a", dataset="d", text="hi")]
    with pytest.raises(ValueError, match="no thinking mode"):
        list(render(tasks, tokenizer, thinking=False))
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template += "{% if enable_thinking is false %}<none>{% endif %}"
    texts = [
        tokenizer.decode(next(render(tasks, tokenizer, thinking=mode)).prompt_ids)
        for mode in (None, True, False)
    ]
    plain = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [plain, plain, f"{plain}<none>"]


def test_batches_hold_every_question_once_and_short_ones_together() -> None:
    questions = make_questions()
    batches = make_batches(questions, batch_size=3)
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert sorted((q.id for batch in batches for q in batch), key=int) == list("01234567")
    lengths = [len(q.prompt_ids) for batch in batches for q in batch]
    assert lengths == sorted(LENGTHS)


# --- workers and the job -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama")
    return folder


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_give_the_rows_of_one(source: Path) -> None:
    target = TargetConfig(source=str(source), dtype="float32")
    settings = AnswerSettings(max_tokens=8, temperature=0.9, num_top=2)
    batches = make_batches(make_questions(), batch_size=3)
    answerer = Answerer.load(target, settings)
    here = [to_table(answerer.answer(batch)) for batch in batches]
    there = list(answer_on_workers(target, settings, batches, num_workers=2))
    assert len(there) == len(here)
    assert by_name(pa.concat_tables(there)) == by_name(pa.concat_tables(here))
    rows = [with_answers(list(to_rows(table))) for table in here]
    scored = list(answer_on_workers(target, settings, rows, num_workers=2))
    assert by_name(pa.concat_tables(scored)) == by_name(pa.concat_tables(here))
    with pytest.raises(ValueError, match="99 workers of 1 CPU do not fit in the cluster's 8 CPU"):
        list(answer_on_workers(target, settings, batches, num_workers=99))


def by_name(table: pa.Table) -> list[tuple[object, ...]]:
    rows = sorted(to_rows(table), key=lambda row: row.key)
    return [(*facts(row), row.top_ids.tolist()) for row in rows if row.top_ids is not None]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_failing_worker_fails_the_run(source: Path) -> None:
    target = TargetConfig(source=str(source), dtype="float32", max_context=20)
    batches = [make_questions([2]), make_questions([20])]
    with pytest.raises(RuntimeError, match="the context of 20"):
        list(answer_on_workers(target, AnswerSettings(max_tokens=2), batches, num_workers=2))


def start_job(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "jobs/answer.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def arguments(source: Path, tmp_path: Path) -> Iterator[list[str | Path]]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "turns": [f"Say {'x' * (i % 7)}"]} for i in range(40)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "templates.json").write_text('{"prompts": "{turn}!", "_comment": "mine"}')
    options: list[str | Path] = ["--target", source, "--dtype", "float32", "--prompts", prompts]
    options += ["--templates", tmp_path / "templates.json", "--temperature", "0.8"]
    yield [*options, "--max-tokens", "100", "--batch-size", "4", "--top-log-probs", "3"]


def test_the_job_goes_on_after_ctrl_c_and_gives_the_rows_of_a_whole_run(
    arguments: list[str | Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = start_job(*arguments, "--out", parts)
    while job.poll() is None and len(list_shards(parts)) < 2:
        time.sleep(0.01)
    job.send_signal(signal.SIGINT)
    assert "the same command goes on" in job.communicate(timeout=120)[1]
    assert job.returncode == 130
    num_before = sum(read_shard(file).num_rows for file in list_shards(parts))
    assert 8 <= num_before < 40

    for folder, num_now in ((parts, 40 - num_before), (whole, 40), (whole, 0)):
        assert main([*map(str, arguments), "--out", str(folder)]) == 0
        captured = capsys.readouterr()
        assert f"{num_now} rows answered now, 40 in all" in captured.out
        assert "40/40" in captured.err
    rows, wanted = list(read_answers(parts)), list(read_answers(whole))
    assert list(map(facts, rows)) == list(map(facts, wanted))
    assert [file.name for file in list_shards(parts)] == [f.name for f in list_shards(whole)]


def test_the_job_scores_answers_that_are_there(
    arguments: list[str | Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, scored = tmp_path / "answers", tmp_path / "scored"
    assert main([*map(str, arguments), "--limit", "5", "--out", str(answers)]) == 0
    options = [*map(str, arguments[:4]), "--score", *map(str, list_shards(answers))]
    assert main([*options, "--top-log-probs", "3", "--out", str(scored)]) == 0
    wanted = {row.key: row for row in read_answers(answers)}
    for row in read_answers(scored):
        assert row.answer_ids == wanted[row.key].answer_ids
        np.testing.assert_array_equal(row.top_ids, wanted[row.key].top_ids)
    assert len(list(read_answers(scored))) == 5
    other = {"id": "0", "dataset": "prompts", "prompt_ids": [4, 5], "answer_ids": [6]}
    (tmp_path / "other.jsonl").write_text(json.dumps(other))
    options[options.index("--score") + 1 :] = [str(tmp_path / "other.jsonl")]
    assert main([*options, "--top-log-probs", "3", "--out", str(scored)]) == 2
    assert "is of another prompt or answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ([], "say how many with --top-log-probs"),
        (["--top-log-probs", "4", "--temperature", "1"], "--temperature has no effect with"),
        (
            ["--top-log-probs", "4", "--score", "none.jsonl"],
            "no .jsonl.* file matches 'none.jsonl'",
        ),
    ],
)
def test_options_that_do_not_fit_scoring_are_refused(
    extra: list[str], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "a", "prompt_ids": [1], "answer_ids": [2]}')
    with pytest.raises(ValueError, match=complaint):
        options = parse_options(["--score", str(file), "--out", str(tmp_path / "out"), *extra])
        read_answered(options.answered)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"id": "a", "prompt_ids": [1], "answer_ids": [2]}')[:-9])
    with pytest.raises(ValueError, match=r"rows.jsonl.gz cannot be read"):
        read_answered([str(file)])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"id": "a", "prompt_ids": [1]}', "has no id, prompt_ids and answer_ids"),
        ('{"id": "a", "prompt_ids": [1], "answer_ids": []}', "needs a prompt and an answer"),
        ('{"id": "a", "prompt_ids": [], "answer_ids": [1]}', "needs a prompt and an answer"),
        ('{"id": "a", "prompt_ids": [1], "answer_ids": ["x"]}', "must be lists of token ids"),
        (2 * '{"id": "a", "prompt_ids": [1], "answer_ids": [2]}\n', "rows/a is there twice"),
    ],
)
def test_bad_rows_to_score_are_refused_with_their_place(
    row: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(row)
    with pytest.raises(ValueError, match=rf"rows.jsonl:\d.*{complaint}"):
        read_answered([str(file)])


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--prompts", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--temperature", "-1"], "temperature must be in [0, 100], not -1.0"),
        (["--top-log-probs", "-1"], "must be 0 to 1024, not -1"),
        (["--preset", "smollm2-cpu"], "not allowed with argument"),
        (["--target", "/no/such/model"], "there is no model folder"),
        (["--thinking", "on"], "no thinking mode"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str | Path],
    extra: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*map(str, arguments), "--out", str(tmp_path / "out"), *extra]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("prompts", '{"id": "a"}', 'prompts:1 must be like {"id": "a", "dataset"'),
        ("prompts", '{"id": "a", "turns": ["x"]}\n\n{}', "prompts:2 is not a JSON object"),
        (
            "prompts",
            '{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}',
            "prompts:2: another question is called prompts/a",
        ),
        ("templates", '{"a": "no field"}', "template of 'a' must hold {turn}"),
        ("templates", '{"a": "{turn} {x}"}', "template of 'a' must hold {turn}"),
        ("templates", "[]", "must be like"),
    ],
)
def test_bad_files_are_refused_with_their_place(
    tmp_path: Path, file: str, text: str, complaint: str
) -> None:
    files = {"prompts": '{"id": "a", "turns": ["x"]}', "templates": '{"a": "{turn}"}', file: text}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    options = ["--prompts", "prompts", "--templates", "templates", "--out", "out"]
    paths = [option if option[0] == "-" else str(tmp_path / option) for option in options]
    with pytest.raises(ValueError) as caught:
        parse_options(paths)
    assert complaint in str(caught.value)
