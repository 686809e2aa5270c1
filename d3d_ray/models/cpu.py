"""What makes inference in bf16 fast on a CPU; elsewhere nothing happens here."""

import ctypes
import sys

import torch
from torch import nn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next pass.

    It gives large blocks back at once, and then each page of a pass is faulted in anew, which took
    half of the time of a training step.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl has none.
            libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
            libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES - 1)


def return_freed_memory() -> None:
    """Give back what `keep_freed_memory` has kept.

    Passes of different sizes cut it into pieces that fit none of the next, and a process would
    grow without an end.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # musl has none.
            libc.malloc_trim(0)


class _PackedLinear(nn.Module):
    """A linear layer whose weight lies as oneDNN's kernel reads it, not reordered at each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(
        self,
        hidden: torch.Tensor,  # [..., in] bf16
    ) -> torch.Tensor:  # [..., out] bf16
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self._weight, self._bias, "none", [], ""
        )
        return output


def pack_weights(model: nn.Module) -> None:
    """Reorder the weights of bf16 linear layers on the CPU, in place.

    The model computes the same, but can no longer be saved, trained or moved. For the private
    operators that ``torch.compile`` uses there is no public name; without them all stays as it is.
    """
    if not _can_pack():
        return
    with torch.inference_mode():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and _is_packable(child.weight):
                    setattr(module, name, _PackedLinear(child))


def _is_packable(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _can_pack() -> bool:
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return (
        torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in names)
        and bool(operators._is_mkldnn_bf16_supported())
    )
