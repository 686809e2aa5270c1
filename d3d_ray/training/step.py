"""The loss of one training row through a drafter; plain torch, whatever wraps it."""

from dataclasses import dataclass

import torch
from torch import nn

from d3d_ray.models.network import DrafterNetwork
from d3d_ray.training.attention import Attention, block_mask, use_attention
from d3d_ray.training.layout import IGNORED, TrainingRow, visible
from d3d_ray.training.objective import combine, in_chunks, row_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of the parts of the loss."""

    gamma: float
    ar_weight: float
    soft_weight: float
    num_drafts: int


class DrafterLoss(nn.Module):
    """A drafter's network with its loss on top."""

    def __init__(
        self,
        network: DrafterNetwork,
        weights: Weights,
        *,
        attention: Attention = "sdpa",
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self._weights = weights
        self._is_flex = attention == "flex"
        use_attention(network.config, attention)
        if is_checkpointed:
            network.model.activation_checkpointing_enable({"use_reentrant": False})

    def forward(self, row: TrainingRow) -> tuple[torch.Tensor, ...]:
        """Total, denoising and autoregressive loss, and the loss of each draft, as ``Losses``."""
        hidden = run(self.network, row, is_flex=self._is_flex)
        labels = self._columns(row.labels)
        at = (labels != IGNORED).nonzero()[:, 0]
        losses = self._losses(hidden[at], row, at, labels)
        weights = self._weights
        parts = combine(
            losses,
            row.draft_index[at],
            gamma=weights.gamma,
            ar_weight=weights.ar_weight,
            num_drafts=weights.num_drafts,
        )
        return parts.total, parts.denoising, parts.autoregressive, parts.by_draft

    def _columns(self, ids: torch.Tensor) -> torch.Tensor:  # any shape, int64
        """Where token ids stand in the logits; IGNORED for those that cannot be drafted."""
        drafted = self.network.draft_ids
        if drafted is None:
            return ids
        drafted = drafted.to(ids.device)
        columns = torch.searchsorted(drafted, ids).clamp(max=len(drafted) - 1)
        return columns.where(drafted[columns] == ids, IGNORED)

    def _losses(
        self,
        hidden: torch.Tensor,  # [n, hidden]
        row: TrainingRow,
        at: torch.Tensor,  # [n] int64, rows that have a label
        labels: torch.Tensor,  # [rows] int64, columns of the logits
    ) -> torch.Tensor:  # [n] fp32
        soft_weight = self._weights.soft_weight
        top_ids = top_log_probs = None
        if soft_weight > 0.0:
            assert row.top_ids is not None and row.top_log_probs is not None
            columns = row.label_column[at]
            top_ids, top_log_probs = row.top_ids[columns], row.top_log_probs[columns]
            if self.network.draft_ids is not None:
                top_ids = self._columns(top_ids)
                top_log_probs = top_log_probs.masked_fill(top_ids == IGNORED, -torch.inf)
                top_ids = top_ids.clamp(min=0)

        def chunk_losses(chunk: torch.Tensor, rows: slice) -> torch.Tensor:
            return row_losses(
                self.network.head(chunk),
                labels[at][rows],
                soft_weight=soft_weight,
                top_ids=None if top_ids is None else top_ids[rows],
                top_log_probs=None if top_log_probs is None else top_log_probs[rows],
            )

        return in_chunks(chunk_losses, hidden, self.network.config.vocab_size)


def run(
    network: DrafterNetwork, row: TrainingRow, *, is_flex: bool = False
) -> torch.Tensor:  # [rows, hidden]
    """One pass over a row, without a cache."""
    rows = torch.arange(len(row.token_ids), device=row.token_ids.device)
    mask = block_mask(row, rows, rows) if is_flex else visible(row)[None, None]
    hidden: torch.Tensor = network(row.token_ids[None], row.position_ids[None], mask)
    return hidden[0]
