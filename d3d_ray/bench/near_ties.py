"""Whether two answers may differ: only in low precision, and only where the target itself wavers.

A pass over a block and a pass over one token round differently. In bf16 and fp16 that can turn a
draw whose two best tokens are about equal; in fp32 it must not happen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from d3d_ray.decode.rescoring import Candidate
from d3d_ray.records import Sampling

MAX_GAP_UNITS = 2.0
"""In units in the last place of the larger logit."""

FindTopTwo = Callable[[Sequence[int]], tuple[Candidate, Candidate]]
"""The plain target's two best tokens behind the prompt and these output tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where an answer departs from the plain one."""

    prompt: str
    mode: str
    position: int
    """Index in the output."""
    expected: int | None
    """The plain answer's token; None = it had ended."""
    found: int | None
    gap_units: float | None
    """Between the target's two best tokens, in units in the last place; None = not looked at."""
    is_near_tie: bool


def find_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index where two answers differ; None when they are the same."""
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def judge(
    expected: Sequence[int],
    found: Sequence[int],
    *,
    prompt: str,
    mode: str,
    dtype: torch.dtype,
    sampling: Sampling,
    find_top_two: FindTopTwo,
) -> Difference | None:
    """Compare an answer with the plain one; None when it is the same, token for token."""
    position = find_difference(expected, found)
    if position is None:
        return None
    pair = [answer[position] if position < len(answer) else None for answer in (expected, found)]
    gap_units = None
    is_near_tie = False
    if dtype != torch.float32:
        first, second = find_top_two(expected[:position])
        gap_units = measure_gap(first, second, dtype=dtype, sampling=sampling)
        is_near_tie = gap_units <= MAX_GAP_UNITS and {first.token, second.token} == set(pair)
    return Difference(
        prompt=prompt,
        mode=mode,
        position=position,
        expected=pair[0],
        found=pair[1],
        gap_units=gap_units,
        is_near_tie=is_near_tie,
    )


def measure_gap(
    first: Candidate, second: Candidate, *, dtype: torch.dtype, sampling: Sampling
) -> float:
    """How far two tokens are apart, in units in the last place of the larger logit."""
    unit = find_unit(max(abs(first.logit), abs(second.logit)), dtype)
    # Scores are logits divided by the temperature, and so is a rounding error in them.
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    return (first.score - second.score) * temperature / unit


def find_unit(largest: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a number of this size."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(largest, info.tiny)))
