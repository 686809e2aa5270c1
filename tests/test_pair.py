"""A real target and a real drafter, tiny ones, in one process."""

import random
from pathlib import Path

import pytest
import torch
from loops import make_request, run
from threaded_drafter import DelayedPlan, ThreadedDrafter
from tiny import MASK, save_tiny

from d3d_ray.decode.lookahead_plans import AnytimePlan, GlueFirstPlan
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.decode.simulation import SimulatedPlan
from d3d_ray.metrics import summarise
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.loading import load_target
from d3d_ray.models.target import Target
from d3d_ray.records import Request

BLOCK_SIZE = 4
PLANS = ("packed", "glue-first", "anytime")
PROMPTS = [[random.Random(i).randrange(4, 512) for _ in range(3 + 5 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    save_tiny(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["shifted", "unshifted"])
def drafter(folder: Path, request: pytest.FixtureRequest) -> DrafterModel:
    return load_drafter(
        None,
        target_source=str(folder),
        block_size=BLOCK_SIZE,
        mask_token_id=MASK,
        label_shift=request.param,
        dtype=torch.float32,
        device="cpu",
    )


def make_requests(mode: str, temperature: float = 0.0) -> list[Request]:
    return [
        make_request(f"{mode}{i}", prompt=prompt, mode=mode, temperature=temperature, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]


def make_plan(name: str, drafter: DrafterModel, *, is_noise_shared: bool = True) -> PackedPlan:
    if name == "anytime":
        return AnytimePlan(drafter, max_rows=40, is_noise_shared=is_noise_shared, max_passes=4)
    kind = GlueFirstPlan if name == "glue-first" else PackedPlan
    return kind(drafter, max_rows=40, is_noise_shared=is_noise_shared)


def answers(
    target: Target,
    plan: PackedPlan | SimulatedPlan,
    requests: list[Request],
    delay=0.0,
    **settings: object,
):
    with ThreadedDrafter(DelayedPlan(plan, delay, seed=0)) as drafter:
        results = run(
            target,
            drafter,
            requests,
            block_size=BLOCK_SIZE,
            vocab_size=target.vocab_size,
            max_wait_s=1.0,
            **settings,
        )
    return [results.tokens(r.id) for r in requests], [
        each for r in requests for each in results.last(r.id).rounds
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_noise_shared", [True, False])
@pytest.mark.parametrize("plan_name", PLANS)
def test_every_mode_gives_the_same_answers(
    target: Target, drafter: DrafterModel, temperature: float, is_noise_shared: bool, plan_name: str
) -> None:
    plan = make_plan(plan_name, drafter, is_noise_shared=is_noise_shared)
    expected, _ = answers(target, plan, make_requests("ar", temperature))
    for mode in ("sync", "async"):
        tokens, rounds = answers(target, plan, make_requests(mode, temperature))
        assert tokens == expected
        assert summarise(rounds).outcomes.keys() & {"hit", "soft"}


def test_a_copy_of_the_target_drafts_its_first_token_right(
    target: Target, drafter: DrafterModel
) -> None:
    """An untrained copy has the target's own head: behind a known anchor one draft is right."""
    if not drafter.label_shift:
        pytest.skip("only a shifted row predicts the next token")
    plan = PackedPlan(drafter, max_rows=64, is_noise_shared=True)
    for temperature in (0.0, 1.0):
        _, rounds = answers(target, plan, make_requests("sync", temperature))
        drafted = [r for r in rounds if r.num_drafts]
        # Not every one: the target may emit the mask token, which is never drafted.
        assert sum(r.num_accepted >= 1 for r in drafted) >= 0.95 * len(drafted) > 0


def test_simulated_drafts_are_right_as_often_as_asked(
    target: Target, drafter: DrafterModel
) -> None:
    expected, _ = answers(
        target, PackedPlan(drafter, max_rows=40, is_noise_shared=True), make_requests("ar")
    )
    for chance in (0.0, 0.5, 1.0):
        plan = SimulatedPlan(
            PackedPlan(drafter, max_rows=40, is_noise_shared=True),
            acceptance=chance,
            block_size=BLOCK_SIZE,
            vocab_size=target.vocab_size,
        )
        for mode in ("sync", "async"):
            requests = [
                make_request(f"{mode}{i}", prompt=r.prompt, mode=mode, seed=i, script=script)
                for i, (r, script) in enumerate(zip(make_requests(mode), expected, strict=True))
            ]
            tokens, rounds = answers(target, plan, requests)
            assert tokens == expected
            drafted = [r for r in rounds if r.num_drafts == BLOCK_SIZE - 1]
            first_kept = sum(r.num_accepted > 0 for r in drafted) / len(drafted)
            assert first_kept == pytest.approx(chance, abs=0.25 if chance == 0.5 else 0.0)


@pytest.mark.parametrize("miss_policy", ["jit", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_anew_after_a_miss_changes_no_token(
    target: Target, drafter: DrafterModel, miss_policy: str, temperature: float
) -> None:
    plan = make_plan("packed", drafter)
    expected, _ = answers(target, plan, make_requests("ar", temperature))
    tokens, rounds = answers(
        target, plan, make_requests("async", temperature), miss_policy=miss_policy
    )
    assert tokens == expected
    if miss_policy == "jit":
        assert summarise(rounds).outcomes["jit"] > 0


@pytest.mark.parametrize("repeats", [2, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("plan_name", ["packed", "anytime"])
def test_eight_in_flight_with_delays_equal_the_eight_alone(
    target: Target, drafter: DrafterModel, repeats: int, plan_name: str
) -> None:
    plan = make_plan(plan_name, drafter)
    alone = [answers(target, plan, [r])[0][0] for r in make_requests("async", 1.0)]
    for _ in range(repeats):
        together, _ = answers(target, plan, make_requests("async", 1.0), delay=0.004)
        assert together == alone
