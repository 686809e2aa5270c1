"""What draft plans offer, with a drafter whose AR head is the target's own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import ToyTarget, always_right
from loops import Results, finish, make_request, make_scheduler, run
from scripted_drafter import Faults, ScriptedDrafter
from test_packed_pass import run_alone
from tiny import MASK, save_tiny, tiny_drafter

from d3d_ray.decode.correspondence import Correspondence
from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.gain import Gain
from d3d_ray.decode.lookahead_plans import AnytimePlan, GlueFirstPlan
from d3d_ray.decode.modes import make_policies
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.decode.passes import Passes
from d3d_ray.decode.plans import Board, DraftPlan, Line, Offer, Work
from d3d_ray.decode.session import Session
from d3d_ray.metrics import Summary, summarise
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.loading import load_target
from d3d_ray.models.target import Target
from d3d_ray.packing import rank_foretold
from d3d_ray.records import FromDrafter, Mode, Outcome, Prefill, Sampling, Table
from d3d_ray.training.evaluation import InlineDrafter

PROMPT = (11, 57, 203, 99, 41, 8, 300)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, DrafterModel]:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny(folder, "qwen3")
    return load_pair(folder)


def load_pair(folder: Path) -> tuple[Target, DrafterModel]:
    target = load_target(str(folder), dtype=torch.float32, device="cpu")
    drafter = load_drafter(
        None,
        target_source=str(folder),
        block_size=4,
        mask_token_id=MASK,
        dtype=torch.float32,
        device="cpu",
    )
    return target, drafter


def decode(target: Target, plan: DraftPlan, temperature: float) -> tuple[tuple[int, ...], Summary]:
    request = make_request(
        prompt=PROMPT, temperature=temperature, max_tokens=60, repetition_penalty=1.3
    )
    results = run(
        target, InlineDrafter(plan), [request], vocab_size=target.vocab_size, max_wait_s=60.0
    )
    return results.tokens("a"), summarise(results.last("a").rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_targets_own_head_repairs_make_every_draft_right(pair, temperature) -> None:
    target, drafter = pair
    plan = AnytimePlan(drafter, max_rows=64, is_noise_shared=True, max_passes=8)
    tokens, summary = decode(target, plan, temperature)
    assert MASK not in tokens, "choose another prompt: the mask token is never drafted"
    # One round in the beginning has no drafts, and the answer's end cuts one.
    assert summary.acceptance_length > 3.5
    assert summary.outcomes["hit"] > 0.9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_targets_own_head_every_outcome_is_foretold(pair, temperature) -> None:
    target, drafter = pair
    plan = GlueFirstPlan(drafter, max_rows=64, is_noise_shared=True)
    _, summary = decode(target, plan, temperature)
    assert summary.outcomes["hit"] > 0.9
    assert plan.foretold_share == 1.0
    assert summary.passes_per_round == 2.0
    _, packed = decode(target, PackedPlan(drafter, max_rows=64, is_noise_shared=True), temperature)
    assert packed.outcomes["hit"] < summary.outcomes["hit"]


@pytest.mark.parametrize("label_shift", [True, False])
@pytest.mark.parametrize("num_checked", [0, 2])
@pytest.mark.parametrize("num_drafts", [0, 2, 5, 7])
def test_a_repaired_line_is_what_the_network_says_alone(
    label_shift: bool, num_checked: int, num_drafts: int
) -> None:
    drafter = tiny_drafter("llama", block_size=8, label_shift=label_shift)
    work = Work(
        request="r",
        epoch=1,
        tokens=PROMPT,
        drafts=(),
        prompt_length=len(PROMPT),
        sampling=Sampling(seed=1),
    )
    own: list[int] = []  # What the AR head goes on with.
    for _ in range(7):
        alone = run_alone(drafter.network, [*PROMPT, *own], None, 0)[:, : drafter.vocab_size]
        own.append(int(alone[-1].argmax()))
    doubt = 4
    drafts = [*own[:doubt], *(token + 1 for token in own[doubt:])][:num_drafts]
    num_checked = min(num_checked, num_drafts)
    line = Line(tuple(drafts), ((),) * num_drafts, num_checked)
    passes = Passes(drafter, is_noise_shared=True, num_guesses=2)
    repaired, _ = passes.repair(work, PROMPT, line, max_rows=64)

    place = min(doubt, num_drafts)
    head = own[: place + 1]
    num_masks = 7 - len(head) + (not label_shift)
    alone = run_alone(drafter.network, [*PROMPT, *own[:place]], None, num_masks)
    tail = alone[-(7 - len(head)) :, : drafter.vocab_size].argmax(dim=-1).tolist()
    assert repaired.drafts == (*head, *tail)
    assert repaired.num_checked == place + 1
    assert len(repaired.runners) == 7
    for draft, runners in zip(
        repaired.drafts[num_checked:], repaired.runners[num_checked:], strict=True
    ):
        assert len(runners) == 2 and draft not in runners

    num_clean = 1 + num_drafts - num_checked
    tight, num_rows = passes.repair(work, PROMPT, line, max_rows=num_clean + 12)
    assert num_rows <= num_clean + 12
    assert len(tight.drafts) in (place + 1, 7)
    assert tight.drafts == repaired.drafts[: len(tight.drafts)]


def test_a_line_without_doubts_stays_as_it_is() -> None:
    drafter = tiny_drafter("llama", block_size=4)
    work = Work(
        request="r", epoch=1, tokens=PROMPT, drafts=(), prompt_length=3, sampling=Sampling(seed=1)
    )
    passes = Passes(drafter, is_noise_shared=True, num_guesses=1)
    line = Line((), ())
    for _ in range(4):
        line, _ = passes.repair(work, PROMPT, line, max_rows=64)
    assert line.num_checked == 3
    assert passes.repair(work, PROMPT, line, max_rows=64)[0].drafts == line.drafts


def test_foretold_outcomes_share_out_all_chance_and_leave_out_the_rejected_draft() -> None:
    scores = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)) * 3
    drafts = (4, 9, 2)
    candidates = rank_foretold(scores, drafts, num_guesses=2)
    assert sum(c.chance for c in candidates) == pytest.approx(1.0, abs=1e-5)
    chances = [c.chance for c in candidates[1:]]
    assert chances == sorted(chances, reverse=True)
    assert all(c.guess != drafts[c.k] for c in candidates if c.k < 3)
    own = scores.argmax(dim=-1).tolist()
    expected = next((k for k, draft in enumerate(drafts) if own[k] != draft), 3)
    assert (candidates[0].k, candidates[0].guess) == (expected, own[expected])


def test_outcomes_foretold_by_a_trimmed_head_are_those_of_one_that_never_gives_the_rest() -> None:
    ids = torch.tensor([1, 4, 5, 9, 13, 17])
    trimmed = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 3
    scores = torch.full((4, 20), -torch.inf)
    scores[:, ids] = trimmed
    drafts = (4, 9, 2)  # 2 cannot be drafted by this head.
    expected = rank_foretold(scores, drafts, num_guesses=2)
    assert rank_foretold(trimmed, drafts, num_guesses=2, ids=ids) == expected


def test_a_drafter_without_guesses_is_asked_again_when_the_policy_is_jit() -> None:
    target = ToyTarget(sees_all=True)
    for policy, kind in (("soft", "soft"), ("jit", "jit")):
        drafter = ScriptedDrafter(target, block_size=4, policy=always_right, hit_rate=0.0)
        results = run(target, drafter, [make_request()], max_wait_s=5.0, miss_policy=policy)
        rounds = results.last("a").rounds
        drafted = {r.kind for r in rounds if r.num_drafts}
        assert drafted == {kind}
        assert results.tokens("a") == target.plain_answer(
            (1, 2, 3), make_request().sampling, max_tokens=40
        )


def test_a_board_offers_every_line_it_has() -> None:
    work = Work(
        request="r", epoch=0, tokens=(1,), drafts=(), prompt_length=1, sampling=Sampling(seed=1)
    )
    board = Board(work, lines={(0, 5): Line((7, 8), ((), ())), (0, None): Line((9,), ((),))})
    offer = board.offer(12)
    assert {(b.k, b.guess, b.drafts) for b in offer.branches} == {(0, 5, (7, 8)), (0, None, (9,))}
    assert offer.num_rows == 12


def test_a_further_pass_of_older_work_does_not_end_the_wait_for_new_drafts() -> None:
    target, results = ToyTarget(sees_all=True), Results()
    drafter = ScriptedDrafter(target, block_size=4, policy=always_right, hit_rate=0.0)
    scheduler = make_scheduler(target, drafter, results, max_wait_s=5.0, miss_policy="jit")
    late: list[Table] = []
    poll = drafter.poll

    def poll_with_further_passes(timeout: float) -> list[FromDrafter]:
        arrived = poll(timeout)
        for message in arrived:
            if isinstance(message, Table) and any(b.k is not None for b in message.branches):
                late.append(message)
        # Every table for all outcomes comes once more, before whatever is next.
        again, late[:] = list(late), []
        return [*again, *arrived]

    drafter.poll = poll_with_further_passes  # type: ignore[method-assign]
    scheduler.submit(make_request())
    finish(scheduler, results, ["a"])
    rounds = results.last("a").rounds
    assert {r.kind for r in rounds if r.num_drafts} == {"jit"}


def test_rounds_behind_a_rest_do_not_count_for_the_pace() -> None:
    sent: list[FromDrafter] = []
    worker = DraftWorker(NoPlan(), lambda message: bool(sent.append(message)) or True)
    sampling = Sampling(seed=1)
    worker.receive(Prefill("r", 0, (1, 2), (), prompt_length=1, sampling=sampling))
    worker.receive(Outcome("r", 1, (3,), (), start=2))
    paced = worker._slots["r"].round_ns
    assert paced > 0.0
    worker.receive(Outcome("r", 60, (4,) * 59, (), start=3))
    assert worker._slots["r"].round_ns == paced
    worker.receive(Outcome("r", 61, (5,), (), start=62))
    assert worker._slots["r"].round_ns != paced


def test_no_pass_is_started_that_would_end_behind_the_outcome() -> None:
    for round_ns, expected in ((0.0, 5), (1.0, 1), (1e15, 5)):
        plan, sent = NoPlan(num_offers=5), list[FromDrafter]()
        worker = DraftWorker(plan, lambda message, sent=sent: bool(sent.append(message)) or True)
        worker.receive(Prefill("r", 0, (1, 2), (), prompt_length=1, sampling=Sampling(seed=1)))
        worker._slots["r"] = replace(worker._slots["r"], round_ns=round_ns)
        worker.step(0.0)
        assert len(sent) == expected


class NoPlan:
    """Offers nothing, so many times."""

    def __init__(self, num_offers: int = 1) -> None:
        self._num_offers = num_offers

    def passes(self, work: Work) -> Iterator[Offer]:
        yield from [Offer(())] * self._num_offers

    def free(self, request: str) -> None:
        pass


def test_nothing_is_waited_for_when_no_drafts_are_wanted() -> None:
    target = ToyTarget(sees_all=True)
    drafter = ScriptedDrafter(target, block_size=4, policy=always_right, faults=Faults(lose=1.0))
    policy = make_policies(
        Correspondence(drafter, block_size=4, vocab_size=32), max_wait_s=9.0, miss_policy="soft"
    )[Mode.ASYNC]
    session = Session(make_request(), Gain(3, None))
    session.epoch, session.is_awaiting, session.gain.limit = 3, True, 0
    policy.after_round(session, 1e9)
    assert not session.is_awaiting
