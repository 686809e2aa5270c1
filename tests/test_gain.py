"""The rule that speculation is never slower than plain decoding."""

import time

import pytest
from fakes import ToyTarget, always_right, always_wrong
from loops import Results, finish, make_request, make_scheduler
from scripted_drafter import ScriptedDrafter

from d3d_ray.decode.gain import Gain, PlainCost

PLAIN_NS = 1_000_000


def rounds(gain: Gain, num_rounds: int, tokens_by_limit: dict[int, tuple[int, int]]) -> list[int]:
    """The limit of each round; a round of limit L gives (tokens, cost) as the table says."""
    limits = []
    for _ in range(num_rounds):
        limits.append(gain.limit)
        gain.observe(*tokens_by_limit[gain.limit])
    return limits


def test_a_request_that_gains_keeps_full_blocks_but_for_a_few_probes() -> None:
    limits = rounds(Gain(7, PlainCost()), 500, {7: (3, PLAIN_NS), 0: (1, PLAIN_NS)})
    assert limits.count(7) == 496 and limits.count(0) == 4


def test_a_request_that_loses_much_stops_drafting_and_tries_ever_more_rarely() -> None:
    limits = rounds(Gain(7, PlainCost()), 4000, {7: (1, 2 * PLAIN_NS), 0: (1, PLAIN_NS)})
    assert set(limits) == {0, 7}
    assert 0 < limits[200:].count(7) < 0.1 * len(limits[200:])
    assert limits[-1000:].count(7) <= 16


def test_a_request_that_loses_little_drafts_shorter_blocks() -> None:
    table = {7: (1, int(1.1 * PLAIN_NS)), 3: (1, int(0.9 * PLAIN_NS)), 0: (1, PLAIN_NS)}
    limits = rounds(Gain(7, PlainCost()), 400, table)
    assert limits.count(3) > 0.6 * len(limits)
    assert 7 in limits[200:], "full blocks are tried again"


def test_a_request_recovers_when_its_text_gets_easier() -> None:
    gain = Gain(7, PlainCost())
    rounds(gain, 300, {7: (1, 2 * PLAIN_NS), 0: (1, PLAIN_NS)})
    limits = rounds(gain, 800, {7: (4, PLAIN_NS), 0: (1, PLAIN_NS)})
    assert limits[-200:] == [7] * 200


def test_without_the_rule_the_limit_never_changes() -> None:
    gain = Gain(7, None)
    assert set(rounds(gain, 200, {7: (1, 9 * PLAIN_NS)})) == {7}


def test_an_old_cost_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainCost()
    plain.observe(PLAIN_NS)
    assert plain.is_known
    later = time.monotonic_ns() + 61_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    assert not plain.is_known


@pytest.mark.parametrize("policy", [always_right, always_wrong])
def test_the_rule_changes_no_token(policy) -> None:  # type: ignore[no-untyped-def]
    target = ToyTarget(sees_all=True)
    results = Results()
    scheduler = make_scheduler(
        target, ScriptedDrafter(target, block_size=4, policy=policy), results, is_never_slower=True
    )
    scheduler.submit(make_request(max_tokens=300))
    finish(scheduler, results, ["a"])
    expected = target.plain_answer((1, 2, 3), make_request().sampling, max_tokens=300)
    assert results.tokens("a") == expected
    # The toy's rounds cost what the clock says, so only that the rule was at work is certain.
    causes = [r.cause for r in results.last("a").rounds]
    assert "no gain" in causes
