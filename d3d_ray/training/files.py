"""Files of answers: rows ``{"id", "dataset", "prompt_ids", "answer_ids"}``, JSONL or Parquet."""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def find_files(patterns: str) -> list[Path]:
    """The files of comma-separated paths, folders and globs, sorted.

    Raises ``ValueError`` for a pattern without a file.
    """
    files: set[Path] = set()
    for pattern in (part.strip() for part in patterns.split(",")):
        found = [Path(name) for name in glob.glob(str(Path(pattern).expanduser()))]
        inside = [file for folder in found if folder.is_dir() for file in folder.iterdir()]
        fitting = [file for file in (*found, *inside) if file.name.endswith(_SUFFIXES)]
        if not fitting:
            raise ValueError(f"no {', '.join(_SUFFIXES)} file matches {pattern!r}")
        files.update(fitting)
    return sorted(files)


def read_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All rows, each with the words for where it stands; ``ValueError`` on malformed ones."""
    return _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)


def _read_json(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(_read_lines(file), start=1):
        where = f"{file}:{number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not a JSON object: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{where} is not a JSON object: {line[:80]!r}")
        yield where, data


def _read_lines(file: Path) -> Iterator[str]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=512):
        for data in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", data
