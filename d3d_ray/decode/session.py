"""One request in flight: what is committed, and what is known for its next block."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_ray.acceptance import count_accepted, cut_at_end
from d3d_ray.decode.gain import Gain
from d3d_ray.decode.protocols import Block
from d3d_ray.metrics import SMOOTHING
from d3d_ray.records import Branch, Chunk, Finish, Mode, Request, Round, Table, TokenLogprobs
from d3d_ray.sampling import History, draw


@dataclass(frozen=True, slots=True)
class Pick:
    """The drafts of a next block, and where they came from."""

    kind: str
    drafts: tuple[int, ...] = ()
    table: Table | None = None
    cause: str = ""


class Session:
    """The state of one request. Only the thread of the decode loop touches it."""

    def __init__(self, request: Request, gain: Gain) -> None:
        self.request = request
        self.gain = gain
        self.tokens = list(request.prompt)
        """Committed tokens, prompt included; the last one is the anchor once decoding."""
        self.epoch = -1
        """The last finished round; -1 before the prefill is done."""
        self.num_prefilled = 0
        self.finish: Finish | None = None
        self.rounds: list[Round] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """Of the prompt so far, where they are asked for; None for its first token."""
        if request.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.last_served_ns = time.monotonic_ns()
        self.decoding_since_ns = 0
        # What the drafter owes and was told.
        self.table: Table | None = None
        """The newest that has come; of use once its epoch is that of the last round."""
        self.num_told: int | None = None
        """How many committed tokens the drafter knows; None = it must get a Prefill."""
        self.is_awaiting = False
        """A table for ``awaited_epoch`` is on its way.

        It is worth a wait until ``deadline_ns``; 0 = no wait.
        """
        self.awaited_epoch = 0
        self.deadline_ns = 0
        self.sent_ns = 0
        self.hop_ns = 0
        self.jit_epoch = -2
        """The last round after which drafts for the known outcome were asked for."""
        self.jit_ns = 0.0
        """Recent mean of the time until they come; 0 = not measured."""
        # The outcome of round ``epoch``.
        self.num_accepted = 0
        self.drafted_length = 2.0
        """Recent mean of the tokens that rounds with drafts gave; optimistic until measured."""
        self.lengths = {"hit": 3.0, "soft": 2.0, "none": 1.0}
        """The same by kind of round."""
        self._history = History(request.prompt) if request.sampling.has_penalties else None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_prefilling(self) -> bool:
        return self.epoch < 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_cached(self) -> int:
        return self.num_prefilled if self.is_prefilling else len(self.tokens) - 1

    @property
    def num_left(self) -> int:
        return self.request.max_tokens - self.num_output

    @property
    def is_drafting_anew(self) -> bool:
        """The drafter was asked once more, now that the outcome of the last round is known."""
        return self.jit_epoch == self.epoch

    @property
    def wants_drafts(self) -> bool:
        return self.num_left > 1 and self.gain.limit > 0

    def ns_per_token(self, now_ns: int) -> float:
        """Of the decoding so far; 0 before it has given a token."""
        num_decoded = self.num_output - 1
        return (now_ns - self.decoding_since_ns) / num_decoded if num_decoded > 0 else 0.0

    def next_chunk(self, size: int) -> Block:
        """The next part of the prompt; logits only for its very last token."""
        start = self.num_prefilled
        tokens = self.request.prompt[start : start + size]
        is_last = start + len(tokens) == len(self.request.prompt)
        return Block(self.id, start, tokens, int(is_last), self._is_read)

    def next_block(self, drafts: Sequence[int]) -> Block:
        """``[anchor, drafts]`` behind everything that is cached."""
        tokens = (self.tokens[-1], *drafts)
        return Block(self.id, len(self.tokens) - 1, tokens, len(tokens), self._is_read)

    @property
    def _is_read(self) -> bool:
        return self.request.mode is Mode.DFLASH

    def pick(self) -> Pick:
        """Take the branch for the outcome of the last round out of the newest table."""
        limit = min(self.num_left - 1, self.gain.limit)  # t* always comes on top
        if self.request.mode is Mode.AR:
            return Pick("none")
        if limit <= 0:
            return Pick("none", cause="limit" if self.gain.limit else "no gain")
        if self.table is None or self.table.epoch != self.epoch:
            return Pick("none", cause="late" if self.is_awaiting else "unasked")
        branch, kind = _choose(self.table.branches, self.num_accepted, self.tokens[-1])
        if branch is None or not branch.drafts:
            return Pick("none", cause="no branch")
        if branch.k is None and self.is_drafting_anew:
            kind = "jit"
        return Pick(kind, branch.drafts[:limit], self.table)

    def settle(
        self,
        logits: torch.Tensor,  # [m + 1, vocab]
        drafts: Sequence[int],
    ) -> tuple[int, ...]:
        """Draw the target's tokens, keep what the drafts got right, and commit.

        Returns the emitted tokens. Raises ``NonFiniteLogitsError``.
        """
        draws = draw(
            logits,
            self.request.sampling,
            position=len(self.tokens),
            drafts=drafts,
            history=self._history,
            num_output=self.num_output,
            stop_ids=self.request.stop_ids,
        ).cpu()
        self.num_accepted = int(count_accepted(draws, torch.tensor(drafts, dtype=torch.long)))
        outcome = (*drafts[: self.num_accepted], int(draws[self.num_accepted]))
        emitted, self.finish = cut_at_end(
            outcome, stop_ids=self.request.stop_ids, num_left=self.num_left
        )
        self.tokens.extend(emitted)
        if self._history is not None:
            self._history.extend(emitted)
        self.epoch += 1
        return emitted

    def record(
        self,
        pick: Pick,
        *,
        num_emitted: int,
        span_ns: tuple[int, int],
        wait_ns: int,
    ) -> None:
        """Keep what the round was like, and learn for the rules of waiting and of gain."""
        start_ns, end_ns = span_ns
        table = pick.table
        self.rounds.append(
            Round(
                request=self.id,
                epoch=self.epoch,
                kind=pick.kind,
                cause=pick.cause,
                num_drafts=len(pick.drafts),
                num_accepted=self.num_accepted,
                num_emitted=num_emitted,
                is_prefill=pick.kind == "prefill",
                verify_start_ns=start_ns,
                verify_end_ns=end_ns,
                wait_ns=wait_ns,
                draft_start_ns=table.started_ns if table else 0,
                draft_end_ns=table.finished_ns if table else 0,
                num_passes=table.num_passes if table else 0,
                num_draft_rows=table.num_rows if table else 0,
                hop_ns=self.hop_ns if table else 0,
            )
        )
        if pick.kind == "prefill":
            self.decoding_since_ns = end_ns
        else:
            self.gain.observe(num_emitted, end_ns - start_ns + wait_ns)
            length = self.lengths.get(pick.kind, self.lengths["hit"])
            self.lengths[pick.kind] = length + SMOOTHING * (num_emitted - length)
        if pick.drafts:
            self.drafted_length += SMOOTHING * (num_emitted - self.drafted_length)
        self.last_served_ns = end_ns

    def chunk(self, emitted: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Chunk:
        """What the user gets of the round just recorded."""
        last = self.rounds[-1]
        return Chunk(
            self.id,
            emitted,
            last.kind,
            num_accepted=min(self.num_accepted, len(emitted)),
            round=last,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if last.is_prefill else (),
        )


def _choose(branches: Sequence[Branch], k: int, token: int) -> tuple[Branch | None, str]:
    """The branch seeded with t*, else the mask-first one for k, else any for k."""
    fitting = [branch for branch in branches if branch.k is None or branch.k == k]
    if not fitting:
        return None, "none"
    best = min(fitting, key=lambda b: 0 if b.guess == token else 1 if b.guess is None else 2)
    return best, "hit" if best.guess == token else "soft"
