"""A folder of answered prompts: Parquet shards, each written once, whole or not at all.

::

    answers/
      answers.json                          what all rows were made with
      shard-000000-5f0c2a9be1d47c33.parquet

The name of a shard ends in the digest of its bytes, so the shards are their own index: a damaged
one is found out, and there is no list beside them that could say otherwise. A row is known by
(dataset, id). What holds more rows is appended by opening the folder again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from d3d_ray.records import Finish

_MANIFEST = "answers.json"
_FORMAT = 1
_TEMPORARY = ".writing-"
_IDS = pa.list_(pa.int32())
QUESTION_SCHEMA = pa.schema({"id": pa.string(), "dataset": pa.string(), "prompt_ids": _IDS})
"""What a row is asked, and its name."""
WORK_SCHEMA = pa.schema([*QUESTION_SCHEMA, ("answer_ids", _IDS)])
"""Of a table of prompts that are still to be answered; or their answers, to be scored."""
_SCHEMA = pa.schema([*WORK_SCHEMA, ("finish", pa.string())])
_TOP_FIELDS = (("top_ids", _IDS), ("top_log_probs", pa.list_(pa.float32())))

RowKey = tuple[str, str]  # dataset and id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredRow:
    """A prompt and the target's own answer to it."""

    id: str
    dataset: str
    prompt_ids: tuple[int, ...]
    """Rendered with the chat template."""
    answer_ids: tuple[int, ...]
    """The stop token included, when one ended the answer."""
    finish: Finish
    top_ids: np.ndarray | None = None
    """[answer, k] int32: the likeliest ids at each answer token, best first."""
    top_log_probs: np.ndarray | None = None
    """[answer, k] fp32: their log-probabilities under the target at temperature 1."""

    @property
    def key(self) -> RowKey:
        return self.dataset, self.id


def read_answers(folder: Path) -> Iterator[AnsweredRow]:
    """All rows, shard by shard. Raises ``ValueError`` as :func:`read_shard`, and for no shards."""
    files = list_shards(folder)
    if not files:
        raise ValueError(f"there are no answers in {folder}: make them with jobs/answer.py")
    for file in files:
        yield from to_rows(read_shard(file))


def list_shards(folder: Path) -> list[Path]:
    """The shards in the order in which they were written."""
    return sorted(folder.glob("shard-*.parquet"))


def read_shard(file: Path, columns: list[str] | None = None) -> pa.Table:
    """The rows of one shard. Raises ``ValueError`` that names a damaged or foreign file."""
    data = file.read_bytes()
    if file.stem.rpartition("-")[2] != _digest(data):
        raise ValueError(
            f"{file} is damaged: its bytes are not those that were written; delete it, and "
            "jobs/answer.py answers its rows again"
        )
    try:
        table = pq.read_table(pa.BufferReader(data), columns=columns)
    except pa.ArrowException as error:
        raise ValueError(f"{file} is not a Parquet file: {error}; delete it") from error
    wanted = _SCHEMA.names if columns is None else columns
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r}; it holds no answers: move it away")
    return table


def to_table(rows: Iterable[AnsweredRow]) -> pa.Table:
    """The inverse of :func:`to_rows`; all rows have top log-probabilities, or none."""
    rows = list(rows)
    has_top = any(row.top_ids is not None for row in rows)
    schema = pa.schema([*_SCHEMA, *_TOP_FIELDS]) if has_top else _SCHEMA
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in _SCHEMA.names
    }
    for name, _ in _TOP_FIELDS if has_top else ():
        columns[name] = [getattr(row, name).ravel() for row in rows]
    return pa.table(columns, schema=schema)


def to_rows(table: pa.Table) -> Iterator[AnsweredRow]:
    """The rows of a table as in a shard."""
    has_top = "top_ids" in table.column_names
    for index, data in enumerate(table.select(_SCHEMA.names).to_pylist()):
        top: dict[str, np.ndarray] = {}
        for name, _ in _TOP_FIELDS if has_top else ():
            flat = table[name][index].values.to_numpy()
            top[name] = flat.reshape(len(data["answer_ids"]), -1)
        yield AnsweredRow(
            id=data["id"],
            dataset=data["dataset"],
            prompt_ids=tuple(data["prompt_ids"]),
            answer_ids=tuple(data["answer_ids"]),
            finish=Finish(data["finish"]),
            **top,
        )


class AnswersStore:
    """The folder, open for writing by this process alone; use it as a context manager.

    ``settings`` are plain values that say how answers are made. Raises ``ValueError`` when the
    folder was begun with others, is in use, or has a damaged shard.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._closing = contextlib.ExitStack()
        lock = FileLock(folder / ".lock", timeout=0)
        try:
            self._closing.enter_context(lock)
        except Timeout as error:
            raise ValueError(
                f"another run is writing to {folder}: wait for it, or choose another folder"
            ) from error
        try:
            self._check_settings(settings)
            for file in folder.glob(f"{_TEMPORARY}*"):
                file.unlink()
            self._columns = (WORK_SCHEMA if settings.get("scored") else QUESTION_SCHEMA).names
            self._asked: dict[RowKey, bytes] = {}
            self._num_shards = 0
            for file in list_shards(folder):
                self._enter(file, read_shard(file, self._columns))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write to the folder."""
        self._closing.close()

    def __len__(self) -> int:
        return len(self._asked)

    def holds(self, key: RowKey, ids: tuple[int, ...]) -> bool:
        """Whether the row of this prompt (with the answer, if that is scored) is there.

        Raises ``ValueError`` when there is another one of this name.
        """
        known = self._asked.get(key)
        if known is not None and known != _digest_ids(ids):
            raise ValueError(
                f"row {'/'.join(key)!r} in {self.folder} is of another prompt or answer: use the "
                "files, templates and --thinking of before, or another folder"
            )
        return known is not None

    def write(self, table: pa.Table) -> Path:
        """Add a shard. It is there as a whole, and on the disk, or not at all."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        file = self.folder / f"shard-{self._num_shards:06d}-{_digest(data)}.parquet"
        self._enter(file, table)
        _write_atomically(file, data)
        return file

    def _enter(self, file: Path, table: pa.Table) -> None:
        rows = table.select(self._columns).to_pylist()
        for row in rows:
            key = row["dataset"], row["id"]
            if key in self._asked:
                raise ValueError(
                    f"row {'/'.join(key)!r} is answered twice, the second time in {file}: delete it"
                )
            self._asked[key] = _digest_ids(row["prompt_ids"] + row.get("answer_ids", []))
        self._num_shards = int(file.stem.split("-")[1]) + 1

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self.folder / _MANIFEST
        wanted = {"format": _FORMAT, **settings}
        if not file.exists():
            if list_shards(self.folder):
                raise ValueError(f"{file} is missing, so nobody knows how the shards were made")
            _write_atomically(file, (json.dumps(wanted, indent=1) + "\n").encode())
            return
        known = read_settings(self.folder)
        for name in wanted | known:
            if wanted.get(name) != known.get(name):
                raise ValueError(
                    f"{self.folder} was begun with {name} = {known.get(name)!r}, not "
                    f"{wanted.get(name)!r}: set it back, or choose another folder"
                )


def read_settings(folder: Path) -> dict[str, Any]:
    """What the answers were made with. Raises ``ValueError`` when that cannot be read."""
    file = folder / _MANIFEST
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; is {folder} right?") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is damaged: it holds {settings!r}")
    return settings


def _write_atomically(file: Path, data: bytes) -> None:
    temporary = file.with_name(f"{_TEMPORARY}{file.name}")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _digest_ids(ids: Iterable[int]) -> bytes:
    return hashlib.blake2b(np.array(list(ids), dtype="<i4").tobytes(), digest_size=16).digest()
