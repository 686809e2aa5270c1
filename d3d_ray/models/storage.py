"""Weight matrices in 8 bits: an int8 tensor and one scale a row, for small folders."""

from collections.abc import Mapping

import torch

SCALE = ".scale"
"""Behind a matrix's name: the name of its scales."""

_MIN_ELEMENTS = 1024
_LARGEST = 127

# A scale has 7 significant bits, and a row's range is met from below. So a row that was restored,
# even in bf16, gives back the scale that it was restored with: 127 of its steps are off by 0.27 %
# at most after rounding, less than this slack, and scales lie 0.8 % apart. The slack must stay
# below 0.39 %, or the largest weight could become 126 steps.
_SLACK = 1.003


def quantise(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices that are not small become ``name`` (int8) and ``name.scale`` (fp32, one a row).

    What :func:`restore` made, in fp32, bf16 or fp16, becomes the same 8 bits again.
    """
    stored = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.numel() >= _MIN_ELEMENTS:
            stored[name], stored[name + SCALE] = _quantise_rows(tensor)
        else:
            stored[name] = tensor
    return stored


def restore(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The inverse of :func:`quantise`. Raises ``ValueError`` for a matrix without its scales."""
    tensors, used = {}, set()
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise ValueError(f"{name} is in 8 bits, but {name + SCALE} is missing or unfit")
            used.add(name + SCALE)
            tensor = (tensor.float() * scale[:, None]).to(dtype)
        tensors[name] = tensor
    return {name: tensor for name, tensor in tensors.items() if name not in used}


def _quantise_rows(
    weight: torch.Tensor,  # [rows, columns]
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, columns] int8, [rows] fp32
    exact = weight.detach().float()
    # The row's range, from below. Cutting off more for the sake of the smaller weights gains
    # nothing: on SmolLM2's matrices the best of six cuts a row took less than 1 % off the error.
    mantissa, exponent = torch.frexp(exact.abs().amax(dim=1) * (_SLACK / _LARGEST))
    scale = torch.ldexp((mantissa * 128).floor(), exponent - 7)
    scale = scale.where(scale > 1e-30, 1.0)  # A row of zeros has no range.
    steps = (exact / scale[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return steps.to(torch.int8), scale
