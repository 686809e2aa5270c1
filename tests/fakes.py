"""A toy target of known law, and policies by which a scripted drafter drafts for it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from d3d_ray.decode.protocols import Block
from d3d_ray.records import Sampling
from d3d_ray.sampling import History, draw


class ToyTarget:
    """A ``Verifier`` whose next-token logits are a fixed function of the last two tokens.

    ``sees_all``: of every token before as well, so that one wrong id anywhere in a cache shows.
    ``nan_at``: request -> the round whose logits are NaN, 0 being the end of its prefill.
    ``on_forward``: called before the blocks run; may block, or raise.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        seed: int = 0,
        sees_all: bool = False,
        nan_at: Mapping[str, int] | None = None,
        on_forward: Callable[[Sequence[Block]], None] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tables = 2 * torch.randn(3, vocab_size, vocab_size, generator=generator)
        if not sees_all:
            self._tables[2] = 0.0
        self._nan_at = dict(nan_at or {})
        self._on_forward = on_forward
        self.vocab_size = vocab_size
        self.cached: dict[str, list[int]] = {}
        self.blocks: list[Block] = []
        """All that ran, in order."""
        self.calls: Counter[str] = Counter()
        self._num_rounds: Counter[str] = Counter()

    def forward(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        self.calls["forward"] += 1
        if self._on_forward is not None:
            self._on_forward(blocks)
        return [self._run(block) for block in blocks]

    def _run(self, block: Block) -> torch.Tensor:
        num_cached = len(self.cached.get(block.request, ()))
        if num_cached != block.start:
            raise ValueError(f"{block} starts at {block.start}, and {num_cached} are cached")
        if not block.tokens or not all(0 <= token < self.vocab_size for token in block.tokens):
            raise ValueError(f"{block} holds no tokens, or ids outside the vocabulary")
        assert 0 <= block.num_logits <= len(block.tokens)
        self.blocks.append(block)
        cache = self.cached.setdefault(block.request, [])
        cache.extend(block.tokens)
        if not block.num_logits:
            return torch.empty(0, self.vocab_size)
        first = len(cache) - block.num_logits + 1
        logits = torch.stack(
            [self.next_logits(cache[:end]) for end in range(first, first + block.num_logits)]
        )
        if self._nan_at.get(block.request) == self._num_rounds[block.request]:
            logits.fill_(torch.nan)
        self._num_rounds[block.request] += 1
        return logits

    def cut(self, request: str, length: int) -> None:
        self.calls["cut"] += 1
        if not 0 <= length <= len(self.cached[request]):
            raise ValueError(f"cut to {length}, and {len(self.cached[request])} are cached")
        del self.cached[request][length:]

    def free(self, request: str) -> None:
        self.calls["free"] += 1
        self.cached.pop(request, None)
        self._num_rounds.pop(request, None)

    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:  # [vocab]
        before = tokens[-2] if len(tokens) > 1 else 0
        rows = torch.tensor([tokens[-1], before, sum(tokens) % self.vocab_size])
        return self._tables[torch.arange(3), rows].sum(dim=0)

    def next_token(
        self,
        tokens: Sequence[int],
        prompt_length: int,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
    ) -> int:
        """The target's own token behind ``tokens``, which are a prompt and an output."""
        drawn = draw(
            self.next_logits(tokens)[None],
            sampling,
            position=len(tokens),
            history=History(tokens[:prompt_length], tokens[prompt_length:]),
            num_output=len(tokens) - prompt_length,
            stop_ids=stop_ids,
        )
        return int(drawn)

    def plain_answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        max_tokens: int = 64,
    ) -> tuple[int, ...]:
        """The reference: one token at a time, no cache, no drafts."""
        output: list[int] = []
        while len(output) < max_tokens:
            token = self.next_token([*prompt, *output], len(prompt), sampling, stop_ids)
            output.append(token)
            if token in stop_ids:
                break
        return tuple(output)


@dataclass(frozen=True)
class Ask:
    """What a policy is asked for: drafts behind ``context``, which ends with (a guess of) t*."""

    context: tuple[int, ...]
    num_drafts: int
    epoch: int
    next_token: Callable[[tuple[int, ...]], int]
    vocab_size: int

    def right(self) -> tuple[int, ...]:
        """The target's own tokens behind the context."""
        tokens = self.context
        for _ in range(self.num_drafts):
            tokens += (self.next_token(tokens),)
        return tokens[len(self.context) :]

    def wrong(self, token: int) -> int:
        return (token + 1) % self.vocab_size


Policy = Callable[[Ask], tuple[int, ...]]


def always_right(ask: Ask) -> tuple[int, ...]:
    return ask.right()


def always_wrong(ask: Ask) -> tuple[int, ...]:
    return tuple(map(ask.wrong, ask.right()))


def at_random(ask: Ask) -> tuple[int, ...]:
    rng = Random(str(ask.context))
    return tuple(rng.randrange(ask.vocab_size) for _ in range(ask.num_drafts))


def no_drafts(ask: Ask) -> tuple[int, ...]:
    return ()


def accept_exactly(num_accepted: int) -> Policy:
    """All right but the draft behind the first ``num_accepted``; 0 = wrong first, right rest."""

    def policy(ask: Ask) -> tuple[int, ...]:
        return tuple(
            ask.wrong(token) if index == num_accepted else token
            for index, token in enumerate(ask.right())
        )

    return policy


def accept_in_turn(ask: Ask) -> tuple[int, ...]:
    """0 drafts are right in one round, 1 in the next, ... then all, then 0 again."""
    return accept_exactly(ask.epoch % (ask.num_drafts + 1))(ask)


def right_with_chance(chance: float) -> Policy:
    """Each draft is right with this chance, by a coin that depends on the context alone."""

    def policy(ask: Ask) -> tuple[int, ...]:
        rng = Random(str(ask.context))
        return tuple(token if rng.random() < chance else ask.wrong(token) for token in ask.right())

    return policy
