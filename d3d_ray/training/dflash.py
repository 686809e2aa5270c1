"""The training of a DFlash drafter: its loss on a row, and its figures on documents held out.

A row is laid out as for the package's own drafters. The frozen target reads the clean tokens, each
document for itself; a block ``[anchor, MASK, …]`` sees the target's hidden states of the tokens
before its anchor, and itself. So what is learned is what is served.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, PreTrainedModel

from d3d_ray.models.dflash import DFlashNetwork
from d3d_ray.models.dflash_drafter import DFlashDrafter, embed, head
from d3d_ray.models.features import capture, join
from d3d_ray.training.attention import Attention, block_mask, use_attention
from d3d_ray.training.evaluation import count_leading, whole_blocks
from d3d_ray.training.layout import IGNORED, BlockShape, Document, TrainingRow, lay_out, see
from d3d_ray.training.objective import combine, in_chunks, row_losses

_NUM_ANCHORS = 32


class DFlashLoss(nn.Module):
    """A DFlash drafter's network with its loss on top: masked cross-entropy alone."""

    def __init__(
        self, drafter: DFlashDrafter, *, gamma: float, attention: Attention = "sdpa"
    ) -> None:
        super().__init__()
        self.network = drafter.network
        # In a tuple torch does not see it: the target is neither trained nor saved.
        self._frozen = (drafter.target.requires_grad_(False),)
        self._layer_ids = drafter.layer_ids
        self._gamma = gamma
        self._num_drafts = drafter.block_size - 1
        self._is_flex = attention == "flex"
        use_attention(drafter.network.config, attention)
        use_attention(drafter.target.config, attention)

    def forward(self, row: TrainingRow) -> tuple[torch.Tensor, ...]:
        """Total, denoising and autoregressive loss (there is none), and the loss of each draft."""
        (target,) = self._frozen
        blocks, hidden = run_blocks(
            self.network, target, self._layer_ids, row, is_flex=self._is_flex
        )
        at = (row.labels[blocks] != IGNORED).nonzero()[:, 0]
        labels = row.labels[blocks][at]

        def losses_of(chunk: torch.Tensor, rows: slice) -> torch.Tensor:
            return row_losses(head(target, chunk), labels[rows])

        parts = combine(
            in_chunks(losses_of, hidden[at], target.config.vocab_size),
            row.draft_index[blocks][at],
            gamma=self._gamma,
            ar_weight=0.0,
            num_drafts=self._num_drafts,
        )
        return parts.total, parts.denoising, parts.autoregressive, parts.by_draft


def run_blocks(
    network: DFlashNetwork,
    target: PreTrainedModel,
    layer_ids: Sequence[int],
    row: TrainingRow,
    *,
    is_flex: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # [n] int64, [n, hidden]
    """One pass over all blocks of a row; which rows they are, and what the head takes."""
    is_block = row.block >= 0
    blocks, clean = is_block.nonzero()[:, 0], (~is_block).nonzero()[:, 0]

    def mask(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | BlockMask:
        if is_flex:
            return block_mask(row, queries, keys)
        return see(row, queries[:, None], keys[None, :])[None, None]

    with torch.no_grad(), capture(target, layer_ids) as outputs:
        target.base_model(
            input_ids=row.token_ids[clean][None],
            position_ids=row.position_ids[clean][None],
            attention_mask=mask(clean, clean),
            use_cache=False,
        )
        features = join(outputs, layer_ids, network.device).to(network.dtype)
        anchors_and_masks = embed(target, row.token_ids[blocks][None]).to(network.dtype)
    cache = DynamicCache()
    network.inject(features, row.position_ids[clean], cache)
    hidden = network(
        anchors_and_masks,
        row.position_ids[blocks][None],
        mask(blocks, torch.cat([clean, blocks])),
        cache,
    )
    return blocks, hidden[0]


def dflash_shape(drafter: DFlashDrafter) -> BlockShape:
    return BlockShape(
        block_size=drafter.block_size,
        label_shift=False,
        mask_token_id=drafter.mask_token_id,
        has_anchor=True,
    )


def judge_dflash(
    drafter: DFlashDrafter, documents: Sequence[Document]
) -> tuple[float, list[float]]:
    """Teacher-forced acceptance length, and the share of right drafts at each place of a block."""
    shape = dflash_shape(drafter)
    right: list[list[bool]] = []
    for index, document in enumerate(documents):
        row = lay_out(
            [document], shape, num_anchors=_NUM_ANCHORS, seeded_share=0.0, rng=Random(index)
        ).to(drafter.device)
        with torch.inference_mode():
            blocks, hidden = run_blocks(drafter.network, drafter.target, drafter.layer_ids, row)
            logits = head(drafter.target, hidden)[:, : drafter.vocab_size]
            logits[:, drafter.mask_token_id : drafter.mask_token_id + 1] = -torch.inf
            is_right = torch.zeros(len(row.labels), dtype=torch.bool)
            is_right[blocks.cpu()] = (logits.argmax(dim=-1) == row.labels[blocks]).cpu()
        row = row.to(torch.device("cpu"))
        right += [is_right[block.rows].tolist() for block in whole_blocks(row, shape)]
    lengths = [1 + count_leading(block) for block in right]
    columns = list(zip(*right, strict=True))
    return (
        sum(lengths) / max(1, len(lengths)),
        [sum(column) / len(column) for column in columns],
    )
