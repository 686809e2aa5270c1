"""Run the modes on the same prompts through one engine, and compare what they say."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray
import torch
from tqdm import tqdm

from d3d_ray.bench.near_ties import Difference, FindTopTwo, judge
from d3d_ray.bench.prompts import NamedPrompt
from d3d_ray.bench.report import Comparison
from d3d_ray.decode.rescoring import Candidate
from d3d_ray.records import Mode, Round, Sampling
from d3d_ray.runtime.engine import Answer, Engine

_WARM_UP_TOKENS = 4

OnAnswer = Callable[[NamedPrompt, Mode, Answer], None]


def compare(
    engine: Engine,
    prompts: Sequence[NamedPrompt],
    sampling: Sampling,
    *,
    modes: Sequence[Mode] = tuple(Mode),
    on_answer: OnAnswer | None = None,
) -> Comparison:
    """Ask prompt by prompt in every mode, so that a drifting machine hurts all modes alike.

    One request at a time; a short first prompt in every mode is not counted. Raises as
    ``Engine.generate`` does.
    """
    # The modes must draw with the same noise.
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    sampling = replace(sampling, seed=seed)
    warm_up = replace(sampling, max_tokens=_WARM_UP_TOKENS, min_tokens=0)
    rounds: dict[Mode, list[Round]] = {mode: [] for mode in modes}
    differences = []
    with tqdm(total=len(prompts) * len(modes), unit="answer", leave=False) as progress:
        for mode in modes:
            progress.set_description(f"warming up {mode}")
            engine.generate([prompts[0].messages], warm_up, mode=mode)
        for prompt in prompts:
            answers: dict[Mode, Answer] = {}
            for mode in modes:
                progress.set_description(f"{prompt.id}, {mode}")
                (answers[mode],) = engine.generate([prompt.messages], sampling, mode=mode)
                rounds[mode].extend(answers[mode].rounds)
                if on_answer is not None:
                    on_answer(prompt, mode, answers[mode])
                progress.update()
            differences += _compare_answers(engine, prompt, sampling, answers)
    return make_comparison(engine, sampling, len(prompts), rounds, differences)


def make_comparison(
    engine: Engine,
    sampling: Sampling,
    num_prompts: int,
    rounds: dict[Mode, list[Round]],
    differences: Sequence[Difference] = (),
) -> Comparison:
    """Put figures together with what the engine says of itself."""
    drafter = engine.supervisor.drafter_info
    return Comparison(
        config=engine.config,
        sampling=sampling,
        is_drafter_trained=None if drafter is None else drafter.is_trained,
        num_prompts=num_prompts,
        rounds=rounds,
        differences=differences,
    )


def _compare_answers(
    engine: Engine, prompt: NamedPrompt, sampling: Sampling, answers: dict[Mode, Answer]
) -> list[Difference]:
    if Mode.AR not in answers:
        return []
    judgements = [
        judge(
            answers[Mode.AR].tokens,
            answer.tokens,
            prompt=prompt.id,
            mode=mode,
            dtype=getattr(torch, engine.config.target.dtype),
            sampling=sampling,
            find_top_two=_ask_target(engine, prompt, sampling),
        )
        for mode, answer in answers.items()
    ]
    return [difference for difference in judgements if difference is not None]


def _ask_target(engine: Engine, prompt: NamedPrompt, sampling: Sampling) -> FindTopTwo:
    def find_top_two(output: Sequence[int]) -> tuple[Candidate, Candidate]:
        request = engine.request(prompt.messages, sampling, mode=Mode.AR)
        reference = engine.supervisor.verifier().find_top_two.remote(request, tuple(output))
        found: tuple[Candidate, Candidate] = ray.get(
            reference, timeout=engine.config.runtime.load_timeout_s
        )
        return found

    return find_top_two
