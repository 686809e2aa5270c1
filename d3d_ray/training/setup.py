"""From settings to what is trained: the drafter, what of it is frozen, and its loss."""

from typing import Literal

import torch

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.training.config import ObjectiveConfig, TrainingConfig
from d3d_ray.training.data import count_answer_tokens
from d3d_ray.training.objective import default_gamma
from d3d_ray.training.step import DrafterLoss, Weights


def load_drafter_for(config: TrainingConfig) -> DrafterModel:
    """The drafter to start from, on the CPU, with its frozen parts frozen."""
    drafter = load_drafter(
        config.drafter.source,
        target_source=config.target.source,
        num_layers=config.drafter.num_layers,
        block_size=config.drafter.block_size,
        mask_token_id=config.drafter.mask_token_id,
        label_shift=config.drafter.label_shift,
        dtype=getattr(torch, config.optimiser.dtype),
        device="cpu",
    )
    freeze(drafter.network, config.objective)
    if config.objective.draft_vocab_size is not None:
        _trim(drafter, config)
    if drafter.draft_ids is not None and config.objective.train_head:
        raise ValueError(
            "a drafter of fewer tokens has a copy of the head's rows, which must stay as they are: "
            "set objective.train_head=false"
        )
    return drafter


def _trim(drafter: DrafterModel, config: TrainingConfig) -> None:
    objective = config.objective
    assert objective.draft_vocab_size is not None
    # The answers may have had fewer tokens than were asked for.
    if drafter.draft_ids is not None and len(drafter.draft_ids) <= objective.draft_vocab_size:
        return
    if drafter.draft_ids is not None:
        raise ValueError(
            f"{config.drafter.source} drafts {len(drafter.draft_ids)} tokens already; leave "
            "objective.draft_vocab_size out"
        )
    counts = count_answer_tokens(config.data, drafter.mask_token_id)
    kept = [id_ for id_, _ in counts.most_common(objective.draft_vocab_size)]
    drafter.network.trim_head(torch.tensor(sorted(kept)))


def freeze(network: DrafterNetwork, objective: ObjectiveConfig) -> None:
    """Raises ``ValueError`` for a tied head that should be trained without the embeddings."""
    table, head = network.model.model.embed_tokens.weight, network.model.lm_head.weight
    if head is table and objective.train_head != objective.train_embeddings:
        raise ValueError(
            "the drafter's head is tied to its embeddings: set objective.train_head and "
            "objective.train_embeddings alike"
        )
    table.requires_grad_(objective.train_embeddings)
    head.requires_grad_(objective.train_head)


def make_loss(drafter: DrafterModel, config: TrainingConfig, device: torch.device) -> DrafterLoss:
    objective = config.objective
    block_size = drafter.block_size
    weights = Weights(
        gamma=default_gamma(block_size) if objective.gamma is None else objective.gamma,
        ar_weight=objective.ar_weight,
        soft_weight=objective.soft_weight,
        num_drafts=block_size - 1,
    )
    return DrafterLoss(
        drafter.network,
        weights,
        attention=_attention(config, device),
        is_checkpointed=config.optimiser.activation_checkpointing,
    )


def _attention(config: TrainingConfig, device: torch.device) -> Literal["sdpa", "dense", "flex"]:
    if device.type == "cuda":
        return "flex"
    return "dense" if config.optimiser.dtype == "bfloat16" else "sdpa"
