"""How well a drafter does: served through the real decode loop, and teacher-forced beside it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from d3d_ray.decode.dflash import FeatureDrafting
from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.decode.plans import DraftPlan
from d3d_ray.decode.scheduler import Scheduler
from d3d_ray.metrics import summarise
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.target import Target
from d3d_ray.records import Chunk, Finish, FromDrafter, Mode, Request, Sampling, Table, ToDrafter
from d3d_ray.training.layout import IGNORED, BlockShape, Document, TrainingRow, lay_out
from d3d_ray.training.step import run

ALARM_RATIO = 0.7
"""Served below this share of teacher-forced: training and serving are not aligned."""

_NUM_ANCHORS = 32
_MAX_ROWS = 64


class InlineDrafter:
    """A drafter in the verifier's own thread: drafts when it is asked whether any have come."""

    def __init__(self, plan: DraftPlan) -> None:
        self._arrived: list[FromDrafter] = []
        self._worker = DraftWorker(plan, self._take, is_paced=False)

    def send(self, message: ToDrafter) -> bool:
        self._worker.receive(message)
        return True

    def poll(self, timeout: float) -> list[FromDrafter]:
        while self._worker.step(0.0):
            pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def _take(self, message: FromDrafter) -> bool:
        if isinstance(message, Table):
            message = replace(message, arrived_ns=time.monotonic_ns())
        self._arrived.append(message)
        return True


def serve(
    target: Target,
    drafter: DrafterModel | DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    mode: Mode,
    max_tokens: int,
) -> list[Chunk]:
    """Answer prompts greedily, one after another; the last chunk of each, with its rounds.

    ``async`` drafts for every outcome before it is known, ``sync`` behind the known token; a DFlash
    drafter reads from the target already, and its mode is ``dflash``.
    """
    chunks: list[Chunk] = []
    inline = dflash = None
    if isinstance(drafter, DFlashDrafter):
        dflash = FeatureDrafting(drafter, is_noise_shared=True)
    else:
        inline = InlineDrafter(PackedPlan(drafter, max_rows=_MAX_ROWS, is_noise_shared=True))
    scheduler = Scheduler(
        target,
        inline,
        on_chunk=chunks.append,
        block_size=drafter.block_size,
        vocab_size=target.vocab_size,
        max_requests=1,
        max_wait_s=60.0,
        dflash=dflash,
    )
    for index, prompt in enumerate(prompts):
        scheduler.submit(
            Request(
                id=f"evaluation {index}",
                prompt=tuple(prompt),
                sampling=Sampling(seed=0),
                stop_ids=target.stop_ids,
                max_tokens=max_tokens,
                mode=mode,
            )
        )
    while sum(chunk.finish is not None for chunk in chunks) < len(prompts):
        scheduler.step(0.01)
    ended = [chunk for chunk in chunks if chunk.finish is not None]
    failed = [chunk.error for chunk in ended if chunk.finish is Finish.ERROR]
    if failed:
        raise RuntimeError(f"the evaluation failed: {failed[0]}")
    return ended


def served_length(
    target: Target,
    drafter: DrafterModel | DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    mode: Mode,
    max_tokens: int,
) -> float:
    """Acceptance length through the decode loop."""
    ended = serve(target, drafter, prompts, mode=mode, max_tokens=max_tokens)
    return summarise(r for chunk in ended for r in chunk.rounds).acceptance_length


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherForced:
    """Agreement with given answers; blocks that the end of an answer cuts are left out."""

    known_anchor: float
    """Acceptance length of seeded blocks: what ``sync`` serves."""
    mask_first: float
    """Acceptance length of blocks of masks alone."""
    ar_accuracy: float
    """Of the next-token head on the clean tokens."""
    foretold_share: float
    """Of outcomes (k, t*) of seeded blocks: the head tells them whole from the block's drafts."""
    draft_accuracies: list[float]
    """Share of drafts that are right at each place of a block, whatever the ones before."""


def teacher_forced(drafter: DrafterModel, documents: Sequence[Document]) -> TeacherForced:
    """Compare drafts at random places of the answers with the answers."""
    shape = block_shape(drafter)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    clean: list[torch.Tensor] = []
    drafts: list[list[bool]] = []
    foretold: list[bool] = []
    for index, document in enumerate(documents):
        for is_seeded in (True, False):
            row = lay_out(
                [document],
                shape,
                num_anchors=_NUM_ANCHORS,
                seeded_share=float(is_seeded),
                rng=Random(index),
            )
            is_right = judge(drafter, row)
            whole = whole_blocks(row, shape)
            blocks = [is_right[b.rows].tolist() for b in whole]
            kept = [count_leading(block) for block in blocks]
            lengths[is_seeded] += [1 + k for k in kept]
            if is_seeded:
                clean.append(is_right[(row.block < 0) & (row.labels != IGNORED)])
                drafts += blocks
                told = [_is_foretold(row, is_right, b, k) for b, k in zip(whole, kept, strict=True)]
                foretold += [is_told for is_told in told if is_told is not None]
    return TeacherForced(
        known_anchor=_mean(lengths[True]),
        mask_first=_mean(lengths[False]),
        ar_accuracy=float(torch.cat(clean).float().mean()),
        foretold_share=_mean(foretold),
        draft_accuracies=[_mean(column) for column in zip(*drafts, strict=True)],
    )


def block_shape(drafter: DrafterModel) -> BlockShape:
    return BlockShape(
        block_size=drafter.block_size,
        label_shift=drafter.label_shift,
        mask_token_id=drafter.mask_token_id,
    )


def judge(drafter: DrafterModel, row: TrainingRow) -> torch.Tensor:  # [rows] bool
    """Whether the best token of each row is its label; False where nothing is predicted."""
    at = (row.labels != IGNORED).nonzero()[:, 0]
    with torch.inference_mode():
        hidden = run(drafter.network, row.to(drafter.device))
        logits = drafter.network.head(hidden[at.to(drafter.device)])[:, : drafter.vocab_size]
        if drafter.draft_ids is None:
            logits[:, drafter.mask_token_id : drafter.mask_token_id + 1] = -torch.inf
            tokens = logits.argmax(dim=-1).cpu()
        else:
            tokens = drafter.draft_ids[logits.argmax(dim=-1)].cpu()
    is_right = torch.zeros(len(row.labels), dtype=torch.bool)
    is_right[at] = tokens == row.labels[at]
    return is_right


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WholeBlock:
    """A block of a row that the end of its answer does not cut."""

    is_seeded: bool
    rows: torch.Tensor
    """[drafts] int64: which rows predict its drafts, in order."""


def whole_blocks(row: TrainingRow, shape: BlockShape) -> list[WholeBlock]:
    """Blocks that the end of an answer cuts are left out: not all their drafts have a label."""
    blocks = []
    for block in range(int(row.block.max()) + 1):
        rows = (row.block == block).nonzero()[:, 0]
        rows = rows[1:] if shape.has_anchor else rows
        if bool((row.labels[rows] == IGNORED).any()):
            continue
        is_seeded = len(rows) < shape.block_size - shape.label_shift  # An anchor is a seed.
        if is_seeded and shape.label_shift:  # The first draft is the clean first slot's.
            rows = torch.cat([row.end_column[rows[:1]] - 1, rows])
        elif not is_seeded and not shape.label_shift:  # The first mask predicts t* itself.
            rows = rows[1:]
        blocks.append(WholeBlock(is_seeded=is_seeded, rows=rows))
    return blocks


def _is_foretold(
    row: TrainingRow,
    is_right: torch.Tensor,  # [rows] bool
    block: WholeBlock,
    k: int,
) -> bool | None:
    """Whether the next-token head is right behind the anchor and the ``k`` drafts that are kept.

    Then it agrees with those drafts, differs from the first wrong one, and gives t*: all these
    tokens are the answer's own, so the clean rows tell it. None where the answer ends before t*.
    """
    anchor = int(row.end_column[block.rows[-1]]) - 1
    if int(row.labels[anchor + k]) == IGNORED:
        return None
    return bool(is_right[anchor : anchor + k + 1].all())


def count_leading(block: list[bool]) -> int:
    """How many of a block's drafts stay: those before the first wrong one."""
    return block.index(False) if False in block else len(block)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
