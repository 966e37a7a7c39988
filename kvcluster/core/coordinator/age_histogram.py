"""A histogram of ages in fixed buckets: for how long blocks had not been used when their last copy was evicted.

That age is what a cache of this size keeps for: where it falls below the time between two turns of a conversation, the
second turn misses. An age is added in constant time, and nothing is kept of the block.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
"""Upper bounds of the buckets, in seconds; a last bucket has all that is older."""

_NS = 1_000_000_000


class AgeHistogram:
    """The number of ages in each bucket, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self.total_ns = 0

    def add(self, age_ns: int) -> None:
        self._counts[bisect_left(AGE_BOUNDS_S, age_ns / _NS)] += 1
        self.total_ns += age_ns

    def cumulative(self) -> tuple[int, ...]:
        """Returns for each of AGE_BOUNDS_S the number of ages up to it, and last the number of all."""
        return tuple(accumulate(self._counts))
