"""A toy target of four tokens, whose next-token law is a table of the last two.

It answers a two-token prompt 50,000 times, one seed an answer, all answers at once: the real
noise, processing and acceptance in a loop written for the tests of the joint law. The exact law of
all 256 answers comes from enumeration in double precision and shares no code with the loop.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from d3d_ray.acceptance import count_accepted
from d3d_ray.records import Sampling
from d3d_ray.sampling import noise_keys, perturb

VOCAB, LENGTH, NUM_DRAFTS, NUM_ANSWERS = 4, 4, 2, 50_000
PROMPT = (2, 1)
SETTINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.5, 1.0, 1.7)
    for top_k in (0, 3)
    for top_p in (1.0, 0.8)
]


def make_table(seed: int) -> torch.Tensor:  # [vocab, vocab, vocab] logits after two tokens
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET = make_table(1)
NEAR_TARGET = TARGET + 0.7 * make_table(2)


@functools.cache
def answer_keys() -> torch.Tensor:  # [answers, positions, 2], from the first answer token on
    num_positions = LENGTH + NUM_DRAFTS
    keys = [noise_keys(seed, 0, len(PROMPT), num_positions) for seed in range(NUM_ANSWERS)]
    return torch.stack(keys)


def draw_rows(
    table: torch.Tensor,  # [vocab, vocab, vocab]
    context: torch.Tensor,  # [..., 2] the two tokens before each row
    keys: torch.Tensor,  # [..., 2]
    sampling: Sampling,
) -> torch.Tensor:  # [...]
    logits = table[context[..., 0], context[..., 1]]
    scores = perturb(logits.view(-1, VOCAB), keys.reshape(-1, 2), sampling)
    return scores.argmax(dim=-1).view(context.shape[:-1])


@dataclass
class Batch:
    """All answers at the start of a round."""

    rows: torch.Tensor
    """[answers] which answers are not finished yet."""
    last_two: torch.Tensor
    """[answers, 2] the newest committed tokens; the second is the anchor."""
    keys: torch.Tensor
    """[answers, NUM_DRAFTS + 1, 2] keys of the positions that a block predicts."""
    sampling: Sampling
    generator: torch.Generator


Draft = Callable[[Batch], torch.Tensor]
"""[answers, drafts]"""


def draft_nothing(batch: Batch) -> torch.Tensor:
    return torch.empty(len(batch.last_two), 0, dtype=torch.int64)


def draft_at_random(batch: Batch) -> torch.Tensor:
    size = (len(batch.last_two), NUM_DRAFTS)
    return torch.randint(VOCAB, size, generator=batch.generator)


def draft_greedily(batch: Batch) -> torch.Tensor:
    context = batch.last_two
    for _ in range(NUM_DRAFTS):
        best = TARGET[context[:, -2], context[:, -1]].argmax(dim=-1)
        context = torch.cat([context, best[:, None]], dim=1)
    return context[:, 2:]


def draft_with_noise(table: torch.Tensor) -> Draft:
    def draft(batch: Batch) -> torch.Tensor:
        context = batch.last_two
        for index in range(NUM_DRAFTS):
            token = draw_rows(table, context[:, -2:], batch.keys[:, index], batch.sampling)
            context = torch.cat([context, token[:, None]], dim=1)
        return context[:, 2:]

    return draft


DRAFTERS: dict[str, Draft] = {
    "plain": draft_nothing,
    "greedy": draft_greedily,
    "random": draft_at_random,
    "oracle": draft_with_noise(TARGET),
    "shared noise": draft_with_noise(NEAR_TARGET),
}

Emitted = tuple[torch.Tensor, torch.Tensor]
"""[answers, drafts + 1] tokens of the round, and [answers] how many of them count."""


def block_context(batch: Batch, drafts: torch.Tensor) -> torch.Tensor:  # [answers, drafts + 1, 2]
    block = torch.cat([batch.last_two, drafts], dim=1)
    return torch.stack([block[:, :-1], block[:, 1:]], dim=-1)


def draw_block(
    batch: Batch, drafts: torch.Tensor, keys: torch.Tensor | None = None
) -> torch.Tensor:  # [answers, drafts + 1] the target's own token at each position
    keys = (batch.keys if keys is None else keys)[:, : drafts.shape[1] + 1]
    return draw_rows(TARGET, block_context(batch, drafts), keys, batch.sampling)


def emit(drafts: torch.Tensor, num_accepted: torch.Tensor, own: torch.Tensor) -> Emitted:
    """The accepted drafts and the target's own token behind them."""
    at = num_accepted[:, None]
    return torch.cat([drafts, own[:, None]], dim=1).scatter(1, at, own[:, None]), num_accepted + 1


def verify(batch: Batch, drafts: torch.Tensor) -> Emitted:
    """One round as the decode loop does it: a draw at every row, drafts kept while equal."""
    draws = draw_block(batch, drafts)
    num_accepted = count_accepted(draws, drafts)
    return emit(drafts, num_accepted, take(draws, num_accepted))


def take(draws: torch.Tensor, row: torch.Tensor) -> torch.Tensor:  # [answers]
    return draws.gather(1, row[:, None])[:, 0]


Verify = Callable[[Batch, torch.Tensor], Emitted]


def answer_all(
    sampling: Sampling, draft: Draft, verify_round: Verify = verify
) -> tuple[torch.Tensor, float]:
    """Returns [answers, LENGTH] tokens and the number of verified rounds an answer."""
    rows = torch.arange(NUM_ANSWERS)
    width = len(PROMPT) + LENGTH + NUM_DRAFTS + 1
    tokens = torch.zeros(NUM_ANSWERS, width, dtype=torch.int64)
    tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
    num_committed = torch.zeros(NUM_ANSWERS, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    num_rounds = 0
    while len(rows):
        done = num_committed[rows]
        last_two = tokens[rows[:, None], done[:, None] + torch.tensor([0, 1])]
        # Near the end the block hangs over the last position: its surplus is cut.
        offsets = done[:, None] + torch.arange(NUM_DRAFTS + 1)
        keys = answer_keys()[rows[:, None], offsets]
        batch = Batch(rows, last_two, keys, sampling, generator)
        emitted, num_emitted = verify_round(batch, draft(batch))
        for index in range(emitted.shape[1]):
            chosen = num_emitted > index
            tokens[rows[chosen], len(PROMPT) + done[chosen] + index] = emitted[chosen, index]
        num_committed[rows] += num_emitted
        num_rounds += len(rows)
        rows = rows[num_committed[rows] < LENGTH]
    return tokens[:, len(PROMPT) : len(PROMPT) + LENGTH], num_rounds / NUM_ANSWERS


def exact_row(logits: list[float], sampling: Sampling) -> list[float]:
    weights = [math.exp(logit / sampling.temperature) for logit in logits]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])[: sampling.top_k or VOCAB]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass < sampling.top_p * total:
            kept.append(token)
        mass += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def exact_law(sampling: Sampling) -> np.ndarray:
    """Probability of every answer, in the order of ``itertools.product``."""
    table = TARGET.double().tolist()
    law = []
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        chance, context = 1.0, PROMPT
        for token in answer:
            chance *= exact_row(table[context[0]][context[1]], sampling)[token]
            context = (context[1], token)
        law.append(chance)
    return np.array(law)


def p_value(answers: torch.Tensor, sampling: Sampling) -> float:
    """Chi-square of the joint counts; an answer that cannot occur gives 0."""
    expected = exact_law(sampling) * len(answers)
    digits = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    counts = (answers * digits).sum(dim=1).bincount(minlength=VOCAB**LENGTH).numpy()
    if counts[expected == 0.0].any():
        return 0.0
    is_rare = expected < 5.0
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    if wanted[-1] == 0.0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted).pvalue)
