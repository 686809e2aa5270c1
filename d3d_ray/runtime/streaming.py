"""One answer as it is made, until it ends, its reader leaves, or its deadline passes."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from d3d_ray.records import Chunk, Finish, Request
from d3d_ray.runtime.answers import DIED, RequestFailedError, VerifierDiedError
from d3d_ray.runtime.role import cause_of
from d3d_ray.runtime.supervisor import Supervisor

_EARLY_S = 0.01
"""A timer may ring so much before its time."""


class Deadline:
    """So many seconds from now; ``None`` = never. Raises ``ValueError`` unless positive."""

    def __init__(self, seconds: float | None) -> None:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise ValueError(f"deadline_s must be a positive number of seconds, not {seconds!r}")
        self.seconds = seconds
        self._at = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        """None = for ever; 0 = it has passed."""
        return None if self.seconds is None else max(0.0, self._at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left_s is not None and self.left_s < _EARLY_S


async def stream_one(
    supervisor: Supervisor, request: Request, deadline: Deadline
) -> AsyncIterator[Chunk]:
    """The chunks of a request.

    When the deadline passes the last one is ``Finish.CANCELLED`` with an error text that says so,
    even if the verifier hangs, and the work of both actors on it stops.
    """
    rounds = []
    chunks = _read(supervisor, request, deadline)
    try:
        async for chunk in chunks:
            if chunk.round is not None:
                rounds.append(chunk.round)
            yield chunk
    except TimeoutError:
        if not deadline.has_passed:
            raise
        error = f"cancelled: the deadline of {deadline.seconds:g} s has passed"
        yield Chunk(request.id, (), finish=Finish.CANCELLED, error=error, rounds=tuple(rounds))
    finally:
        await chunks.aclose()


async def _read(
    supervisor: Supervisor, request: Request, deadline: Deadline
) -> AsyncGenerator[Chunk, None]:
    """Raises ``TimeoutError`` once the deadline has passed."""
    verifier = await asyncio.to_thread(supervisor.verifier, deadline.left_s)
    references = verifier.stream.remote(request)
    is_finished = False
    try:
        while not is_finished:
            chunk = await asyncio.wait_for(_next(references), deadline.left_s)
            is_finished = chunk.finish is not None
            if chunk.finish is Finish.ERROR:
                raise RequestFailedError(chunk.error)
            yield chunk
    except RayActorError as error:
        is_finished = True
        supervisor.report_loss(verifier)
        raise VerifierDiedError(DIED) from error
    except RayTaskError as error:
        is_finished = True
        raise cause_of(error) from error
    finally:
        if not is_finished:
            verifier.cancel.remote(request.id)


async def _next(references: Any) -> Chunk:
    chunk = await (await anext(references))
    assert isinstance(chunk, Chunk)
    return chunk
