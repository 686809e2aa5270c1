"""The plan ``packed``: one packed pass a round; and what it learns from outcomes."""

from collections.abc import Iterator, Sequence

from d3d_ray.decode.passes import Passes, Reading
from d3d_ray.decode.plans import Board, Line, Offer, PackableModel, Work
from d3d_ray.packing import Candidate, rank_outcomes

NUM_GUESSES = 3


class PackedPlan:
    """One packed pass a round: glue, then branches for the likeliest outcomes.

    Guesses of t* are the runners-up of the draft that would be rejected, from the branch that won
    the last round. Full acceptance has none: that branch is mask-first.
    """

    def __init__(
        self,
        model: PackableModel,
        *,
        max_rows: int,
        is_noise_shared: bool,
        num_guesses: int = NUM_GUESSES,
    ) -> None:
        self._make = Passes(model, is_noise_shared=is_noise_shared, num_guesses=num_guesses)
        self._max_rows = max_rows
        self._boards: dict[str, Board] = {}
        self._statistics = _Statistics(model.block_size - 1, num_guesses)

    def passes(self, work: Work) -> Iterator[Offer]:
        board = self._open(work)
        if not self._make.fits(work):
            yield Offer(())
        elif work.drafts is None:  # The verifier waits, and takes the first drafts there are.
            yield board.offer(self._make.continue_known(board))
        else:
            yield from self._passes(board, work.drafts)

    def _passes(self, board: Board, drafts: tuple[int, ...]) -> Iterator[Offer]:
        """While ``drafts`` are verified."""
        yield board.offer(self._draft(board, self._rank(board)).num_rows)

    @property
    def foretold_share(self) -> float:
        """Of the outcomes so far that the AR head was asked for, those that it got right whole."""
        return self._statistics.num_right / max(1, self._statistics.num_foretold)

    def free(self, request: str) -> None:
        self._boards.pop(request, None)
        self._make.model.free(request)

    def _open(self, work: Work) -> Board:
        """A board for new work; the last one tells how good its chances and guesses were."""
        last = self._boards.get(work.request)
        if last is not None:
            self._statistics.observe(last, work)
        drafts = work.drafts or ()
        line = _find_line(last, drafts)
        guesses = [list(runners) for runners in line.runners[: len(drafts)]] if line else []
        guesses += [[] for _ in range(len(drafts) + 1 - len(guesses))]
        board = Board(work, guesses, num_checked=line.num_checked if line else 0)
        self._boards[work.request] = board
        return board

    def _rank(self, board: Board) -> list[Candidate]:
        return rank_outcomes(
            self._statistics.accept_rates(board),
            board.guesses,
            self._statistics.guess_rates,
        )

    def _draft(self, board: Board, candidates: Sequence[Candidate]) -> Reading:
        return self._make.draft(board, candidates, max_rows=self._max_rows)


def _find_line(last: Board | None, drafts: tuple[int, ...]) -> Line | None:
    """Of the last board, the one whose drafts are verified now."""
    if last is None or not drafts:
        return None
    return next((ln for ln in last.lines.values() if ln.drafts[: len(drafts)] == drafts), None)


class _Statistics:
    """Running chances: draft i kept when those before it were; guess of rank f right.

    Drafts that the AR head has read and agreed with are counted apart.
    """

    def __init__(self, num_drafts: int, num_guesses: int) -> None:
        self._accept_rates = {True: [0.85] * num_drafts, False: [0.7] * num_drafts}
        self.guess_rates = [0.4 * 0.4**rank for rank in range(num_guesses)]
        self._weight = 0.05
        self.num_foretold = self.num_right = 0

    def accept_rates(self, board: Board) -> list[float]:
        """Of the drafts under verification."""
        num_drafts = len(board.work.drafts or ())
        return [self._accept_rates[i < board.num_checked][i] for i in range(num_drafts)]

    def observe(self, board: Board, work: Work) -> None:
        """Learn from the outcome of the block that the last work was about."""
        drafts = board.work.drafts
        news = work.tokens[len(board.work.tokens) :]
        if not drafts or not news:
            return
        if board.foretold is not None:
            k = next((i for i, d in enumerate(drafts) if news[i : i + 1] != (d,)), len(drafts))
            self.num_foretold += 1
            self.num_right += board.foretold == (k, news[k] if k < len(news) else None)
        for i, draft in enumerate(drafts[: len(news)]):
            is_kept = news[i] == draft
            rates = self._accept_rates[i < board.num_checked]
            rates[i] += self._weight * (is_kept - rates[i])
            if not is_kept:
                for rank, guess in enumerate(board.guesses[i][: len(self.guess_rates)]):
                    is_right = guess == news[i]
                    self.guess_rates[rank] += self._weight * (is_right - self.guess_rates[rank])
                return
