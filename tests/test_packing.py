"""The layout of the packed pass, and which branches go into it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_ray.packing import (
    Candidate,
    PackedPass,
    continuation,
    fill_budget,
    mask_first,
    pack,
    rank_outcomes,
    seeded,
)

MASK = 99

FULL_PASS = """
#...............
##..............
###.............
####............
#...###.........
#...###.........
#...###.........
##.....###......
##.....###......
##.....###......
###.......###...
###.......###...
###.......###...
####.........###
####.........###
####.........###
"""


def picture(packed: PackedPass) -> str:
    rows = ("".join("#" if seen else "." for seen in row) for row in packed.visible.tolist())
    return "\n" + "\n".join(rows) + "\n"


def test_full_mask_first_pass_sees_what_the_design_draws() -> None:
    branches = [mask_first(k, anchor_row=0, block_size=4, label_shift=True) for k in range(4)]
    packed = pack([10, 11, 12, 13], branches, start=50, mask_token_id=MASK)
    assert picture(packed) == FULL_PASS
    assert packed.token_ids.tolist() == [10, 11, 12, 13] + [MASK] * 12
    assert packed.position_ids.tolist() == [
        *(50, 51, 52, 53),
        *(51, 52, 53),
        *(52, 53, 54),
        *(53, 54, 55),
        *(54, 55, 56),
    ]
    assert packed.draft_rows == ((4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14, 15))


def test_guess_is_a_causal_clean_row_before_its_masks() -> None:
    branches = [seeded(1, 40, anchor_row=0, block_size=4, label_shift=True)]
    packed = pack([10, 11, 12], branches, start=5, mask_token_id=MASK)
    assert picture(packed) == "\n#.....\n##....\n###...\n##.#..\n##.###\n##.###\n"
    assert packed.token_ids.tolist() == [10, 11, 12, 40, MASK, MASK]
    assert packed.position_ids.tolist() == [5, 6, 7, 7, 8, 9]
    assert packed.draft_rows == ((3, 4, 5),)


def test_unshifted_branches_have_one_row_more_and_draft_from_masks_only() -> None:
    branches = [
        mask_first(0, anchor_row=0, block_size=3, label_shift=False),
        seeded(1, 40, anchor_row=0, block_size=3, label_shift=False),
    ]
    packed = pack([10, 11], branches, start=0, mask_token_id=MASK)
    assert packed.token_ids.tolist() == [10, 11, MASK, MASK, MASK, 40, MASK, MASK]
    # The first mask of the mask-first branch stands at the bonus and predicts it, not a draft.
    assert packed.position_ids.tolist() == [0, 1, 1, 2, 3, 2, 3, 4]
    assert packed.draft_rows == ((3, 4), (6, 7))


def test_continuation_takes_its_first_draft_from_the_anchor_when_shifted() -> None:
    branch = continuation(num_glue=3, block_size=4, label_shift=True)
    packed = pack([7, 8, 10], [branch], start=20, mask_token_id=MASK)
    assert packed.token_ids.tolist() == [7, 8, 10, MASK, MASK]
    assert packed.position_ids.tolist() == [20, 21, 22, 23, 24]
    assert packed.draft_rows == ((2, 3, 4),)
    assert picture(packed) == "\n#....\n##...\n###..\n#####\n#####\n"


def test_unshifted_continuation_drafts_from_masks_only() -> None:
    branch = continuation(num_glue=1, block_size=4, label_shift=False)
    packed = pack([10], [branch], start=20, mask_token_id=MASK)
    assert packed.position_ids.tolist() == [20, 21, 22, 23]
    assert packed.draft_rows == ((1, 2, 3),)


def test_committed_tokens_before_the_anchor_shift_rows_and_are_seen_by_all_branches() -> None:
    branches = [
        mask_first(0, anchor_row=2, block_size=3, label_shift=True),
        seeded(1, 40, anchor_row=2, block_size=3, label_shift=True),
    ]
    packed = pack([7, 8, 10, 11], branches, start=30, mask_token_id=MASK)
    assert packed.position_ids.tolist() == [30, 31, 32, 33, 33, 34, 34, 35]
    assert picture(packed) == (
        "\n#.......\n##......\n###.....\n####....\n###.##..\n###.##..\n####..#.\n####..##\n"
    )
    assert packed.draft_rows == ((4, 5), (6, 7))


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, int, int, bool, list[tuple[int, int | None]]]:
    num_committed = draw(st.integers(0, 3))
    num_drafts = draw(st.integers(0, 4))
    outcome = st.tuples(st.integers(0, num_drafts), st.none() | st.integers(0, 50))
    return (
        num_committed,
        num_drafts,
        draw(st.integers(2, 6)),
        draw(st.booleans()),
        draw(st.lists(outcome, max_size=5)),
    )


@given(passes())
def test_branch_sees_its_outcome_and_itself_and_nothing_else(
    case: tuple[int, int, int, bool, list[tuple[int, int | None]]],
) -> None:
    num_committed, num_drafts, block_size, label_shift, outcomes = case
    num_glue = num_committed + 1 + num_drafts
    branches = [
        mask_first(k, anchor_row=num_committed, block_size=block_size, label_shift=label_shift)
        if guess is None
        else seeded(
            k, guess, anchor_row=num_committed, block_size=block_size, label_shift=label_shift
        )
        for k, guess in outcomes
    ]
    packed = pack(range(100, 100 + num_glue), branches, start=7, mask_token_id=MASK)
    first = num_glue
    for (k, guess), branch, rows in zip(outcomes, branches, packed.draft_rows, strict=True):
        last = first + branch.num_rows
        for row in range(first, last):
            own = (
                range(first, row + 1) if guess is not None and row == first else range(first, last)
            )
            seen = packed.visible[row].nonzero().flatten().tolist()
            assert seen == [*range(num_committed + k + 1), *own]
        bonus_position = 7 + num_committed + k + 1
        assert packed.position_ids[first] == bonus_position
        # Draft i belongs at the i-th position behind the bonus; a shifted row stands one before it.
        predicted = [int(packed.position_ids[row]) + label_shift for row in rows]
        assert predicted == [bonus_position + 1 + i for i in range(block_size - 1)]
        first = last
    assert first == len(packed.token_ids) == len(packed.visible)
    assert not packed.visible[:num_glue, num_glue:].any()


def test_prediction_of_a_continuation_stands_right_behind_the_anchor() -> None:
    for label_shift in (True, False):
        branch = continuation(num_glue=2, block_size=5, label_shift=label_shift)
        packed = pack([1, 2], [branch], start=10, mask_token_id=MASK)
        rows = packed.draft_rows[0]
        predicted = [int(packed.position_ids[row]) + label_shift for row in rows]
        assert predicted == [12, 13, 14, 15]


def test_two_passes_of_one_shape_differ_only_in_tokens_and_positions() -> None:
    branches = [seeded(0, guess, anchor_row=0, block_size=3, label_shift=True) for guess in (5, 6)]
    first, second = (
        pack([10], [branch], start=start, mask_token_id=MASK)
        for branch, start in zip(branches, (3, 8), strict=True)
    )
    assert first.token_ids.tolist() == [10, 5, MASK]
    assert second.token_ids.tolist() == [10, 6, MASK]
    assert second.position_ids.tolist() == [8, 9, 10]
    assert torch.equal(first.visible, second.visible)


@given(
    st.lists(st.floats(0, 1), max_size=6),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    st.data(),
)
def test_chances_of_all_outcomes_sum_to_one(
    accept_rates: list[float], weights: list[float], data: st.DataObject
) -> None:
    guess_rates = [weight / (1.2 * sum(weights)) for weight in weights]
    size = len(accept_rates) + 1
    guesses = data.draw(
        st.lists(st.lists(st.integers(0, 9), max_size=5, unique=True), min_size=size, max_size=size)
    )
    ranked = rank_outcomes(accept_rates, guesses, guess_rates)
    chances = [candidate.chance for candidate in ranked]
    assert sum(chances) == pytest.approx(1.0)
    assert chances == sorted(chances, reverse=True)
    for k, guesses_k in enumerate(guesses):
        named = {candidate.guess for candidate in ranked if candidate.k == k}
        assert named == {None, *guesses_k[: len(guess_rates)]}


def test_chance_is_that_of_reaching_k_and_guessing_right() -> None:
    ranked = rank_outcomes([0.5, 0.8], [[1, 2], [3], [4]], [0.6, 0.3])
    chances = {(candidate.k, candidate.guess): candidate.chance for candidate in ranked}
    assert chances == {
        (0, 1): pytest.approx(0.30),
        (0, 2): pytest.approx(0.15),
        (0, None): pytest.approx(0.05),
        (1, 3): pytest.approx(0.06),
        (1, None): pytest.approx(0.04),
        (2, 4): pytest.approx(0.24),
        (2, None): pytest.approx(0.16),
    }
    assert [(candidate.k, candidate.guess) for candidate in ranked[:3]] == [
        (0, 1),
        (2, 4),
        (2, None),
    ]


@pytest.mark.parametrize(
    "num_free_rows, num_kept", [(-4, 1), (0, 1), (2, 1), (3, 1), (5, 1), (6, 2), (12, 4), (99, 4)]
)
def test_budget_keeps_the_likeliest_that_fit_and_always_one(
    num_free_rows: int, num_kept: int
) -> None:
    candidates = [Candidate(k, None, 0.4 - 0.1 * k) for k in range(4)]
    kept = fill_budget(candidates, num_free_rows=num_free_rows, num_rows_each=3)
    assert kept == candidates[:num_kept]


def test_every_likely_k_has_a_branch_before_any_has_a_second_guess() -> None:
    candidates = rank_outcomes([0.6, 0.6], [[1, 2, 3]] * 3, [0.4, 0.15, 0.05])
    chosen = fill_budget(candidates, num_free_rows=12, num_rows_each=3)
    assert {candidate.k for candidate in chosen} == {0, 1, 2}
    by_chance = candidates[:4]
    assert {candidate.k for candidate in by_chance} != {0, 1, 2}, "chance alone leaves one out"


def test_an_almost_certain_guess_needs_no_branch_of_masks_beside_it() -> None:
    candidates = [
        Candidate(0, 5, 0.5),
        Candidate(0, None, 0.01),
        Candidate(1, None, 0.4),
        Candidate(1, 7, 0.09),
    ]
    chosen = fill_budget(candidates, num_free_rows=6, num_rows_each=3)
    assert chosen == [candidates[0], candidates[2]]
