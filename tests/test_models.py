"""The target, its KV cache and the selection of layers, on tiny models."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import END, FAMILIES, tiny_model, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from d3d_ray.decode.protocols import Block, Verifier
from d3d_ray.models.cache import SlotCache, check_can_cut
from d3d_ray.models.network import check_family, evenly_spaced, select_layers
from d3d_ray.models.target import Target

TARGETS = {family: tiny_target(family) for family in FAMILIES}


def block(start: int, tokens: tuple[int, ...], num_logits: int | None = None) -> Block:
    num_logits = len(tokens) if num_logits is None else num_logits
    return Block(request="r", start=start, tokens=tokens, num_logits=num_logits)


def plain_logits(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:  # [rows, vocab]
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


TOKENS = st.integers(0, 511)
ROUNDS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.integers(0, 8)), min_size=1, max_size=8
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(rounds=ROUNDS)
def test_blocks_and_cut_backs_give_the_logits_of_a_fresh_prefill(
    family: str, rounds: list[tuple[list[int], int]]
) -> None:
    target: Target = TARGETS[family]
    target.free("r")
    committed: tuple[int, ...] = ()
    for tokens, num_kept in rounds:
        (logits,) = target.forward([block(len(committed), tuple(tokens))])
        fresh = plain_logits(target.model, (*committed, *tokens))
        torch.testing.assert_close(logits, fresh[len(committed) :], rtol=0, atol=1e-5)
        committed += tuple(tokens[:num_kept])
        target.cut("r", len(committed))


def test_only_the_last_rows_get_logits_and_none_when_none_are_wanted() -> None:
    target = tiny_target()
    head_rows = []
    target.model.lm_head.register_forward_hook(
        lambda module, inputs, output: head_rows.append(inputs[0].shape[1])
    )
    (chunk,) = target.forward([block(0, (5, 6, 7), 0)])
    (last,) = target.forward([block(3, (8, 9, 10), 2)])
    assert head_rows == [2]
    assert chunk.shape == (0, 512)
    fresh = plain_logits(target.model, (5, 6, 7, 8, 9, 10))
    torch.testing.assert_close(last, fresh[4:], rtol=0, atol=1e-5)


def test_requests_keep_their_own_caches() -> None:
    target = tiny_target()
    prompts = {"a": (5, 6, 7), "b": (300, 301)}
    target.forward([Block(name, 0, tokens, 1) for name, tokens in prompts.items()])
    both = target.forward([Block(name, len(t), (9, 10), 2) for name, t in prompts.items()])
    for logits, tokens in zip(both, prompts.values(), strict=True):
        fresh = plain_logits(target.model, (*tokens, 9, 10))[len(tokens) :]
        torch.testing.assert_close(logits, fresh, rtol=0, atol=1e-5)


def test_positions_follow_the_committed_length_whatever_was_cut() -> None:
    target = tiny_target()
    seen: list[list[int]] = []
    target.model.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(
            (args[1] if len(args) > 1 else kwargs["position_ids"])[0].tolist()
        ),
        with_kwargs=True,
    )
    target.forward([block(0, (5, 6, 7))])
    length = 3
    for num_accepted in range(4):
        target.forward([block(length, (8, 9, 10, 11))])
        assert seen[-1] == list(range(length, length + 4))
        length += num_accepted + 1
        target.cut("r", length)


def test_padding_rows_have_no_logits_and_are_refused_as_input() -> None:
    target = Target(tiny_model("qwen3", vocab=512), vocab_size=500)
    assert target.forward([block(0, (499,))])[0].shape == (1, 500)
    for token in (500, 511, -1):
        with pytest.raises(ValueError, match=rf"token id {token} .*\[0, 500\)"):
            target.forward([block(1, (5, token))])
    assert Target(tiny_model("qwen3", vocab=512), vocab_size=600).vocab_size == 512


def test_blocks_that_do_not_fit_are_refused_and_change_nothing() -> None:
    target = Target(tiny_model("llama"), vocab_size=512, max_context=8)
    assert target.max_positions == 8
    with pytest.raises(ValueError, match="starts at 3, its cache holds 0"):
        target.forward([block(3, (5,))])
    target.forward([block(0, (5, 6, 7))])
    for start in (0, 2, 4):
        with pytest.raises(ValueError, match=f"starts at {start}, its cache holds 3"):
            target.forward([block(start, (5,))])
    with pytest.raises(ValueError, match="do not fit in the context of 8"):
        target.forward([block(3, (1,) * 6)])
    with pytest.raises(ValueError, match="0 logits of 0 rows"):
        target.forward([block(3, ())])
    with pytest.raises(ValueError, match="2 logits of 1 rows"):
        target.forward([block(3, (5,), 2)])
    assert target.forward([block(3, (1,) * 5)])[0].shape == (5, 512)
    target.free("r")
    target.free("unknown")
    target.forward([block(0, (5,))])


def test_a_target_is_a_verifier_and_knows_its_limits() -> None:
    verifier: Verifier = TARGETS["llama"]
    assert isinstance(verifier, Target)
    assert verifier.max_positions == 1024
    assert verifier.stop_ids == {END}
    num_layers, num_heads, head_dim, num_bytes = 2, 2, 8, 4
    assert verifier.kv_bytes_per_token == 2 * num_layers * num_heads * head_dim * num_bytes


def test_a_cache_is_cut_only_to_what_it_holds() -> None:
    cache = SlotCache(1)
    states = torch.arange(600.0).reshape(1, 1, 600, 1)
    keys, values = cache.update(states[:, :, :300], states[:, :, :300] + 1, 0)
    cache.cut(250)
    keys, values = cache.update(states[:, :, 300:], states[:, :, 300:] + 1, 0)
    assert torch.equal(keys.flatten(), torch.cat([states.flatten()[:250], states.flatten()[300:]]))
    assert torch.equal(values, keys + 1)
    assert cache.length == cache.get_seq_length() == 550
    assert cache.get_mask_sizes(7, 0) == (557, 0)
    with pytest.raises(AssertionError):
        cache.cut(551)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_attention .window 64"),
        ("gemma2", {}, "'sliding_attention'"),
        ("llama4_text", {}, "'chunked_attention'"),
        ("mamba", {}, "'linear_attention'"),
        ("qwen3_next", {}, "'linear_attention'"),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_a_model_whose_cache_cannot_be_cut_is_refused_with_the_layer_type(
    model_type: str, options: dict[str, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"'{model_type}'.*{reason}"):
        check_can_cut(AutoConfig.for_model(model_type, **options))


def test_a_model_without_keys_and_values_is_refused_whatever_its_config_says() -> None:
    config = AutoConfig.for_model(
        "rwkv", hidden_size=16, num_hidden_layers=2, vocab_size=64, attention_hidden_size=16
    )
    with pytest.raises(ValueError, match="'rwkv'"):
        Target(AutoModelForCausalLM.from_config(config), vocab_size=64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [(0, 2, 4, 5), (3,)])
def test_selected_layers_are_renumbered(family: str, kept: tuple[int, ...], tmp_path: Path) -> None:
    model = tiny_model(family, num_layers=6)
    whole = list(model.model.layers)
    select_layers(model, kept)
    assert list(model.model.layers) == [whole[index] for index in kept]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(len(kept)))
    tokens = (5, 6, 7, 8, 9)
    fresh = plain_logits(model, tokens)
    target = Target(model, vocab_size=512)
    target.forward([block(0, tokens[:2])])
    torch.testing.assert_close(target.forward([block(2, tokens[2:])])[0], fresh[2:])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.num_hidden_layers == len(again.model.layers) == len(kept)
    assert torch.equal(plain_logits(again, tokens), fresh)


def test_evenly_spaced_layers_include_both_ends() -> None:
    assert evenly_spaced(30, 8) == [0, 4, 8, 12, 17, 21, 25, 29]
    assert evenly_spaced(6, 6) == [0, 1, 2, 3, 4, 5]
    assert evenly_spaced(6, 1) == [0]
    for num_layers in range(2, 40):
        for num_kept in range(2, num_layers + 1):
            kept = evenly_spaced(num_layers, num_kept)
            assert kept == sorted(set(kept)) and len(kept) == num_kept
            assert (kept[0], kept[-1]) == (0, num_layers - 1)
    with pytest.raises(ValueError, match=r"drafter\.num_layers is 7.*1 to 6"):
        evenly_spaced(6, 7)


def test_other_families_cannot_be_drafters() -> None:
    with pytest.raises(ValueError, match=r"'gpt2' is not supported.*llama, qwen2, qwen3"):
        check_family(AutoConfig.for_model("gpt2"))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_fixed_rows_a_row_is_the_same_bits_in_whatever_block(family: str) -> None:
    model = tiny_model(family, max_position_embeddings=96).to(torch.bfloat16)
    target = Target(model, vocab_size=512)
    target.fix_rows(8)
    rng = random.Random(0)
    tokens = tuple(rng.randrange(512) for _ in range(96))
    target.forward([Block("a", 0, tokens[:5], num_logits=0)])
    plain = []
    for start in range(5, 96):
        plain.append(target.forward([Block("a", start, tokens[start : start + 1], 1)])[0][0])
    for _ in range(5):
        target.cut("a", start := 5)
        while start < 96:
            block = tokens[start : start + rng.randint(1, 8)]
            logits = target.forward([Block("a", start, block, len(block))])[0]
            num_kept = rng.randint(1, len(block))
            for row in range(num_kept):
                assert torch.equal(logits[row], plain[start - 5 + row])
            start += num_kept
            target.cut("a", start)
