"""What a verification and a packed pass cost, by their number of rows: T_verify and T_draft.

Both are timed as the decode loops run them: with the draws of the target, and with the drafter's
choice of drafts and runners-up, so that a time ends when the token ids are on the host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import torch

from d3d_ray.decode.protocols import Block
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.target import Target
from d3d_ray.packing import BranchShape, pack
from d3d_ray.records import Sampling
from d3d_ray.sampling import draw

ROWS = (1, 2, 4, 8, 16, 32, 64)
CACHED = 256

_REQUEST = "curve"
_NUM_WARMUPS = 3
_NUM_REPEATS = 11
_MIN_REPEATS = 3
_ENOUGH_S = 2.0
"""A row count whose repeats took this long gets no more of them."""


class Deadline:
    """A time budget that starts when it is made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Median milliseconds by number of rows, behind ``num_cached`` tokens."""

    num_cached: int
    milliseconds: dict[int, float]
    skipped: tuple[int, ...] = ()
    """Row counts for which no time or no context was left."""

    def __str__(self) -> str:
        points = ", ".join(f"{rows}: {ms:.3g}" for rows, ms in self.milliseconds.items())
        skipped = f" (skipped {', '.join(map(str, self.skipped))})" if self.skipped else ""
        return f"ms by rows behind {self.num_cached} tokens: {points}{skipped}"


def verify_curve(
    target: Target,
    rows: Sequence[int] = ROWS,
    *,
    num_cached: int = CACHED,
    deadline: Deadline | None = None,
) -> Curve:
    """T_verify: blocks of so many rows, all of them with logits and a greedy draw."""
    prefix = random_tokens(num_cached, target.vocab_size)
    rows, too_long = _split(rows, target.max_positions - num_cached)

    def verify(num_rows: int) -> None:
        tokens = random_tokens(num_rows, target.vocab_size, seed=num_rows)
        logits = target.forward([Block(_REQUEST, num_cached, tokens, num_logits=num_rows)])[0]
        draw(logits, Sampling(), position=num_cached + 1).cpu()
        target.cut(_REQUEST, num_cached)

    if rows:
        target.forward([Block(_REQUEST, 0, prefix, num_logits=0)])
    try:
        return _measure(verify, rows, num_cached, too_long, target.device, deadline)
    finally:
        target.free(_REQUEST)


def draft_curve(
    drafter: DrafterModel,
    rows: Sequence[int] = ROWS,
    *,
    num_cached: int = CACHED,
    deadline: Deadline | None = None,
) -> Curve:
    """T_draft: packed passes of so many rows, a block of glue and then mask-first branches."""
    prefix = random_tokens(num_cached, drafter.vocab_size, without=drafter.mask_token_id)
    rows, too_long = _split(rows, 10**9)
    if num_cached + 2 * drafter.block_size > drafter.max_positions:
        rows, too_long = (), (*rows, *too_long)

    def draft(num_rows: int) -> None:
        num_clean = min(num_rows, drafter.block_size)
        block = random_tokens(num_clean, drafter.vocab_size, num_rows, drafter.mask_token_id)
        clean = (*prefix, *block)
        start = drafter.match_cache(_REQUEST, clean, anchor=num_cached)
        glue = clean[start:]
        branches = fill_with_branches(
            num_rows - num_clean,
            anchor_row=num_cached - start,
            num_clean=num_clean,
            block_size=drafter.block_size,
            label_shift=drafter.label_shift,
        )
        packed = pack(glue, branches, start=start, mask_token_id=drafter.mask_token_id)
        heads = [row for branch in packed.draft_rows for row in branch] or [len(glue) - 1]
        logits = drafter.forward(_REQUEST, packed, len(glue), heads)
        logits.topk(min(4, logits.shape[-1]), dim=-1).indices.tolist()

    try:
        return _measure(draft, rows, num_cached, too_long, drafter.device, deadline)
    finally:
        drafter.free(_REQUEST)


def fill_with_branches(
    num_rows: int, *, anchor_row: int, num_clean: int, block_size: int, label_shift: bool
) -> list[BranchShape]:
    """Mask-first branches of ``num_rows`` rows together, for k = 0, 1, … in turn."""
    width = block_size - 1 if label_shift else block_size
    branches: list[BranchShape] = []
    while num_rows > 0:
        num_masks = min(width, num_rows)
        after = anchor_row + 1 + len(branches) % num_clean
        branches.append(BranchShape(after, None, num_masks, min(num_masks, block_size - 1)))
        num_rows -= num_masks
    return branches


def judge_fit(
    verify: Curve, draft: Curve, *, block_size: int, max_draft_rows: int, hop_ms: float
) -> tuple[bool, str]:
    """Whether T_draft of the packed pass and two hops fit under T_verify; and a sentence on it.

    The curves must hold ``block_size`` and ``max_draft_rows`` themselves.
    """
    verify_ms, draft_ms = verify.milliseconds[block_size], draft.milliseconds[max_draft_rows]
    needed_ms = draft_ms + 2 * hop_ms
    facts = (
        f"a packed pass of {max_draft_rows} rows and two hops take {needed_ms:.3g} ms, "
        f"a verification of {block_size} rows takes {verify_ms:.3g} ms"
    )
    if needed_ms <= verify_ms:
        return True, f"T_draft fits under T_verify: {facts}"
    fitting = [rows for rows, ms in draft.milliseconds.items() if ms + 2 * hop_ms <= verify_ms]
    remedy = "use a drafter with fewer layers, or a faster device for it"
    if fitting and max(fitting) >= block_size + block_size - 1:  # Glue and one branch, at least.
        remedy = f"set decode.max_draft_rows={max(fitting)}, or {remedy}"
    return False, f"T_draft does not fit under T_verify: {facts}; {remedy}"


def random_tokens(
    num_tokens: int, vocab_size: int, seed: int = 0, without: int | None = None
) -> tuple[int, ...]:
    """Token ids in [0, ``vocab_size``), the same for the same seed, none of them ``without``."""
    rng = Random(seed)
    tokens = (rng.randrange(vocab_size) for _ in range(num_tokens))
    return tuple((token + 1) % vocab_size if token == without else token for token in tokens)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _split(rows: Sequence[int], limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ordered = sorted(set(rows))
    return tuple(n for n in ordered if n <= limit), tuple(n for n in ordered if n > limit)


def _measure(
    run: Callable[[int], None],
    rows: Sequence[int],
    num_cached: int,
    skipped: tuple[int, ...],
    device: torch.device,
    deadline: Deadline | None,
) -> Curve:
    milliseconds: dict[int, float] = {}
    for num_rows in rows:
        if deadline is not None and deadline.seconds_left <= 0:
            skipped = (*rows[len(milliseconds) :], *skipped)
            break
        milliseconds[num_rows] = _median_ms(run, num_rows, device)
    return Curve(num_cached=num_cached, milliseconds=milliseconds, skipped=skipped)


def _median_ms(run: Callable[[int], None], num_rows: int, device: torch.device) -> float:
    for _ in range(_NUM_WARMUPS):
        run(num_rows)
    seconds: list[float] = []
    while len(seconds) < _NUM_REPEATS and (len(seconds) < _MIN_REPEATS or sum(seconds) < _ENOUGH_S):
        synchronise(device)
        start = time.perf_counter()
        run(num_rows)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds) * 1e3
