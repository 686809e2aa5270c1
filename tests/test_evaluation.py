"""Teacher-forced figures are those of drafting block by block."""

from random import Random

import pytest
import torch
from tiny import MASK, tiny_drafter

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.training.evaluation import teacher_forced
from d3d_ray.training.layout import Document

PROMPT = (11, 57, 203, 99)


def best_tokens(drafter: DrafterModel, tokens: list[int], num_clean: int) -> list[int]:
    """The best token of each row; the clean rows are causal, the masks behind them see all."""
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    visible[:num_clean] = visible[:num_clean].tril()
    with torch.inference_mode():
        hidden = drafter.network(
            torch.tensor([tokens]), torch.arange(len(tokens))[None], visible[None, None]
        )
        logits = drafter.network.head(hidden)[0]
        logits[:, MASK] = -torch.inf
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


def half_own_answer(drafter: DrafterModel, seed: int) -> tuple[int, ...]:
    """The drafter's own next tokens, with others between them: its head is right now and then."""
    rng, tokens = Random(seed), list(PROMPT)
    while len(tokens) < 36:
        own = best_tokens(drafter, tokens, len(tokens))[-1]
        tokens.append(own if rng.random() < 0.7 else rng.randrange(4, 500))
    return tuple(tokens[len(PROMPT) :])


def test_the_foretold_share_is_that_of_reading_each_block() -> None:
    drafter = tiny_drafter("llama", block_size=4)
    documents = [Document(PROMPT, half_own_answer(drafter, seed)) for seed in range(4)]
    kept, foretold = [], []
    for document in documents:
        tokens = [*document.prompt, *document.answer]
        for anchor in range(len(PROMPT), len(tokens) - 3):
            clean = tokens[: anchor + 1]
            drafts = best_tokens(drafter, [*clean, MASK, MASK], len(clean))[anchor:]
            own = best_tokens(drafter, [*clean, *drafts], len(clean) + 3)[anchor:]
            truth = [*tokens[anchor + 1 : anchor + 5], -1]
            k = next((i for i in range(3) if drafts[i] != truth[i]), 3)
            own_k = next((i for i in range(3) if drafts[i] != own[i]), 3)
            kept.append(1 + k)
            if truth[k] >= 0:  # Otherwise the answer ends before t*.
                foretold.append((own_k, own[own_k]) == (k, truth[k]))
    figures = teacher_forced(drafter, documents)
    # With 32 anchors each, every place of these answers is taken.
    assert 0.2 < sum(foretold) / len(foretold) < 0.8
    assert figures.foretold_share == pytest.approx(sum(foretold) / len(foretold))
    assert figures.known_anchor == pytest.approx(sum(kept) / len(kept))
