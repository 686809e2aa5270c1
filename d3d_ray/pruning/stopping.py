"""When a run has reached what is wanted, and which depth is its result."""

from collections.abc import Sequence

from d3d_ray.pruning.anchors import tokens
from d3d_ray.pruning.config import StopConfig
from d3d_ray.pruning.estimates import Estimate, ratio
from d3d_ray.pruning.state import Depth


def share_kept(depth: Depth, unpruned: Depth) -> Estimate:
    """Of the unpruned drafter's acceptance length, as it was before the run."""
    return ratio(tokens(depth.healed), tokens(unpruned.healed))


def find_result(stop: StopConfig, depths: Sequence[Depth]) -> tuple[Depth, str] | None:
    """The depth that is the result, and why the run ends; None while it goes on."""
    last = depths[-1]
    is_bare = last.num_layers == 1
    if stop.depth is not None:
        # The first: a run that goes on may have gone further before.
        found = next((d for d in depths if d.num_layers <= stop.depth), None)
        return (found, f"{found.num_layers} layers") if found else None
    if stop.pass_ms is not None:
        found = next((d for d in depths if d.pass_ms <= stop.pass_ms), last)
        words = f"a packed pass of {found.pass_ms:.1f} ms with {found.num_layers} layers"
        if found.pass_ms <= stop.pass_ms:
            return found, words
        return (last, f"{words}, and no layer to remove is left") if is_bare else None
    assert stop.min_share is not None
    shares = [share_kept(depth, depths[0]).value for depth in depths]
    if shares[-1] >= stop.min_share and not is_bare:
        return None
    fitting = [d for d, share in zip(depths, shares, strict=True) if share >= stop.min_share]
    words = f"{last.num_layers} layers keep {shares[-1]:.2%} of the acceptance length"
    return fitting[-1], words


def num_to_remove(stop: StopConfig, depth: Depth, layers_per_round: int) -> int:
    """Never more than leads to the wanted depth, or to a single layer."""
    return min(layers_per_round, depth.num_layers - (stop.depth or 1))
