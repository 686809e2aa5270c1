"""Which drafts stay, and where a round's tokens end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_ray.acceptance import count_accepted, cut_at_end
from d3d_ray.records import Finish

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@given(TOKENS, st.data())
def test_drafts_are_kept_up_to_the_first_mismatch(drafts: list[int], data: st.DataObject) -> None:
    size = len(drafts) + 1
    draws = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    num_kept = 0
    while num_kept < len(drafts) and draws[num_kept] == drafts[num_kept]:
        num_kept += 1
    counted = count_accepted(torch.tensor(draws), torch.tensor(drafts, dtype=torch.int64))
    assert counted.shape == ()
    assert int(counted) == num_kept


def test_right_drafts_behind_a_wrong_one_do_not_count() -> None:
    assert int(count_accepted(torch.tensor([5, 2, 3, 4]), torch.tensor([1, 2, 3]))) == 0
    assert int(count_accepted(torch.tensor([1, 5, 3, 4]), torch.tensor([1, 2, 3]))) == 1


def test_draw_behind_the_block_is_compared_with_nothing() -> None:
    assert int(count_accepted(torch.tensor([1, 2, 9]), torch.tensor([1, 2]))) == 2


def test_answers_of_a_batch_are_counted_apart() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    draws = torch.tensor([[1, 2, 3, 0], [1, 2, 0, 0], [1, 0, 3, 0], [0, 2, 3, 0]])
    assert count_accepted(draws, drafts).tolist() == [3, 2, 1, 0]
    assert count_accepted(draws.view(2, 2, 4), drafts.view(2, 2, 3)).tolist() == [[3, 2], [1, 0]]


def test_plain_step_accepts_nothing() -> None:
    no_drafts = torch.empty(2, 0, dtype=torch.int64)
    assert count_accepted(torch.tensor([[7], [8]]), no_drafts).tolist() == [0, 0]


@pytest.mark.parametrize("offset", range(5))
def test_stop_token_ends_the_round_wherever_it_stands(offset: int) -> None:
    tokens = [10, 11, 12, 13, 14]
    tokens[offset] = 2
    kept, finish = cut_at_end(tokens, stop_ids={2, 3}, num_left=100)
    assert kept == tuple(tokens[: offset + 1])
    assert finish is Finish.STOP


def test_first_of_two_stop_tokens_counts() -> None:
    assert cut_at_end([10, 3, 2, 11], stop_ids={2, 3}, num_left=9) == ((10, 3), Finish.STOP)


@pytest.mark.parametrize("num_left", range(1, 8))
def test_round_never_gives_more_than_is_left(num_left: int) -> None:
    tokens = (10, 11, 12, 13, 14)
    kept, finish = cut_at_end(tokens, stop_ids=frozenset(), num_left=num_left)
    assert kept == tokens[:num_left]
    assert finish is (Finish.LENGTH if num_left <= 5 else None)


def test_stop_at_the_limit_is_a_stop() -> None:
    assert cut_at_end([10, 11, 2], stop_ids={2}, num_left=3) == ((10, 11, 2), Finish.STOP)


def test_stop_behind_the_limit_is_not_seen() -> None:
    assert cut_at_end([10, 11, 2], stop_ids={2}, num_left=2) == ((10, 11), Finish.LENGTH)


@given(TOKENS, st.sets(st.integers(0, 3)), st.integers(1, 8))
def test_cut_tokens_obey_stop_and_limit(
    tokens: list[int], stop_ids: set[int], num_left: int
) -> None:
    kept, finish = cut_at_end(tokens, stop_ids=stop_ids, num_left=num_left)
    assert kept == tuple(tokens[: len(kept)])
    assert len(kept) <= num_left
    assert not stop_ids & set(kept[:-1])
    ends_in_stop = bool(kept) and kept[-1] in stop_ids
    assert (finish is Finish.STOP) == ends_in_stop
    assert (finish is Finish.LENGTH) == (len(kept) == num_left and not ends_in_stop)
    assert finish is not None or len(kept) == len(tokens)
