"""The packed pass: which rows it has, where they stand and what they see. Pure functions.

One pass of the drafter over ``[glue | branches]``::

    segment        rows                        see                                    predict
    glue           clean tokens                prefix + glue up to themselves         the next token
    mask-first     masks                       prefix + glue[..after] + each other    the drafts
    seeded         guess (clean), then masks   guess: prefix + glue[..after] + self   the drafts
                                               masks: that + guess + each other

The glue ends with the block under verification ``[anchor, d_1 … d_m]``; before the anchor it may
hold committed tokens that are not in the drafter's cache yet. Positions are given, never derived
from the slot: in the packed part slot and RoPE position differ. A row at position p predicts
position p + 1 (``label_shift``), on clean tokens and on masks alike; a drafter trained without the
shift predicts p at p, and its branches have one row more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class BranchShape:
    """One branch of a packed pass."""

    after: int
    """Number of glue rows that it sees."""
    seed: int | None
    """A clean token in the first slot; None = the first slot is a mask."""
    num_masks: int
    num_drafts: int
    """The last ``num_drafts`` rows of the branch (glue row ``after - 1`` included) give drafts."""

    @property
    def num_rows(self) -> int:
        return self.num_masks + (self.seed is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPass:
    """The input of one pass. ``rows`` counts glue first, then the branches in order."""

    token_ids: torch.Tensor
    """[rows] int64; the mask token's id where a row is a mask."""
    position_ids: torch.Tensor
    """[rows] int64."""
    visible: torch.Tensor
    """[rows, rows] bool: row sees column. The prefix is seen by every row and left out."""
    draft_rows: tuple[tuple[int, ...], ...]
    """For each branch the rows whose predictions are its drafts, in order."""


def mask_first(k: int, *, anchor_row: int, block_size: int, label_shift: bool) -> BranchShape:
    """The branch for k accepted drafts that holds for every t*: a mask at the bonus position."""
    num_drafts = block_size - 1
    num_masks = num_drafts if label_shift else num_drafts + 1
    return BranchShape(anchor_row + k + 1, None, num_masks, num_drafts)


def seeded(
    k: int, guess: int, *, anchor_row: int, block_size: int, label_shift: bool
) -> BranchShape:
    """The branch for the outcome ``(k, guess)``: the guess at the bonus position, then masks."""
    num_drafts = block_size - 1
    num_masks = num_drafts - 1 if label_shift else num_drafts
    return BranchShape(anchor_row + k + 1, guess, num_masks, num_drafts)


def continuation(*, num_glue: int, block_size: int, label_shift: bool) -> BranchShape:
    """Drafts behind a known anchor, the last glue row: the only branch of an unpacked pass."""
    num_drafts = block_size - 1
    num_masks = num_drafts - 1 if label_shift else num_drafts
    return BranchShape(num_glue, None, num_masks, num_drafts)


def pack(
    glue: Sequence[int],
    branches: Sequence[BranchShape],
    *,
    start: int,
    mask_token_id: int,
) -> PackedPass:
    """Lay out one pass; ``start`` is the position of the first glue row."""
    token_ids = list(glue)
    positions = list(range(start, start + len(glue)))
    for branch in branches:
        assert 1 <= branch.after <= len(glue)
        if branch.seed is not None:
            token_ids.append(branch.seed)
        token_ids.extend([mask_token_id] * branch.num_masks)
        positions.extend(range(start + branch.after, start + branch.after + branch.num_rows))
    shapes = tuple((b.after, b.seed is not None, b.num_rows, b.num_drafts) for b in branches)
    visible, draft_rows = _layout(len(glue), shapes)
    return PackedPass(torch.tensor(token_ids), torch.tensor(positions), visible, draft_rows)


@lru_cache(maxsize=512)
def _layout(
    num_glue: int, shapes: tuple[tuple[int, bool, int, int], ...]
) -> tuple[torch.Tensor, tuple[tuple[int, ...], ...]]:
    num_rows = num_glue + sum(num_branch_rows for _, _, num_branch_rows, _ in shapes)
    visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    visible[:num_glue, :num_glue] = torch.ones(num_glue, num_glue, dtype=torch.bool).tril()
    draft_rows = []
    first = num_glue
    for after, is_seeded, num_branch_rows, num_drafts in shapes:
        last = first + num_branch_rows
        visible[first:last, :after] = True
        visible[first:last, first:last] = True
        if is_seeded:  # The guess is an ordinary causal clean row: it must not see the masks.
            visible[first, first + 1 : last] = False
        rows = (after - 1, *range(first, last))
        draft_rows.append(rows[len(rows) - num_drafts :])
        first = last
    return visible, tuple(draft_rows)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A branch that could go into the pass, with the chance that its outcome comes."""

    k: int
    guess: int | None
    chance: float


def rank_outcomes(
    accept_rates: Sequence[float],
    guesses: Sequence[Sequence[int]],
    guess_rates: Sequence[float],
) -> list[Candidate]:
    """All candidate branches for a block of ``m = len(accept_rates)`` drafts, likeliest first.

    ``accept_rates[i]`` is the chance that draft i + 1 is kept when those before it were;
    ``guesses[k]`` lists guesses of t* for k = 0..m, best first, without the rejected draft;
    ``guess_rates[f]`` is the chance that the guess of rank f is right. A mask-first branch takes
    the chance that the guesses of its k leave over.
    """
    assert len(guesses) == len(accept_rates) + 1
    candidates = []
    reached = 1.0
    for k, guesses_k in enumerate(guesses):
        rejected = 1.0 - accept_rates[k] if k < len(accept_rates) else 1.0
        chance_left = 1.0
        for rate, guess in zip(guess_rates, guesses_k, strict=False):
            candidates.append(Candidate(k, guess, reached * rejected * rate))
            chance_left -= rate
        candidates.append(Candidate(k, None, reached * rejected * max(chance_left, 0.0)))
        if k < len(accept_rates):
            reached *= accept_rates[k]
    return sorted(candidates, key=lambda candidate: -candidate.chance)


def rank_foretold(
    scores: torch.Tensor,  # [m + 1, columns] fp32, of the drafter's AR head on the block's rows
    drafts: Sequence[int],
    num_guesses: int,
    ids: torch.Tensor | None = None,  # [columns] int64, ascending
) -> list[Candidate]:
    """As :func:`rank_outcomes`, by what the drafter itself thinks of the block.

    Row k is its law behind k drafts: the chance of its own token there, and of every guess. First
    comes the outcome that would be if its own tokens were the target's, then the likeliest.
    ``ids`` are the tokens of the columns; None = the column is the token.
    """
    assert len(scores) == len(drafts) + 1
    probs = scores.softmax(dim=-1)
    best, columns = probs.topk(min(num_guesses + 1, probs.shape[-1]), dim=-1)
    likeliest = (columns if ids is None else ids[columns]).tolist()
    foretold = next((k for k, draft in enumerate(drafts) if likeliest[k][0] != draft), len(drafts))
    chances_kept = _chances(probs, drafts, ids)
    candidates = []
    reached = 1.0
    for k, (chances, tokens) in enumerate(zip(best.tolist(), likeliest, strict=True)):
        draft = drafts[k] if k < len(drafts) else None
        kept = 0.0 if draft is None else chances_kept[k]
        left = 1.0 - kept
        guesses = [(t, c) for t, c in zip(tokens, chances, strict=True) if t != draft]
        for token, chance in guesses[:num_guesses]:
            candidates.append(Candidate(k, token, reached * chance))
            left -= chance
        candidates.append(Candidate(k, None, reached * max(left, 0.0)))
        reached *= kept
    return sorted(
        candidates, key=lambda c: ((c.k, c.guess) != (foretold, likeliest[foretold][0]), -c.chance)
    )


def _chances(
    probs: torch.Tensor,  # [rows, columns]
    tokens: Sequence[int],  # the token of row i is tokens[i]; rows behind them are left out
    ids: torch.Tensor | None,  # [columns] int64, ascending
) -> list[float]:
    """The chance of each token in its row; 0 for one without a column."""
    columns = wanted = torch.tensor(tokens, dtype=torch.int64, device=probs.device)
    if ids is not None:
        columns = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    chances = probs[: len(tokens)].gather(-1, columns[:, None])[:, 0]
    if ids is not None:
        chances = chances * (ids[columns] == wanted)
    result: list[float] = chances.tolist()
    return result


# Tokens that a round gives beyond t*, roughly, when its drafts were made for (k, t*), for k and
# whatever t* is, and for k with another t*. Only their ratios matter.
_HIT, _MASK_FIRST, _WRONG_GUESS = 2.0, 1.1, 0.6


def fill_budget(
    candidates: Sequence[Candidate], *, num_free_rows: int, num_rows_each: int
) -> list[Candidate]:
    """The candidates that fit and add most tokens, one after another; the first in any case.

    The first branch for a k serves all its outcomes somehow, each further one only its own.
    """
    num_fitting = max(1, num_free_rows // num_rows_each)
    if num_fitting >= len(candidates):
        return list(candidates)
    reached: dict[int, float] = {}
    for candidate in candidates:
        reached[candidate.k] = reached.get(candidate.k, 0.0) + candidate.chance
    chosen = list(candidates[:1])
    left = list(candidates[1:])
    while left and len(chosen) < num_fitting:
        best = max(left, key=lambda c: _added_tokens(c, chosen, reached[c.k]))
        chosen.append(best)
        left.remove(best)
    return chosen


def _added_tokens(candidate: Candidate, chosen: Sequence[Candidate], reached: float) -> float:
    others = [other for other in chosen if other.k == candidate.k]
    return _expected_tokens([*others, candidate], reached) - _expected_tokens(others, reached)


def _expected_tokens(branches: Sequence[Candidate], reached: float) -> float:
    """Of the branches for one k, which comes with chance ``reached``."""
    if not branches:
        return 0.0
    hit = sum(branch.chance for branch in branches if branch.guess is not None)
    has_mask_first = any(branch.guess is None for branch in branches)
    return hit * _HIT + (reached - hit) * (_MASK_FIRST if has_mask_first else _WRONG_GUESS)
