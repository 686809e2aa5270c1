"""The keyed noise: what it depends on, how it is distributed, and what no noise can save."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats

from d3d_ray.records import Sampling
from d3d_ray.sampling import History, NonFiniteLogitsError, draw, gumbel, noise_keys

PROMPT, OUTPUT = (1, 4, 4, 7), (2, 4, 2)
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.3, seed=-5, choice=2, top_k=40),
    Sampling(temperature=0.7, seed=2**64 - 1, top_p=0.9),
    Sampling(temperature=1.0, seed=0, top_k=50, top_p=0.8, repetition_penalty=1.2, min_tokens=6),
    Sampling(temperature=2.0, seed=9, presence_penalty=0.5, frequency_penalty=-0.5),
]
HOT = Sampling(temperature=1.0, seed=3)


def random_logits(seed: int, *, num_rows: int, vocab: int) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def noise_of(seeds: range, positions: range, num_ids: int, *, choice: int = 0) -> torch.Tensor:
    """[seeds x positions, ids]"""
    keys = [noise_keys(seed, choice, positions.start, len(positions)) for seed in seeds]
    ids = torch.arange(num_ids)
    return gumbel(torch.cat(keys), ids.expand(len(seeds) * len(positions), num_ids))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draw_does_not_depend_on_vocabulary_padding(sampling: Sampling) -> None:
    logits = random_logits(1, num_rows=40, vocab=300)
    padded = torch.cat([logits, torch.full((40, 212), -torch.inf)], dim=-1)
    drafts = tuple(range(100, 139))
    narrow, wide = (
        draw(
            wanted,
            sampling,
            position=11,
            drafts=drafts,
            history=History(PROMPT, OUTPUT),
            num_output=len(OUTPUT),
            stop_ids=[3, 5],
        )
        for wanted in (logits, padded)
    )
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_draw_does_not_depend_on_how_the_rows_are_split(sampling: Sampling, split: int) -> None:
    logits = random_logits(2, num_rows=6, vocab=60)
    drafts = (8, 9, 8, 30, 4)
    whole = draw(
        logits,
        sampling,
        position=20,
        drafts=drafts,
        history=History(PROMPT, OUTPUT),
        num_output=len(OUTPUT),
        stop_ids=[3, 5],
    )
    parts = [
        draw(
            logits[first : first + split],
            sampling,
            position=20 + first,
            drafts=drafts[first : first + split - 1],
            history=History(PROMPT, OUTPUT + drafts[:first]),
            num_output=len(OUTPUT) + first,
            stop_ids=[3, 5],
        )
        for first in range(0, 6, split)
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_history_counts_nothing_of_the_drafts() -> None:
    history = History(PROMPT, OUTPUT)
    sampling = Sampling(frequency_penalty=1.0)
    draw(torch.zeros(3, 60), sampling, position=7, drafts=(50, 51), history=history)
    assert history.seen == {1, 2, 4, 7}
    assert history.output_counts == {2: 2, 4: 1}


def test_same_key_gives_the_same_noise_and_any_other_key_another() -> None:
    assert torch.equal(noise_keys(5, 1, 30, 7)[3:], noise_keys(5, 1, 33, 4))
    keys = {
        tuple(key)
        for seed, choice in product([*range(-20, 20), 2**32, 2**63, 2**64 - 21], range(4))
        for key in noise_keys(seed, choice, 0, 100).tolist()
    }
    assert len(keys) == 43 * 4 * 100


def test_both_words_of_a_key_count() -> None:
    keys = torch.tensor([[5, 7], [6, 7], [5, 8]])
    noise = gumbel(keys, torch.arange(100).expand(3, 100))
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert (noise[left] == noise[right]).float().mean() < 0.1


def test_noise_is_standard_gumbel() -> None:
    noise = noise_of(range(20), range(50), 1000).flatten().double()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > 1e-3


def test_noise_reaches_the_far_upper_tail() -> None:
    noise = noise_of(range(4), range(4), 250_000)
    for threshold, expected in ((8.0, 1341.7), (10.0, 181.6), (12.0, 24.6)):
        deviations = (float((noise > threshold).sum()) - expected) / expected**0.5
        assert abs(deviations) < 4.5, threshold


def test_noise_of_neighbouring_keys_is_independent() -> None:
    positions = noise_of(range(10), range(101), 200).view(10, 101, 200)
    seeds = noise_of(range(11), range(100), 200).view(11, 100, 200)
    choices = [noise_of(range(10), range(100), 200, choice=choice) for choice in (0, 1)]
    pairs = {
        "position": (positions[:, 1:], positions[:, :-1]),
        "seed": (seeds[1:], seeds[:-1]),
        "id": (positions[..., 1:], positions[..., :-1]),
        "choice": (choices[0], choices[1]),
        "position and id": (positions[:, 1:, 1:], positions[:, :-1, :-1]),
    }
    for name, (left, right) in pairs.items():
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / left.numel() ** 0.5, name


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("bad_row", [0, 2])
@pytest.mark.parametrize("kind", ["one nan", "all nan", "inf", "two inf", "all -inf"])
def test_hopeless_row_is_an_error_and_not_a_token(
    sampling: Sampling, bad_row: int, kind: str
) -> None:
    logits = random_logits(3, num_rows=3, vocab=60)
    row = logits[bad_row]
    match kind:
        case "one nan":
            row[17] = torch.nan
        case "all nan":
            row.fill_(torch.nan)
        case "inf":
            row[17] = torch.inf
        case "two inf":
            row[[17, 30]] = torch.inf
        case "all -inf":
            row.fill_(-torch.inf)
    with pytest.raises(NonFiniteLogitsError, match="positions 9 to 11"):
        draw(
            logits,
            replace(sampling, min_tokens=0),
            position=9,
            drafts=(8, 30),
            history=History(PROMPT, OUTPUT),
        )


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-30, 1e-37, 1e-45, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float, cut: dict[str, Any]) -> None:
    logits = 10 * random_logits(4, num_rows=200, vocab=60)
    sampling = replace(HOT, temperature=temperature, **cut)
    assert torch.equal(draw(logits, sampling, position=0), logits.argmax(dim=-1))


def test_highest_temperature_is_nearly_uniform() -> None:
    logits = random_logits(5, num_rows=1, vocab=8).expand(20_000, 8)
    tokens = draw(logits, replace(HOT, temperature=100.0), position=0)
    expected = 20_000 * (logits[0] / 100).softmax(dim=-1).double().numpy()
    expected *= 20_000 / expected.sum()
    assert stats.chisquare(tokens.bincount(minlength=8).numpy(), expected).pvalue > 1e-3


def test_half_precision_logits_are_drawn_in_fp32() -> None:
    logits = random_logits(6, num_rows=200, vocab=300).bfloat16()
    for sampling in SETTINGS[:4]:
        half, full = (draw(wanted, sampling, position=3) for wanted in (logits, logits.float()))
        assert torch.equal(half, full)


def test_draw_leaves_the_logits_as_they_were() -> None:
    for sampling in SETTINGS:
        logits = random_logits(7, num_rows=3, vocab=60)
        before = logits.clone()
        history = History(PROMPT, OUTPUT)
        draw(logits, sampling, position=0, drafts=(8, 9), history=history, stop_ids=[3])
        assert torch.equal(logits, before)
