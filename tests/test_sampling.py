"""The law of a draw, against a reference in plain Python that shares no code with it."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_ray.records import Sampling
from d3d_ray.sampling import History, draw, gumbel, noise_keys, processed_scores

VOCAB = 12
PROMPT = (1, 4, 4, 7)
OUTPUT = (2, 4, 2)
DRAFTS = (2, 9, 9)
STOPS = (3, 5)
POSITION = 7


@dataclass
class Row:
    """One position of the block, as the reference sees it."""

    scores: list[float]
    seen: set[int]
    counts: Counter[int]
    num_output: int


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def repetition(row: Row, sampling: Sampling) -> None:
    for token in row.seen:
        score, penalty = row.scores[token], sampling.repetition_penalty
        row.scores[token] = score / penalty if score > 0 else score * penalty


def presence_frequency(row: Row, sampling: Sampling) -> None:
    for token, count in row.counts.items():
        row.scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count


def min_tokens(row: Row, sampling: Sampling) -> None:
    if row.num_output < sampling.min_tokens:
        for token in STOPS:
            row.scores[token] = -math.inf


def temperature(row: Row, sampling: Sampling) -> None:
    row.scores = [score / (sampling.temperature or 1.0) for score in row.scores]


def by_score(row: Row) -> list[int]:
    return sorted(range(len(row.scores)), key=lambda token: (-row.scores[token], token))


def top_k(row: Row, sampling: Sampling) -> None:
    for token in by_score(row)[sampling.top_k or len(row.scores) :]:
        row.scores[token] = -math.inf


def top_p(row: Row, sampling: Sampling) -> None:
    probs, mass = softmax(row.scores), 0.0
    for token in by_score(row):
        if mass >= sampling.top_p:
            row.scores[token] = -math.inf
        mass += probs[token]


Step = Callable[[Row, Sampling], None]
ORDER: list[Step] = [repetition, presence_frequency, min_tokens, temperature, top_k, top_p]


def reference_laws(
    logits: torch.Tensor, sampling: Sampling, *, num_output: int, order: Sequence[Step] = ORDER
) -> torch.Tensor:
    laws = []
    for index, scores in enumerate(logits.double().tolist()):
        output = OUTPUT + DRAFTS[:index]
        row = Row(scores, {*PROMPT, *output}, Counter(output), num_output + index)
        for step in order:
            step(row, sampling)
        laws.append(softmax(row.scores))
    return torch.tensor(laws)


def real_laws(logits: torch.Tensor, sampling: Sampling, *, num_output: int) -> torch.Tensor:
    """The scores without their noise, as probabilities."""
    scores = processed_scores(
        logits,
        sampling,
        position=POSITION,
        drafts=DRAFTS,
        history=History(PROMPT, OUTPUT),
        num_output=num_output,
        stop_ids=STOPS,
    )
    if not sampling.is_greedy:
        assert sampling.seed is not None
        keys = noise_keys(sampling.seed, sampling.choice, POSITION, len(logits))
        scores = scores - gumbel(keys, torch.arange(logits.shape[-1]).expand_as(scores))
    return scores.softmax(dim=-1)


def random_logits(seed: int, *, num_rows: int = 4, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


FULL = Sampling(
    temperature=1.7,
    top_k=6,
    top_p=0.7,
    repetition_penalty=1.8,
    presence_penalty=0.9,
    frequency_penalty=0.6,
    min_tokens=5,
    seed=3,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits_seed=st.integers(0, 10_000),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        top_k=st.integers(0, VOCAB + 2),
        top_p=st.sampled_from([0.05, 0.513, 0.871, 1.0]),
        repetition_penalty=st.sampled_from([0.7, 1.0, 1.6]),
        presence_penalty=st.sampled_from([-0.8, 0.0, 1.1]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        min_tokens=st.integers(0, 8),
        seed=st.integers(-(2**63), 2**64 - 1),
    ),
    num_output=st.integers(0, 9),
)
def test_every_row_follows_the_reference_law(
    logits_seed: int, sampling: Sampling, num_output: int
) -> None:
    if sampling.is_greedy:  # The cuts keep the argmax and are not computed.
        sampling = replace(sampling, top_k=0, top_p=1.0)
    logits = random_logits(logits_seed)
    torch.testing.assert_close(
        real_laws(logits, sampling, num_output=num_output),
        reference_laws(logits, sampling, num_output=num_output),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "first, second",
    [
        (repetition, presence_frequency),
        (presence_frequency, temperature),
        (presence_frequency, top_k),
        (min_tokens, top_k),
        (temperature, top_p),
        (top_k, top_p),
    ],
)
def test_law_is_not_that_of_another_order(first: Step, second: Step) -> None:
    names = {first: second, second: first}
    swapped = [names.get(step, step) for step in ORDER]
    logits = torch.cat([random_logits(seed) for seed in range(20)]).view(20, 4, VOCAB)
    gap = 0.0
    for block in logits:
        law = real_laws(block, FULL, num_output=3)
        torch.testing.assert_close(
            law, reference_laws(block, FULL, num_output=3), rtol=1e-4, atol=1e-6
        )
        other = reference_laws(block, FULL, num_output=3, order=swapped)
        gap = max(gap, float((law - other).abs().max()))
    assert gap > 0.01


CHANGES: dict[str, Any] = {
    "temperature": 0.4,
    "top_k": 2,
    "top_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "min_tokens": 9,
}
OTHER_NOISE: dict[str, Any] = {"seed": 4, "choice": 1}
USED_BY_THE_LOOP = {"max_tokens", "stop_token_ids", "ignore_eos"}
ONLY_REPORTED = {"num_logprobs", "num_prompt_logprobs"}


def test_every_field_is_accounted_for() -> None:
    known = {*CHANGES, *OTHER_NOISE} | USED_BY_THE_LOOP | ONLY_REPORTED
    assert {field.name for field in fields(Sampling)} == known


@pytest.mark.parametrize("name", sorted(ONLY_REPORTED))
def test_reported_field_changes_no_token(name: str) -> None:
    plain = Sampling(temperature=1.0, seed=3)
    changed = replace(plain, **{name: 5})
    logits = torch.zeros(50, VOCAB)
    assert torch.equal(draw(logits, plain, position=4), draw(logits, changed, position=4))


@pytest.mark.parametrize("name", CHANGES)
def test_field_changes_the_law(name: str) -> None:
    plain = Sampling(temperature=1.0, seed=3)
    changed = replace(plain, **{name: CHANGES[name]})
    logits = random_logits(5)
    gap = real_laws(logits, changed, num_output=3) - real_laws(logits, plain, num_output=3)
    assert gap.abs().max() > 0.01


@pytest.mark.parametrize("name", OTHER_NOISE)
def test_field_changes_the_noise(name: str) -> None:
    plain = Sampling(temperature=1.0, seed=3)
    changed = replace(plain, **{name: OTHER_NOISE[name]})
    logits = torch.zeros(50, VOCAB)
    same = draw(logits, plain, position=4) == draw(logits, changed, position=4)
    assert same.float().mean() < 0.4


def test_greedy_draw_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [4, 9]] = 2.0
    logits[2, 1:] = 1e-3
    assert draw(logits, Sampling(), position=0).tolist() == [0, 4, 1]


@pytest.mark.parametrize("cut, num_kept", [({"top_k": 3}, 3), ({"top_p": 0.24}, 3)])
def test_cut_keeps_the_lower_ids_on_ties(cut: dict[str, Any], num_kept: int) -> None:
    sampling = Sampling(temperature=1.0, seed=1, **cut)
    scores = processed_scores(torch.zeros(2, VOCAB), sampling, position=0)
    kept = scores.isfinite()
    assert kept[:, :num_kept].all()
    assert not kept[:, num_kept:].any()


def test_top_p_keeps_the_likeliest_token_however_small_it_is() -> None:
    logits = random_logits(8, num_rows=50)
    for top_p_value in (1e-3, 1e-30, 1e-300):
        sampling = Sampling(temperature=1.0, seed=1, top_p=top_p_value)
        assert torch.equal(draw(logits, sampling, position=0), logits.argmax(dim=-1))
