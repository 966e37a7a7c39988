"""Heat: how often runs of blocks are loaded, so that hot ones can lie on more than one shard.

Counts are of runs (placement.py), by the hash of their first block, within one window of time; then all are
forgotten. A run that is as hot as that in every window is noticed in every window, which repairs what was lost since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash


class HotPrefixes:
    """`loads` within `window_ns` make a run hot."""

    def __init__(self, *, loads: int, window_ns: int, run_blocks: int) -> None:
        self.loads = loads
        self._window = window_ns
        self._run_blocks = run_blocks
        self._counts: dict[BlockHash, int] = {}
        self._window_ends = 0

    def loaded(self, hashes: Sequence[BlockHash], now: int) -> Iterator[Sequence[BlockHash]]:
        """Counts one load of a chain from its first block on. The runs that have become hot with it."""
        if now >= self._window_ends:
            self._counts.clear()
            self._window_ends = now + self._window
        counts = self._counts
        for start in range(0, len(hashes), self._run_blocks):
            count = counts.get(hashes[start], 0) + 1
            if count > 1 or len(counts) < limits.HOT_RUNS:
                counts[hashes[start]] = count
            if count == self.loads:
                yield hashes[start : start + self._run_blocks]
