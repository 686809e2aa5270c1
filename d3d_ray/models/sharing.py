"""Tensors of a drafter that are the target's own: not stored twice, and checked by their hash."""

import hashlib
from collections.abc import Collection, Mapping

import torch

from d3d_ray.models.loading import read_tensors

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def find_shared(state: Mapping[str, torch.Tensor], target_source: str) -> dict[str, torch.Tensor]:
    """The target's embeddings and head as it stores them, where ``state`` has the same values."""
    theirs = read_tensors(target_source, (TABLE, HEAD))
    return {
        name: tensor
        for name, tensor in theirs.items()
        if tensor.shape == state[name].shape
        and torch.equal(tensor.to(state[name].dtype), state[name].cpu())
    }


def take_shared(
    names: Collection[str], expected: str, target_source: str
) -> dict[str, torch.Tensor]:
    """The target's tensors of these names. Raises ``ValueError`` when their hash is another."""
    tensors = read_tensors(target_source, names)
    if set(tensors) != set(names) or fingerprint(tensors) != expected:
        raise ValueError(
            f"the drafter was made for another target: it takes {', '.join(sorted(names))} from "
            f"the target, and {target_source} has others; use the target that it was trained for"
        )
    return tensors


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
