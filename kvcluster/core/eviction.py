"""Eviction: which record is the coldest. A policy only scores; a queue finds the lowest score.

A lookup touches hundreds of records and must not pay for order, so it writes `record.stamp` and nothing else.
The queue catches up when a victim is wanted: it is a heap of (score when queued, record), and an entry whose
record scores higher by now goes back in with that score. This is exact. A score never falls while its record is
queued, so every entry is at most its record's present score; when the least entry *equals* its record's present
score, every other record's present score is at least its own entry, which is at least that one. Work is paid by
touches: a record is put back at most once for each time that it was touched.

An entry is one integer: the score above, the number of a cell below. Hence ties go by cell and never compare
records, a comparison is one of integers, and a queued record costs 57 bytes (tracemalloc) and no object that the
garbage collector would have to visit.

Records are not told that they are queued. One that vanishes is found to be gone when it comes up, or by `compact`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

INSPECTED = 4_096
"""Entries that one search looks at: at most 20 ms in a queue of a million, however many are spared or were touched."""

LRU_DEPTH_BITS = 24
"""limits.TOKENS_PER_SEQUENCE in blocks of one token. What is deeper counts as equally deep."""

_CELL_BITS = 32
_CELL_MASK = (1 << _CELL_BITS) - 1
_COMPACT_ABOVE = 1_024
"""Below this, what is gone is not worth looking for."""


class Verdict(Enum):
    """What a caller says of a record that is cold enough to go."""

    TAKE = "take"
    SPARE = "spare"  # held or pinned: not now
    GONE = "gone"  # not here any more: forget it


class Scored(Protocol):
    """What a policy judges. `stamp` is the last use in nanoseconds and never falls; `depth` never changes."""

    @property
    def stamp(self) -> int: ...

    @property
    def depth(self) -> int: ...


class EvictionPolicy(Protocol):
    """Scores a block: the lowest goes first. At equal depth, a later stamp must not score lower."""

    def score(self, *, stamp: int, depth: int) -> int: ...


class LRU:
    """Least recently used first; at equal recency the deeper first, so that tails go before roots.

    A score is the stamp, shifted by LRU_DEPTH_BITS, plus the depth counted downwards: with stamps of 63 bits,
    87 bits in all.
    """

    def score(self, *, stamp: int, depth: int) -> int:
        deepest = (1 << LRU_DEPTH_BITS) - 1
        return stamp << LRU_DEPTH_BITS | deepest - min(depth, deepest)


R = TypeVar("R", bound=Scored)


class ColdQueue(Generic[R]):
    """Records by coldness. Records compare by identity; one pushed twice is there twice until it is compacted."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[int] = []
        self._cells: list[R | None] = []
        self._vacant: list[int] = []
        self._spared: deque[int] = deque()  # cells that are in no heap entry; every other occupied cell is in one
        self.cut_short = False  # the last search stopped at its bound: another may find what it did not

    def __len__(self) -> int:
        return len(self._cells) - len(self._vacant)

    def push(self, record: R) -> None:
        """Queues a record, by its present score."""
        if self._vacant:
            cell = self._vacant.pop()
            self._cells[cell] = record
        else:
            cell = len(self._cells)
            assert cell <= _CELL_MASK
            self._cells.append(record)
        heappush(self._heap, self._entry(record, cell))

    def coldest(self, count: int, verdict: Callable[[R], Verdict], *, max_inspected: int = INSPECTED) -> list[R]:
        """Takes out the `count` coldest records that `verdict` lets go, coldest first; fewer where there are no more,
        or `max_inspected` entries were looked at (`cut_short`). Each is returned once; push it again if it stays.

        What is spared steps aside until the next call, which brings back as much as half of its own inspections can
        deal with, the longest aside first. So the order is exact while no more than that is spared at a time, and
        beyond that a crowd of pinned records delays nothing for ever: each call gets on by the other half.
        """
        for _ in range(min(len(self._spared), max_inspected // 2)):
            cell = self._spared.popleft()
            heappush(self._heap, self._entry(self._record(cell), cell))
        taken: dict[R, None] = {}
        inspected = 0
        while self._heap and len(taken) < count and inspected < max_inspected:
            inspected += 1
            cell = self._heap[0] & _CELL_MASK
            record = self._record(cell)
            entry = self._entry(record, cell)
            assert entry >= self._heap[0], "a score fell while its record was queued"
            if entry > self._heap[0]:
                heapreplace(self._heap, entry)
                continue
            heappop(self._heap)
            fate = verdict(record)
            if fate is Verdict.SPARE:
                self._spared.append(cell)
                continue
            self._vacate(cell)
            if fate is Verdict.TAKE:
                taken[record] = None
        assert len(self._heap) + len(self._spared) == len(self)
        self.cut_short = len(taken) < count and inspected == max_inspected
        return list(taken)

    def compact(self, live: int, verdict: Callable[[R], Verdict]) -> None:
        """Forgets what is gone, if there are more than twice as many entries as the `live` records that the caller
        knows of. It looks at every entry, a second for a million; half of them or more go by it.
        """
        if len(self) > 2 * live + _COMPACT_ABOVE:
            kept = dict.fromkeys(record for record in self.drain() if verdict(record) is not Verdict.GONE)
            self._cells.extend(kept)
            self._heap.extend(self._entry(record, cell) for cell, record in enumerate(kept))
            heapify(self._heap)

    def drain(self) -> list[R]:
        """Takes out all records, in no order of coldness."""
        records = [record for record in self._cells if record is not None]
        self._heap, self._cells, self._vacant = [], [], []
        self._spared.clear()
        return records

    def _entry(self, record: R, cell: int) -> int:
        return self._policy.score(stamp=record.stamp, depth=record.depth) << _CELL_BITS | cell

    def _record(self, cell: int) -> R:
        record = self._cells[cell]
        assert record is not None, "an entry without its record"
        return record

    def _vacate(self, cell: int) -> None:
        self._cells[cell] = None
        self._vacant.append(cell)
