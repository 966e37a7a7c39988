"""Heat: how often runs of blocks are loaded, so that hot ones can be copied to more than one shard.

Loads are counted per run (placement.py), by the hash of its first block, within one window of time; then all counts are
reset. Hot runs are reported once per window, so that copies lost since the last one are made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash


class HotPrefixes:
    """Finds runs that are loaded `loads` times within `window_ns`."""

    def __init__(self, *, loads: int, window_ns: int, run_blocks: int) -> None:
        self.loads = loads
        self.window_ns = window_ns
        self._run_blocks = run_blocks
        self._counts: dict[BlockHash, int] = {}
        self._window_ends = 0

    def record_load(self, hashes: Sequence[BlockHash], now: int) -> Iterator[Sequence[BlockHash]]:
        """Counts one load of a chain, from its first block on. Yields the runs that become hot by it."""
        if now >= self._window_ends:
            self._counts.clear()
            self._window_ends = now + self.window_ns
        counts = self._counts
        for start in range(0, len(hashes), self._run_blocks):
            count = counts.get(hashes[start], 0) + 1
            if count > 1 or len(counts) < limits.HOT_RUNS:
                counts[hashes[start]] = count
            if count == self.loads:
                yield hashes[start : start + self._run_blocks]
