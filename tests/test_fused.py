"""Fused layers compute what the model's own layers do."""

from typing import Any

import pytest
import torch
from tiny import MASK, tiny_drafter

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.packing import mask_first, pack, seeded

TOKENS = [11, 57, 203, 99, 41, 8, 300, 5, 77, 12]


def run_passes(drafter: DrafterModel) -> list[torch.Tensor]:
    """A first pass behind nothing, then one behind a cache that was cut back."""
    results = []
    for tokens in (TOKENS, [*TOKENS[:8], 90, 91, 92]):
        anchor = len(tokens) - 3
        num_cached = drafter.match_cache("a", tokens, anchor)
        row = anchor - num_cached
        shape: dict[str, Any] = {"anchor_row": row, "block_size": 4, "label_shift": True}
        branches = [mask_first(2, **shape), seeded(0, 400, **shape), seeded(1, 7, **shape)]
        glue = tokens[num_cached:]
        packed = pack(glue, branches, start=num_cached, mask_token_id=MASK)
        rows = range(len(packed.token_ids))
        results.append(drafter.forward("a", packed, len(glue), rows))
    return results


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ],
)
def test_fused_passes_equal_plain_ones(family: str, options: dict[str, Any]) -> None:
    plain = tiny_drafter(family, num_layers=3, **options)
    fused = tiny_drafter(family, num_layers=3, **options)
    fused.fuse()
    for one, other in zip(run_passes(plain), run_passes(fused), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_fused_layers_hold_the_weights_once() -> None:
    drafter = tiny_drafter("qwen3", num_layers=3)
    before = sum(parameter.numel() for parameter in drafter.network.parameters())
    drafter.fuse()
    assert sum(parameter.numel() for parameter in drafter.network.parameters()) == before


def test_a_trimmed_head_is_served_alone() -> None:
    drafter = tiny_drafter("llama")
    drafter.network.trim_head(torch.arange(10, 60))
    expected = run_passes(drafter)
    drafter.free("a")
    drafter.fuse()
    assert not any("lm_head" in name for name, _ in drafter.network.named_parameters())
    for one, other in zip(expected, run_passes(drafter), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
