"""Copies of trained drafters: smaller, and measured against what they are copies of."""

from pathlib import Path

import torch
from torch import nn

from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.dflash_folder import load_dflash, save_dflash
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer, save_drafter
from d3d_ray.models.loading import load_config, load_target
from d3d_ray.models.section import DFLASH_SECTION


def copy_drafter_folder(
    source: str, output: Path, *, target: str | None, bits: int | None, max_shard_mb: int
) -> float:
    """Write ``source`` anew; the largest relative error of a tensor of the copy.

    Raises ``ValueError`` for a DFlash drafter without its ``target``.
    """
    if getattr(load_config(source), DFLASH_SECTION, None) is not None:
        if target is None:
            raise ValueError(f"{source} is a DFlash drafter, which needs its target: give --target")
        dflash = _load_dflash(source, target)
        save_dflash(dflash, output, bits=bits, max_shard_mb=max_shard_mb)
        return _compare(dflash.network, _load_dflash(str(output), target).network)
    drafter = _load(source, target or source)
    save_drafter(
        drafter,
        output,
        load_drafter_tokenizer(source, target_source=target or source),
        target_source=target,
        bits=bits,
        max_shard_mb=max_shard_mb,
    )
    return _compare(drafter.network, _load(str(output), target or source).network)


def _load(source: str, target: str) -> DrafterModel:
    return load_drafter(source, target_source=target, dtype=_stored_dtype(source), device="cpu")


def _load_dflash(source: str, target_source: str) -> DFlashDrafter:
    dtype = _stored_dtype(source)
    target = load_target(target_source, dtype=dtype, device="cpu")
    return load_dflash(
        source,
        target.model,
        target_source=target_source,
        vocab_size=target.vocab_size,
        dtype=dtype,
    )


def _stored_dtype(source: str) -> torch.dtype:
    stored = load_config(source).dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _compare(original: nn.Module, copied: nn.Module) -> float:
    again, error = copied.state_dict(), 0.0
    for name, tensor in original.state_dict().items():
        difference, size = tensor.float() - again[name].float(), tensor.float().norm()
        error = max(error, float(difference.norm() / size.clamp(min=1e-30)))
    return error
