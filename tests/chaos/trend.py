"""Whether a series of samples rises: a straight line by least squares, and the error of its slope. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope` is per second, `error` its standard error, `span_s` what was observed."""

    mean: float
    slope: float
    error: float
    span_s: float

    def rises(self, allowed: float) -> bool:
        """Has it risen by more than that over the whole span, beyond three standard errors?"""
        return (self.slope - 3 * self.error) * self.span_s > allowed


def averaged(samples: Sequence[tuple[float, float]], blocks: int) -> list[tuple[float, float]]:
    """The means of so many stretches of equal length. What wanders, as memory does, is like itself a moment later; the
    error of a line through single samples would be told too small."""
    edges = [len(samples) * block // blocks for block in range(blocks + 1)]
    stretches = [samples[start:stop] for start, stop in pairwise(edges) if start < stop]
    return [
        (sum(at for at, _ in stretch) / len(stretch), sum(value for _, value in stretch) / len(stretch))
        for stretch in stretches
    ]


def fit(samples: Sequence[tuple[float, float]]) -> Trend:
    """The line through (seconds, value); at least three of them, at different times."""
    count = len(samples)
    assert count >= 3
    mid = sum(at for at, _ in samples) / count
    mean = sum(value for _, value in samples) / count
    spread = sum((at - mid) ** 2 for at, _ in samples)
    assert spread > 0
    slope = sum((at - mid) * (value - mean) for at, value in samples) / spread
    missed = sum((value - mean - slope * (at - mid)) ** 2 for at, value in samples)
    error = math.sqrt(missed / (count - 2) / spread)
    return Trend(mean, slope, error, max(at for at, _ in samples) - min(at for at, _ in samples))
