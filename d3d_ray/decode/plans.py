"""What a draft plan is: which passes the drafter makes for a block under verification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from d3d_ray.packing import PackedPass
from d3d_ray.records import Branch, Sampling

BranchKey = tuple[int | None, int | None]
"""(k, guess), as in :class:`Branch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to draft for: the committed tokens, and the drafts that are verified at present."""

    request: str
    epoch: int
    """The round whose outcomes the branches are for."""
    tokens: tuple[int, ...]
    """Prompt and output; the last one is the anchor."""
    drafts: tuple[int, ...] | None
    """None: nothing is verified; draft behind the anchor."""
    prompt_length: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    script: tuple[int, ...] = ()
    received_ns: int = 0
    round_ns: float = 0.0
    """What a round of this request takes at present; 0 = not known."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The branches known after one pass or more; they replace those of the offer before."""

    branches: tuple[Branch, ...]
    num_rows: int = 0
    """Of the last pass."""
    num_passes: int = 1
    """Since the offer before."""


class DraftPlan(Protocol):
    def passes(self, work: Work) -> Iterator[Offer]:
        """Make passes, each behind a yield; the caller stops when the work gets stale."""
        ...

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        ...


class NoPlan:
    """While there is no model: an answer at once, without drafts."""

    def passes(self, work: Work) -> Iterator[Offer]:
        yield Offer(())

    def free(self, request: str) -> None:
        pass


class PackableModel(Protocol):
    """What a plan asks of the drafter's model."""

    max_positions: int

    @property
    def block_size(self) -> int: ...
    @property
    def label_shift(self) -> bool: ...
    @property
    def mask_token_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_ids(self) -> torch.Tensor | None:
        """[drafted ids] int64: what the columns of the logits stand for; None = all ids."""
        ...

    def match_cache(self, request: str, tokens: Sequence[int], anchor: int) -> int:
        """Cut the cache to what it shares with ``tokens[:anchor]``; returns that length."""
        ...

    def forward(
        self, request: str, packed: PackedPass, num_glue: int, rows: Sequence[int]
    ) -> torch.Tensor:  # [len(rows), vocab or drafted ids] fp32
        """One packed pass; afterwards only the glue stays in the cache."""
        ...

    def free(self, request: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    """The drafts of one branch, and for each of them the tokens that came next to it."""

    drafts: tuple[int, ...]
    runners: tuple[tuple[int, ...], ...]
    """Best first."""
    num_checked: int = 0
    """The AR head has read this many of the drafts, and agreed."""


@dataclass(slots=True)
class Board:
    """All that is known for the outcomes of one block under verification."""

    work: Work
    guesses: list[list[int]] = field(default_factory=list)
    """For each k = 0..m those of t*, best first, never the draft just rejected."""
    num_checked: int = 0
    """Drafts under verification that the AR head has read and agreed with."""
    lines: dict[BranchKey, Line] = field(default_factory=dict)
    foretold: BranchKey | None = None
    """The outcome by the drafter's own AR head, where it was asked."""

    def offer(self, num_rows: int, num_passes: int = 1) -> Offer:
        branches = (Branch(k, guess, line.drafts) for (k, guess), line in self.lines.items())
        return Offer(tuple(branches), num_rows, num_passes)
