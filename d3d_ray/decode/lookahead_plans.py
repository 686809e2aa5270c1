"""Plans that let the drafter's own AR head foretell the outcome: ``glue-first``, ``anytime``."""

from collections.abc import Iterator

from d3d_ray.decode.packed_plan import NUM_GUESSES, PackedPlan
from d3d_ray.decode.passes import Reading
from d3d_ray.decode.plans import Board, BranchKey, Line, Offer, PackableModel
from d3d_ray.packing import Candidate, rank_foretold

_LEAST_CHANCE = 0.02
"""Outcomes less likely than this are not worth a pass of their own."""


class _LookaheadPlan(PackedPlan):
    def _foretell(self, board: Board, reading: Reading) -> list[Candidate]:
        drafts = board.work.drafts or ()
        candidates = rank_foretold(reading.scores, drafts, self._make.num_guesses, reading.ids)
        board.foretold = candidates[0].k, candidates[0].guess
        return candidates


class GlueFirstPlan(_LookaheadPlan):
    """A cheap pass reads the block under verification, then one packed pass drafts.

    The AR head's law behind each draft ranks the outcomes and gives the guesses.
    """

    def _passes(self, board: Board, drafts: tuple[int, ...]) -> Iterator[Offer]:
        reading = self._draft(board, [])
        drafted = self._draft(board, self._foretell(board, reading))
        yield board.offer(drafted.num_rows, num_passes=2)


class AnytimePlan(_LookaheadPlan):
    """Passes go on until the outcome comes: the drafter speculates on itself.

    The first pass drafts for all outcomes, and lets the AR head foretell them. The second drafts
    for those foretold. Each further one repairs: it takes the likeliest outcome whose drafts the
    AR head has not read to their end, reads them, and drafts anew from the first doubt on.
    """

    def __init__(
        self,
        model: PackableModel,
        *,
        max_rows: int,
        is_noise_shared: bool,
        max_passes: int,
        num_guesses: int = NUM_GUESSES,
    ) -> None:
        super().__init__(
            model, max_rows=max_rows, is_noise_shared=is_noise_shared, num_guesses=num_guesses
        )
        self._max_passes = max_passes

    def _passes(self, board: Board, drafts: tuple[int, ...]) -> Iterator[Offer]:
        reading = self._draft(board, self._rank(board))
        yield board.offer(reading.num_rows)
        if self._max_passes == 1:
            return
        foretold = self._foretell(board, reading)
        new = [
            candidate
            for candidate in foretold
            if candidate.chance >= _LEAST_CHANCE
            and (candidate.k, candidate.guess) not in board.lines
        ]
        if new:
            yield board.offer(self._draft(board, new).num_rows)
        for _ in range(2, self._max_passes):
            candidate = self._next_to_repair(board.lines, foretold)
            if candidate is None:
                return
            k, token = candidate.k, candidate.guess
            assert token is not None
            line = board.lines.get((k, token)) or board.lines.get((k, None)) or Line((), ())
            known = (*board.work.tokens, *drafts[:k], token)
            board.lines[k, token], num_rows = self._make.repair(
                board.work, known, line, max_rows=self._max_rows
            )
            yield board.offer(num_rows)

    def _next_to_repair(
        self, lines: dict[BranchKey, Line], foretold: list[Candidate]
    ) -> Candidate | None:
        for rank, candidate in enumerate(foretold):
            if rank > 0 and candidate.chance < _LEAST_CHANCE:
                return None
            line = lines.get((candidate.k, candidate.guess))
            is_whole = line is not None and line.num_checked >= self._make.model.block_size - 1
            if candidate.guess is not None and not is_whole:
                return candidate
        return None
