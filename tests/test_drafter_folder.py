"""Drafter folders, and which drafter goes with which target."""

import json
from pathlib import Path

import pytest
import torch
from tiny import END, FAMILIES, MASK, START, save_tiny, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer, save_drafter
from d3d_ray.models.loading import count_token_ids
from d3d_ray.models.pairing import check_mask_token, check_pair, check_vocabularies
from d3d_ray.packing import continuation, pack

CPU = {"dtype": torch.float32, "device": "cpu"}


def draft_logits(drafter: DrafterModel) -> torch.Tensor:  # [4, vocab]
    glue = [5, 300, 7]
    shape = continuation(num_glue=3, block_size=4, label_shift=True)
    drafter.match_cache("r", glue, 2)
    packed = pack(glue, [shape], start=0, mask_token_id=drafter.mask_token_id)
    logits = drafter.forward("r", packed, 3, [0, 2, 3, 4])
    drafter.free("r")
    return logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_drafter_reloads_bit_for_bit(family: str, is_tied: bool, tmp_path: Path) -> None:
    drafter = tiny_drafter(family, tie_word_embeddings=is_tied)
    before = draft_logits(drafter)
    save_drafter(drafter, tmp_path, tiny_tokenizer())
    assert torch.equal(draft_logits(drafter), before)
    table = drafter.network.model.model.embed_tokens.weight
    assert not torch.equal(table[MASK], drafter.network.mask_embedding)
    again = load_drafter(str(tmp_path), target_source="/unused", **CPU)
    assert again.section == drafter.section
    assert torch.equal(draft_logits(again), before)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(plain.model.embed_tokens.weight[MASK], drafter.network.mask_embedding)
    weights = plain.model.embed_tokens.weight, plain.lm_head.weight
    assert torch.equal(*weights) == is_tied


def test_a_derived_drafter_takes_evenly_spaced_layers_of_the_target(tmp_path: Path) -> None:
    target = save_tiny(tmp_path, "qwen3", num_layers=5, num_tokens=500)
    options = {"target_source": str(tmp_path), "block_size": 4, "mask_token_id": MASK, **CPU}
    drafter = load_drafter(None, num_layers=3, **options)
    assert drafter.section.source_layers == (0, 2, 4)
    assert (drafter.num_layers, drafter.vocab_size, drafter.max_positions) == (3, 500, 1024)
    assert not drafter.is_trained and drafter.label_shift
    for new, old in enumerate((0, 2, 4)):
        ours, theirs = drafter.network.model.model.layers[new], target.model.layers[old]
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    mean = target.model.embed_tokens.weight.mean(dim=0)
    torch.testing.assert_close(drafter.network.mask_embedding, mean)
    save_drafter(drafter, tmp_path / "drafter")
    again = load_drafter(str(tmp_path / "drafter"), target_source=str(tmp_path), **CPU)
    assert torch.equal(draft_logits(again), draft_logits(drafter))
    assert again.section == drafter.section
    assert load_drafter(None, **options).num_layers == 5
    for missing in ("block_size", "mask_token_id"):
        with pytest.raises(
            ValueError, match=rf"made from other weights .* give drafter\.{missing}"
        ):
            load_drafter(None, **{**options, missing: None})


def test_a_released_drafter_is_told_its_block_size_and_mask_token(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen2")
    options = {"target_source": "/unused", **CPU}
    drafter = load_drafter(str(tmp_path), block_size=8, mask_token_id=MASK, **options)
    assert (drafter.block_size, drafter.label_shift, drafter.is_trained) == (8, False, True)
    assert torch.equal(drafter.network.mask_embedding, model.model.embed_tokens.weight[MASK])
    shifted = {"block_size": 8, "mask_token_id": MASK, "label_shift": True}
    assert load_drafter(str(tmp_path), **shifted, **options).label_shift
    with pytest.raises(ValueError, match=r"give drafter\.block_size"):
        load_drafter(str(tmp_path), mask_token_id=MASK, **options)
    with pytest.raises(ValueError, match=r"give drafter\.mask_token_id"):
        load_drafter(str(tmp_path), block_size=8, **options)
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id is 512.*0 to 511"):
        load_drafter(str(tmp_path), block_size=8, mask_token_id=512, **options)
    with pytest.raises(ValueError, match=r"drafter\.block_size is 1"):
        load_drafter(str(tmp_path), block_size=1, mask_token_id=MASK, **options)
    # Asked for some of its layers, it is a checkpoint like the target's.
    assert not load_drafter(str(tmp_path), num_layers=1, **shifted, **options).is_trained


def test_options_override_the_block_size_and_must_agree_otherwise(tmp_path: Path) -> None:
    save_drafter(tiny_drafter(block_size=4), tmp_path, tiny_tokenizer())
    options = {"target_source": "/unused", **CPU}
    assert load_drafter(str(tmp_path), block_size=6, **options).block_size == 6
    assert load_drafter(str(tmp_path), mask_token_id=MASK, **options).block_size == 4
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id is 9, but .* with 3"):
        load_drafter(str(tmp_path), mask_token_id=9, **options)
    with pytest.raises(ValueError, match=r"drafter\.label_shift is False, but .* with True"):
        load_drafter(str(tmp_path), label_shift=False, **options)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["d3d"]["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"section 'd3d' of .*block_size"):
        load_drafter(str(tmp_path), **options)


def test_a_folder_without_a_tokenizer_uses_the_target_s(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", "llama", num_tokens=400)
    save_drafter(tiny_drafter(), tmp_path / "bare")
    save_drafter(tiny_drafter(), tmp_path / "whole", tiny_tokenizer(450))
    for source, expected in (("bare", 400), ("whole", 450), (None, 400)):
        path = None if source is None else str(tmp_path / source)
        tokenizer = load_drafter_tokenizer(path, target_source=str(tmp_path / "target"))
        assert count_token_ids(tokenizer) == expected


# --- pairs -----------------------------------------------------------------------------------


def test_a_fitting_pair_passes_with_padding_of_any_size() -> None:
    tokenizer = tiny_tokenizer(500)
    check_pair(tiny_target(), tiny_drafter(), tokenizer, tokenizer)
    check_pair(tiny_target(), tiny_drafter(vocab=640), tokenizer, tokenizer)


def test_a_drafter_with_too_few_embeddings_is_refused() -> None:
    tokenizer = tiny_tokenizer(500)
    with pytest.raises(ValueError, match="embeds 505 ids, the target emits 512"):
        check_pair(tiny_target(), tiny_drafter(vocab=505), tokenizer, tokenizer)


def test_different_vocabularies_are_refused_at_the_first_differing_id() -> None:
    ours, swapped = tiny_tokenizer(), tiny_tokenizer()
    model = json.loads(swapped.backend_tokenizer.to_str())
    vocab = model["model"]["vocab"]
    vocab["ab"], vocab["ac"] = vocab["ac"], vocab["ab"]
    swapped._tokenizer = swapped.backend_tokenizer.from_str(json.dumps(model))
    first = ours.convert_tokens_to_ids("ab")
    with pytest.raises(ValueError, match=f"id {first} is 'ab' for the target and 'ac' for the dr"):
        check_vocabularies(ours, swapped)
    with pytest.raises(ValueError, match=r"id 500 is '.*' for the target and None"):
        check_vocabularies(tiny_tokenizer(), tiny_tokenizer(500))
    with_mask = tiny_tokenizer(500)
    with_mask.add_special_tokens({"mask_token": "<|draft|>"})
    check_vocabularies(tiny_tokenizer(500), with_mask, mask_token_id=500)
    with pytest.raises(ValueError, match=r"id 500 is None .*'<\|draft\|>'"):
        check_vocabularies(tiny_tokenizer(500), with_mask, mask_token_id=MASK)


def test_a_mask_token_that_means_something_is_refused() -> None:
    options = {"num_rows": 512, "stop_ids": frozenset({END, 505}), "tokenizer": tiny_tokenizer(500)}
    check_mask_token(MASK, **options)
    check_mask_token(511, **options)  # padding
    for token, reason in [
        (512, r"512 is not in \[0, 512\)"),
        (-1, r"-1 is not in \[0, 512\)"),
        (END, "2 is a stop token"),
        (505, "505 is a stop token"),
        (90, "ordinary text"),
        (START, r"'<\|im_start\|>', used in prompts"),
    ]:
        with pytest.raises(ValueError, match=f"{reason}.*set drafter.mask_token_id"):
            check_mask_token(token, **options)
