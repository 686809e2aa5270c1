"""The joint law of whole answers: exact with every kind of draft, and no known fault passes."""

import math
from dataclasses import replace

import pytest
import torch
from toy_law import (
    DRAFTERS,
    LENGTH,
    NUM_ANSWERS,
    NUM_DRAFTS,
    SETTINGS,
    TARGET,
    VOCAB,
    Batch,
    Emitted,
    Verify,
    answer_all,
    answer_keys,
    block_context,
    draft_nothing,
    draw_block,
    emit,
    p_value,
    take,
    verify,
)

from d3d_ray.acceptance import count_accepted
from d3d_ray.records import Sampling

P_LIMIT = 1e-6


def describe(sampling: Sampling) -> str:
    return f"t{sampling.temperature:g}-k{sampling.top_k}-p{sampling.top_p:g}"


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=describe)
def test_joint_law_is_the_targets(name: str, sampling: Sampling) -> None:
    answers, _ = answer_all(sampling, DRAFTERS[name])
    assert p_value(answers, sampling) > P_LIMIT


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_answer_is_the_plain_one_of_its_seed(name: str) -> None:
    sampling = SETTINGS[7]
    plain, num_plain_rounds = answer_all(sampling, draft_nothing)
    answers, num_rounds = answer_all(sampling, DRAFTERS[name])
    assert torch.equal(answers, plain)
    assert num_plain_rounds == LENGTH
    if name == "oracle":
        assert num_rounds == math.ceil(LENGTH / (NUM_DRAFTS + 1))
    elif name != "plain":
        assert math.ceil(LENGTH / (NUM_DRAFTS + 1)) < num_rounds < LENGTH


def bonus_one_row_early(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, (num_accepted - 1).clamp(min=0)))


def bonus_one_row_late(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, (num_accepted + 1).clamp(max=NUM_DRAFTS)))


def own_token_of_another_answer(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, num_accepted).roll(1))


def drafts_of_another_branch(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts.roll(1, dims=0), num_accepted, take(draws, num_accepted))


def verified_behind_another_branch(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts.roll(1, dims=0))
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, num_accepted))


def fresh_noise(batch: Batch) -> torch.Tensor:
    return torch.randint(2**32, batch.keys.shape, generator=batch.generator)


def redrawn_after_a_mismatch(batch: Batch, drafts: torch.Tensor) -> Emitted:
    """Uniformly random drafts would hide it: with them the redraw has the law of p again."""
    num_accepted = count_accepted(draw_block(batch, drafts), drafts)
    redrawn = draw_block(batch, drafts, fresh_noise(batch))
    return emit(drafts, num_accepted, take(redrawn, num_accepted))


def redrawn_without_the_rejected_draft(batch: Batch, drafts: torch.Tensor) -> Emitted:
    """Right for drafts that ignore the noise (the rest of p is the exact residual), else biased."""
    num_accepted = count_accepted(draw_block(batch, drafts), drafts)
    context = block_context(batch, drafts)
    probs = TARGET[context[..., 0], context[..., 1]].softmax(dim=-1)
    probs[:, :-1].scatter_(2, drafts[..., None], 0.0)
    redrawn = probs.view(-1, VOCAB).multinomial(1, generator=batch.generator)
    return emit(drafts, num_accepted, take(redrawn.view(context.shape[:2]), num_accepted))


def one_noise_for_the_whole_block(batch: Batch, drafts: torch.Tensor) -> Emitted:
    return verify(replace(batch, keys=batch.keys[:, :1].expand_as(batch.keys)), drafts)


def noise_keyed_by_the_row_in_the_block(batch: Batch, drafts: torch.Tensor) -> Emitted:
    return verify(replace(batch, keys=answer_keys()[batch.rows, : NUM_DRAFTS + 1]), drafts)


def first_draft_unchecked(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    draws[:, 0] = drafts[:, 0]
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, num_accepted))


def last_accepted_draft_dropped(batch: Batch, drafts: torch.Tensor) -> Emitted:
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    shorter = (num_accepted - 1).clamp(min=0)
    return emit(drafts, shorter, take(draws, num_accepted))


def always_greedy(batch: Batch, drafts: torch.Tensor) -> Emitted:
    return verify(replace(batch, sampling=replace(batch.sampling, top_k=1)), drafts)


def cut_left_out_behind_the_first_row(batch: Batch, drafts: torch.Tensor) -> Emitted:
    """top-p left out on the rows behind the first."""
    draws = draw_block(batch, drafts)
    uncut = draw_block(replace(batch, sampling=replace(batch.sampling, top_p=1.0)), drafts)
    draws[:, 1:] = uncut[:, 1:]
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, num_accepted))


PLAIN_LAW, CUT_LAW = SETTINGS[4], SETTINGS[5]


@pytest.mark.parametrize(
    "fault, drafter, sampling",
    [
        (bonus_one_row_early, "greedy", PLAIN_LAW),
        (bonus_one_row_late, "greedy", PLAIN_LAW),
        (own_token_of_another_answer, "greedy", PLAIN_LAW),
        (own_token_of_another_answer, "plain", PLAIN_LAW),
        (drafts_of_another_branch, "random", PLAIN_LAW),
        (verified_behind_another_branch, "random", PLAIN_LAW),
        (redrawn_after_a_mismatch, "greedy", PLAIN_LAW),
        (redrawn_after_a_mismatch, "shared noise", PLAIN_LAW),
        (redrawn_without_the_rejected_draft, "shared noise", PLAIN_LAW),
        (one_noise_for_the_whole_block, "greedy", PLAIN_LAW),
        (one_noise_for_the_whole_block, "shared noise", PLAIN_LAW),
        (noise_keyed_by_the_row_in_the_block, "plain", PLAIN_LAW),
        (noise_keyed_by_the_row_in_the_block, "greedy", PLAIN_LAW),
        (first_draft_unchecked, "greedy", PLAIN_LAW),
        (first_draft_unchecked, "shared noise", PLAIN_LAW),
        (last_accepted_draft_dropped, "greedy", PLAIN_LAW),
        (always_greedy, "shared noise", PLAIN_LAW),
        (cut_left_out_behind_the_first_row, "greedy", CUT_LAW),
    ],
)
def test_fault_is_noticed(fault: Verify, drafter: str, sampling: Sampling) -> None:
    answers, _ = answer_all(sampling, DRAFTERS[drafter], fault)
    assert answers.shape == (NUM_ANSWERS, LENGTH)
    assert p_value(answers, sampling) < P_LIMIT


def test_exact_residual_passes_for_drafts_that_ignore_the_noise() -> None:
    """The test of the law does not merely notice other noise than that of the seed."""
    answers, _ = answer_all(PLAIN_LAW, DRAFTERS["greedy"], redrawn_without_the_rejected_draft)
    plain, _ = answer_all(PLAIN_LAW, draft_nothing)
    assert not torch.equal(answers, plain)
    assert p_value(answers, PLAIN_LAW) > P_LIMIT
