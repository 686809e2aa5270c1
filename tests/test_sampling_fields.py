"""Sampling parameters out of range are refused by name."""

import math
from typing import Any

import pytest

from d3d_ray.records import Sampling


@pytest.mark.parametrize(
    "name, value",
    [
        *(("temperature", bad) for bad in (-0.1, 101.0, 10**400, math.nan, math.inf, "1", None)),
        *(("top_k", bad) for bad in (-1, 2.0, None, True)),
        *(("top_p", bad) for bad in (0.0, -0.5, 1.01, math.nan, None)),
        *(("repetition_penalty", bad) for bad in (0.0, -1.0, math.inf, "2")),
        *(("presence_penalty", bad) for bad in (-101.0, 101.0, math.nan, "0")),
        *(("frequency_penalty", bad) for bad in (-101.0, 101.0, math.nan, "0")),
        *(("min_tokens", bad) for bad in (-1, 1.5, None)),
        *(("max_tokens", bad) for bad in (0, -1, 1.5, "5", True)),
        *(("seed", bad) for bad in (-(2**63) - 1, 2**64, 1.5, "7", True)),
        *(("choice", bad) for bad in (-1, 0.5, None)),
        *(("stop_token_ids", bad) for bad in ((-1,), ("2",), (1.0,), (True,))),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens is 6 and max_tokens is 5"):
        Sampling(min_tokens=6, max_tokens=5)
