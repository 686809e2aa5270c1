"""Does block decoding give the plain text? Through the real scheduler, with drafts made up here.

It does exactly in fp32, and with fixed rows. Otherwise, in bf16, the number of rows of a pass
changes its last bits, so a token may differ where the plain target has a near-tie; such differences
are counted.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from d3d_ray.bench.check import Status
from d3d_ray.bench.curves import Deadline, random_tokens
from d3d_ray.bench.near_ties import MAX_GAP_UNITS, find_difference, find_unit
from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.plans import Offer, Work
from d3d_ray.decode.protocols import Block, Verifier
from d3d_ray.decode.scheduler import Scheduler
from d3d_ray.decode.simulation import SimulatedPlan
from d3d_ray.models.target import Target
from d3d_ray.records import Chunk, FromDrafter, Mode, Request, Sampling, Table, ToDrafter

_ACCEPTANCE = 0.8
_REQUEST = "identity"
_NUM_CANDIDATES = 8
_MAX_NOISE_UNITS = 16.0
"""More noise than this is no rounding, and excuses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Greedy block decoding against the plain decoding of the same target."""

    num_tokens: int
    num_wanted: int
    """More than ``num_tokens`` when the time ran out."""
    num_drafts: int
    num_accepted: int
    gaps: tuple[float, ...]
    """For each difference how far the plain target has the token below its best one, in units in
    the last place of the larger logit."""
    noise_units: float
    """How much the gaps of the target's best tokens change, at most, when the same text is run in
    one pass instead of token by token: what rounding alone does, without any drafter."""

    @property
    def num_near_ties(self) -> int:
        return sum(gap <= MAX_GAP_UNITS for gap in self.gaps)

    @property
    def num_wrong(self) -> int:
        """Differences that rounding does not explain."""
        limit = max(MAX_GAP_UNITS, min(self.noise_units, _MAX_NOISE_UNITS))
        return sum(gap > limit for gap in self.gaps)

    @property
    def status(self) -> Status:
        """Random weights have many candidates close together, and may need the wider limit."""
        if self.num_wrong:
            return Status.FAIL
        is_done = self.num_tokens == self.num_wanted
        is_tight = self.num_near_ties == len(self.gaps)
        return Status.OK if is_done and is_tight else Status.WARN

    def __str__(self) -> str:
        others = len(self.gaps) - self.num_near_ties - self.num_wrong
        return (
            f"{self.num_tokens} of {self.num_wanted} tokens compared, {self.num_accepted} of "
            f"{self.num_drafts} drafts accepted; differences: {self.num_near_ties} at near-ties "
            f"(2 units in the last place), {others} within the target's own rounding noise "
            f"({self.noise_units:.1f} units), {self.num_wrong} wrong"
        )


def compare_decoding(
    target: Target,
    *,
    num_prompt: int,
    num_tokens: int,
    block_size: int,
    deadline: Deadline | None = None,
) -> Decoding:
    """Decode plainly and in blocks; after a difference both go on behind the block's token.

    The drafts are the plain answer with errors put in, so that blocks are accepted in part.
    """
    committed = random_tokens(num_prompt, target.vocab_size)
    gaps: list[float] = []
    num_drafts = num_accepted = num_left = 0
    noise_units = 0.0
    end = num_prompt + num_tokens
    while (num_left := end - len(committed)) and (not deadline or deadline.seconds_left > 0):
        request = Request(
            id=_REQUEST, prompt=committed, sampling=Sampling(seed=0), max_tokens=num_left
        )
        recorder = _Recorder(target)
        expected = _tokens(_decode(recorder, replace(request, mode=Mode.AR), target, block_size))
        noise_units = max(noise_units, _measure_noise(target, committed, expected, recorder.rows))
        blocks = _decode(target, replace(request, script=expected), target, block_size)
        num_drafts += sum(r.num_drafts for r in blocks[-1].rounds)
        num_accepted += sum(r.num_accepted for r in blocks[-1].rounds)
        found = _tokens(blocks)
        at = find_difference(expected, found)
        if at is not None:
            gaps.append(measure_shortfall(recorder.rows[at], found[at]))
        committed += found if at is None else found[: at + 1]
    return Decoding(
        num_tokens=num_tokens - num_left,
        num_wanted=num_tokens,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        gaps=tuple(gaps),
        noise_units=noise_units,
    )


def _measure_noise(
    target: Target, prompt: tuple[int, ...], answer: tuple[int, ...], rows: Sequence[torch.Tensor]
) -> float:
    """Largest change of the gap between the best token and a candidate, in one pass over all."""
    block = Block(_REQUEST, 0, prompt + answer[:-1], num_logits=len(answer))
    again = target.forward([block])[0].double()
    target.free(_REQUEST)
    largest = 0.0
    for before, after in zip(torch.stack(list(rows)).double(), again, strict=True):
        ids = before.topk(min(_NUM_CANDIDATES, len(before))).indices
        change = (after - before)[ids]
        unit = find_unit(float(before.abs()[ids].max()), rows[0].dtype)
        largest = max(largest, float((change - change[0]).abs().max()) / unit)
    return largest


def measure_shortfall(
    logits: torch.Tensor,  # [vocab]
    token: int,
) -> float:
    """How far the token is below the best one, in units in the last place of the larger logit."""
    best, own = float(logits.max()), float(logits[token])
    return (best - own) / find_unit(max(abs(best), abs(own)), logits.dtype)


def _tokens(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.tokens)


class _Recorder:
    """A verifier that keeps the logits of every draw."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.rows: list[torch.Tensor] = []

    def forward(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        results = self._target.forward(blocks)
        for logits in results:
            self.rows.extend(logits)
        return results

    def cut(self, request: str, length: int) -> None:
        self._target.cut(request, length)

    def free(self, request: str) -> None:
        self._target.free(request)


class _NoPasses:
    """A plan that offers nothing; the simulated one puts the known answer in."""

    def passes(self, work: Work) -> Iterator[Offer]:
        yield Offer(())

    def free(self, request: str) -> None:
        pass


class _InProcess:
    """A drafter that has answered by the time ``send`` returns."""

    def __init__(self, *, block_size: int, vocab_size: int) -> None:
        plan = SimulatedPlan(
            _NoPasses(), acceptance=_ACCEPTANCE, block_size=block_size, vocab_size=vocab_size
        )
        self._arrived: list[FromDrafter] = []
        self._worker = DraftWorker(plan, self._deliver)

    def _deliver(self, message: FromDrafter) -> bool:
        if isinstance(message, Table):
            message = replace(message, arrived_ns=time.monotonic_ns())
        self._arrived.append(message)
        return True

    def send(self, message: ToDrafter) -> bool:
        self._worker.receive(message)
        self._worker.step(0.0)
        return True

    def poll(self, timeout: float) -> list[FromDrafter]:
        arrived, self._arrived = self._arrived, []
        return arrived


def _decode(verifier: Verifier, request: Request, target: Target, block_size: int) -> list[Chunk]:
    """All chunks of a request; where there is a script, up to the first one that leaves it."""
    chunks: list[Chunk] = []
    scheduler = Scheduler(
        verifier,
        _InProcess(block_size=block_size, vocab_size=target.vocab_size) if request.script else None,
        on_chunk=chunks.append,
        block_size=block_size,
        vocab_size=target.vocab_size,
    )
    scheduler.submit(request)
    while not chunks or chunks[-1].finish is None:
        scheduler.step(0.01)
        tokens = _tokens(chunks)
        if request.script and tokens != request.script[: len(tokens)]:
            scheduler.cancel(request.id)
    if chunks[-1].error:
        raise RuntimeError(chunks[-1].error)
    return chunks
