"""Packed weights change where numbers lie, not what comes out."""

from pathlib import Path

import pytest
import torch
from loops import make_request, run
from tiny import MASK, save_tiny, tiny_drafter
from torch import nn

from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.models.cpu import pack_weights
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.loading import load_target
from d3d_ray.training.evaluation import InlineDrafter


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_gives_the_plain_ones_output(num_rows: int, has_bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(96, 160, bias=has_bias)).to(torch.bfloat16)
    hidden = torch.randn(1, num_rows, 96).to(torch.bfloat16)
    with torch.inference_mode():
        expected = plain(hidden).float()
        pack_weights(plain)
        packed = plain(hidden).float()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert type(plain[0]) is not nn.Linear
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


def test_packed_weights_in_bf16_give_the_same_tokens_in_every_mode(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    bf16 = {"dtype": torch.bfloat16, "device": "cpu"}
    target = load_target(str(tmp_path), **bf16)  # type: ignore[arg-type]
    drafter = load_drafter(
        None,
        target_source=str(tmp_path),
        block_size=4,
        mask_token_id=MASK,
        **bf16,  # type: ignore[arg-type]
    )
    pack_weights(target.model)
    drafter.fuse()
    target.fix_rows(4)
    plan = PackedPlan(drafter, max_rows=40, is_noise_shared=True)
    answers = []
    for mode in ("ar", "sync", "async"):
        request = make_request(prompt=range(20, 31), mode=mode, max_tokens=60)
        results = run(
            target, InlineDrafter(plan), [request], vocab_size=target.vocab_size, max_wait_s=60.0
        )
        answers.append(results.tokens("a"))
    assert answers[0] == answers[1] == answers[2]
