"""The passes that draft plans are made of, and what their logits say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_ray.decode.plans import Board, Line, PackableModel, Work
from d3d_ray.packing import (
    BranchShape,
    Candidate,
    continuation,
    fill_budget,
    mask_first,
    pack,
    seeded,
)
from d3d_ray.sampling import History, processed_scores

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Reading:
    """What the AR head says of a chain of clean tokens."""

    scores: torch.Tensor
    """[tokens + 1, columns] fp32; the best of row i is the drafter's own token behind i of them."""
    ids: torch.Tensor | None
    """[columns] int64, ascending: the token of each column; None = the column is the token."""
    num_rows: int
    """Rows of the pass."""


class Passes:
    """Makes passes of one drafter. Drafts are drawn as the target draws, if noise is shared."""

    def __init__(self, model: PackableModel, *, is_noise_shared: bool, num_guesses: int) -> None:
        self.model = model
        self.num_guesses = num_guesses
        self._is_noise_shared = is_noise_shared

    def fits(self, work: Work) -> bool:
        """Whether the positions of a packed pass are within the model's."""
        return len(work.tokens) + 3 * self.model.block_size <= self.model.max_positions

    def continue_known(self, board: Board) -> int:
        """Draft behind the anchor, the outcome being known. Returns the rows of the pass."""
        work, model = board.work, self.model
        anchor = len(work.tokens) - 1
        num_cached = model.match_cache(work.request, work.tokens, anchor)
        shape = continuation(
            num_glue=len(work.tokens) - num_cached,
            block_size=model.block_size,
            label_shift=model.label_shift,
        )
        parts, num_rows = self._run(work, work.tokens, num_cached, [shape])
        token = work.tokens[-1]
        board.lines[None, token] = self._line(parts[0], work, work.tokens)
        return num_rows

    def draft(self, board: Board, candidates: Sequence[Candidate], *, max_rows: int) -> Reading:
        """One packed pass: the block under verification is read, and branches are drafted.

        As many of the candidates as fit into ``max_rows``, the clean rows included, and one in any
        case.
        """
        work, model = board.work, self.model
        drafts = work.drafts or ()
        clean = (*work.tokens, *drafts)
        anchor = len(work.tokens) - 1
        num_cached = model.match_cache(work.request, clean, anchor)
        row = anchor - num_cached
        size, shift = model.block_size, model.label_shift
        chosen = fill_budget(
            candidates,
            num_free_rows=max_rows - (len(clean) - num_cached),
            num_rows_each=size - 1 if shift else size,
        )
        shapes = [
            mask_first(c.k, anchor_row=row, block_size=size, label_shift=shift)
            if c.guess is None
            else seeded(c.k, c.guess, anchor_row=row, block_size=size, label_shift=shift)
            for c in chosen
        ]
        rows = range(row, row + len(drafts) + 1)
        parts, num_rows = self._run(work, clean, num_cached, shapes, rows)
        for candidate, logits in zip(chosen, parts[1:], strict=True):
            bonus = _NO_TOKEN if candidate.guess is None else candidate.guess
            known = (*work.tokens, *drafts[: candidate.k], bonus)
            board.lines[candidate.k, candidate.guess] = self._line(logits, work, known)
        scores = self._scores(parts[0], work, work.tokens, drafts)
        return Reading(scores, self._ids(scores), num_rows)

    def repair(
        self, work: Work, known: tuple[int, ...], line: Line, *, max_rows: int
    ) -> tuple[Line, int]:
        """Read the line's drafts behind ``known``; from the first doubt on draft anew.

        The same pass has the continuation behind every draft, so the AR head's own token at the
        doubt is followed by drafts that were made behind all that it agreed with. What does not
        fit into ``max_rows`` is left out from the end, and behind a late doubt the line then
        ends. Returns the new line and the rows of the pass.
        """
        model, shift = self.model, self.model.label_shift
        first = len(known) + line.num_checked - 1
        clean = known + line.drafts
        num_cached = model.match_cache(work.request, clean, first)
        num_drafts = model.block_size - 1
        places = range(line.num_checked, min(len(line.drafts) + 1, num_drafts - 1))
        shapes = [
            mask_first(
                place,
                anchor_row=len(known) - 1 - num_cached,
                block_size=num_drafts - place,
                label_shift=shift,
            )
            for place in places
        ]
        num_free = max_rows - (len(clean) - num_cached)
        while len(shapes) > 1 and sum(shape.num_rows for shape in shapes) > num_free:
            shapes.pop()
        rows = range(first - num_cached, len(clean) - num_cached)
        parts, num_rows = self._run(work, clean, num_cached, shapes, rows)
        read = line.drafts[line.num_checked :]
        best = self._best(self._scores(parts[0], work, clean[: first + 1], read))
        num_agreed = next(
            (i for i, draft in enumerate(read) if best[i][0] != draft),
            len(read),
        )
        place = line.num_checked + num_agreed
        drafts = line.drafts[:place]
        runners = line.runners[: line.num_checked]
        runners += tuple(tuple(row[1:]) for row in best[:num_agreed])
        if place < num_drafts:
            drafts += (best[num_agreed][0],)
            runners += (tuple(best[num_agreed][1:]),)
        if num_agreed < len(shapes) and place < num_drafts - 1:
            tail = self._line(parts[1 + num_agreed], work, known + drafts)
            drafts, runners = drafts + tail.drafts, runners + tail.runners
        return Line(drafts, runners, min(place + 1, num_drafts)), num_rows

    def _run(
        self,
        work: Work,
        clean: tuple[int, ...],
        num_cached: int,
        shapes: Sequence[BranchShape],
        clean_rows: Sequence[int] = (),
    ) -> tuple[list[torch.Tensor], int]:
        """Logits of the clean rows (if any are asked for), then of each branch; and all rows."""
        glue = clean[num_cached:]
        packed = pack(glue, shapes, start=num_cached, mask_token_id=self.model.mask_token_id)
        rows = [*clean_rows, *(row for rows in packed.draft_rows for row in rows)]
        logits = self.model.forward(work.request, packed, len(glue), rows)
        sizes = [shape.num_drafts for shape in shapes]
        if clean_rows:
            sizes.insert(0, len(clean_rows))
        return list(logits.split(sizes)), len(packed.token_ids)

    def _line(
        self,
        logits: torch.Tensor,  # [drafts, vocab or drafted ids]
        work: Work,
        known: tuple[int, ...],
    ) -> Line:
        """The drafts behind ``known``, whose last token may be unknown."""
        best = self._best(self._scores(logits, work, known, None))
        return Line(tuple(row[0] for row in best), tuple(tuple(row[1:]) for row in best))

    def _best(
        self,
        scores: torch.Tensor,  # [rows, vocab or drafted ids]
    ) -> list[list[int]]:
        """The best token of each row, and its runners-up."""
        columns = scores.topk(self.num_guesses + 1, dim=-1).indices
        ids = self._ids(scores)
        tokens: list[list[int]] = (columns if ids is None else ids[columns]).tolist()
        return tokens

    def _ids(
        self,
        scores: torch.Tensor,  # [rows, vocab or drafted ids]
    ) -> torch.Tensor | None:  # [columns]
        """The token of each column where the head is trimmed; None = the column is the token."""
        ids = self.model.draft_ids
        if ids is None or scores.shape[-1] == self.model.vocab_size:
            return None
        return ids

    def _scores(
        self,
        logits: torch.Tensor,  # [rows, vocab or drafted ids]
        work: Work,
        known: tuple[int, ...],
        drafts: Sequence[int] | None,
    ) -> torch.Tensor:  # [rows, vocab]; or as it came, where nothing is to be done
        """Process the drafter's logits as the target's are, under the same noise if shared.

        The rows are for the positions from ``len(known)`` on; ``drafts`` stand there, None = those
        that the logits give.
        """
        if not self._is_noise_shared or not _is_processed(work):
            return logits
        return shared_scores(self._spread(logits), work, known, drafts)

    def _spread(
        self,
        logits: torch.Tensor,  # [rows, vocab or drafted ids]
    ) -> torch.Tensor:  # [rows, vocab]; -inf for what cannot be drafted
        ids = self._ids(logits)
        if ids is None:
            return logits
        full = logits.new_full((len(logits), self.model.vocab_size), -torch.inf)
        full[:, ids] = logits
        return full


def shared_scores(
    logits: torch.Tensor,  # [rows, vocab] fp32
    work: Work,
    known: tuple[int, ...],
    drafts: Sequence[int] | None,
) -> torch.Tensor:  # [rows, vocab]
    """A drafter's logits processed as the target's are, under the same noise; see ``_scores``."""
    if not _is_processed(work):
        return logits
    history = None
    if work.sampling.has_penalties:
        output = (token for token in known[work.prompt_length :] if token != _NO_TOKEN)
        history = History(work.tokens[: work.prompt_length], output)
    return processed_scores(
        logits,
        work.sampling,
        position=len(known),
        drafts=logits.argmax(dim=-1).tolist() if drafts is None else drafts,
        history=history,
        num_output=len(known) - work.prompt_length,
        stop_ids=work.stop_ids,
    )


def _is_processed(work: Work) -> bool:
    return not work.sampling.is_greedy or work.sampling.has_penalties
