"""What comes back to users: whole answers, and errors that say what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from d3d_ray.records import Chunk, Finish, Request, Round
from d3d_ray.runtime.role import cause_of
from d3d_ray.runtime.supervisor import Supervisor

DIED = "the verifier died with this request in it; another is being started, ask again"


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


def collect(
    supervisor: Supervisor, requests: Sequence[Request], *, max_requests: int, wait_s: float
) -> Iterator[tuple[int, list[Chunk]]]:
    """Run so many requests at a time; yields the index and the chunks of each as it ends."""
    verifier = supervisor.verifier()
    waiting = list(enumerate(requests))[::-1]
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max_requests:
                index, request = waiting.pop()
                running[verifier.answer.remote(request)] = index
            # A dead or hanging verifier is killed by the supervisor, which ends this wait.
            ready, _ = ray.wait(list(running), timeout=wait_s)
            for reference in ready:
                index = running.pop(reference)
                try:
                    chunks = ray.get(reference)
                except RayTaskError as error:
                    raise cause_of(error) from error
                except RayActorError:
                    supervisor.report_loss(verifier)
                    raise
                yield index, chunks
    finally:
        for index in running.values():
            verifier.cancel.remote(requests[index].id)
