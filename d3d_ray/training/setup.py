"""From settings to what is trained: the drafter, what of it is frozen, and its loss."""

import torch
from torch import nn

from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.dflash_folder import load_dflash, make_dflash
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.loading import count_token_ids, load_causal_lm, load_tokenizer, stop_ids
from d3d_ray.models.network import DrafterNetwork, check_family, select_layers
from d3d_ray.models.pairing import check_mask_token
from d3d_ray.training.attention import Attention
from d3d_ray.training.config import ObjectiveConfig, TrainingConfig
from d3d_ray.training.data import count_answer_tokens
from d3d_ray.training.dflash import DFlashLoss
from d3d_ray.training.objective import default_gamma
from d3d_ray.training.step import DrafterLoss, Weights

AnyDrafter = DrafterModel | DFlashDrafter


def load_trained(config: TrainingConfig, device: torch.device) -> AnyDrafter:
    """What ``objective.kind`` says, on the CPU; the target of a DFlash drafter is on the device."""
    if config.objective.kind == "dflash":
        return load_dflash_for(config, device)
    return load_drafter_for(config)


def load_dflash_for(config: TrainingConfig, device: torch.device) -> DFlashDrafter:
    """The DFlash drafter to start from, with the layers of the target that it reads."""
    settings, source = config.drafter, config.target.source
    dtype = getattr(torch, config.optimiser.dtype)
    target = load_causal_lm(source, dtype=dtype, device=device)
    check_family(target.config)
    vocab_size = count_token_ids(load_tokenizer(source))
    if settings.source is None:
        drafter = make_dflash(
            target,
            target_source=source,
            vocab_size=vocab_size,
            num_layers=settings.num_layers,
            block_size=settings.block_size,
            mask_token_id=settings.mask_token_id,
            dtype=dtype,
        )
    else:
        drafter = load_dflash(
            settings.source, target, target_source=source, vocab_size=vocab_size, dtype=dtype
        )
        for name in ("num_layers", "block_size", "mask_token_id"):
            if getattr(settings, name) is not None:
                raise ValueError(
                    f"drafter.{name} is that of {settings.source} already: leave it out"
                )
    check_mask_token(
        drafter.mask_token_id,
        num_rows=target.config.vocab_size,
        stop_ids=stop_ids(target),
        tokenizer=load_tokenizer(source),
    )
    select_layers(target, range(max(drafter.layer_ids) + 1))  # The others need not be run.
    return drafter


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


def make_loss(drafter: AnyDrafter, config: TrainingConfig, device: torch.device) -> nn.Module:
    objective = config.objective
    block_size = drafter.block_size
    gamma = default_gamma(block_size) if objective.gamma is None else objective.gamma
    if isinstance(drafter, DFlashDrafter):
        return DFlashLoss(drafter, gamma=gamma, attention=_attention(config, device))
    weights = Weights(
        gamma=gamma,
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


def _attention(config: TrainingConfig, device: torch.device) -> Attention:
    if device.type == "cuda":
        return "flex"
    return "dense" if config.optimiser.dtype == "bfloat16" else "sdpa"
