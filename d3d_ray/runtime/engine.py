"""The engine for Python users: starts both actors, feeds requests, and mends what breaks."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from d3d_ray.config import EngineConfig
from d3d_ray.models.loading import load_tokenizer
from d3d_ray.records import Chunk, Finish, Mode, Request, Round, Sampling
from d3d_ray.runtime.placement import Placement, place
from d3d_ray.runtime.prompts import Prompt, check_tokens, encode
from d3d_ray.runtime.role import cause_of
from d3d_ray.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

_GREEDY = Sampling()
_DIED = "the verifier died with this request in it; another is being started, ask again"


class VerifierDiedError(RuntimeError):
    """The verifier died with this request in it. A new one is being started; ask again."""


class RequestFailedError(RuntimeError):
    """The request could not be decoded to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished request."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The stop token included, when one ended the answer."""
    text: str
    """Without special tokens."""
    finish: Finish
    rounds: tuple[Round, ...]


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
            for index, chunks in self._run(requests):
                answers[index] = self._answer(requests[index], chunks)
                if on_answer is not None:
                    on_answer(index, answers[index])
        except RayActorError as error:
            raise VerifierDiedError(_DIED) from error
        return [answers[index] for index in range(len(requests))]

    async def stream(
        self, prompt: Prompt, sampling: Sampling = _GREEDY, *, mode: Mode | None = None
    ) -> AsyncIterator[Chunk]:
        """Answer one prompt, a chunk a verified block. Leaving the iteration cancels the request.

        Raises as :meth:`generate` does.
        """
        request = self.request(prompt, sampling, mode=mode)
        if self._is_simulating([request]):
            script = await asyncio.to_thread(
                self.generate, [request.prompt], request.sampling, mode=Mode.AR
            )
            request = replace(request, script=script[0].tokens)
        verifier = await asyncio.to_thread(self._supervisor.verifier)
        chunks = verifier.stream.remote(request)
        is_finished = False
        try:
            async for reference in chunks:
                chunk = await reference
                is_finished = chunk.finish is not None
                if chunk.finish is Finish.ERROR:
                    raise RequestFailedError(chunk.error)
                yield chunk
        except RayActorError as error:
            is_finished = True
            self._supervisor.report_loss(verifier)
            raise VerifierDiedError(_DIED) from error
        except RayTaskError as error:
            is_finished = True
            raise cause_of(error) from error
        finally:
            if not is_finished:
                verifier.cancel.remote(request.id)

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

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Chunk]]]:
        """Yield the chunks of each request as it ends."""
        verifier = self._supervisor.verifier()
        waiting = list(enumerate(requests))[::-1]
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.config.runtime.max_requests:
                    index, request = waiting.pop()
                    running[verifier.answer.remote(request)] = index
                # A dead or hanging verifier is killed by the supervisor, which ends this wait.
                ready, _ = ray.wait(list(running), timeout=self.config.runtime.call_timeout_s)
                for reference in ready:
                    index = running.pop(reference)
                    try:
                        chunks = ray.get(reference)
                    except RayTaskError as error:
                        raise cause_of(error) from error
                    except RayActorError:
                        self._supervisor.report_loss(verifier)
                        raise
                    yield index, chunks
        finally:
            for index in running.values():
                verifier.cancel.remote(requests[index].id)

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
