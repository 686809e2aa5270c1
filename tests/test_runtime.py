"""Both actors for real, on tiny models: identity, transports, faults, nothing left behind."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from tiny import END, MASK, save_tiny

from d3d_ray.config import DecodeConfig, DrafterConfig, EngineConfig, RuntimeConfig, TargetConfig
from d3d_ray.decode.protocols import Block
from d3d_ray.models.loading import load_target
from d3d_ray.records import Finish, Mode, Sampling
from d3d_ray.runtime.engine import Engine, VerifierDiedError
from d3d_ray.runtime.placement import Placement

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

MODES = (Mode.AR, Mode.SYNC, Mode.ASYNC)
PROMPTS = [tuple(range(10 + i, 14 + 3 * i)) for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen3")
    return path


def make_config(folder: Path, *, block_size: int = 4, **settings: Any) -> EngineConfig:
    runtime = {k: v for k, v in settings.items() if hasattr(RuntimeConfig, k)}
    decode = {k: v for k, v in settings.items() if hasattr(DecodeConfig, k)}
    assert len(runtime) + len(decode) == len(settings)
    return EngineConfig(
        target=TargetConfig(source=str(folder), dtype="float32"),
        drafter=DrafterConfig(block_size=block_size, mask_token_id=MASK),
        decode=DecodeConfig(**decode),
        runtime=RuntimeConfig(**{"call_timeout_s": 20, **runtime}),
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(make_config(folder)) as engine:
        yield engine


def plain_answer(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The simplest loop over the model, without a cache."""
    target = load_target(str(folder), dtype=torch.float32, device="cpu")
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and not (
        tokens[len(prompt) :] and tokens[-1] in target.stop_ids
    ):
        logits = target.forward([Block("x", 0, tuple(tokens), 1)])[0]
        target.free("x")
        tokens.append(int(logits[0].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_plain_loop(engine: Engine, folder: Path, mode: Mode) -> None:
    answers = engine.generate(PROMPTS, Sampling(max_tokens=24), mode=mode)
    assert [a.tokens for a in answers] == [plain_answer(folder, p, 24) for p in PROMPTS]


def test_one_seed_gives_one_text_in_every_mode_alone_or_together(engine: Engine) -> None:
    samplings = [
        Sampling(max_tokens=24, temperature=1.0, seed=i, top_k=20 * (i % 2), top_p=1 - i % 3 / 10)
        for i in range(8)
    ]
    together = engine.generate(PROMPTS, samplings, mode=Mode.ASYNC)
    for mode in MODES:
        alone = [
            engine.generate([prompt], sampling, mode=mode)[0]
            for prompt, sampling in zip(PROMPTS, samplings, strict=True)
        ]
        assert [a.tokens for a in alone] == [a.tokens for a in together]


@pytest.mark.parametrize(
    "settings",
    [{"transport": "call"}, {"block_size": 2}, {"block_size": 16, "max_draft_rows": 40}],
    ids=str,
)
def test_transports_and_block_sizes_give_the_same_answers(
    engine: Engine, folder: Path, settings: dict[str, Any]
) -> None:
    expected = [a.tokens for a in engine.generate(PROMPTS, Sampling(max_tokens=24), mode=Mode.AR)]
    with Engine(make_config(folder, **settings)) as other:
        assert other.supervisor.transport == settings.get("transport", "channel")
        for mode in (Mode.SYNC, Mode.ASYNC):
            answers = other.generate(PROMPTS, Sampling(max_tokens=24), mode=mode)
            assert [a.tokens for a in answers] == expected
            assert any(r.num_drafts for a in answers for r in a.rounds)


def test_streaming_gives_the_same_tokens_and_leaving_it_cancels(engine: Engine) -> None:
    expected = engine.generate([PROMPTS[0]], Sampling(max_tokens=40))[0].tokens

    async def read(limit: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in engine.stream(PROMPTS[0], Sampling(max_tokens=40, ignore_eos=True)):
            tokens.extend(chunk.tokens)
            if len(tokens) >= limit:
                break
        return tokens

    assert tuple(asyncio.run(read(10**6)))[: len(expected)] == expected
    asyncio.run(read(1))
    wait_until(lambda: counters(engine)["running"] == 0 and counters(engine)["streams"] == 0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([512], {}, "512"),
        ([-1], {}, "-1"),
        ([5] * 1024, {}, "1024"),
        ([5], {"stop_token_ids": (600,)}, "600"),
        (
            [5],
            {"stop_token_ids": tuple(range(512)), "min_tokens": 1},
            "min_tokens is 1: set it to 0",
        ),
        ([1.5], {}, "token ids"),
        (b"abc", {}, "bytes"),
        (None, {}, "NoneType"),
        ("\ud800", {}, "no valid text"),
        ([{"role": "user"}], {}, "role and content"),
        ([{"role": "user", "content": None}], {}, "role and content"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(
    engine: Engine, prompt, sampling, message
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt], Sampling(max_tokens=4, **sampling))
    assert len(engine.generate([[5]], Sampling(max_tokens=4, ignore_eos=True))[0].tokens) == 4


def test_the_thinking_mode_of_the_config_reaches_the_chat_template(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(engine.config.target, enable_thinking=False)
    monkeypatch.setattr(engine, "config", replace(engine.config, target=target))
    with pytest.raises(ValueError, match=r"no thinking mode"):
        engine.generate([[{"role": "user", "content": "hi"}]])


def test_one_text_in_place_of_a_list_of_prompts_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="list of prompts"):
        engine.generate("Why is the sky blue?")


@pytest.mark.parametrize("length", [1023, 1022, 1020, 1016])
def test_the_context_limit_is_exact(engine: Engine, length: int) -> None:
    for mode in MODES:
        answer = engine.generate([[7] * length], Sampling(ignore_eos=True), mode=mode)[0]
        assert len(answer.tokens) == 1024 - length
        assert answer.finish is Finish.LENGTH


def test_killing_the_drafter_costs_speed_and_nothing_else(engine: Engine) -> None:
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    expected = engine.generate([PROMPTS[1]], sampling, mode=Mode.AR)[0].tokens
    old_pid = drafter_pid(engine)
    tokens: list[int] = []

    async def read() -> None:
        is_killed = False
        async for chunk in engine.stream(PROMPTS[1], sampling):
            tokens.extend(chunk.tokens)
            if len(tokens) >= 20 and not is_killed:
                os.kill(old_pid, signal.SIGKILL)
                is_killed = True

    asyncio.run(read())
    assert tuple(tokens) == expected
    wait_until(lambda: drafter_pid(engine) != old_pid, seconds=30)
    wait_until(lambda: is_drafting(engine), seconds=30)


def test_a_stopped_drafter_means_plain_decoding(engine: Engine) -> None:
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    expected = engine.generate([PROMPTS[2]], sampling, mode=Mode.AR)[0].tokens
    os.kill(drafter_pid(engine), signal.SIGSTOP)
    try:
        answer = engine.generate([PROMPTS[2]], sampling)[0]
    finally:
        os.kill(drafter_pid(engine), signal.SIGCONT)
    assert answer.tokens == expected
    wait_until(lambda: is_drafting(engine), seconds=30)


def test_killing_the_verifier_is_an_explicit_error_and_the_next_request_works(
    engine: Engine,
) -> None:
    expected = engine.generate([PROMPTS[3]], Sampling(max_tokens=20))[0].tokens

    async def read() -> None:
        async for _ in engine.stream(PROMPTS[3], Sampling(max_tokens=900, ignore_eos=True)):
            os.kill(engine.supervisor.verifier_info.pid, signal.SIGKILL)

    with pytest.raises(VerifierDiedError):
        asyncio.run(asyncio.wait_for(read(), timeout=10))
    answer = engine.generate([PROMPTS[3]], Sampling(max_tokens=20))[0]
    assert answer.tokens == expected
    wait_until(lambda: is_drafting(engine), seconds=30)


def test_both_killed_at_once_are_both_replaced(engine: Engine) -> None:
    expected = engine.generate([PROMPTS[3]], Sampling(max_tokens=20))[0].tokens
    for pid in (engine.supervisor.verifier_info.pid, drafter_pid(engine)):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_answering(engine), seconds=60)
    assert engine.generate([PROMPTS[3]], Sampling(max_tokens=20))[0].tokens == expected
    wait_until(lambda: is_drafting(engine), seconds=60)


def test_a_pair_that_cannot_work_is_refused_without_pages_of_traceback(folder: Path) -> None:
    config = make_config(folder)
    drafter = replace(config.drafter, mask_token_id=END)
    with pytest.raises(ValueError, match=r"^mask token 2 is a stop token"):
        Engine(replace(config, drafter=drafter))


def test_a_user_s_placement_must_have_a_bundle_for_each_actor() -> None:
    group = SimpleNamespace(bundle_specs=[{"CPU": 1.0}, {"CPU": 1.0}])
    for verifier, drafter, message in ((0, 2, "no 2"), (-1, 0, "no -1"), (1, 1, "one each")):
        with pytest.raises(ValueError, match=message):
            Placement(group, verifier, drafter, is_owned=False)  # type: ignore[arg-type]


def test_closing_ends_the_answers_in_flight_and_refuses_new_ones(folder: Path) -> None:
    ended: list[BaseException] = []

    def ask(engine: Engine) -> None:
        try:
            engine.generate(PROMPTS, Sampling(max_tokens=900, ignore_eos=True))
        except RuntimeError as error:
            ended.append(error)

    with Engine(make_config(folder)) as engine:
        thread = threading.Thread(target=ask, args=[engine])
        thread.start()
        wait_until(lambda: counters(engine)["running"] > 0)
    thread.join(timeout=20)
    assert not thread.is_alive() and len(ended) == 1
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS)


def test_nothing_is_left_behind(folder: Path) -> None:
    with Engine(make_config(folder)) as engine:
        pids = [engine.supervisor.verifier_info.pid, drafter_pid(engine)]
        (answer,) = engine.generate(PROMPTS[:1], Sampling(max_tokens=20, ignore_eos=True))
        assert any(r.num_drafts for r in answer.rounds), "both ways between the actors are open"
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    semaphores = {Path(name) for name in re.findall(r"/dev/shm/sem\.(?:hdr|obj)[0-9-]+", maps)}
    assert len(semaphores) > 8, "the channels have them, though their names are gone"
    assert [file for file in semaphores if file.exists()] == []
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"] - 2)


def drafter_pid(engine: Engine) -> int:
    info = engine.supervisor.drafter_info
    assert info is not None
    return info.pid


def is_drafting(engine: Engine) -> bool:
    answer = engine.generate([PROMPTS[1]], Sampling(max_tokens=50, ignore_eos=True))[0]
    return any(r.num_drafts for r in answer.rounds)


def is_answering(engine: Engine) -> bool:
    try:
        return bool(engine.generate([PROMPTS[1]], Sampling(max_tokens=5)))
    except VerifierDiedError:
        return False


def counters(engine: Engine) -> dict[str, int]:
    return ray.get(engine.supervisor.verifier().counters.remote(), timeout=10)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
