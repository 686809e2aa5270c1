"""Drafters on disk: ordinary Hugging Face folders with a section ``d3d`` in ``config.json``."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from d3d_ray.models.drafter import DrafterModel, DrafterSection
from d3d_ray.models.loading import (
    count_token_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
)
from d3d_ray.models.network import DrafterNetwork, check_family, evenly_spaced, select_layers

SECTION = "d3d"


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
            block_size=_required("block_size", block_size),
            mask_token_id=_required("mask_token_id", mask_token_id),
            label_shift=True if label_shift is None else label_shift,
            source_layers=(),
            is_trained=False,
        )
        return _derive(source or target_source, section, num_layers, dtype=dtype, device=device)
    section = _section(load_config(source), source, block_size, mask_token_id, label_shift)
    model = load_causal_lm(source, dtype=dtype, device=device)
    _check_mask_row(model, section.mask_token_id)
    row = model.model.embed_tokens.weight[section.mask_token_id]
    tokenizer = load_drafter_tokenizer(source, target_source=target_source)
    return _build(model, section, row, tokenizer)


def load_drafter_tokenizer(source: str | None, *, target_source: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the drafter's folder, or the target's where the folder has none."""
    if source is None:
        return load_tokenizer(target_source)
    folder = Path(source).expanduser()
    has_none = folder.is_dir() and not (folder / "tokenizer_config.json").is_file()
    return load_tokenizer(target_source if has_none else source)


def save_drafter(
    drafter: DrafterModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a folder from which :func:`load_drafter` gives the same drafter, bit for bit.

    The mask embedding is stored as the mask token's row of the embedding table. Where the table
    is tied to the head, this is the head's row too, which is never drafted.
    """
    model = drafter.network.model
    # A copy: the table in memory may be shared with the target, which must not change.
    table = model.model.embed_tokens.weight.detach().clone()
    table[drafter.mask_token_id] = drafter.network.mask_embedding.detach()
    state = {**model.state_dict(), "model.embed_tokens.weight": table}
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = table
    section = asdict(drafter.section)
    setattr(model.config, SECTION, {**section, "source_layers": list(section["source_layers"])})
    model.save_pretrained(folder, state_dict=state)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _derive(
    target_source: str,
    section: DrafterSection,
    num_layers: int | None,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> DrafterModel:
    model = load_causal_lm(target_source, dtype=dtype, device=device)
    check_family(model.config)
    _check_mask_row(model, section.mask_token_id)
    num_all: int = model.config.num_hidden_layers
    kept = evenly_spaced(num_all, num_all if num_layers is None else num_layers)
    select_layers(model, kept)
    table = model.model.embed_tokens.weight
    mean = table.float().mean(dim=0).to(table.dtype)
    section = replace(section, source_layers=tuple(kept))
    return _build(model, section, mean, load_tokenizer(target_source))


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


def _section(
    config: PretrainedConfig,
    source: str,
    block_size: int | None,
    mask_token_id: int | None,
    label_shift: bool | None,
) -> DrafterSection:
    check_family(config)
    stored = getattr(config, SECTION, None)
    if stored is None:
        return DrafterSection(
            block_size=_required("block_size", block_size, source),
            mask_token_id=_required("mask_token_id", mask_token_id, source),
            label_shift=bool(label_shift),
            source_layers=tuple(range(config.num_hidden_layers)),
            is_trained=True,
        )
    try:
        section = DrafterSection(**{**stored, "source_layers": tuple(stored["source_layers"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the section {SECTION!r} of {source}/config.json: {error}") from error
    for name, given in (("mask_token_id", mask_token_id), ("label_shift", label_shift)):
        if given is not None and given != getattr(section, name):
            raise ValueError(
                f"drafter.{name} is {given}, but {source} was trained with "
                f"{getattr(section, name)}; leave the option out"
            )
    return section if block_size is None else replace(section, block_size=block_size)


def _required(name: str, value: int | None, source: str | None = None) -> int:
    if value is None:
        what = "a drafter made from other weights" if source is None else repr(source)
        raise ValueError(f"{what} does not say its {name}; give drafter.{name}")
    return value


def _check_mask_row(model: PreTrainedModel, mask_token_id: int) -> None:
    num_rows = model.config.vocab_size
    if not 0 <= mask_token_id < num_rows:
        raise ValueError(
            f"drafter.mask_token_id is {mask_token_id}, but the drafter embeds the ids 0 to "
            f"{num_rows - 1}; give one of them that no text uses"
        )
