"""Run the modes on the same prompts through one engine, and compare what they say."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import ray
import torch
from tqdm import tqdm

from d3d_ray.bench.near_ties import Difference, FindTopTwo, judge
from d3d_ray.bench.options import available_modes
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
    modes: Sequence[Mode] | None = None,
    on_answer: OnAnswer | None = None,
) -> Comparison:
    """Ask prompt by prompt in every mode, so that a drifting machine hurts all modes alike.

    On a CPU plain decoding is run once more with the drafter's cores as well: who has no drafter
    would give it those, so speed-ups are over that. So is ``dflash``, which leaves them idle, too.

    ``modes=None`` are all that there are drafters for.

    One request at a time; a short first prompt in every mode is not counted. Raises as
    ``Engine.generate`` does.
    """
    modes = available_modes(engine.config) if modes is None else modes
    # The modes must draw with the same noise.
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    sampling = replace(sampling, seed=seed)
    warm_up = replace(sampling, max_tokens=_WARM_UP_TOKENS, min_tokens=0)
    rounds: dict[Mode, list[Round]] = {mode: [] for mode in modes}
    differences, all_cores = list[Difference](), dict[Mode, list[Round]]()
    if Mode.AR in modes and len(modes) > 1 and _count_cores(engine) is not None:
        all_cores = {mode: [] for mode in (Mode.AR, Mode.DFLASH) if mode in modes}
    total = len(prompts) * (len(modes) + len(all_cores))
    with tqdm(total=total, unit="answer", leave=False) as progress:
        for mode in modes:
            progress.set_description(f"warming up {mode}")
            engine.generate([prompts[0].messages], warm_up, mode=mode)
        for prompt in prompts:
            answers: dict[Mode, Answer] = {}
            for mode, collected in all_cores.items():
                progress.set_description(f"{prompt.id}, {mode} with all cores")
                with _all_cores(engine):
                    (answer,) = engine.generate([prompt.messages], sampling, mode=mode)
                collected.extend(answer.rounds)
                progress.update()
            for mode in modes:
                progress.set_description(f"{prompt.id}, {mode}")
                (answers[mode],) = engine.generate([prompt.messages], sampling, mode=mode)
                rounds[mode].extend(answers[mode].rounds)
                if on_answer is not None:
                    on_answer(prompt, mode, answers[mode])
                progress.update()
            differences += _compare_answers(engine, prompt, sampling, answers)
    result = make_comparison(engine, sampling, len(prompts), rounds, differences)
    return replace(result, all_cores=all_cores)


def _count_cores(engine: Engine) -> tuple[int, int] | None:
    """Torch threads of verifier and drafter; None on GPUs."""
    verifier, drafter = engine.supervisor.verifier_info, engine.supervisor.drafter_info
    if verifier is None or drafter is None or verifier.device != "cpu":
        return None
    if verifier.node_id != drafter.node_id:
        return None
    return verifier.num_threads, drafter.num_threads


@contextlib.contextmanager
def _all_cores(engine: Engine) -> Iterator[None]:
    """The verifier works with the drafter's cores as well, which is idle meanwhile."""
    cores = _count_cores(engine)
    assert cores is not None
    for_target, for_drafter = cores
    timeout = engine.config.runtime.call_timeout_s
    verifier = engine.supervisor.verifier()
    ray.get(verifier.use_threads.remote(for_target + for_drafter), timeout=timeout)
    try:
        yield
    finally:
        ray.get(verifier.use_threads.remote(for_target), timeout=timeout)


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
