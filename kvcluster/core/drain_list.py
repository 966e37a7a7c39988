"""The blocks of a shard that is to go, in the order in which they are to find another place: the last used first, and
chains from their roots on, so that what does not fit any more is what would be missed least.

An index of millions is neither searched nor sorted in one step. First all its blocks are looked at, some in each step,
and those of the shard go onto a heap; then they come off it, some in each step. What the shard stores meanwhile is told
by its stream, and what it has lost meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain

from kvcluster.core.index import BlockRecord

LISTED_BLOCKS = 4_096
"""Blocks looked at, or listed, in one step: as long a step as sweeping as many (report_handler.py)."""


class DrainList:
    """Of the shard in that slot. `blocks` are those of all namespaces, as they are now."""

    def __init__(self, slot: int, blocks: Iterable[Iterable[BlockRecord]]) -> None:
        self._slot = slot
        self._unseen: Iterator[BlockRecord] | None = chain.from_iterable([list(some) for some in blocks])
        self._heap: list[tuple[int, int, int, BlockRecord]] = []
        self._seen = 0  # numbers the entries, so that records are never compared

    @property
    def done(self) -> bool:
        """Have all of them been listed?"""
        return self._unseen is None and not self._heap

    def some(self) -> list[BlockRecord]:
        """Goes on by a step. Returns those whose turn has come."""
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
