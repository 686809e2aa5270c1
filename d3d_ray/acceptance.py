"""Which drafts stay. Pure functions; they know nothing of caches, branches or transport.

The target draws its own token at every position of the block; a draft is kept while it equals
that draw, and the first unequal draw is t*. Every emitted token is therefore the target's own
draw, and the law of the output does not depend on the drafts. The rule is that of DFlash
(arXiv 2602.06036), which is exact for any draft chosen without changing the target's noise.
"""

from collections.abc import Sequence, Set

import torch

from d3d_ray.records import Finish


def count_accepted(
    draws: torch.Tensor,  # [..., m + 1] the target's own token at each position of the block
    drafts: torch.Tensor,  # [..., m]
) -> torch.Tensor:  # [...] number of drafts kept, 0..m
    return (draws[..., :-1] == drafts).long().cumprod(dim=-1).sum(dim=-1)


def cut_at_end(
    tokens: Sequence[int], *, stop_ids: Set[int], num_left: int
) -> tuple[tuple[int, ...], Finish | None]:
    """Cut the tokens of one round behind the first stop token and at the ``num_left``-th token.

    The stop token itself is kept. A stop token at the very limit counts as a stop.
    """
    assert num_left >= 1
    for index, token in enumerate(tokens[:num_left]):
        if token in stop_ids:
            return tuple(tokens[: index + 1]), Finish.STOP
    if len(tokens) >= num_left:
        return tuple(tokens[:num_left]), Finish.LENGTH
    return tuple(tokens), None
