"""Outputs of chosen layers of a model, taken in passing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def capture(model: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Passes inside leave the outputs ``[batch, rows, hidden]`` of these layers, by number."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(index: int) -> None:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            found = output[0] if isinstance(output, tuple) else output
            assert isinstance(found, torch.Tensor)
            outputs[index] = found

        handles.append(layers[index].register_forward_hook(hook))

    backbone: Any = model.base_model
    layers, handles = backbone.layers, list[torch.utils.hooks.RemovableHandle]()
    try:
        for index in set(layer_ids):
            keep(index)
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def join(
    outputs: dict[int, torch.Tensor],
    layer_ids: Sequence[int],
    device: torch.device,
) -> torch.Tensor:  # [rows, layers · hidden]
    """The outputs of one batch's only sequence beside one another, in the order of the ids."""
    return torch.cat([outputs[index][0].to(device) for index in layer_ids], dim=-1)
