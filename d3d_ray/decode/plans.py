"""Draft plans: which passes the drafter makes for a block under verification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from d3d_ray.packing import (
    BranchShape,
    PackedPass,
    continuation,
    fill_budget,
    mask_first,
    pack,
    rank_outcomes,
    seeded,
)
from d3d_ray.records import Branch, Sampling
from d3d_ray.sampling import History, processed_scores

_NO_TOKEN = -1

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


@dataclass(frozen=True, slots=True)
class Offer:
    """The branches known after one pass; they replace those of the pass before."""

    branches: tuple[Branch, ...]
    num_rows: int = 0


class DraftPlan(Protocol):
    def passes(self, work: Work) -> Iterator[Offer]:
        """Make passes, each behind a yield; the caller stops when the work gets stale."""
        ...

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        ...


class PackableModel(Protocol):
    """What a plan asks of the drafter's model."""

    max_positions: int

    @property
    def block_size(self) -> int: ...
    @property
    def label_shift(self) -> bool: ...
    @property
    def mask_token_id(self) -> int: ...

    def match_cache(self, request: str, tokens: Sequence[int], anchor: int) -> int:
        """Cut the cache to what it shares with ``tokens[:anchor]``; returns that length."""
        ...

    def forward(
        self, request: str, packed: PackedPass, num_glue: int, rows: Sequence[int]
    ) -> torch.Tensor:  # [len(rows), vocab] fp32
        """One packed pass; afterwards only the glue stays in the cache."""
        ...

    def free(self, request: str) -> None: ...


@dataclass(slots=True)
class _Memory:
    """What a request's last work offered, for guesses and for statistics."""

    work: Work
    runners: dict[BranchKey, list[list[int]]] = field(default_factory=dict)
    """(k, guess) -> for each draft the tokens that came next to it, best first."""
    drafts: dict[BranchKey, tuple[int, ...]] = field(default_factory=dict)
    guesses: list[list[int]] = field(default_factory=list)


class PackedPlan:
    """One packed pass a round: glue, then branches for the likeliest outcomes.

    Guesses of t* are the runners-up of the draft that would be rejected, from the branch that won
    the last round. Full acceptance has none: that branch is mask-first.
    """

    def __init__(
        self,
        model: PackableModel,
        *,
        max_rows: int,
        is_noise_shared: bool,
        num_guesses: int = 3,
    ) -> None:
        self._model = model
        self._max_rows = max_rows
        self._is_noise_shared = is_noise_shared
        self._num_guesses = num_guesses
        self._memories: dict[str, _Memory] = {}
        self._statistics = _Statistics(model.block_size - 1, num_guesses)

    def passes(self, work: Work) -> Iterator[Offer]:
        memory = self._memories.get(work.request)
        if memory is not None:
            self._statistics.observe(memory, work)
        if len(work.tokens) + 2 * self._model.block_size > self._model.max_positions:
            yield Offer(())
            return
        memory = _Memory(work, guesses=self._guesses(memory, work))
        self._memories[work.request] = memory
        yield self._draft(work, memory)

    def free(self, request: str) -> None:
        self._memories.pop(request, None)
        self._model.free(request)

    def _guesses(self, memory: _Memory | None, work: Work) -> list[list[int]]:
        """For each k = 0..m the guesses of t*, best first, never the draft just rejected."""
        drafts = work.drafts or ()
        guesses: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        if memory is None or not drafts:
            return guesses
        for key, offered in memory.drafts.items():
            if offered[: len(drafts)] == drafts:
                for k, draft in enumerate(drafts):
                    guesses[k] = [token for token in memory.runners[key][k] if token != draft]
                break
        return guesses

    def _draft(self, work: Work, memory: _Memory) -> Offer:
        drafts = work.drafts or ()
        anchor = len(work.tokens) - 1
        clean = (*work.tokens, *drafts)
        num_cached = self._model.match_cache(work.request, clean, anchor)
        glue = clean[num_cached:]
        keys, shapes = self._branches(work, memory, num_glue=len(glue))
        packed = pack(glue, shapes, start=num_cached, mask_token_id=self._model.mask_token_id)
        rows = [row for branch_rows in packed.draft_rows for row in branch_rows]
        logits = self._model.forward(work.request, packed, len(glue), rows)
        branches = []
        for (k, guess), branch_logits in zip(
            keys, logits.split([shape.num_drafts for shape in shapes]), strict=True
        ):
            scores = self._scores(branch_logits, work, k, guess)
            best = scores.topk(self._num_guesses + 1, dim=-1).indices.tolist()
            tokens = tuple(row[0] for row in best)
            memory.drafts[k, guess] = tokens
            memory.runners[k, guess] = [row[1:] for row in best]
            branches.append(Branch(k, guess, tokens))
        return Offer(tuple(branches), len(packed.token_ids))

    def _branches(
        self, work: Work, memory: _Memory, *, num_glue: int
    ) -> tuple[list[BranchKey], list[BranchShape]]:
        model = self._model
        size, shift = model.block_size, model.label_shift
        if work.drafts is None:
            shape = continuation(num_glue=num_glue, block_size=size, label_shift=shift)
            return [(None, work.tokens[-1])], [shape]
        anchor_row = num_glue - 1 - len(work.drafts)
        candidates = rank_outcomes(
            self._statistics.accept_rates[: len(work.drafts)],
            memory.guesses,
            self._statistics.guess_rates,
        )
        chosen = fill_budget(
            candidates,
            num_free_rows=self._max_rows - num_glue,
            num_rows_each=size - 1 if shift else size,
        )
        shapes = [
            mask_first(c.k, anchor_row=anchor_row, block_size=size, label_shift=shift)
            if c.guess is None
            else seeded(c.k, c.guess, anchor_row=anchor_row, block_size=size, label_shift=shift)
            for c in chosen
        ]
        return [(c.k, c.guess) for c in chosen], shapes

    def _scores(
        self,
        logits: torch.Tensor,  # [drafts, vocab]
        work: Work,
        k: int | None,
        guess: int | None,
    ) -> torch.Tensor:  # [drafts, vocab]
        """Process the drafter's logits as the target's are, under the same noise if shared."""
        sampling = work.sampling
        if not self._is_noise_shared or (sampling.is_greedy and not sampling.has_penalties):
            return logits
        # The drafts follow t*, which stands behind k drafts; or the anchor, when it is known.
        known = work.tokens
        if k is not None:
            known += (*(work.drafts or ())[:k], guess if guess is not None else _NO_TOKEN)
        history = None
        if sampling.has_penalties:
            output = (token for token in known[work.prompt_length :] if token != _NO_TOKEN)
            history = History(work.tokens[: work.prompt_length], output)
        return processed_scores(
            logits,
            sampling,
            position=len(known),
            drafts=logits.argmax(dim=-1).tolist(),
            history=history,
            num_output=len(known) - work.prompt_length,
            stop_ids=work.stop_ids,
        )


class _Statistics:
    """Running chances: draft i kept when those before it were; guess of rank f right."""

    def __init__(self, num_drafts: int, num_guesses: int) -> None:
        self.accept_rates = [0.7] * num_drafts
        self.guess_rates = [0.4 * 0.4**rank for rank in range(num_guesses)]
        self._weight = 0.05

    def observe(self, memory: _Memory, work: Work) -> None:
        """Learn from the outcome of the block that the last work was about."""
        drafts = memory.work.drafts
        news = work.tokens[len(memory.work.tokens) :]
        if not drafts or not news:
            return
        for i, draft in enumerate(drafts[: len(news)]):
            is_kept = news[i] == draft
            self.accept_rates[i] += self._weight * (is_kept - self.accept_rates[i])
            if not is_kept:
                for rank, guess in enumerate(memory.guesses[i][: len(self.guess_rates)]):
                    is_right = guess == news[i]
                    self.guess_rates[rank] += self._weight * (is_right - self.guess_rates[rank])
                return
