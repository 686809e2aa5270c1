"""What the plain target thinks of one next token, for judging a difference between two answers."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from d3d_ray.decode.protocols import Block, Verifier
from d3d_ray.decode.scheduler import Scheduler
from d3d_ray.records import Request
from d3d_ray.sampling import History, processed_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A token that might come next."""

    token: int
    logit: float
    """As the target gives it."""
    score: float
    """The draw takes the token with the highest one: processed, and perturbed if not greedy."""


def find_top_two(
    verifier: Verifier, request: Request, output: Sequence[int]
) -> tuple[Candidate, Candidate]:
    """The two best next tokens behind the prompt and ``output``, the better one first."""
    tokens = (*request.prompt, *output)
    private_id = f"{request.id}/rescoring"
    try:
        logits = verifier.forward([Block(private_id, 0, tokens, num_logits=1)])[0]
    finally:
        verifier.free(private_id)
    scores = processed_scores(
        logits,
        request.sampling,
        position=len(tokens),
        history=History(request.prompt, output),
        num_output=len(output),
        stop_ids=request.stop_ids,
    )
    best = scores[0].topk(2)
    first, second = (
        Candidate(token=token, logit=float(logits[0, token]), score=score)
        for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    return first, second


def find_top_two_between_rounds(
    scheduler: Scheduler, verifier: Verifier, request: Request, output: Sequence[int]
) -> Future[tuple[Candidate, Candidate]]:
    """:func:`find_top_two` in the thread that the verifier belongs to."""
    future: Future[tuple[Candidate, Candidate]] = Future()

    def run() -> None:
        try:
            future.set_result(find_top_two(verifier, request, output))
        except (ValueError, torch.OutOfMemoryError) as error:
            future.set_exception(error)

    scheduler.run_between_rounds(run)
    return future
