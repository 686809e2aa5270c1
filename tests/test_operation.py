"""What a server needs of the engine: deadlines, counters, health, another drafter, patience."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from test_runtime import (
    PROMPTS,
    drafter_pid,
    is_answering,
    is_drafting,
    make_config,
    wait_until,
)
from tiny import MASK, save_tiny, tiny_drafter, tiny_tokenizer

from d3d_ray.config import EngineConfig
from d3d_ray.models.drafter_folder import save_drafter
from d3d_ray.records import Chunk, Finish, Mode, Sampling
from d3d_ray.runtime import backoff
from d3d_ray.runtime.engine import Engine, VerifierDiedError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LONG = Sampling(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(make_config(folder)) as engine:
        yield engine


def make_drafter(path: Path, *, seed: int = 5, block_size: int = 4) -> Path:
    drafter = tiny_drafter("qwen3", seed=seed, block_size=block_size)
    save_drafter(drafter, path, tokenizer=tiny_tokenizer())
    return path


async def read(
    engine: Engine, on_chunk: Callable[[int], Any] = lambda count: None, **options: Any
) -> list[Chunk]:
    """All chunks; ``on_chunk(tokens so far)`` may give something to be awaited beside."""
    chunks: list[Chunk] = []
    beside: list[asyncio.Future[Any]] = []
    async for chunk in engine.stream(PROMPTS[1], LONG, **options):
        chunks.append(chunk)
        work = on_chunk(sum(len(c.tokens) for c in chunks))
        if work is not None:
            beside.append(asyncio.ensure_future(work))
    await asyncio.gather(*beside)
    return chunks


def tokens_of(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.tokens)


# --- log-probabilities and rounds on their way through Ray ---------------------------------------


def test_logprobs_reach_the_user_the_same_in_every_mode(engine: Engine) -> None:
    sampling = Sampling(max_tokens=30, num_logprobs=3, num_prompt_logprobs=2, ignore_eos=True)

    async def rated(mode: Mode) -> list[Any]:
        chunks = [c async for c in engine.stream(PROMPTS[1], sampling, mode=mode)]
        assert [c.round for c in chunks] == list(chunks[-1].rounds)
        return [x for c in chunks for x in (*c.prompt_logprobs, *c.logprobs)]

    expected = asyncio.run(rated(Mode.AR))
    assert len(expected) == len(PROMPTS[1]) + 30
    for mode in (Mode.SYNC, Mode.ASYNC):
        assert asyncio.run(rated(mode)) == expected


# --- deadlines -----------------------------------------------------------------------------------


def test_a_deadline_ends_the_answer_with_what_there_is_and_stops_the_work(engine: Engine) -> None:
    expected = engine.generate([PROMPTS[1]], LONG, mode=Mode.AR)[0].tokens
    chunks = asyncio.run(read(engine, deadline_s=0.3))
    assert chunks[-1].finish is Finish.CANCELLED
    assert "deadline of 0.3 s" in chunks[-1].error
    assert chunks[-1].rounds == tuple(c.round for c in chunks[:-1])
    tokens = tokens_of(chunks)
    assert 0 < len(tokens) < 900 and tokens == expected[: len(tokens)]
    wait_until(lambda: engine.counters()["running"] == 0)
    before = engine.counters()["drafter_passes"]
    time.sleep(0.5)
    assert engine.counters()["drafter_passes"] == before


def test_a_deadline_that_is_not_reached_does_nothing(engine: Engine) -> None:
    chunks = asyncio.run(read(engine, deadline_s=60))
    assert chunks[-1].finish is Finish.LENGTH and len(tokens_of(chunks)) == 900


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("nan"), float("inf"), True, "3"])
def test_a_bad_deadline_is_refused(engine: Engine, deadline_s: Any) -> None:
    with pytest.raises(ValueError, match="deadline_s must be a positive number"):
        asyncio.run(read(engine, deadline_s=deadline_s))


# --- counters and health -------------------------------------------------------------------------


def test_the_counters_are_the_sums_over_all_rounds(engine: Engine) -> None:
    before = engine.counters()
    answers = engine.generate(PROMPTS, Sampling(max_tokens=40, ignore_eos=True))
    after = engine.counters()
    rounds = [r for a in answers for r in a.rounds if not r.is_prefill]
    gained = {k: after[k] - before[k] for k, v in after.items() if isinstance(v, int)}
    assert gained["rounds"] == len(rounds)
    assert gained["emitted_tokens"] == len(PROMPTS) * 40
    assert gained["prefilled_tokens"] == sum(map(len, PROMPTS))
    assert gained["drafts_proposed"] == sum(r.num_drafts for r in rounds) > 0
    assert gained["drafts_accepted"] == sum(r.num_accepted for r in rounds)
    assert gained["bubble_ns"] == sum(r.wait_ns for r in rounds)
    assert gained["hop_ns"] == sum(r.hop_ns for r in rounds)
    assert gained["drafter_passes"] > 0
    per_position = [
        b - a
        for a, b in zip(
            before["accepted_per_position"], after["accepted_per_position"], strict=True
        )
    ]
    assert per_position == [sum(r.num_accepted > i for r in rounds) for i in range(3)]
    for kind, count in after["outcomes"].items():
        assert count - before["outcomes"][kind] == sum(r.kind == kind for r in rounds)
    assert after["running"] == after["waiting"] == after["kv_tokens"] == 0


def test_counters_come_while_decoding_runs_and_when_an_actor_is_stopped(engine: Engine) -> None:
    seen: list[dict[str, Any]] = []

    def look(count: int) -> Any:
        if 20 <= count < 30:
            return asyncio.to_thread(lambda: seen.append(engine.counters()))

    asyncio.run(read(engine, look))
    assert seen and seen[0]["running"] == 1 and seen[0]["kv_tokens"] > len(PROMPTS[1])
    assert all(state == "ready" for state in [engine.drafter_state()])
    os.kill(drafter_pid(engine), signal.SIGSTOP)
    try:
        snapshot = engine.counters(timeout_s=0.5)
        assert not snapshot["drafter_up"] and snapshot["verifier_up"]
        assert snapshot["rounds"] >= seen[0]["rounds"] and snapshot["drafter_passes"] > 0
        asyncio.run(engine.check_health(5))
    finally:
        os.kill(drafter_pid(engine), signal.SIGCONT)


def test_a_stopped_verifier_is_unhealthy_and_a_full_one_is_not(folder: Path) -> None:
    with Engine(make_config(folder, max_requests=1, max_waiting=0, heartbeat_s=60)) as engine:
        checks: list[Any] = []

        def check(count: int) -> Any:
            if not checks:
                checks.append(engine.check_health(5))
                return checks[0]

        assert asyncio.run(read(engine, check))[-1].finish is Finish.LENGTH
        assert checks
        pid = engine.supervisor.verifier_info.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RuntimeError, match="decoded nothing within 1 s"):
                asyncio.run(engine.check_health(1))
        finally:
            os.kill(pid, signal.SIGCONT)
        asyncio.run(engine.check_health(10))
        wait_until(lambda: engine.counters()["running"] == engine.counters()["waiting"] == 0)


def test_a_dead_verifier_is_unhealthy_until_another_is_there(engine: Engine) -> None:
    restarts = engine.counters()["verifier_restarts"]
    os.kill(engine.supervisor.verifier_info.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"dead|nothing within"):
        asyncio.run(engine.check_health(0.5))
    wait_until(lambda: is_answering(engine), seconds=60)
    asyncio.run(engine.check_health(10))
    assert engine.counters()["verifier_restarts"] == restarts + 1
    wait_until(lambda: engine.drafter_state() == "ready", seconds=60)


def test_a_decode_thread_that_hangs_is_unhealthy_and_its_actor_is_replaced(folder: Path) -> None:
    with Engine(make_config(folder, max_pass_s=3)) as engine:
        verifier = engine.supervisor.verifier()

        def block(actor: Any) -> None:  # A local function travels to the actor whole.
            actor._scheduler.run_between_rounds(lambda: time.sleep(1000))

        async def hang() -> None:
            async for _ in engine.stream(PROMPTS[3], LONG):
                verifier.__ray_call__.remote(block)

        started = time.monotonic()
        with pytest.raises(VerifierDiedError):
            asyncio.run(asyncio.wait_for(hang(), timeout=60))
        assert time.monotonic() - started > 2, "a pass of max_pass_s is allowed"
        wait_until(lambda: is_answering(engine), seconds=60)


# --- another drafter in a running engine ---------------------------------------------------------


def test_a_swap_in_the_middle_of_an_answer_changes_no_token(folder: Path, tmp_path: Path) -> None:
    source = str(make_drafter(tmp_path / "other"))
    with Engine(make_config(folder)) as engine:
        expected = engine.generate([PROMPTS[1]], LONG, mode=Mode.AR)[0].tokens
        old_pid, swaps = drafter_pid(engine), []

        def swap(count: int) -> Any:
            if count >= 20 and not swaps:
                swaps.append(engine.swap_drafter(source))
                return swaps[0]

        assert tokens_of(asyncio.run(read(engine, swap))) == expected
        assert swaps and engine.config.drafter.source == source
        assert drafter_pid(engine) == old_pid and engine.drafter_state() == "ready"
        assert engine.supervisor.drafter_info.is_trained, "the one before was derived"
        assert is_drafting(engine)
        os.kill(old_pid, signal.SIGKILL)  # The next life begins with the new checkpoint.
        wait_until(lambda: drafter_pid(engine) != old_pid, seconds=30)
        assert engine.supervisor.drafter_info.is_trained
        wait_until(lambda: is_drafting(engine), seconds=30)
        assert engine.counters()["drafter_restarts"] == 1


def test_a_swap_without_memory_for_two_unloads_first_and_restores(
    folder: Path, tmp_path: Path
) -> None:
    source = str(make_drafter(tmp_path / "other"))
    broken = make_drafter(tmp_path / "broken")
    next(broken.glob("*.safetensors")).write_bytes(b"no tensors")
    with Engine(make_config(folder)) as engine:
        expected = engine.generate([PROMPTS[1]], LONG, mode=Mode.AR)[0].tokens

        def refuse_room(actor: Any) -> None:
            actor._load_beside = lambda config, target: None

        ray.get(engine.supervisor.drafter().__ray_call__.remote(refuse_room), timeout=10)
        with pytest.raises(ValueError, match="so the drafter stays"):
            asyncio.run(engine.swap_drafter(str(broken)))
        assert is_drafting(engine) and not engine.supervisor.drafter_info.is_trained
        swaps: list[Any] = []

        def swap(count: int) -> Any:
            if count >= 20 and not swaps:
                swaps.append(engine.swap_drafter(source))
                return swaps[0]

        assert tokens_of(asyncio.run(read(engine, swap))) == expected
        assert engine.supervisor.drafter_info.is_trained and is_drafting(engine)


def test_a_drafter_that_cannot_work_is_refused_and_the_old_one_stays(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    short = make_drafter(tmp_path / "short", block_size=2)
    broken = make_drafter(tmp_path / "broken")
    next(broken.glob("*.safetensors")).write_bytes(b"no tensors")
    foreign = make_drafter(tmp_path / "foreign")
    tiny_tokenizer(500).save_pretrained(foreign)
    config, pid = engine.config, drafter_pid(engine)
    for source, message in (
        (tmp_path / "nowhere", "nowhere"),
        (tmp_path / "empty", "empty"),
        (short, "drafts blocks of 2 and the engine runs blocks of 4"),
        (broken, "broken cannot draft here, so the drafter stays"),
        (foreign, "different vocabularies"),
        ("", "folder or hub name"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.swap_drafter(str(source)))
        assert engine.config == config and engine.drafter_state() == "ready"
    assert drafter_pid(engine) == pid and is_drafting(engine)


def test_without_a_drafter_there_is_none_to_swap(folder: Path) -> None:
    with Engine(make_config(folder, mode="ar")) as engine:
        assert engine.drafter_state() == "off"
        assert not engine.counters()["drafter_up"]
        asyncio.run(engine.check_health(10))
        with pytest.raises(ValueError, match="mode ar has no drafter"):
            asyncio.run(engine.swap_drafter(str(folder)))


# --- a drafter that keeps failing ----------------------------------------------------------------


def test_waits_double_up_to_a_minute_and_end_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = backoff.Backoff()
    assert [waits.fail() for _ in range(5)] == [1, 2, 4, 8, None]
    waits.succeed()
    assert waits.fail() == 1
    waits.allow_one()
    assert waits.fail() is None
    monkeypatch.setattr(backoff, "MAX_FAILURES", 20)
    assert [waits.fail() for _ in range(5)][-1] == 60


def test_a_drafter_that_dies_at_load_is_given_up_on_and_another_can_be_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 0.05)
    source, other = make_drafter(tmp_path / "fleeting"), make_drafter(tmp_path / "other", seed=6)
    with Engine(with_drafter(make_config(folder), source)) as engine:
        expected = engine.generate([PROMPTS[1]], LONG, mode=Mode.AR)[0].tokens
        shutil.rmtree(source)
        os.kill(drafter_pid(engine), signal.SIGKILL)
        wait_until(lambda: engine.drafter_state() == "restarting", seconds=10)
        wait_until(lambda: engine.drafter_state() == "failed", seconds=120)
        assert "failed 5 times in a row and is given up on" in caplog.text
        assert engine.generate([PROMPTS[1]], LONG)[0].tokens == expected
        with pytest.raises(ValueError, match="fleeting"):
            asyncio.run(engine.swap_drafter(str(source)))
        assert engine.drafter_state() == "failed"
        asyncio.run(engine.swap_drafter(str(other)))
        assert engine.drafter_state() == "ready" and is_drafting(engine)


def with_drafter(config: EngineConfig, source: Path) -> EngineConfig:
    return replace(config, drafter=replace(config.drafter, source=str(source), mask_token_id=MASK))
