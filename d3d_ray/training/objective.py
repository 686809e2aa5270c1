"""The loss of a drafter: blockwise denoising, and next-token prediction on the clean stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

_HEAD_BYTES = 2**29
"""Logits that are held at a time, fp32; more labels than that go through the head in chunks."""

GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}
"""Decay of the weight of later drafts by block size, from DFlash (arXiv 2602.06036)."""


def default_gamma(block_size: int) -> float:
    """From the table, and in proportion to the nearest block size beside it."""
    nearest = min(GAMMAS, key=lambda size: abs(size - block_size))
    return GAMMAS[nearest] * block_size / nearest


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars, and the mean cross-entropy of each draft for the record."""

    total: torch.Tensor
    denoising: torch.Tensor
    autoregressive: torch.Tensor
    by_draft: torch.Tensor
    """[drafts], detached; nan where a draft has no row."""


def combine(
    losses: torch.Tensor,  # [n] fp32, of the rows that predict something
    draft_index: torch.Tensor,  # [n] int64, -1 on clean rows
    *,
    gamma: float,
    ar_weight: float,
    num_drafts: int,
) -> Losses:
    """Denoising cross-entropy, draft i weighted exp(-i / gamma), + ar_weight × next-token loss."""
    is_mask = draft_index >= 0
    weights = torch.exp(-draft_index.clamp(min=0) / gamma) * is_mask
    denoising = (losses * weights).sum() / weights.sum().clamp(min=1e-8)
    is_clean = (~is_mask).float()
    autoregressive = (losses * is_clean).sum() / is_clean.sum().clamp(min=1.0)
    one_hot = torch.zeros(len(losses), num_drafts, device=losses.device)
    one_hot[is_mask, draft_index[is_mask]] = 1.0
    by_draft = (losses.detach()[:, None] * one_hot).sum(dim=0) / one_hot.sum(dim=0)
    return Losses(denoising + ar_weight * autoregressive, denoising, autoregressive, by_draft)


def row_losses(
    logits: torch.Tensor,  # [n, vocab], of rows that predict something
    labels: torch.Tensor,  # [n] int64
    *,
    soft_weight: float = 0.0,
    top_ids: torch.Tensor | None = None,  # [n, top] int64
    top_log_probs: torch.Tensor | None = None,  # [n, top] the target's own
) -> torch.Tensor:  # [n] fp32
    """Cross-entropy of each row, with the label, the target's law, or a share of both.

    The target's law is its top probabilities, renormalised.
    """
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    hard = -log_probs.gather(-1, labels[:, None])[:, 0]
    if soft_weight == 0.0:
        return hard
    assert top_ids is not None and top_log_probs is not None
    law = top_log_probs.softmax(dim=-1).nan_to_num(0.0)  # None of them can be drafted.
    soft = -(law * log_probs.gather(-1, top_ids)).sum(dim=-1)
    return (1.0 - soft_weight) * hard + soft_weight * soft


def in_chunks(
    losses_of: Callable[[torch.Tensor, slice], torch.Tensor],
    hidden: torch.Tensor,  # [n, hidden]
    vocab_size: int,
) -> torch.Tensor:  # [n] fp32
    """``losses_of(hidden[rows], rows)`` of as many rows at a time as memory for logits allows."""
    size = max(1, _HEAD_BYTES // (4 * vocab_size))
    if len(hidden) <= size:
        return losses_of(hidden, slice(None))
    chunks = [slice(first, first + size) for first in range(0, len(hidden), size)]
    # Logits of all chunks would be kept for the backward pass; they are made again instead.
    parts = [checkpoint(losses_of, hidden[rows], rows, use_reentrant=False) for rows in chunks]
    return torch.cat(parts)
