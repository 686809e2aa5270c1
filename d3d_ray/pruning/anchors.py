"""Fixed places of held-out answers, at which any drafter is compared with the answers."""

import hashlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TypedDict

import torch
from torch import nn

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.pruning.config import PruningConfig
from d3d_ray.training.data import read_heldout
from d3d_ray.training.evaluation import WholeBlock, block_shape, count_leading, judge, whole_blocks
from d3d_ray.training.layout import IGNORED, Document, TrainingRow, lay_out

logger = logging.getLogger(__name__)


class Tally(TypedDict):
    """Sums over the anchors of each document; two tallies of the same anchors are paired."""

    known_anchor: list[int]
    """Tokens a round of blocks with a known token at the first slot."""
    mask_first: list[int]
    """The same of blocks of masks alone."""
    next_token: list[int]
    """Right predictions on the clean tokens."""


def tokens(tally: Tally) -> list[int]:
    """Of blocks of both kinds: what layers are judged by. Of counts the blocks."""
    return [a + b for a, b in zip(tally["known_anchor"], tally["mask_first"], strict=True)]


@dataclass(frozen=True, slots=True)
class _Row:
    row: TrainingRow
    blocks: list[WholeBlock]


class Anchors:
    """About ``num_anchors`` anchors, in as few of the documents as hold them.

    A row is one document: attention over several would cost more than it saves.
    """

    def __init__(
        self,
        documents: Iterator[Document],
        drafter: DrafterModel,
        *,
        num_anchors: int,
        per_document: int,
        seeded_share: float,
        seed: str,
    ) -> None:
        shape, self._rows, self.num_anchors = block_shape(drafter), list[_Row](), 0
        for number, document in enumerate(documents):
            row = lay_out(
                [document],
                shape,
                num_anchors=per_document,
                seeded_share=seeded_share,
                rng=Random(f"{seed}/{number}"),
            )
            blocks = whole_blocks(row, shape)
            if blocks:  # Answers shorter than a block have none.
                self._rows.append(_Row(row, blocks))
                self.num_anchors += len(blocks)
            if self.num_anchors >= num_anchors:
                break
        everything = (torch.ones(len(each.row.labels), dtype=torch.bool) for each in self._rows)
        self.counts = self._sum(everything, lambda block: 1)
        """Blocks and clean tokens, rather than sums over them."""

    @property
    def num_documents(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """The same for the same anchors."""
        digest = hashlib.sha256()
        for each in self._rows:
            for tensor in (each.row.token_ids, each.row.labels, each.row.block):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def measure(self, drafter: DrafterModel) -> Tally:
        return self._sum(
            (judge(drafter, each.row) for each in self._rows),
            lambda block: 1 + count_leading(block),
        )

    def _sum(
        self,
        is_right: Iterator[torch.Tensor],  # of each row [rows] bool
        value: Callable[[list[bool]], int],
    ) -> Tally:
        sums = torch.zeros(3, len(self._rows), dtype=torch.long)
        for number, (each, right) in enumerate(zip(self._rows, is_right, strict=True)):
            for block in each.blocks:
                sums[0 if block.is_seeded else 1, number] += value(right[block.rows].tolist())
            is_clean = (each.row.block < 0) & (each.row.labels != IGNORED)
            sums[2, number] = right[is_clean].sum()
        known_anchor, mask_first, next_token = sums.tolist()
        return Tally(known_anchor=known_anchor, mask_first=mask_first, next_token=next_token)


def draw_anchors(config: PruningConfig, drafter: DrafterModel) -> tuple[Anchors, Anchors]:
    """Those of the ranking and, of other documents, those that confirm and measure.

    Raises ``ValueError`` when the documents held out do not suffice for both.
    """
    documents = read_heldout(config.data, drafter.mask_token_id, sys.maxsize)
    # The files may hold one dataset after another.
    Random(f"{config.seed}/documents").shuffle(documents)
    left, drawn = iter(documents), []
    wanted = (config.anchors.num_ranking, config.anchors.num_confirming)
    for name, num_anchors in zip(("ranking", "confirming"), wanted, strict=True):
        anchors = Anchors(
            left,
            drafter,
            num_anchors=num_anchors,
            per_document=config.anchors.per_document,
            seeded_share=config.anchors.seeded_share,
            seed=f"{config.seed}/{name}",
        )
        if anchors.num_documents < 2:
            raise ValueError(
                f"of {len(documents)} documents held out {anchors.num_documents} are left for "
                f"{name}, and a standard error needs two: give more answers, or lower "
                f"anchors.num_ranking, now {wanted[0]}"
            )
        logger.info(
            "%s: %d anchors, %d documents", name, anchors.num_anchors, anchors.num_documents
        )
        if anchors.num_anchors < num_anchors:
            logger.warning(
                "these are fewer than the %d asked for: no document is left", num_anchors
            )
        drawn.append(anchors)
    return drawn[0], drawn[1]


@contextmanager
def without_layers(network: DrafterNetwork, removed: Collection[int]) -> Iterator[None]:
    """Skip these layers, by their index, in passes without a cache."""
    backbone = network.model.model
    layers: Sequence[nn.Module] = backbone.layers
    backbone.layers = nn.ModuleList(
        layer for index, layer in enumerate(layers) if index not in removed
    )
    try:
        yield
    finally:
        backbone.layers = layers
