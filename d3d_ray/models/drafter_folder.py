"""Drafters on disk: ordinary Hugging Face folders with a section ``d3d`` in ``config.json``."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.embedded import shipped_folder
from d3d_ray.models.loading import (
    count_token_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
    read_tensors,
    save_model,
)
from d3d_ray.models.network import DrafterNetwork, check_family, evenly_spaced, select_layers
from d3d_ray.models.section import SECTION, DrafterSection, read_section, required
from d3d_ray.models.sharing import HEAD, TABLE, find_shared, fingerprint, take_shared
from d3d_ray.models.storage import quantise, restore

_MASK_EMBEDDING = "mask_embedding"
_DRAFT_IDS = "draft_ids"


def load_drafter(
    source: str | None,
    *,
    target_source: str,
    num_layers: int | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    label_shift: bool | None = None,
    dtype: torch.dtype,
    device: str | torch.device,
) -> DrafterModel:
    """Load a drafter, or derive an untrained one from an autoregressive checkpoint.

    - ``source=None``, or ``num_layers`` given: ``num_layers`` evenly spaced layers (None = all) of
      ``source`` or of the target's checkpoint; the mask embedding is the mean of the table.
    - a folder with our section: that drafter; ``block_size`` may be overridden.
    - any other checkpoint: a released drafter whose mask embedding is its own row
      ``mask_token_id``; without label shift unless told otherwise.

    Raises ``ValueError`` naming the option to give or to leave out.
    """
    if source is None or num_layers is not None:
        section = DrafterSection(
            block_size=required("block_size", block_size),
            mask_token_id=required("mask_token_id", mask_token_id),
            label_shift=True if label_shift is None else label_shift,
            source_layers=(),
            is_trained=False,
        )
        return _derive(source or target_source, section, num_layers, dtype=dtype, device=device)
    section = read_section(load_config(source), source, block_size, mask_token_id, label_shift)
    draft_ids = None
    if section.shared_with_target or section.bits or section.draft_vocab_size:
        model, row, draft_ids = _complete(
            source, section, target_source, dtype=dtype, device=device
        )
    else:
        model = load_causal_lm(source, dtype=dtype, device=device)
        _check_mask_row(model, section.mask_token_id)
        row = model.model.embed_tokens.weight[section.mask_token_id]
    tokenizer = load_drafter_tokenizer(source, target_source=target_source)
    drafter = _build(model, section, row, tokenizer)
    if draft_ids is not None:
        drafter.network.trim_head(draft_ids)
    return drafter


def load_drafter_tokenizer(source: str | None, *, target_source: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the drafter's folder, or the target's where the folder has none."""
    if source is None:
        return load_tokenizer(target_source)
    folder = shipped_folder(source) or Path(source).expanduser()
    has_none = folder.is_dir() and not (folder / "tokenizer_config.json").is_file()
    return load_tokenizer(target_source if has_none else source)


def save_drafter(
    drafter: DrafterModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    target_source: str | None = None,
    bits: int | None = None,
    max_shard_mb: int = 50_000,
) -> None:
    """Write a folder from which :func:`load_drafter` gives the same drafter, bit for bit.

    The mask embedding is stored as the mask token's row of the embedding table. Where the table
    is tied to the head, this is the head's row too, which is never drafted.

    With ``target_source``, embeddings and head are left out where they are the target's; the
    folder then holds their fingerprint, and the mask embedding as a tensor of its own.

    ``bits=8`` rounds the weight matrices (see :mod:`d3d_ray.models.storage`), once: saved again,
    the loaded drafter gives the same tensors. The mask embedding is again a tensor of its own.
    Files are split at ``max_shard_mb``, between tensors.
    """
    model = drafter.network.model
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state[HEAD] = state[TABLE]
    shared = {} if target_source is None else find_shared(state, target_source)
    section = replace(
        drafter.section,
        shared_with_target=tuple(sorted(shared)),
        fingerprint=fingerprint(shared) if shared else "",
        draft_vocab_size=None if drafter.draft_ids is None else len(drafter.draft_ids),
        bits=bits,
    )
    _place_mask_embedding(state, drafter, is_apart=TABLE in shared or bits is not None)
    state = {name: tensor for name, tensor in state.items() if name not in shared}
    if drafter.draft_ids is not None:
        state[_DRAFT_IDS] = drafter.draft_ids
    setattr(model.config, SECTION, asdict(section))
    state = quantise(state) if bits else state
    save_model(model, folder, state_dict=state, max_shard_size=f"{max_shard_mb}MB")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _place_mask_embedding(
    state: dict[str, torch.Tensor], drafter: DrafterModel, *, is_apart: bool
) -> None:
    """As a tensor of its own, or in the table's row; a tied head goes with the table."""
    mask_embedding = drafter.network.mask_embedding.detach()
    if is_apart:
        state[_MASK_EMBEDDING] = mask_embedding
    else:
        # A copy: the table in memory may be shared with the target, which must not change.
        state[TABLE] = state[TABLE].detach().clone()
        state[TABLE][drafter.mask_token_id] = mask_embedding
    if drafter.network.config.tie_word_embeddings:
        del state[HEAD]
        if not is_apart:
            state[HEAD] = state[TABLE]


def _complete(
    source: str,
    section: DrafterSection,
    target_source: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> tuple[PreTrainedModel, torch.Tensor, torch.Tensor | None]:
    """The network with the target's tensors in their places, mask embedding and drafted ids."""
    state = restore(read_tensors(source), dtype)
    if section.shared_with_target:
        state |= take_shared(section.shared_with_target, section.fingerprint, target_source)
    mask_embedding = state.pop(_MASK_EMBEDDING, None)
    draft_ids = state.pop(_DRAFT_IDS, None)
    config = load_config(source)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = architecture.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        output_loading_info=True,
    )
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ValueError(f"{source} is incomplete: {dict(info)}")
    if mask_embedding is None:
        mask_embedding = model.model.embed_tokens.weight[section.mask_token_id]
    mask_embedding = mask_embedding.to(device=device, dtype=dtype)
    return model.to(device).eval(), mask_embedding, draft_ids


def _derive(
    source: str,
    section: DrafterSection,
    num_layers: int | None,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> DrafterModel:
    model = load_causal_lm(source, dtype=dtype, device=device)
    check_family(model.config)
    stored = getattr(model.config, SECTION, None) or {}
    if stored.get("shared_with_target") or stored.get("bits"):
        raise ValueError(f"{source} holds no whole checkpoint; leave drafter.num_layers out")
    _check_mask_row(model, section.mask_token_id)
    num_all: int = model.config.num_hidden_layers
    kept = evenly_spaced(num_all, num_all if num_layers is None else num_layers)
    select_layers(model, kept)
    table = model.model.embed_tokens.weight
    mean = table.float().mean(dim=0).to(table.dtype)
    section = replace(section, source_layers=tuple(kept))
    return _build(model, section, mean, load_tokenizer(source))


def _build(
    model: PreTrainedModel,
    section: DrafterSection,
    mask_embedding: torch.Tensor,  # [hidden]
    tokenizer: PreTrainedTokenizerBase,
) -> DrafterModel:
    network = DrafterNetwork(
        model, mask_token_id=section.mask_token_id, mask_embedding=mask_embedding
    )
    return DrafterModel(network, section, vocab_size=count_token_ids(tokenizer))


def _check_mask_row(model: PreTrainedModel, mask_token_id: int) -> None:
    num_rows = model.config.vocab_size
    if not 0 <= mask_token_id < num_rows:
        raise ValueError(
            f"drafter.mask_token_id is {mask_token_id}, but the drafter embeds the ids 0 to "
            f"{num_rows - 1}; give one of them that no text uses"
        )
