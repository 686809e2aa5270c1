"""T_draft: how long one packed pass of a drafter takes."""

import statistics
import time
from random import Random

import torch

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.packing import mask_first, pack
from d3d_ray.pruning.config import TimingConfig

_REQUEST = "timing"
_NUM_WARMUP = 2


def measure_pass_ms(drafter: DrafterModel, config: TimingConfig) -> float:
    """The median of some passes behind a filled cache, as in serving: a block, and branches.

    The drafter is fused for it, so it can no longer be trained or saved.
    """
    drafter.fuse()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return _measure(drafter, config)
    finally:
        torch.set_num_threads(num_threads)
        drafter.free(_REQUEST)


def _measure(drafter: DrafterModel, config: TimingConfig) -> float:
    size = drafter.block_size
    num_cached = min(config.num_cached, drafter.max_positions - 2 * size)
    rng, ids = Random(0), [id_ for id_ in range(drafter.vocab_size) if id_ != drafter.mask_token_id]
    tokens = rng.choices(ids, k=num_cached + size)
    times = []
    for _ in range(_NUM_WARMUP + config.num_runs):  # The first one fills the cache.
        started = time.perf_counter()
        _run_pass(drafter, tokens, num_cached, config.num_rows)
        times.append(time.perf_counter() - started)
    return 1000.0 * statistics.median(times[_NUM_WARMUP:])


def _run_pass(drafter: DrafterModel, tokens: list[int], anchor: int, num_rows: int) -> None:
    start = drafter.match_cache(_REQUEST, tokens, anchor)
    glue, size, shift = tokens[start:], drafter.block_size, drafter.label_shift
    num_masks = size - 1 if shift else size
    num_branches = max(1, (num_rows - (len(tokens) - anchor)) // num_masks)
    branches = [
        mask_first(number % size, anchor_row=anchor - start, block_size=size, label_shift=shift)
        for number in range(num_branches)
    ]
    packed = pack(glue, branches, start=start, mask_token_id=drafter.mask_token_id)
    rows = [row for branch in packed.draft_rows for row in branch]
    logits = drafter.forward(_REQUEST, packed, len(glue), rows)
    logits.argmax(dim=-1).tolist()  # Waits for the device.
