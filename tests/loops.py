"""Runs requests through the real scheduler to their ends."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from d3d_ray.decode.protocols import Drafter, Verifier
from d3d_ray.decode.scheduler import Scheduler
from d3d_ray.records import Chunk, Mode, Request, Sampling

DEADLINE_S = 60.0


@dataclass
class Results:
    """What came out of a run, by request."""

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)

    def take(self, chunk: Chunk) -> None:
        self.chunks.setdefault(chunk.request, []).append(chunk)

    def tokens(self, request: str) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks[request] for token in chunk.tokens)

    def last(self, request: str) -> Chunk:
        return self.chunks[request][-1]

    def is_finished(self, request: str) -> bool:
        return request in self.chunks and self.last(request).finish is not None


def make_request(
    name: str = "a",
    *,
    prompt: Sequence[int] = (1, 2, 3),
    mode: str = "async",
    max_tokens: int = 40,
    stop_ids: Iterable[int] = (),
    script: Sequence[int] = (),
    **sampling: object,
) -> Request:
    return Request(
        id=name,
        prompt=tuple(prompt),
        sampling=Sampling(**{"seed": 7, **sampling}),  # type: ignore[arg-type]
        stop_ids=frozenset(stop_ids),
        max_tokens=max_tokens,
        mode=Mode(mode),
        script=tuple(script),
    )


def make_scheduler(
    verifier: Verifier,
    drafter: Drafter | None,
    results: Results,
    *,
    block_size: int = 4,
    vocab_size: int = 32,
    **settings: object,
) -> Scheduler:
    return Scheduler(
        verifier,
        drafter,
        on_chunk=results.take,
        block_size=block_size,
        vocab_size=vocab_size,
        **{"prefill_chunk": 4, "max_wait_s": 0.05, **settings},  # type: ignore[arg-type]
    )


def run(
    verifier: Verifier, drafter: Drafter | None, requests: Sequence[Request], **settings: object
) -> Results:
    """Decode all requests at once; fails when that takes longer than ``DEADLINE_S``."""
    results = Results()
    scheduler = make_scheduler(verifier, drafter, results, **settings)
    for request in requests:
        scheduler.submit(request)
    finish(scheduler, results, [request.id for request in requests])
    return results


def finish(scheduler: Scheduler, results: Results, names: Sequence[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(results.is_finished(name) for name in names):
        assert time.monotonic() < deadline, "the scheduler hangs"
        scheduler.step(0.01)
