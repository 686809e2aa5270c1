"""Does a branch of a packed pass see what it would see alone?

In fp32 its logits are the same but for rounding. In bf16 another number of rows changes their last
bits, and many layers add that up; so the difference is held against the one between two branches.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_ray.bench.check import Status
from d3d_ray.bench.curves import random_tokens
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.packing import mask_first, pack

_REQUEST = "packing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The branches of one packed pass against each branch in a pass of its own."""

    num_rows: int
    difference: float
    """Largest difference of two logits ÷ the largest logit."""
    agreement: float
    """Share of the draft rows with the same best token."""
    deviation: float
    """Root mean square of the differences ÷ that of the logits; of the worst branch."""
    deviation_between_branches: float
    """The same for neighbouring branches, the closest two: what a wrong mask looks like."""

    @property
    def status(self) -> Status:
        is_same = self.deviation < 0.5 * self.deviation_between_branches
        return Status.OK if is_same else Status.FAIL

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows: logits differ by at most {self.difference:.2g} of the largest "
            f"and by {self.deviation:.2g} in the mean square (neighbouring branches: "
            f"{self.deviation_between_branches:.2g}); the best token agrees in {self.agreement:.1%}"
        )


def compare_packing(drafter: DrafterModel, *, num_cached: int) -> Packing:
    """Branches for every k of a full block, mask-first: all in one pass, then one a pass."""
    prefix = random_tokens(num_cached, drafter.vocab_size, without=drafter.mask_token_id)
    block = random_tokens(drafter.block_size, drafter.vocab_size, 1, drafter.mask_token_id)
    every_k = range(drafter.block_size)
    _branch_logits(drafter, prefix, block[:1], [0])  # Now the prefix is cached.
    packed, num_rows = _branch_logits(drafter, prefix, block, every_k)
    alone = [_branch_logits(drafter, prefix, block[: k + 1], [k])[0][0] for k in every_k]
    drafter.free(_REQUEST)
    pairs = list(zip(packed, alone, strict=True))
    largest = max(float(logits.abs().max()) for logits in alone)
    same = torch.cat([p.argmax(dim=-1) == a.argmax(dim=-1) for p, a in pairs])
    return Packing(
        num_rows=num_rows,
        difference=max(float((p - a).abs().max()) for p, a in pairs) / largest,
        agreement=float(same.float().mean()),
        deviation=max(_deviation(p, a) for p, a in pairs),
        deviation_between_branches=min(
            _deviation(left, right) for left, right in itertools.pairwise(alone)
        ),
    )


def _deviation(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).square().mean().sqrt() / right.square().mean().sqrt())


def _branch_logits(
    drafter: DrafterModel, prefix: tuple[int, ...], block: tuple[int, ...], every_k: Sequence[int]
) -> tuple[list[torch.Tensor], int]:  # for each k [drafts, vocab]; rows of the pass
    clean, anchor = (*prefix, *block), len(prefix)
    start = drafter.match_cache(_REQUEST, clean, anchor)
    glue = clean[start:]
    size, shift = drafter.block_size, drafter.label_shift
    branches = [
        mask_first(k, anchor_row=anchor - start, block_size=size, label_shift=shift)
        for k in every_k
    ]
    layout = pack(glue, branches, start=start, mask_token_id=drafter.mask_token_id)
    rows = [row for branch in layout.draft_rows for row in branch]
    logits = drafter.forward(_REQUEST, layout, len(glue), rows)
    logits = logits.nan_to_num(neginf=0.0)  # The mask token's logit, which is never drafted.
    return list(logits.split(size - 1)), len(layout.token_ids)
