"""A drafter that does as it is told: right or wrong, late, lost, stale, garbled or dead."""

import time
from collections import deque
from dataclasses import dataclass, replace
from random import Random

from fakes import Ask, Policy, ToyTarget, always_right

from d3d_ray.records import Branch, Free, FromDrafter, Lost, Outcome, Prefill, Table, ToDrafter


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances are a table's; ``*_from`` count the messages received so far, from 0."""

    late_polls: int = 0
    """A table arrives at the poll after this many others."""
    lose: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    """The table goes to another open request, with the epoch that this one waits for."""
    stale: float = 0.0
    """A wrong epoch, older or newer."""
    garble: float = 0.0
    """One branch has ids outside the vocabulary, a k out of range, or too many drafts."""
    silent_from: int | None = None
    """Takes messages and answers none."""
    deaf_from: int | None = None
    """Takes no messages."""
    lost_from: int | None = None
    """Answers ``Lost`` to everything."""
    restart_at: int | None = None
    """Forgets every request before this message."""


class ScriptedDrafter:
    """A ``Drafter`` with a branch for every k.

    ``policy`` decides the drafts. The right t* is among the guesses of a k with chance
    ``hit_rate``, next to ``num_wrong_guesses`` wrong ones and, if ``has_mask_first``, a branch for
    whatever t* is. The coins depend on ``seed``, request, epoch and k, not on time.
    """

    def __init__(
        self,
        target: ToyTarget,
        *,
        block_size: int,
        policy: Policy = always_right,
        hit_rate: float = 1.0,
        num_wrong_guesses: int = 1,
        has_mask_first: bool = True,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self._target = target
        self._block_size = block_size
        self._policy = policy
        self._hit_rate = hit_rate
        self._num_wrong_guesses = num_wrong_guesses
        self._has_mask_first = has_mask_first
        self._faults = faults or Faults()
        self._seed = seed
        self._opened: dict[str, Prefill] = {}
        self._epochs: dict[str, int] = {}
        self._under_way: deque[tuple[int, FromDrafter]] = deque()
        self._num_polls = 0
        self.committed: dict[str, tuple[int, ...]] = {}
        """What it was told of every open request."""
        self.messages: list[ToDrafter] = []

    def send(self, message: ToDrafter) -> bool:
        faults, index = self._faults, len(self.messages)
        if _is_reached(faults.deaf_from, index):
            return False
        if index == faults.restart_at:
            self.committed.clear()
        self.messages.append(message)
        if _is_reached(faults.silent_from, index):
            return True
        if isinstance(message, Free):
            self.committed.pop(message.request, None)
            return True
        if _is_reached(faults.lost_from, index) or not self._commit(message):
            self._under_way.append((0, Lost(message.request)))
            return True
        self._deliver(self._table(message))
        return True

    def poll(self, timeout: float) -> list[FromDrafter]:
        due = [message for at, message in self._under_way if at <= self._num_polls]
        self._under_way = deque(item for item in self._under_way if item[0] > self._num_polls)
        self._num_polls += 1
        if not due:
            time.sleep(min(timeout, 1e-4))
        now = time.monotonic_ns()
        return [replace(m, arrived_ns=now) if isinstance(m, Table) else m for m in due]

    def _commit(self, message: Prefill | Outcome) -> bool:
        """False when the message does not follow what is known."""
        if isinstance(message, Prefill):
            self._opened[message.request] = message
            self.committed[message.request] = message.tokens
            return True
        known = self.committed.get(message.request)
        if known is None or len(known) != message.start:
            return False
        self.committed[message.request] = known + message.tokens
        return True

    def _table(self, message: Prefill | Outcome) -> Table:
        request, drafts, started_ns = message.request, message.drafts, time.monotonic_ns()
        known = self.committed[request]
        epoch = message.epoch + (drafts is not None)
        self._epochs[request] = epoch
        if drafts is None:
            branches = [Branch(None, known[-1], self._drafts(request, epoch, known))]
        else:
            branches = [
                branch
                for k in range(len(drafts) + 1)
                for branch in self._branches(request, epoch, known + drafts[:k], k)
            ]
        self._rng(request, epoch, "order").shuffle(branches)
        return Table(
            request,
            epoch,
            tuple(branches),
            received_ns=started_ns,
            started_ns=started_ns,
            finished_ns=time.monotonic_ns(),
        )

    def _branches(self, request: str, epoch: int, known: tuple[int, ...], k: int) -> list[Branch]:
        right = self._next_token(request, known)
        guesses = [
            (right + 1 + index) % self._target.vocab_size
            for index in range(self._num_wrong_guesses)
        ]
        if self._rng(request, epoch, k).random() < self._hit_rate:
            guesses.append(right)
        branches = [
            Branch(k, guess, self._drafts(request, epoch, (*known, guess))) for guess in guesses
        ]
        if self._has_mask_first:
            branches.append(Branch(k, None, self._drafts(request, epoch, (*known, right))))
        return branches

    def _drafts(self, request: str, epoch: int, context: tuple[int, ...]) -> tuple[int, ...]:
        ask = Ask(
            context,
            self._block_size - 1,
            epoch,
            lambda tokens: self._next_token(request, tokens),
            self._target.vocab_size,
        )
        return self._policy(ask)

    def _next_token(self, request: str, tokens: tuple[int, ...]) -> int:
        opened = self._opened[request]
        return self._target.next_token(
            tokens, opened.prompt_length, opened.sampling, opened.stop_ids
        )

    def _deliver(self, table: Table) -> None:
        faults = self._faults
        rng = self._rng(table.request, table.epoch, "fault")
        if rng.random() < faults.lose:
            return
        if rng.random() < faults.garble:
            table = self._garbled(table, rng)
        if rng.random() < faults.stale:
            table = replace(table, epoch=table.epoch + rng.choice([-2, -1, 1, 2]))
        others = sorted(self.committed.keys() - {table.request})
        if others and rng.random() < faults.swap:
            other = rng.choice(others)
            table = replace(table, request=other, epoch=self._epochs[other])
        at = self._num_polls + faults.late_polls
        self._under_way.extend([(at, table)] * (1 + (rng.random() < faults.duplicate)))

    def _garbled(self, table: Table, rng: Random) -> Table:
        branches = list(table.branches)
        index = rng.randrange(len(branches))
        branch = branches[index]
        size, vocab = self._block_size, self._target.vocab_size
        branches[index] = rng.choice(
            [
                replace(branch, drafts=(vocab, *branch.drafts[1:])),
                replace(branch, drafts=(*branch.drafts[:-1], -1)),
                replace(branch, drafts=(*branch.drafts[:-1], 2**40)),
                replace(branch, drafts=(0,) * size),
                replace(branch, k=-1),
                replace(branch, k=size),
            ]
        )
        return replace(table, branches=tuple(branches))

    def _rng(self, *key: object) -> Random:
        return Random(repr((self._seed, *key)))


def _is_reached(first: int | None, index: int) -> bool:
    return first is not None and index >= first
