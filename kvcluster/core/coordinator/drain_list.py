"""The blocks of a draining shard, in the order in which they are to be copied elsewhere: the last used first, and
chains from their roots on, so that the blocks that do not fit any more are those that would be missed least.

An index of millions is neither searched nor sorted in one step. First all its blocks are examined, some in each step,
and those on the shard are put on a heap; then they are taken off it, some in each step. Blocks that the shard stores
meanwhile come from its report stream, and blocks that it has lost meanwhile are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain

from kvcluster.core.coordinator.index import BlockRecord

LISTED_BLOCKS = 4_096
"""Blocks examined or listed in one step, which takes as long as sweeping the same number (report_handler.py)."""


class DrainList:
    """The list for the shard in that slot. `blocks` are the blocks of each namespace, as they are now."""

    def __init__(self, slot: int, blocks: Iterable[Iterable[BlockRecord]]) -> None:
        self._slot = slot
        self._unseen: Iterator[BlockRecord] | None = chain.from_iterable([list(some) for some in blocks])
        self._heap: list[tuple[int, int, int, BlockRecord]] = []
        self._seen = 0  # numbers the entries, so that records are never compared

    @property
    def done(self) -> bool:
        """Whether all of them have been listed."""
        return self._unseen is None and not self._heap

    def some(self) -> list[BlockRecord]:
        """Does one step of the work. Returns the blocks that are listed in it."""
        left = LISTED_BLOCKS
        while self._unseen is not None and left > 0:
            left -= 1
            record = next(self._unseen, None)
            if record is None:
                self._unseen = None
            elif record.copies.on(self._slot):
                self._seen += 1
                heappush(self._heap, (-record.stamp, record.depth, self._seen, record))
        listed: list[BlockRecord] = []
        while self._unseen is None and self._heap and left > 0:
            left -= 1
            record = heappop(self._heap)[-1]
            if record.copies.on(self._slot):
                listed.append(record)
        return listed
