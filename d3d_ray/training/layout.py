"""One training row: a stream of clean tokens, and blocks of masks behind random first slots.

::

    [clean tokens, token-causal | block 0 | block 1 | …]

    block        first slot s            masks stand at      see                  predict (shift)
    mask-first   a mask                  s … s+B-2           clean < s, own block s+1 … s+B-1
    seeded       the clean token at s    s+1 … s+B-2         clean ≤ s, own block s+2 … s+B-1

It is the packed pass of serving, with many anchors at once: the first slot stands where t* will.
Two blocks never see each other, nor another document. Without label shift a row predicts its own
position, and a block has one row more. A DFlash block is such a mask-first one whose first row
holds the true token, the anchor: the clean stream, before it, is the target's. The layout of
anchors and blocks is that of DFlash (arXiv 2602.06036) with the clean stream of TiDAR
(arXiv 2511.08923) in place of target features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import torch
from torch.nn.functional import pad

IGNORED = -100
"""Label of a row that predicts nothing; ``cross_entropy`` leaves it out."""


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and the target's own answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    top_ids: torch.Tensor | None = None
    """[answer, top] int64: the target's likeliest tokens at each place of the answer."""
    top_log_probs: torch.Tensor | None = None
    """[answer, top] fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the blocks of a drafter look like."""

    block_size: int
    """Anchor and drafts together."""
    label_shift: bool
    mask_token_id: int
    has_anchor: bool = False
    """DFlash: the first slot is a clean row of the block that predicts nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """Tensors of one row; ``clean`` rows first, then the masks of all blocks."""

    token_ids: torch.Tensor
    """[rows] int64."""
    position_ids: torch.Tensor
    """[rows] int64, from 0 in each document."""
    labels: torch.Tensor
    """[rows] int64; ``IGNORED`` where nothing is predicted."""
    draft_index: torch.Tensor
    """[rows] int64: which draft of its block a mask predicts, from 0; -1 on clean rows."""
    first_column: torch.Tensor
    """[rows] int64: the first clean row that is seen, the start of the document."""
    end_column: torch.Tensor
    """[rows] int64: one behind the last clean row that is seen."""
    block: torch.Tensor
    """[rows] int64: number of the block; -1 on clean rows."""
    label_column: torch.Tensor
    """[rows] int64: the clean row that holds the label; -1 where nothing is predicted."""
    top_ids: torch.Tensor | None = None
    """[clean, top] int64: soft targets for the token of each clean row; zeros in prompts."""
    top_log_probs: torch.Tensor | None = None
    """[clean, top] fp32."""

    @property
    def num_clean(self) -> int:
        return int((self.block < 0).sum())

    def to(self, device: torch.device) -> "TrainingRow":
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        moved = {name: t.to(device) for name, t in tensors.items() if t is not None}
        return TrainingRow(**moved)


_COLUMNS = (
    "token_ids",
    "position_ids",
    "labels",
    "draft_index",
    "first_column",
    "end_column",
    "block",
    "label_column",
)


def lay_out(
    documents: Sequence[Document],
    shape: BlockShape,
    *,
    num_anchors: int,
    seeded_share: float,
    rng: Random,
) -> TrainingRow:
    """Pack documents into one row, with ``num_anchors`` blocks at random slots of their answers.

    Anchors are drawn without repetition over all answers; where there are fewer slots than that,
    all are taken. Raises ``ValueError`` for a document without prompt or answer.
    """
    builder = _Builder(shape)
    slots: list[tuple[int, int]] = []
    for document in documents:
        if not document.prompt or not document.answer:
            raise ValueError("a document needs a prompt and an answer of at least one token each")
        start = builder.add_clean(document)
        first = start + len(document.prompt)
        slots += [(slot, start) for slot in range(first, first + len(document.answer))]
    # The last slot of an answer has nothing behind it to predict.
    slots = [slot for slot in slots if builder.num_following(slot[0]) > 0]
    for slot, start in sorted(rng.sample(slots, min(num_anchors, len(slots)))):
        is_seeded = rng.random() < seeded_share and not shape.has_anchor
        builder.add_block(slot, start, is_seeded=is_seeded)
    return builder.build()


class _Builder:
    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape
        self._clean: list[int] = []
        self._ends: list[int] = []
        """For each clean row the end of its document."""
        self._columns: list[tuple[int, int, int, int, int, int, int, int]] = []
        self._soft: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_clean(self, document: Document) -> int:
        start, tokens = len(self._clean), (*document.prompt, *document.answer)
        self._clean += tokens
        self._ends += [start + len(tokens)] * len(tokens)
        for index, token in enumerate(tokens):
            is_predicting = len(document.prompt) - 1 <= index < len(tokens) - 1
            label = tokens[index + 1] if is_predicting else IGNORED
            column = start + index + 1
            self._columns.append(
                (token, index, label, -1, start, column, -1, column if is_predicting else -1)
            )
        self._add_soft(document)
        return start

    def _add_soft(self, document: Document) -> None:
        if document.top_ids is None or document.top_log_probs is None:
            return
        assert document.top_ids.shape == document.top_log_probs.shape
        assert len(document.top_ids) == len(document.answer)
        padding = (0, 0, len(document.prompt), 0)
        self._soft.append(
            (pad(document.top_ids, padding), pad(document.top_log_probs.float(), padding))
        )

    def num_following(self, slot: int) -> int:
        return self._ends[slot] - slot - 1

    def add_block(self, slot: int, start: int, *, is_seeded: bool) -> None:
        shape, block = self._shape, self._columns[-1][6] + 1
        shift = int(shape.label_shift)
        first, last = slot + is_seeded, slot + shape.block_size - shift
        for at in range(first, last):
            predicted = at + shift
            is_anchor = shape.has_anchor and at == slot
            is_inside = predicted < self._ends[slot] and not is_anchor
            label = self._clean[predicted] if is_inside else IGNORED
            # Unshifted, the mask at the first slot predicts t* itself: as much worth as draft 0.
            draft_index = max(predicted - slot - 1, 0)
            self._columns.append(
                (
                    self._clean[slot] if is_anchor else shape.mask_token_id,
                    at - start,
                    label,
                    draft_index,
                    start,
                    slot + is_seeded,
                    block,
                    predicted if is_inside else -1,
                )
            )

    def build(self) -> TrainingRow:
        columns = dict(zip(_COLUMNS, torch.tensor(self._columns).T.contiguous(), strict=True))
        if not self._soft:
            return TrainingRow(**columns)
        ids, log_probs = (torch.cat(parts) for parts in zip(*self._soft, strict=True))
        assert len(ids) == len(self._clean), "all documents of a row have soft targets, or none"
        return TrainingRow(**columns, top_ids=ids, top_log_probs=log_probs)


def pad_rows(row: TrainingRow, num_rows: int) -> TrainingRow:
    """Lengthen to ``num_rows`` with rows that predict nothing and see only themselves.

    One shape for all rows means one compilation on a GPU.
    """
    at, num_added = len(row.token_ids), num_rows - len(row.token_ids)
    assert num_added >= 0
    own = torch.arange(at, num_rows)
    zeros = torch.zeros_like(own)
    added = (zeros, zeros, zeros + IGNORED, zeros - 1, own, own + 1, zeros - 1, zeros - 1)
    return replace(
        row,
        **{
            name: torch.cat([getattr(row, name), new])
            for name, new in zip(_COLUMNS, added, strict=True)
        },
    )


def visible(row: TrainingRow) -> torch.Tensor:  # [rows, rows] bool: row sees column
    """The dense mask, for attention that takes one."""
    rows = torch.arange(len(row.token_ids), device=row.token_ids.device)
    return see(row, rows[:, None], rows[None, :])


def see(row: TrainingRow, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Whether rows ``query`` see rows ``key``, elementwise; also a FlexAttention ``mask_mod``."""
    is_clean = row.block[key] < 0
    is_before = (key >= row.first_column[query]) & (key < row.end_column[query])
    is_own_block = (row.block[query] == row.block[key]) & ~is_clean
    return (is_clean & is_before) | is_own_block
