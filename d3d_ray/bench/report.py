"""What came out: a frozen record, as JSON and as a plain-text table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from d3d_ray.bench.environment import describe_environment
from d3d_ray.bench.near_ties import Difference
from d3d_ray.config import EngineConfig, to_dict
from d3d_ray.metrics import Summary, summarise
from d3d_ray.records import Mode, Round, Sampling


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The modes on the same prompts; with a single mode there is nothing to compare."""

    config: EngineConfig
    sampling: Sampling
    is_drafter_trained: bool | None
    """None = there was no drafter."""
    num_prompts: int
    rounds: Mapping[Mode, Sequence[Round]]
    """Each mode's rounds, prompt after prompt."""
    all_cores: Mapping[Mode, Sequence[Round]] = field(default_factory=dict)
    """Of ``ar`` and ``dflash`` with the idle drafter's cores as well, where all is on a CPU."""
    differences: Sequence[Difference] = ()
    """Answers that are not those of plain decoding, token for token."""

    @property
    def is_compared(self) -> bool:
        return Mode.AR in self.rounds and len(self.rounds) > 1

    @property
    def num_identical(self) -> int:
        """Prompts that every mode answers with the same tokens."""
        return self.num_prompts - len({difference.prompt for difference in self.differences})

    @property
    def num_near_ties(self) -> int:
        return sum(difference.is_near_tie for difference in self.differences)

    @property
    def num_violations(self) -> int:
        """Differences that must not be."""
        return len(self.differences) - self.num_near_ties

    @cached_property
    def summaries(self) -> dict[Mode, Summary]:
        return {mode: summarise(rounds) for mode, rounds in self.rounds.items()}

    @cached_property
    def plain(self) -> Summary:
        """What speed-ups are over."""
        rounds = self.all_cores.get(Mode.AR)
        return summarise(rounds) if rounds else self.summaries[Mode.AR]

    def label(self, mode: Mode | None = None) -> str:
        """What must be said with every figure of a mode (None: of all); often nothing."""
        if mode in (Mode.AR, Mode.DFLASH) or self.is_drafter_trained is None:
            return ""
        simulated = self.config.decode.simulate_acceptance
        parts = [f"SIMULATED acceptance {simulated:g}"] if simulated is not None else []
        parts += [] if self.is_drafter_trained else ["untrained drafter"]
        return ", ".join(parts)

    def speed_up(self, mode: Mode) -> float | None:
        """Over plain decoding, with all cores where that was run.

        None for simulated drafts and for answers that are wrong.
        """
        is_honest = self.config.decode.simulate_acceptance is None and not self.num_violations
        if not is_honest or not self.is_compared:
            return None
        return self._over_plain(self.summaries[mode])

    def _over_plain(self, summary: Summary) -> float | None:
        plain = self.plain.tokens_per_second
        return summary.tokens_per_second / plain if plain else None

    def to_json(self) -> dict[str, Any]:
        """Everything that is known, as plain values."""
        dflash = self.all_cores.get(Mode.DFLASH)
        return {
            "label": self.label(),
            "preset": self.config.name,
            "dtype": self.config.target.dtype,
            "drafter_trained": self.is_drafter_trained,
            "simulated": self.config.decode.simulate_acceptance,
            "identical": self.num_identical == self.num_prompts if self.is_compared else None,
            "num_prompts": self.num_prompts,
            "num_identical": self.num_identical if self.is_compared else None,
            "num_near_ties": self.num_near_ties,
            "num_violations": self.num_violations,
            "differences": [asdict(difference) for difference in self.differences],
            "plain_with_all_cores": asdict(self.plain) if self.all_cores else None,
            "dflash_with_all_cores": asdict(summarise(dflash)) if dflash else None,
            "modes": {
                str(mode): {
                    "label": self.label(mode),
                    "speed_up": self.speed_up(mode),
                    **asdict(summary),
                }
                for mode, summary in self.summaries.items()
            },
            "sampling": asdict(self.sampling),
            "settings": to_dict(self.config),
            **describe_environment(),
        }

    def table(self) -> str:
        """A title, a row a mode, and what is known of the answers."""
        config = self.config
        facts = [config.name, f"target {config.target.dtype}", f"prompts {self.num_prompts}"]
        lines = [", ".join([*facts, *filter(None, [self.label()])])]
        rows = []
        for mode, summary in self.summaries.items():
            if mode in self.all_cores:
                name = f"{mode}, all cores"
                rows.append(self._row(mode, summarise(self.all_cores[mode]), name=name))
            rows.append(self._row(mode, summary))
        lines += _align([_HEAD, *rows])
        lines += self._verdict() if self.is_compared else []
        return "\n".join(lines)

    def line(self, mode: Mode) -> str:
        """One mode in one line."""
        summary, label = self.summaries[mode], self.label(mode)
        return (
            f"{mode}: {summary.num_tokens} tokens in {summary.num_rounds} rounds, "
            f"{summary.tokens_per_second:.1f} tokens/s, "
            f"acceptance length {summary.acceptance_length:.2f}" + (f" ({label})" if label else "")
        )

    def _row(self, mode: Mode, summary: Summary, *, name: str | None = None) -> list[str]:
        speed_up = None if self.speed_up(mode) is None else self._over_plain(summary)
        has_drafts = mode is not Mode.AR
        return [
            str(mode) if name is None else name,
            f"{summary.tokens_per_second:.1f}",
            "" if speed_up is None else f"{speed_up:.2f}x",
            f"{summary.acceptance_length:.2f}",
            *(f"{summary.outcomes.get(kind, 0.0):.0%}" for kind in _KINDS),
            f"{summary.passes_per_round:.1f}" if has_drafts else "–",
            f"{summary.verify_ms:.1f}",
            *(f"{t:.1f}" if has_drafts else "–" for t in (summary.draft_ms, summary.hop_ms)),
            f"{summary.bubble_ms:.1f}",
            f"{summary.pipeline_efficiency:.0%}",
            self.label(mode),
        ]

    def _verdict(self) -> list[str]:
        if not self.differences:
            return [f"identical: {self.num_prompts} of {self.num_prompts} prompts, token for token"]
        return [
            f"same tokens in every mode: {self.num_identical} of {self.num_prompts} prompts; "
            f"near-ties: {self.num_near_ties}, violations: {self.num_violations}",
            *(_describe(difference) for difference in self.differences),
        ]


_REMARK = "remark"
_KINDS = ("hit", "soft", "jit", "none")
_HEAD = [
    "mode", "tokens/s", "speed-up", "acceptance length", *_KINDS, "passes",
    "T_verify ms", "T_draft ms", "T_hop ms", "bubble ms", "efficiency", _REMARK,
]  # fmt: skip


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, numbers to the right; columns that hold nothing are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        first, *rest = (
            cell.ljust(width) if columns[index][0] in (_HEAD[0], _REMARK) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _describe(difference: Difference) -> str:
    gap = difference.gap_units
    reason = "no difference is allowed" if gap is None else f"gap of the two best {gap:.1f} units"
    return (
        f"  {difference.prompt}, {difference.mode}: output token {difference.position} is "
        f"{difference.found}, plain decoding has {difference.expected}: "
        f"{'near-tie' if difference.is_near_tie else 'VIOLATION'}, {reason}"
    )
