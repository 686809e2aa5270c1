"""The engine for Python users: starts both actors, feeds requests, and mends what breaks."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayError

from d3d_ray.config import EngineConfig
from d3d_ray.models.loading import load_tokenizer
from d3d_ray.records import Chunk, Finish, Mode, Request, Sampling
from d3d_ray.runtime.answers import (
    DIED,
    Answer,
    RequestFailedError,
    VerifierDiedError,
    collect,
)
from d3d_ray.runtime.monitoring import Monitor, check_health
from d3d_ray.runtime.placement import Placement, place
from d3d_ray.runtime.prompts import Prompt, check_tokens, encode
from d3d_ray.runtime.role import cause_of
from d3d_ray.runtime.streaming import Deadline, stream_one
from d3d_ray.runtime.supervisor import Supervisor
from d3d_ray.runtime.upkeep import DrafterState

logger = logging.getLogger(__name__)

_GREEDY = Sampling()


class Engine:
    """A verifier and a drafter, each on its own device.

    Connects to the Ray cluster that is there, or starts one on this machine. ``placement`` takes
    bundles that are reserved already. Use it as a context manager, or call :meth:`close`.

    Raises ``ValueError`` when the pair or the cluster cannot work, with the reason.
    """

    def __init__(self, config: EngineConfig, placement: Placement | None = None) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.target.source)  # Finds a wrong source at once.
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        self._closing = contextlib.ExitStack()
        try:
            if self._owns_ray:
                self._closing.callback(ray.shutdown)
            if placement is None:
                placement = place(
                    config.runtime,
                    has_drafter=config.has_drafter_actor,
                    timeout_s=config.runtime.call_timeout_s,
                )
            self._closing.callback(placement.remove)
            self._supervisor = Supervisor(config, placement)
            self._closing.callback(self._supervisor.close)
            self._supervisor.start()
        except RayError as error:
            self._closing.close()
            raise cause_of(error) from error
        except BaseException:
            self._closing.close()
            raise
        self._monitor = Monitor(self._supervisor)
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop both actors and give the devices back."""
        self._closing.close()

    @property
    def supervisor(self) -> Supervisor:
        """The actors behind this engine."""
        return self._supervisor

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = _GREEDY,
        *,
        mode: Mode | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Answer all prompts, ``runtime.max_requests`` in flight at a time, in their order.

        ``on_answer(index, answer)`` is called as answers come. Raises ``ValueError`` on a bad
        prompt or setting, :class:`VerifierDiedError`, :class:`RequestFailedError`, and
        ``OverflowError`` when more than ``runtime.max_waiting`` requests wait already.
        """
        if isinstance(prompts, str):
            raise ValueError("generate takes a list of prompts: write [prompt] for a single one")
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(samplings)} samplings: give as many")
        requests = [
            self.request(prompt, each, mode=mode)
            for prompt, each in zip(prompts, samplings, strict=True)
        ]
        if self._is_simulating(requests):
            # Drawn with the requests' own seeds, or the script would be another answer.
            seeded = [r.sampling for r in requests]
            scripts = self.generate([r.prompt for r in requests], seeded, mode=Mode.AR)
            requests = [replace(r, script=a.tokens) for r, a in zip(requests, scripts, strict=True)]
        answers: dict[int, Answer] = {}
        try:
            runtime = self.config.runtime
            for index, chunks in collect(
                self._supervisor,
                requests,
                max_requests=runtime.max_requests,
                wait_s=runtime.call_timeout_s,
            ):
                answers[index] = self._answer(requests[index], chunks)
                if on_answer is not None:
                    on_answer(index, answers[index])
        except RayActorError as error:
            raise VerifierDiedError(DIED) from error
        return [answers[index] for index in range(len(requests))]

    async def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = _GREEDY,
        *,
        mode: Mode | None = None,
        deadline_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Answer one prompt, a chunk a verified block. Leaving the iteration cancels the request.

        So does the passing of ``deadline_s`` seconds from now on, time in the queue included: the
        last chunk then has ``Finish.CANCELLED`` and an error text. Raises as :meth:`generate` does.
        """
        deadline = Deadline(deadline_s)
        request = self.request(prompt, sampling, mode=mode)
        if self._is_simulating([request]):
            script = await asyncio.to_thread(
                self.generate, [request.prompt], request.sampling, mode=Mode.AR
            )
            request = replace(request, script=script[0].tokens)
        async for chunk in stream_one(self._supervisor, request, deadline):
            yield chunk

    def counters(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """What happens and what has happened, see :class:`Monitor`; waits so long at most.

        For an event loop: ``await asyncio.to_thread(engine.counters)``.
        """
        return self._monitor.counters(timeout_s)

    def drafter_state(self) -> DrafterState:
        return self._supervisor.drafter_state

    async def check_health(self, timeout_s: float = 10.0) -> None:
        """Let the verifier decode one token, by the way that requests take.

        Behind others it need not come to its turn: it is enough that the decode thread finishes
        one of their blocks. Raises ``RuntimeError`` when neither happens within ``timeout_s``: the
        verifier is dead, being replaced, or hangs. The drafter is not asked for anything.
        """
        probe = self.request([0], Sampling(max_tokens=1), mode=Mode.AR)
        await check_health(self._supervisor, probe, timeout_s)

    async def swap_drafter(self, source: str) -> None:
        """Draft with another checkpoint (a folder, hub name or ``embedded:<name>``) from now on.

        In the middle of answers, and without changing a token of them, since drafts never do. The
        drafter's actor loads it next to the present one, which drafts until then; where there is
        no memory for both, decoding is plain while it loads. The block size stays. A drafter that
        was given up on is started once more, with the new checkpoint.

        Raises ``ValueError`` with the reason when it cannot be loaded or does not fit, and the
        present one stays; ``RuntimeError`` while a drafter is being started or swapped.
        """
        try:
            drafter = await asyncio.to_thread(self._supervisor.swap_drafter, source)
        except RayError as error:
            raise cause_of(error) from error
        self.config = replace(self.config, drafter=drafter)

    def request(self, prompt: Prompt, sampling: Sampling, *, mode: Mode | None = None) -> Request:
        """Check a prompt and its sampling against the target. Raises ``ValueError``."""
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, not {sampling!r:.80}")
        info = self._supervisor.verifier_info
        tokens = encode(self.tokenizer, prompt, thinking=self.config.target.enable_thinking)
        own_stops = frozenset() if sampling.ignore_eos else info.stop_ids
        stop_ids = own_stops | frozenset(sampling.stop_token_ids)
        check_tokens(tokens, sampling, stop_ids, info.vocab_size, info.max_positions)
        mode = Mode(mode or self.config.decode.mode)
        if mode is Mode.DFLASH and self.config.dflash.source is None:
            raise ValueError(f"mode {mode} needs a DFlash drafter: start with dflash.source")
        if mode in (Mode.SYNC, Mode.ASYNC) and self._supervisor.drafter() is None:
            raise ValueError(f"mode {mode} needs a drafter: start with decode.mode={mode}")
        room = info.max_positions - len(tokens)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Request(
            id=f"{self._prefix}-{next(self._ids)}",
            prompt=tokens,
            sampling=replace(sampling, seed=seed),
            stop_ids=stop_ids,
            max_tokens=min(room, sampling.max_tokens or room),
            mode=mode,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _is_simulating(self, requests: Sequence[Request]) -> bool:
        is_on = self.config.decode.simulate_acceptance is not None
        return is_on and any(request.mode is not Mode.AR for request in requests)

    def _answer(self, request: Request, chunks: Sequence[Chunk]) -> Answer:
        last = chunks[-1]
        if last.finish is Finish.ERROR:
            raise RequestFailedError(last.error)
        assert last.finish is not None
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        return Answer(
            prompt=request.prompt,
            tokens=tokens,
            text=self.decode(tokens),
            finish=last.finish,
            rounds=last.rounds,
        )
