"""DFlash drafters on disk, in the format of the public checkpoints: ``config.json`` with a section
``dflash_config``, and the drafter's own tensors, without embeddings and head."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PretrainedConfig, PreTrainedModel

from d3d_ray.models.dflash import DFlashNetwork, DFlashSection, spaced_layers
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.loading import load_config, read_tensors
from d3d_ray.models.network import evenly_spaced
from d3d_ray.models.section import DFLASH_SECTION, required
from d3d_ray.models.sharing import HEAD, TABLE, fingerprint
from d3d_ray.models.storage import quantise, restore

NUM_LAYERS = 5
"""Of a new drafter, as in the paper."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "is_causal": (None, False),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
}
"""What later kinds of DFlash drafters have, and the values with which it makes no difference."""


def load_dflash(
    source: str,
    target: PreTrainedModel,
    *,
    target_source: str,
    vocab_size: int,
    dtype: torch.dtype,
) -> DFlashDrafter:
    """Load a DFlash drafter onto the device of its target, which it shares embeddings with.

    Raises ``ValueError`` that says what is wrong: no DFlash folder, one of another kind or for
    another target, or a tensor that is missing, superfluous or of another shape.
    """
    config = load_config(source)
    section = read_dflash_section(config, source)
    _check_target(config, section, source, target.config)
    if section.fingerprint and section.fingerprint != _fingerprint(target_source):
        raise ValueError(
            f"{source} was trained for another target than {target_source}: embeddings or head "
            "differ; use the target that it was trained for"
        )
    network = DFlashNetwork(config, len(section.target_layer_ids), dtype)
    state = restore(read_tensors(source), dtype)
    _check_tensors(state, network.state_dict(), source)
    network.load_state_dict(state)
    network.to(target.device)
    return DFlashDrafter(network, section, target, vocab_size=vocab_size)


def make_dflash(
    target: PreTrainedModel,
    *,
    target_source: str,
    vocab_size: int,
    num_layers: int | None,
    block_size: int | None,
    mask_token_id: int | None,
    dtype: torch.dtype,
) -> DFlashDrafter:
    """An untrained drafter. Its layers start as evenly spaced ones of the target.

    Raises ``ValueError`` naming the option to give, and for a target that is too shallow.
    """
    num_layers = NUM_LAYERS if num_layers is None else num_layers
    num_all = target.config.num_hidden_layers
    section = DFlashSection(
        block_size=required("block_size", block_size),
        mask_token_id=required("mask_token_id", mask_token_id),
        target_layer_ids=spaced_layers(num_all, num_layers),
        num_target_layers=num_all,
        fingerprint=_fingerprint(target_source),
    )
    kept = evenly_spaced(num_all, num_layers)
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]
    network = DFlashNetwork(config, len(section.target_layer_ids), dtype)
    backbone: Any = target.base_model
    for layer, index in zip(network.layers, kept, strict=True):
        layer.load_state_dict(backbone.layers[index].state_dict())
    network.norm.load_state_dict(backbone.norm.state_dict())
    seed = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(network.fc.weight, std=config.initializer_range, generator=seed)
    _check_target(config, section, "the new drafter", target.config)
    return DFlashDrafter(network, section, target, vocab_size=vocab_size)


def save_dflash(
    drafter: DFlashDrafter,
    folder: str | Path,
    *,
    bits: int | None = None,
    max_shard_mb: int = 50_000,
) -> None:
    """Write a folder from which :func:`load_dflash` gives the same drafter, bit for bit.

    ``bits=8`` rounds the weight matrices (see :mod:`d3d_ray.models.storage`). Files are split at
    ``max_shard_mb``, between tensors.
    """
    folder, section = Path(folder), drafter.section
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(drafter.network.public_config)
    config.architectures = ["DFlashDraftModel"]
    config.dtype = drafter.network.dtype
    config.num_target_layers = section.num_target_layers
    config.block_size = section.block_size
    setattr(
        config,
        DFLASH_SECTION,
        {
            "mask_token_id": section.mask_token_id,
            "target_layer_ids": list(section.target_layer_ids),
            "fingerprint": section.fingerprint,
        },
    )
    config.save_pretrained(folder)
    state = {name: tensor.cpu() for name, tensor in drafter.network.state_dict().items()}
    state = quantise(state) if bits else state
    save_torch_state_dict(state, folder, max_shard_size=f"{max_shard_mb}MB")


def read_dflash_section(config: PretrainedConfig, source: str) -> DFlashSection:
    """Raises ``ValueError`` when there is none, or one of another kind of drafter."""
    stored = getattr(config, DFLASH_SECTION, None)
    if not isinstance(stored, Mapping):
        raise ValueError(
            f"{source} is no DFlash drafter: its config.json has no section {DFLASH_SECTION!r}"
        )

    def value(name: str, default: Any = None) -> Any:
        return stored.get(name, getattr(config, name, default))

    for name, neutral in _NEUTRAL.items():
        if value(name) not in neutral:
            raise ValueError(
                f"{source} has {name}={value(name)!r}, which this kind of DFlash drafter has not; "
                "use one of the first kind, such as those with block size 16 for Qwen3"
            )
    for name in ("mask_token_id", "target_layer_ids", "num_target_layers", "block_size"):
        if value(name) is None:
            raise ValueError(f"config.json of {source} does not say {name}")
    return DFlashSection(
        block_size=int(value("block_size")),
        mask_token_id=int(value("mask_token_id")),
        target_layer_ids=tuple(value("target_layer_ids")),
        num_target_layers=int(value("num_target_layers")),
        fingerprint=str(value("fingerprint", "")),
    )


def _check_target(
    config: PretrainedConfig, section: DFlashSection, source: str, target: PretrainedConfig
) -> None:
    num_layers, num_rows = target.num_hidden_layers, target.vocab_size
    facts = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", section.num_target_layers, num_layers),
    ]
    for name, found, wanted in facts:
        if found != wanted:
            raise ValueError(
                f"{source} is for a target with {name}={found}, and this one has {wanted}; use a "
                "drafter that was trained for this target"
            )
    # The output of the last layer is normed in the public code's eyes, and never used.
    wrong = [id_ for id_ in section.target_layer_ids if not 0 <= id_ < num_layers - 1]
    if wrong:
        raise ValueError(
            f"{source} reads layer {wrong[0]} of the target, which offers 0 to {num_layers - 2}"
        )
    if not 0 <= section.mask_token_id < num_rows:
        raise ValueError(
            f"{source} has mask token {section.mask_token_id}, and the target embeds the ids 0 to "
            f"{num_rows - 1}"
        )


def _check_tensors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: str
) -> None:
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} is superfluous" for name in sorted(found.keys() - expected.keys())]
    faults += [
        f"{name} has shape {list(found[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"{source} does not fit its config.json: {'; '.join(faults[:3])}{more}")


def _fingerprint(target_source: str) -> str:
    return fingerprint(read_tensors(target_source, (TABLE, HEAD)))
