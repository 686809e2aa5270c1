"""Packed weights change where numbers lie, not what comes out."""

import pytest
import torch
from tiny import tiny_drafter
from torch import nn

from d3d_ray.models.cpu import keep_freed_memory, pack_weights


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_gives_the_plain_ones_output(num_rows: int, has_bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(96, 160, bias=has_bias)).to(torch.bfloat16)
    hidden = torch.randn(1, num_rows, 96).to(torch.bfloat16)
    with torch.inference_mode():
        expected = plain(hidden).float()
        pack_weights(plain)
        packed = plain(hidden).float()
    torch.testing.assert_close(packed, expected, rtol=2**-7, atol=2**-7)


def test_the_same_number_of_rows_gives_the_same_bits() -> None:
    """What fixed rows rely on."""
    network = nn.Sequential(nn.Linear(96, 160, bias=False)).to(torch.bfloat16)
    hidden = torch.randn(8, 96).to(torch.bfloat16)
    with torch.inference_mode():
        pack_weights(network)
        first = network(hidden)
        shuffled = network(hidden.flip(0)).flip(0)
    assert torch.equal(first, shuffled)


def test_fp32_layers_and_tied_tables_stay_as_they_are() -> None:
    drafter = tiny_drafter("llama", block_size=4)
    before = {name: tensor.clone() for name, tensor in drafter.network.state_dict().items()}
    pack_weights(drafter.network)
    after = drafter.network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_freed_memory_can_be_kept_more_than_once() -> None:
    keep_freed_memory()
    keep_freed_memory()
    assert torch.zeros(2**22).sum() == 0
