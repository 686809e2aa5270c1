"""Means over anchors with their standard errors; anchors of one document are not independent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    error: float
    """Standard error, with the documents as clusters."""

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The sum of one over documents ÷ that of the other; nan where that is zero.

    The error is that of the ratio estimator of cluster sampling (Cochran, Sampling Techniques,
    chapter 6). Sums of tokens by counts of blocks give an acceptance length; differences of two
    drafters' sums by the counts their paired difference; one's sums by the other's the share kept.
    """
    assert len(numerators) == len(denominators) >= 2
    total = sum(denominators)
    if total == 0:
        return Estimate(math.nan, math.nan)
    value = sum(numerators) / total
    residuals = (n - value * d for n, d in zip(numerators, denominators, strict=True))
    num = len(numerators)
    variance = num / (num - 1) * sum(residual**2 for residual in residuals)
    return Estimate(value, math.sqrt(variance) / total)


def difference(ones: Sequence[float], others: Sequence[float], counts: Sequence[float]) -> Estimate:
    """The paired difference of two means over the same anchors."""
    return ratio([one - other for one, other in zip(ones, others, strict=True)], counts)
