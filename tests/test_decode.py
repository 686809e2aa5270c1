"""The decode loops on a toy target: output never depends on the drafter."""

from collections import Counter

import pytest
from fakes import (
    ToyTarget,
    accept_exactly,
    accept_in_turn,
    always_right,
    always_wrong,
    at_random,
    no_drafts,
    right_with_chance,
)
from loops import Results, finish, make_request, make_scheduler, run
from scripted_drafter import Faults, ScriptedDrafter

from d3d_ray.metrics import summarise
from d3d_ray.records import Finish

VOCAB = 32
POLICIES = {
    "right": always_right,
    "wrong": always_wrong,
    "random": at_random,
    "none": no_drafts,
    "first wrong": accept_exactly(0),
    "in turn": accept_in_turn,
    "mixed": right_with_chance(0.7),
}
SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 1.0},
    "cut": {"temperature": 1.7, "top_k": 5, "top_p": 0.8},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    "penalised warm": {"temperature": 0.8, "frequency_penalty": 2.0, "min_tokens": 9},
}


@pytest.fixture
def target() -> ToyTarget:
    return ToyTarget(VOCAB, sees_all=True)


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_greedy_output_equals_the_plain_loop(target, mode, policy, block_size):
    drafter = ScriptedDrafter(
        target, block_size=block_size, policy=POLICIES[policy], hit_rate=0.5, seed=block_size
    )
    results = run(target, drafter, [make_request(mode=mode)], block_size=block_size)
    assert results.tokens("a") == target.plain_answer(
        (1, 2, 3), make_request().sampling, max_tokens=40
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_same_seed_gives_the_same_text_in_every_mode_and_company(target, setting, hit_rate, mode):
    requests = [
        make_request(f"r{i}", prompt=range(1, 3 + i), mode=mode, seed=i, **SETTINGS[name])
        for i, name in enumerate([setting, *SETTINGS])
    ]
    drafter = ScriptedDrafter(
        target, block_size=4, policy=right_with_chance(0.8), hit_rate=hit_rate
    )
    results = run(target, drafter, requests)
    for request in requests:
        expected = target.plain_answer(request.prompt, request.sampling, max_tokens=40)
        assert results.tokens(request.id) == expected


@pytest.mark.parametrize(
    "faults",
    [
        Faults(late_polls=3),
        Faults(late_polls=50),
        Faults(lose=0.5),
        Faults(lose=1.0),
        Faults(duplicate=1.0),
        Faults(swap=0.5),
        Faults(stale=0.5),
        Faults(garble=0.7),
        Faults(silent_from=5),
        Faults(deaf_from=5),
        Faults(lost_from=5),
        Faults(restart_at=7),
        Faults(lose=0.2, duplicate=0.3, swap=0.3, stale=0.3, garble=0.3, late_polls=1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_faulty_tables_never_change_a_token(target, faults, mode):
    requests = [
        make_request(f"r{i}", prompt=[i + 1, 5], mode=mode, temperature=float(i % 2), seed=i)
        for i in range(3)
    ]
    drafter = ScriptedDrafter(target, block_size=4, policy=right_with_chance(0.8), faults=faults)
    results = run(target, drafter, requests, max_wait_s=0.002)
    for request in requests:
        expected = target.plain_answer(request.prompt, request.sampling, max_tokens=40)
        assert results.tokens(request.id) == expected
    assert all(0 <= t < VOCAB for block in target.blocks for t in block.tokens)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_right_drafter_is_accepted_in_every_round(target, mode):
    drafter = ScriptedDrafter(target, block_size=4)
    results = run(target, drafter, [make_request(mode=mode, max_tokens=801)], max_wait_s=1.0)
    decode = [r for r in results.last("a").rounds if not r.is_prefill]
    assert len(decode) == 200
    assert {(r.kind, r.num_accepted) for r in decode} == {("hit", 3)}


def test_positions_follow_the_committed_length_for_every_number_of_accepted_drafts(target):
    drafter = ScriptedDrafter(target, block_size=4, policy=accept_in_turn)
    results = run(target, drafter, [make_request()], max_wait_s=1.0)
    rounds = [r for r in results.last("a").rounds if not r.is_prefill]
    blocks = [block for block in target.blocks if block.start >= 3]
    committed = 4
    for block, each in zip(blocks, rounds, strict=True):
        assert block.start == committed - 1
        committed += each.num_emitted
    assert {r.num_accepted for r in rounds} >= {0, 1, 2, 3}


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_a_stop_token_anywhere_in_a_block_ends_the_answer_there(target, mode):
    plain = target.plain_answer((1, 2, 3), make_request().sampling, max_tokens=16)
    for index in range(12):
        stop = plain[index]
        end = plain.index(stop) + 1
        drafter = ScriptedDrafter(target, block_size=4)
        results = run(target, drafter, [make_request(mode=mode, stop_ids=[stop, 99])])
        assert results.tokens("a") == plain[:end]
        assert results.last("a").finish is Finish.STOP


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_max_tokens_is_exact(target, mode, max_tokens):
    drafter = ScriptedDrafter(target, block_size=4)
    results = run(target, drafter, [make_request(mode=mode, max_tokens=max_tokens)])
    assert len(results.tokens("a")) == max_tokens
    assert results.last("a").finish is Finish.LENGTH
    assert max(block.start + len(block.tokens) for block in target.blocks) <= 3 + max_tokens


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_no_stop_token_before_min_tokens(target, mode):
    plain = target.plain_answer((1, 2, 3), make_request().sampling, max_tokens=16)
    stop_ids = frozenset(plain)
    for min_tokens in (1, 2, 5, 9):
        request = make_request(mode=mode, stop_ids=stop_ids, min_tokens=min_tokens)
        drafter = ScriptedDrafter(target, block_size=4)
        results = run(target, drafter, [request])
        expected = target.plain_answer((1, 2, 3), request.sampling, stop_ids, max_tokens=40)
        assert results.tokens("a") == expected
        assert not stop_ids & set(expected[:min_tokens])


def test_a_silent_drafter_is_given_up_on_and_taken_back(target):
    results = Results()
    faults = Faults(silent_from=0)
    scheduler = make_scheduler(
        target, ScriptedDrafter(target, block_size=4, faults=faults), results, max_wait_s=0.01
    )
    scheduler.submit(make_request(max_tokens=400))
    while len(results.chunks.get("a", ())) < 20:
        scheduler.step(0.01)
    assert scheduler.correspondence.is_suspended
    scheduler.attach(ScriptedDrafter(target, block_size=4))
    finish(scheduler, results, ["a"])
    assert results.tokens("a") == target.plain_answer(
        (1, 2, 3), make_request().sampling, max_tokens=400
    )
    assert any(r.kind == "hit" for r in results.last("a").rounds)


def test_a_drafter_that_restarts_gets_a_prefill_and_rejoins(target):
    drafter = ScriptedDrafter(target, block_size=4, faults=Faults(restart_at=6))
    results = run(target, drafter, [make_request(max_tokens=100)], max_wait_s=1.0)
    kinds = Counter(r.kind for r in results.last("a").rounds if not r.is_prefill)
    assert kinds["hit"] >= 20
    assert kinds["none"] <= 3


def test_a_drafter_knows_exactly_what_is_committed(target):
    drafter = ScriptedDrafter(target, block_size=4, policy=right_with_chance(0.5))
    results = Results()
    scheduler = make_scheduler(target, drafter, results)
    scheduler.submit(make_request())
    while not results.is_finished("a"):
        scheduler.step(0.01)
        known, tokens = (
            drafter.committed.get("a", ()),
            (1, 2, 3, *results.tokens("a")) if "a" in results.chunks else (1, 2, 3),
        )
        assert known == tokens[: len(known)]
    assert "a" not in drafter.committed, "the end of a request frees it at the drafter"


def test_rounds_of_requests_interleave_and_a_long_prompt_does_not_block(target):
    long = make_request("long", prompt=[1] * 400)
    requests = [make_request("first"), long, make_request("second")]
    run(target, ScriptedDrafter(target, block_size=4), requests)
    order = [block.request for block in target.blocks]
    first_end = max(i for i, name in enumerate(order) if name == "first")
    second_end = max(i for i, name in enumerate(order) if name == "second")
    long_starts = order.index("long")
    assert long_starts < min(first_end, second_end)
    assert max(first_end, second_end) < len(order) - 50, "short answers end before the long prompt"


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_a_cancelled_request_stops_and_the_others_go_on(target, mode):
    results = Results()
    drafter = ScriptedDrafter(target, block_size=4)
    scheduler = make_scheduler(target, drafter, results)
    scheduler.submit(make_request("a", mode=mode, max_tokens=10**6))
    scheduler.submit(make_request("b", mode=mode))
    while len(results.chunks.get("a", ())) < 3:
        scheduler.step(0.01)
    scheduler.cancel("a")
    scheduler.cancel("unknown")
    finish(scheduler, results, ["a", "b"])
    assert results.last("a").finish is Finish.CANCELLED
    assert results.tokens("b") == target.plain_answer(
        (1, 2, 3), make_request().sampling, max_tokens=40
    )
    assert not target.cached and not drafter.committed
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_requests_beyond_the_kv_budget_wait_and_impossible_ones_are_refused(target):
    results = Results()
    scheduler = make_scheduler(target, None, results, kv_budget_tokens=100)
    with pytest.raises(ValueError, match=r"budget is 100.*kv_budget_tokens"):
        scheduler.submit(make_request("huge", max_tokens=98))
    for name in "abc":
        scheduler.submit(make_request(name, mode="ar"))
    scheduler.step(0.0)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    finish(scheduler, results, ["a", "b", "c"])
    assert results.tokens("a") == results.tokens("c")


def test_nan_logits_end_the_request_with_an_error_and_no_other():
    target = ToyTarget(VOCAB, nan_at={"bad": 3})
    drafter = ScriptedDrafter(target, block_size=4)
    results = run(target, drafter, [make_request("bad"), make_request("good")])
    assert results.last("bad").finish is Finish.ERROR
    assert "NaN" in results.last("bad").error
    plain = target.plain_answer((1, 2, 3), make_request().sampling, max_tokens=40)
    assert results.tokens("good") == plain
    assert results.tokens("bad") == plain[: len(results.tokens("bad"))]


def test_reported_lengths_equal_a_recount_of_the_emitted_tokens(target):
    plain = target.plain_answer((1, 2, 3), make_request().sampling, max_tokens=40)
    drafter = ScriptedDrafter(target, block_size=4, policy=right_with_chance(0.7))
    results = run(target, drafter, [make_request(stop_ids=[plain[22]])])
    chunks = results.chunks["a"]
    summary = summarise(results.last("a").rounds)
    assert summary.num_rounds == len(chunks) - 1
    assert summary.num_tokens == sum(len(chunk.tokens) for chunk in chunks[1:])
    assert summary.acceptance_length == summary.num_tokens / summary.num_rounds
    assert sum(summary.acceptance_histogram) == summary.num_rounds
    assert sum(summary.outcomes.values()) == pytest.approx(1.0)


def test_length_of_self_drafting_does_not_fall_over_a_long_answer(target):
    drafter = ScriptedDrafter(target, block_size=4, policy=right_with_chance(0.9))
    results = run(target, drafter, [make_request(max_tokens=2000)], max_wait_s=1.0)
    lengths = [r.num_emitted for r in results.last("a").rounds if not r.is_prefill]
    assert sum(lengths[-100:]) == pytest.approx(sum(lengths[:100]), rel=0.15)
