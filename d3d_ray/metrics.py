"""What the rounds of a request, or of many, add up to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import median

from d3d_ray.records import Round

_NS_PER_MS = 1e6
_NS_PER_S = 1e9

SMOOTHING = 0.1
"""Weight of the newest value in running means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures over decode rounds; the prefill belongs to none of them.

    Times are medians in milliseconds, 0 where nothing was measured.
    """

    num_rounds: int
    num_tokens: int
    """Tokens of decode rounds, without those cut off by a stop or a limit."""
    tokens_per_second: float
    """Decode tokens ÷ time from the end of the prefill to the end of the last round."""
    acceptance_length: float
    """Tokens emitted by decode rounds ÷ number of decode rounds, plain rounds included."""
    outcomes: dict[str, float]
    """Share of rounds by kind: hit, soft, jit, none."""
    acceptance_length_by_kind: dict[str, float]
    causes: dict[str, int]
    """Why plain rounds had no drafts."""
    acceptance_histogram: list[int]
    """Number of rounds that accepted 0, 1, 2 … drafts."""
    verify_ms: float
    draft_ms: float
    """From the first pass to the table, of tables that were used."""
    hop_ms: float
    bubble_ms: float
    """How long the verifier stood idle before a round."""
    passes_per_round: float
    draft_rows: float
    """Mean rows of the last pass, clean and masked."""
    pipeline_efficiency: float
    """Decode tokens/s ÷ (acceptance length ÷ T_verify), with the mean T_verify of the same run."""


def running_mean(mean: float, value: float) -> float:
    """``mean`` after one more ``value``, recent ones weighing most; 0 = nothing measured yet."""
    return mean + (SMOOTHING if mean else 1.0) * (value - mean)


def summarise(rounds: Iterable[Round]) -> Summary:
    """Summarise the rounds of one request or more, each request's in order."""
    by_request = [list(group) for _, group in groupby(rounds, key=attrgetter("request"))]
    decode = [r for group in by_request for r in group if not r.is_prefill]
    num_tokens = sum(r.num_emitted for r in decode)
    seconds = sum(_decode_ns(group) for group in by_request) / _NS_PER_S
    acceptance_length = num_tokens / len(decode) if decode else 0.0
    verify_s = sum(_verify_ns(r) for r in decode) / _NS_PER_S
    drafted = [r for r in decode if r.draft_end_ns]
    kinds = Counter(r.kind for r in decode)
    emitted = Counter[str]()
    for r in decode:
        emitted[r.kind] += r.num_emitted
    return Summary(
        num_rounds=len(decode),
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        acceptance_length=acceptance_length,
        outcomes={kind: count / len(decode) for kind, count in sorted(kinds.items())},
        acceptance_length_by_kind={k: emitted[k] / count for k, count in sorted(kinds.items())},
        causes=dict(Counter(r.cause for r in decode if r.cause)),
        acceptance_histogram=_histogram([r.num_accepted for r in decode]),
        verify_ms=_median_ms([_verify_ns(r) for r in decode]),
        draft_ms=_median_ms([r.draft_end_ns - r.draft_start_ns for r in drafted]),
        hop_ms=_median_ms([r.hop_ns for r in drafted if r.hop_ns]),
        bubble_ms=_median_ms([r.wait_ns for r in decode]),
        passes_per_round=_mean([r.num_passes for r in drafted]),
        draft_rows=_mean([r.num_draft_rows for r in drafted]),
        pipeline_efficiency=verify_s / seconds if seconds else 0.0,
    )


def _decode_ns(rounds: Sequence[Round]) -> int:
    decode = [r for r in rounds if not r.is_prefill]
    if not decode:
        return 0
    prefill_end = [r.verify_end_ns for r in rounds if r.is_prefill]
    start = prefill_end[-1] if prefill_end else decode[0].verify_start_ns
    return decode[-1].verify_end_ns - start


def _verify_ns(r: Round) -> int:
    return r.verify_end_ns - r.verify_start_ns


def _median_ms(values: Sequence[int]) -> float:
    return median(values) / _NS_PER_MS if values else 0.0


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _histogram(values: Sequence[int]) -> list[int]:
    counts = Counter(values)
    return [counts[value] for value in range(max(counts, default=-1) + 1)]
