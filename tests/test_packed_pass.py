"""The packed pass of a real network equals each of its branches run alone, without a cache."""

from collections.abc import Iterator
from random import Random

import pytest
import torch
from tiny import FAMILIES, MASK, tiny_drafter

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.packing import BranchShape, PackedPass, continuation, mask_first, pack, seeded

PREFIX = [11, 57, 203, 99, 41, 8, 300]


def run_alone(
    network: DrafterNetwork, clean: list[int], seed: int | None, num_masks: int
) -> torch.Tensor:  # [len(clean) + rows of the branch, vocab]
    """Logits of one branch behind clean tokens: no cache, no packing, positions 0, 1, 2, …"""
    tokens = clean + ([] if seed is None else [seed])
    num_clean = len(tokens)
    tokens = tokens + [network.mask_token_id] * num_masks
    visible = torch.tensor(
        [
            [column <= row if row < num_clean else True for column in range(len(tokens))]
            for row in range(len(tokens))
        ]
    )
    with torch.inference_mode():
        hidden = network(
            torch.tensor([tokens]), torch.arange(len(tokens))[None], visible[None, None]
        )
        logits = network.head(hidden)[0].float()
        logits[:, network.mask_token_id] = -torch.inf  # It is never drafted.
        return logits


def branches_for(num_drafts: int, block_size: int, label_shift: bool) -> list[BranchShape]:
    """A mask-first and two seeded branches for every number of accepted drafts."""
    options = {"anchor_row": 1, "block_size": block_size, "label_shift": label_shift}
    return [
        branch
        for k in range(num_drafts + 1)
        for branch in (
            mask_first(k, **options),
            seeded(k, 400 + k, **options),
            seeded(k, 77, **options),
        )
    ]


def cases() -> Iterator[tuple[int, bool, int]]:
    for block_size in (2, 4, 8):
        for label_shift in (True, False):
            for num_drafts in range(block_size):
                yield block_size, label_shift, num_drafts


def check_branches(
    drafter: DrafterModel,
    packed: PackedPass,
    logits: torch.Tensor,
    context: list[int],
    glue: list[int],
    branches: list[BranchShape],
    tolerance: float,
) -> None:
    """Every row of every branch, and every glue row, against the branch run alone."""
    first = len(glue)
    for branch, draft_rows in zip(branches, packed.draft_rows, strict=True):
        clean = context + glue[: branch.after]
        alone = run_alone(drafter.network, clean, branch.seed, branch.num_masks)
        alone = alone[:, : drafter.vocab_size]
        rows = list(range(first, first + branch.num_rows))
        torch.testing.assert_close(
            logits[: branch.after], alone[len(context) : len(clean)], rtol=0, atol=tolerance
        )
        torch.testing.assert_close(logits[rows], alone[len(clean) :], rtol=0, atol=tolerance)
        # Draft i stands at position anchor + k + 2 + i: rows predict their own or the next place.
        num_drafts = drafter.block_size - 1
        expected = alone[len(alone) - num_drafts :].argmax(dim=-1)
        assert logits[list(draft_rows)].argmax(dim=-1).tolist() == expected.tolist()
        first += branch.num_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_every_branch_of_a_packed_pass_equals_the_branch_alone(family: str) -> None:
    for block_size, label_shift, num_drafts in cases():
        drafter = tiny_drafter(family, block_size=block_size, label_shift=label_shift)
        glue = [5, 120, *range(60, 60 + num_drafts)]  # a missing token, the anchor, the drafts
        tokens, anchor = PREFIX + glue, len(PREFIX) + 1
        assert drafter.match_cache("r", [*PREFIX, 1], len(PREFIX)) == 0
        drafter.forward("r", pack(PREFIX, [], start=0, mask_token_id=MASK), len(PREFIX), [0])
        assert drafter.match_cache("r", tokens, anchor) == len(PREFIX)
        branches = branches_for(num_drafts, block_size, label_shift)
        packed = pack(glue, branches, start=len(PREFIX), mask_token_id=MASK)
        logits = drafter.forward("r", packed, len(glue), range(len(packed.token_ids)))
        check_branches(drafter, packed, logits, PREFIX, glue, branches, 1e-5)


@pytest.mark.parametrize("label_shift", [True, False])
def test_an_unpacked_pass_drafts_behind_the_known_anchor(label_shift: bool) -> None:
    drafter = tiny_drafter(block_size=4, label_shift=label_shift)
    tokens = [*PREFIX, 120]
    shape = continuation(num_glue=len(tokens), block_size=4, label_shift=label_shift)
    packed = pack(tokens, [shape], start=0, mask_token_id=MASK)
    drafter.match_cache("r", tokens, len(PREFIX))
    rows = packed.draft_rows[0]
    logits = drafter.forward("r", packed, len(tokens), rows)
    alone = run_alone(drafter.network, tokens, None, 2 if label_shift else 3)[-3:]
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def test_what_stands_in_other_branches_changes_nothing() -> None:
    drafter = tiny_drafter("qwen3", block_size=4)
    glue = [120, 60, 61]
    options = {"anchor_row": 0, "block_size": 4, "label_shift": True}
    results = []
    for other in (9, 444):
        branches = [mask_first(0, **options), seeded(1, other, **options), mask_first(2, **options)]
        packed = pack(glue, branches, start=0, mask_token_id=MASK)
        drafter.match_cache("r", glue, 0)
        results.append(drafter.forward("r", packed, 3, range(len(packed.token_ids))))
    is_other = torch.tensor([6 <= row < 9 for row in range(12)])
    assert torch.equal(results[0][~is_other], results[1][~is_other])
    assert not torch.allclose(results[0][is_other], results[1][is_other], atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_backends_agree(family: str) -> None:
    results = []
    for attention in ("sdpa", "eager"):
        drafter = tiny_drafter(family, block_size=4)
        drafter.network.model.set_attn_implementation(attention)
        assert drafter.network.config._attn_implementation == attention
        glue = [120, 60, 61]
        packed = pack(glue, branches_for(1, 4, True), start=0, mask_token_id=MASK)
        drafter.match_cache("r", glue, 0)
        results.append(drafter.forward("r", packed, 3, range(len(packed.token_ids))))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


def test_the_mask_token_is_never_drafted_and_padding_has_no_logits() -> None:
    drafter = tiny_drafter(vocab=512)
    cut = DrafterModel(drafter.network, drafter.section, vocab_size=500)
    packed = pack(
        [5, 6],
        [continuation(num_glue=2, block_size=4, label_shift=True)],
        start=0,
        mask_token_id=MASK,
    )
    for model, vocab_size in ((drafter, 512), (cut, 500)):
        model.match_cache("r", [5, 6], 1)
        logits = model.forward("r", packed, 2, [1, 3])
        assert logits.shape == (2, vocab_size)
        assert logits.dtype == torch.float32
        assert torch.equal(logits[:, MASK], torch.full((2,), -torch.inf))
        assert torch.isfinite(logits).sum() == 2 * (vocab_size - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_any_outcomes_the_cache_equals_a_fresh_prefill(family: str) -> None:
    drafter, random = tiny_drafter(family, block_size=4), Random(0)
    committed = [random.randrange(4, 512) for _ in range(9)]
    for _ in range(60):
        drafts = [random.randrange(4, 512) for _ in range(random.randrange(4))]
        tokens, anchor = committed + drafts, len(committed) - 1
        cached = drafter.match_cache("r", tokens, anchor)
        assert cached <= anchor
        glue = tokens[cached:]
        branches = [
            mask_first(k, anchor_row=anchor - cached, block_size=4, label_shift=True)
            for k in range(len(drafts) + 1)
        ]
        packed = pack(glue, branches, start=cached, mask_token_id=MASK)
        logits = drafter.forward("r", packed, len(glue), range(len(glue)))
        fresh = run_alone(drafter.network, tokens, None, 0)
        torch.testing.assert_close(logits, fresh[cached:], rtol=0, atol=1e-5)
        kept = drafts[: random.randrange(len(drafts) + 1)]
        committed += [*kept, random.randrange(4, 512)]
        if random.random() < 0.2:  # Outcomes that this drafter never heard of.
            committed += [random.randrange(4, 512) for _ in range(random.randrange(1, 5))]
        if random.random() < 0.1:  # Another answer under the same name, or a restart.
            committed = committed[: random.randrange(1, len(committed))]
            committed.append(random.randrange(4, 512))


def test_the_cache_keeps_what_agrees_with_the_tokens_but_never_the_anchor() -> None:
    drafter = tiny_drafter()
    cached = [5, 6, 7, 8, 9]
    drafter.match_cache("r", cached, 4)
    drafter.forward("r", pack(cached, [], start=0, mask_token_id=MASK), 5, [4])
    # From the longest to the shortest: each call cuts the cache to what it returns.
    for tokens, anchor, num_kept in [
        ([5, 6, 7, 8, 9, 10], 5, 5),
        ([5, 6, 7, 8, 9], 4, 4),
        ([5, 6, 7, 99, 9, 10], 5, 3),
        ([5, 6], 1, 1),
        ([50, 6], 1, 0),
    ]:
        assert drafter.match_cache("r", tokens, anchor) == num_kept
    drafter.free("r")
    drafter.free("unknown")
    for token in (512, -1):
        with pytest.raises(ValueError, match=f"token id {token} is outside"):
            drafter.match_cache("r", [5, token], 1)


def test_a_long_gap_is_run_in_chunks_before_the_pass() -> None:
    drafter, random = tiny_drafter("qwen2", block_size=4), Random(1)
    tokens = [random.randrange(4, 512) for _ in range(700)]
    assert drafter.match_cache("r", tokens, 256) == 0
    assert drafter.match_cache("r", tokens, 690) == 690
    packed = pack(tokens[690:], [], start=690, mask_token_id=MASK)
    logits = drafter.forward("r", packed, 10, range(10))
    fresh = run_alone(drafter.network, tokens, None, 0)[690:]
    torch.testing.assert_close(logits, fresh, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_every_branch_equals_the_branch_alone_on_a_pretrained_model() -> None:
    drafter = load_drafter(
        None,
        target_source="embedded:smollm2-135m-instruct",
        block_size=4,
        mask_token_id=7,
        dtype=torch.float32,
        device="cpu",
    )
    context, glue = [1, 520, 9531, 198, 504, 3575, 282], [5, 4649, 314, 7042]
    drafter.match_cache("r", [*context, 0], len(context))
    drafter.forward("r", pack(context, [], start=0, mask_token_id=7), len(context), [0])
    assert drafter.match_cache("r", context + glue, len(context) + 1) == len(context)
    branches = branches_for(2, 4, True)
    packed = pack(glue, branches, start=len(context), mask_token_id=7)
    logits = drafter.forward("r", packed, len(glue), range(len(packed.token_ids)))
    largest = float(logits[torch.isfinite(logits)].abs().max())
    check_branches(drafter, packed, logits, context, glue, branches, 1e-5 * largest)
