"""Rounds as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

Both lanes share one clock as long as both actors run on one machine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d_ray.records import Mode, Round

_NS_PER_US = 1e3
_VERIFIER, _DRAFTER = 1, 2


def write_trace(file: Path, rounds: Mapping[Mode, Sequence[Round]], *, label: str = "") -> None:
    """Write one process a mode, each with the lanes verifier and drafter."""
    trace = {
        "traceEvents": make_events(rounds, label=label),
        "displayTimeUnit": "ms",
        "otherData": {"label": label},
    }
    file.write_text(json.dumps(trace) + "\n", encoding="utf-8")


def make_events(rounds: Mapping[Mode, Sequence[Round]], *, label: str = "") -> list[dict[str, Any]]:
    """Trace events, times in µs from the first one."""
    spans = [span for each in rounds.values() for span in each]
    starts = [r.verify_start_ns for r in spans]
    origin_ns = min([*starts, *(r.draft_start_ns for r in spans if r.draft_end_ns)], default=0)
    events: list[dict[str, Any]] = []
    for process, (mode, each) in enumerate(rounds.items(), start=1):
        # Plain decoding has no drafter that something could be said of.
        has_label = bool(label) and mode in (Mode.SYNC, Mode.ASYNC)
        events += _name_lanes(process, f"{mode} ({label})" if has_label else str(mode))
        for r in each:
            events += _events_of(r, process, origin_ns)
    return events


def _name_lanes(process: int, name: str) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for thread, lane in ((_VERIFIER, "verifier"), (_DRAFTER, "drafter")):
        ids = {"pid": process, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **ids, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": thread}}


def _events_of(r: Round, process: int, origin_ns: int) -> Iterable[dict[str, Any]]:
    args = {
        "request": r.request,
        "epoch": r.epoch,
        "kind": r.kind,
        "k": r.num_accepted,
        "drafts": r.num_drafts,
    }
    yield {
        "ph": "X",
        "name": "prefill" if r.is_prefill else f"verify {r.epoch}",
        "cat": r.kind,
        "pid": process,
        "tid": _VERIFIER,
        **_span(r.verify_start_ns, r.verify_end_ns, origin_ns),
        "args": {**args, "emitted": r.num_emitted, "cause": r.cause},
    }
    if r.draft_end_ns:
        yield {
            "ph": "X",
            "name": f"draft for {r.epoch}",
            "cat": r.kind,
            "pid": process,
            "tid": _DRAFTER,
            **_span(r.draft_start_ns, r.draft_end_ns, origin_ns),
            "args": {**args, "passes": r.num_passes, "rows": r.num_draft_rows},
        }


def _span(start_ns: int, end_ns: int, origin_ns: int) -> dict[str, float]:
    return {"ts": (start_ns - origin_ns) / _NS_PER_US, "dur": (end_ns - start_ns) / _NS_PER_US}
