"""The tests' own tools keep the contracts that they stand in for."""

import pytest
import torch
from fakes import (
    Policy,
    ToyTarget,
    accept_exactly,
    accept_in_turn,
    always_right,
    always_wrong,
    at_random,
    no_drafts,
    right_with_chance,
)
from scripted_drafter import Faults, ScriptedDrafter

from d3d_ray.acceptance import count_accepted
from d3d_ray.decode.protocols import Block
from d3d_ray.records import Free, FromDrafter, Lost, Outcome, Prefill, Sampling, Table

HOT = Sampling(temperature=1.0, seed=5, frequency_penalty=0.5)
PROMPT = (3, 1, 4)


def prefill(request: str = "a", *, epoch: int = -1, drafts: tuple[int, ...] | None = ()) -> Prefill:
    return Prefill(request, epoch, PROMPT, drafts, len(PROMPT), HOT)


def tables(messages: list[FromDrafter]) -> list[Table]:
    return [message for message in messages if isinstance(message, Table)]


def test_target_gives_a_blocks_rows_what_it_gives_one_token_at_a_time() -> None:
    target = ToyTarget(sees_all=True)
    tokens = (3, 1, 4, 1, 5)
    assert target.forward([Block("a", 0, tokens[:2], 0)])[0].shape == (0, 32)
    logits = target.forward([Block("a", 2, tokens[2:], 2)])[0]
    assert torch.equal(logits[1], target.next_logits(tokens))
    assert torch.equal(logits[0], target.next_logits(tokens[:-1]))
    target.cut("a", 3)
    assert torch.equal(target.forward([Block("a", 3, (1,), 1)])[0][0], logits[0])
    target.free("a")
    target.free("a")
    assert target.cached == {}


@pytest.mark.parametrize("start", [1, 3])
def test_target_refuses_a_block_that_does_not_follow_its_cache(start: int) -> None:
    target = ToyTarget()
    target.forward([Block("a", 0, (1, 2), 1)])
    with pytest.raises(ValueError, match="2 are cached"):
        target.forward([Block("a", start, (1,), 1)])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        target.forward([Block("b", 0, (32,), 1)])
    with pytest.raises(ValueError, match="2 are cached"):
        target.cut("a", 3)


def test_target_is_poisoned_in_the_round_and_request_asked_for() -> None:
    target = ToyTarget(nan_at={"a": 1})
    target.forward([Block("a", 0, (1,), 0)])  # an inner chunk of the prompt is no round
    blocks = [Block("a", 1, (2, 3), 2), Block("b", 0, (1, 2), 1), Block("a", 3, (2,), 1)]
    is_poisoned = [bool(target.forward([block])[0].isnan().all()) for block in blocks]
    assert is_poisoned == [False, False, True]


def test_plain_answer_ends_at_its_stop_or_limit() -> None:
    target = ToyTarget()
    answer = target.plain_answer(PROMPT, HOT, max_tokens=40)
    assert len(answer) == 40
    assert len(set(answer)) > 5
    stopped = target.plain_answer(PROMPT, HOT, frozenset({answer[7]}), max_tokens=40)
    assert stopped == answer[: answer.index(answer[7]) + 1]


@pytest.mark.parametrize(
    "policy, num_accepted",
    [
        (always_right, 3),
        (always_wrong, 0),
        (accept_exactly(0), 0),
        (accept_exactly(2), 2),
        (accept_in_turn, 1),
    ],
)
def test_policy_gets_as_many_drafts_accepted_as_it_says(policy: Policy, num_accepted: int) -> None:
    target = ToyTarget()
    drafter = ScriptedDrafter(target, block_size=4, policy=policy)
    answer = target.plain_answer(PROMPT, HOT, max_tokens=5)
    drafter.send(prefill(epoch=0))
    branches = tables(drafter.poll(0.0))[0].branches
    drafts = next(branch.drafts for branch in branches if branch.guess == answer[0])
    assert count_accepted(torch.tensor(answer[1:]), torch.tensor(drafts)) == num_accepted


def test_random_policies_are_deterministic_and_neither_right_nor_wrong_throughout() -> None:
    for policy in (at_random, right_with_chance(0.5)):
        drafts = []
        for _ in range(2):
            drafter = ScriptedDrafter(ToyTarget(), block_size=40, policy=policy)
            drafter.send(prefill(drafts=None))
            drafts.append(tables(drafter.poll(0.0))[0].branches[0].drafts)
        assert drafts[0] == drafts[1]
        assert len(set(drafts[0])) > 5


def test_drafter_answers_for_every_outcome_with_the_epoch_that_the_records_promise() -> None:
    target = ToyTarget()
    drafter = ScriptedDrafter(target, block_size=4, num_wrong_guesses=2)
    drafter.send(prefill(epoch=-1, drafts=()))
    drafter.send(Outcome("a", 0, (7,), (8, 9), start=3))
    drafter.send(Outcome("a", 2, (8, 9, 2), None, start=4))
    first, second, third = tables(drafter.poll(0.0))
    assert [table.epoch for table in (first, second, third)] == [0, 1, 2]
    assert {branch.k for branch in first.branches} == {0}
    for k in range(3):
        right = target.next_token((*PROMPT, 7, *(8, 9)[:k]), 3, HOT)
        guesses = [branch.guess for branch in second.branches if branch.k == k]
        assert len(guesses) == 4
        assert {None, right} < set(guesses)
    assert [(branch.k, branch.guess) for branch in third.branches] == [(None, 2)]
    assert drafter.committed == {"a": (*PROMPT, 7, 8, 9, 2)}
    drafter.send(Free("a"))
    assert drafter.committed == {}


def test_drafter_never_guesses_right_when_told_not_to() -> None:
    target = ToyTarget()
    drafter = ScriptedDrafter(target, block_size=4, hit_rate=0.0, has_mask_first=False)
    drafter.send(prefill())
    (branch,) = tables(drafter.poll(0.0))[0].branches
    assert branch.guess != target.next_token(PROMPT, 3, HOT)


def test_drafter_has_lost_what_does_not_follow_or_came_before_its_restart() -> None:
    drafter = ScriptedDrafter(ToyTarget(), block_size=4, faults=Faults(restart_at=2))
    drafter.send(prefill())
    drafter.send(Outcome("a", 0, (7,), (), start=4))
    drafter.send(Outcome("a", 0, (7,), (), start=3))
    drafter.send(prefill())
    assert [type(message) for message in drafter.poll(0.0)] == [Table, Lost, Lost, Table]


def received(faults: Faults, *, num_polls: int = 1) -> list[FromDrafter]:
    drafter = ScriptedDrafter(ToyTarget(), block_size=4, policy=no_drafts, faults=faults)
    for request in ("a", "b"):
        drafter.send(prefill(request))
    return [message for _ in range(num_polls) for message in drafter.poll(0.0)]


def test_each_fault_is_the_one_asked_for() -> None:
    assert len(received(Faults())) == 2
    assert received(Faults(late_polls=2), num_polls=2) == []
    assert len(received(Faults(late_polls=2), num_polls=3)) == 2
    assert received(Faults(lose=1.0)) == []
    assert received(Faults(silent_from=0)) == []
    assert received(Faults(deaf_from=0)) == []
    assert {type(message) for message in received(Faults(lost_from=1))} == {Lost, Table}
    assert len(received(Faults(duplicate=1.0))) == 4
    assert [table.request for table in tables(received(Faults(swap=1.0)))] == ["a", "a"]
    assert 0 not in {table.epoch for table in tables(received(Faults(stale=1.0)))}


def test_garbled_table_breaks_a_rule_of_the_records() -> None:
    drafter = ScriptedDrafter(ToyTarget(), block_size=4, faults=Faults(garble=1.0))
    for index in range(30):
        drafter.send(prefill(str(index)))
    garbled = tables(drafter.poll(0.0))
    assert len(garbled) == 30
    for table in garbled:
        assert any(
            not 0 <= (branch.k or 0) < 4
            or len(branch.drafts) > 3
            or not all(0 <= token < 32 for token in branch.drafts)
            for branch in table.branches
        )
