"""SIMULATED acceptance, for studying the pipeline without a good drafter."""

from collections.abc import Iterator
from random import Random

from d3d_ray.decode.plans import DraftPlan, Offer, Work
from d3d_ray.records import Branch


class SimulatedPlan:
    """SIMULATED acceptance: makes another plan's passes, then swaps in drafts from a known answer.

    A draft is right with chance ``acceptance`` at each position, wrong otherwise, and the guess of
    t* is always right. For studying the pipeline; its figures say nothing about a drafter.
    """

    def __init__(self, plan: DraftPlan, *, acceptance: float, block_size: int, vocab_size: int):
        self._plan = plan
        self._acceptance = acceptance
        self._block_size = block_size
        self._vocab_size = vocab_size

    def passes(self, work: Work) -> Iterator[Offer]:
        for offer in self._plan.passes(work):
            yield Offer((self._branch(work),), offer.num_rows, offer.num_passes)

    def free(self, request: str) -> None:
        self._plan.free(request)

    def _branch(self, work: Work) -> Branch:
        at = len(work.tokens) - work.prompt_length
        if work.drafts is None:
            return Branch(None, work.tokens[-1], self._drafts(work, at))
        rest = work.script[at:]
        k = next(
            (i for i, d in enumerate(work.drafts) if rest[i : i + 1] != (d,)), len(work.drafts)
        )
        guess = rest[k] if k < len(rest) else None
        return Branch(k, guess, self._drafts(work, at + k + 1))

    def _drafts(self, work: Work, at: int) -> tuple[int, ...]:
        return tuple(
            token
            if Random(f"{work.sampling.seed}:{position}").random() < self._acceptance
            else (token + 1) % self._vocab_size
            for position, token in enumerate(work.script[at : at + self._block_size - 1], start=at)
        )
