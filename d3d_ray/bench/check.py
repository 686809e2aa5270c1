"""One line of a report: what was looked at, how it stands, and what to do."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from d3d_ray.bench.environment import describe_environment


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``text`` says what was found and, unless it is fine, what to do about it."""

    name: str
    status: Status
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    """The figures behind the text; plain values, as JSON has them."""

    def __str__(self) -> str:
        return f"{self.status:<4}  {self.name:<9}  {self.text}"


def report(checks: Iterable[Check], json_file: Path | None = None, **head: Any) -> int:
    """Print the checks as they come and write all of them; 1 when one has failed, else 0.

    The file holds ``head``, the environment, ``ok``, and each check's name, status, text and data.
    """
    rows: list[dict[str, Any]] = []
    whole = {**head, "environment": describe_environment(), "ok": True, "checks": rows}
    _write(json_file, whole)
    for check in checks:
        print(check, flush=True)
        whole["ok"] &= check.status is not Status.FAIL
        rows.append({**asdict(check), "status": str(check.status)})
        _write(json_file, whole)  # Whatever comes next may end this process.
    return 0 if whole["ok"] else 1


def _write(file: Path | None, whole: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
