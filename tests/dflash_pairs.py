"""A tiny target with a DFlash drafter of random weights that reads from it."""

from typing import Any

import torch
from tiny import END, MASK, tiny_model

from d3d_ray.models.dflash import DFlashNetwork, DFlashSection
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.target import Target


def make_pair(
    family: str = "llama",
    *,
    block_size: int = 4,
    layer_ids: tuple[int, ...] = (1, 3),
    num_layers: int = 2,
    **options: Any,
) -> tuple[Target, DFlashDrafter]:
    """A target of 6 layers; the drafter's weights are drawn wide, norms included."""
    model = tiny_model(family, num_layers=6, **options)
    target = Target(model, vocab_size=512, stop_ids=frozenset({END}))
    config = tiny_model(family, num_layers=num_layers, **options).config
    network = DFlashNetwork(config, len(layer_ids), torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + 0.2 * noise)
    section = DFlashSection(
        block_size=block_size,
        mask_token_id=MASK,
        target_layer_ids=layer_ids,
        num_target_layers=6,
    )
    drafter = DFlashDrafter(network, section, model, vocab_size=512)
    target.read_with(drafter)
    return target, drafter
