"""The eviction queue: the records of one tier of one shard, and which of them goes first.

A policy scores (kvcluster/eviction); the queue finds the lowest score among the *leaves*. A leaf is a queued record
that no queued record follows: so a block never goes before a block that follows it in the same tier of the same shard,
whatever the policy says. When a leaf is taken, the record before it is a leaf at once if it has no other follower.

A lookup touches hundreds of records and must not pay for order: it writes into records and tells no queue. The queue
catches up when a victim is wanted. It is a heap of (score when queued, leaf). An entry that comes up is scored again;
one whose score has risen goes back in with it. What this guarantees:

- Where scores never fall (`policy.falls` is False), the result is exact: of all leaves the one of the lowest score.
  An entry is then at most its record's present score, so the least entry that equals its record's score is the least.
- Where they may fall, a victim scores no higher than any other leaf did when that leaf was last scored; and each leaf
  is scored again at least once in every ceil(cells / RESCORED) searches, whose number of cells is that of the leaves
  or less than twice as many. Until then a leaf whose score has fallen stays longer than it should.

The queue is told of each record that comes to its tier (`push`) and leaves it (`remove`, `forget`), and it counts and
returns a record no longer than that. For each record it keeps one small integer: how many queued records follow it,
whether it is queued, and whether it has a cell. Only what was a leaf has a cell and a heap entry. The cells of a
namespace that was forgotten are vacated as they come up, so that a purge looks at no record (docs/adr/0034).

An entry is one integer: the score above, the number of a cell below. Hence ties go by cell and never compare records,
and a comparison is one of integers. Nothing that it allocates for a record is visited by the garbage collector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.eviction import Block, EvictionPolicy

INSPECTED = 4_096
"""Entries that one search looks at: at most 20 ms in a queue of a million, however many are spared or were touched."""

RESCORED = 256
"""Leaves that one search scores again, if scores may fall: a sixteenth of the work that INSPECTED allows."""

FRESH = 64
"""Records that have just come and have no cell: a chain comes from its first block on, and only its last is a leaf."""

_CELL_BITS = 32
_CELL_MASK = (1 << _CELL_BITS) - 1
_COMPACT_ABOVE = 1_024
"""Below this, superseded entries are not worth looking for."""

# What is kept of a record: how many queued records follow it, above two bits.
_QUEUED = 1
_CELL = 2  # it has a cell, or is fresh and will get one
_FOLLOWER = 4


class Queued(Block, Protocol):
    """A record in the index."""

    @property
    def space(self) -> NamespaceId: ...

    @property
    def hash(self) -> BlockHash: ...

    @property
    def parent(self) -> BlockHash: ...


R = TypeVar("R", bound=Queued)


class EvictionQueue(Generic[R]):
    """The records of one tier of one shard. `find` gives the index's present record of a block, or None."""

    def __init__(self, policy: EvictionPolicy, find: Callable[[NamespaceId, BlockHash], R | None]) -> None:
        self._policy = policy
        self._find = find
        self._states: dict[NamespaceId, dict[BlockHash, int]] = {}
        self._lengths: dict[NamespaceId, int] = {}
        self._length = 0
        self._fresh: deque[R] = deque()
        self._heap: list[int] = []
        self._cells: list[R | None] = []
        # By cell: its valid entry, None while it is spared or vacant. Any other of that cell in the heap is superseded.
        self._entries: list[int | None] = []
        # By cell: what is kept of its record's namespace; another dict than at present where that was forgotten since.
        self._owners: list[dict[BlockHash, int] | None] = []
        self._vacant: list[int] = []
        self._spared: deque[int] = deque()  # cells without an entry in the heap; every other occupied one has its own
        self._now = 0  # of the last search: what comes between two is scored as of then
        self._hand = 0  # the next cell to be scored again
        self.cut_short = False  # the last search stopped at its bound: another may find what it did not

    def __len__(self) -> int:
        """How many records are queued."""
        return self._length

    def __contains__(self, record: R) -> bool:
        return bool(self._states.get(record.space, {}).get(record.hash, 0) & _QUEUED)

    def push(self, record: R) -> None:
        """Queues a record, unless it is queued."""
        states = self._states.setdefault(record.space, {})
        state = states.get(record.hash, 0)
        if state & _QUEUED:
            return
        states[record.hash] = state | _QUEUED | _CELL
        states[record.parent] = states.get(record.parent, 0) + _FOLLOWER
        self._lengths[record.space] = self._lengths.get(record.space, 0) + 1
        self._length += 1
        if not state & _CELL:
            self._fresh.append(record)
            if len(self._fresh) > FRESH:
                self._give_cell(self._fresh.popleft())

    def remove(self, record: R) -> None:
        """A record has left the tier. Nothing, where it is not queued."""
        if record in self:
            self._leave(record, _QUEUED)

    def forget(self, space: NamespaceId) -> None:
        """All records of a namespace are gone from the index. It looks at none of them."""
        if self._states.pop(space, None) is not None:
            self._length -= self._lengths.pop(space, 0)
            self._fresh = deque(record for record in self._fresh if record.space != space)

    def drain(self) -> Iterator[tuple[NamespaceId, BlockHash]]:
        """Takes out all records, in no order: their names, one by one, at the cost of one each."""
        states, self._states, self._lengths, self._length = self._states, {}, {}, 0
        self._heap, self._cells, self._entries, self._owners, self._vacant = [], [], [], [], []
        self._fresh.clear()
        self._spared.clear()
        return ((space, block) for space, of in states.items() for block, state in of.items() if state & _QUEUED)

    def coldest(self, count: int, spares: Callable[[R], bool], now: int, *, max_inspected: int = INSPECTED) -> list[R]:
        """Takes out the `count` coldest records that `spares` does not spare, in the order in which they are to go;
        fewer where there are no more, or `max_inspected` entries were looked at (`cut_short`).

        What is spared steps aside until the next call, and all that it follows stays with it. The next call brings
        back as much as half of its own inspections can deal with, the longest aside first. So the order is exact while
        no more than that is spared at a time, and beyond that a crowd of pinned records delays nothing for ever:
        each call gets on by the other half.
        """
        self._now = now
        self._catch_up(max_inspected)
        taken: list[R] = []
        inspected = 0
        heap = self._heap
        while heap and len(taken) < count and inspected < max_inspected:
            inspected += 1
            entry = heap[0]
            cell = entry & _CELL_MASK
            if self._entries[cell] != entry:
                heappop(heap)
                continue
            record = self._leaf(cell)
            if record is None:
                heappop(heap)
                continue
            present = self._scored(record, cell)
            if present > entry:
                self._entries[cell] = present
                heapreplace(heap, present)
                continue
            heappop(heap)
            if spares(record):
                self._entries[cell] = None
                self._spared.append(cell)
                continue
            self._vacate(cell)
            self._leave(record, _QUEUED | _CELL)
            self._policy.taken(present >> _CELL_BITS, now)
            taken.append(record)
        self.cut_short = len(taken) < count and inspected == max_inspected
        return taken

    def check(self) -> None:
        """What is kept of each record agrees with the rest. Raises AssertionError."""
        followers: dict[tuple[NamespaceId, BlockHash], int] = {}
        owned = zip(self._cells, self._owners, strict=True)
        known = [record for record, owner in owned if record is not None and owner is self._states.get(record.space)]
        with_cell = [*known, *self._fresh]
        own = dict.fromkeys((record.space, record.hash) for record in with_cell)
        assert len(own) == len(with_cell), "a record with two cells"
        length = 0
        for space, states in self._states.items():
            of_space = sum(state & _QUEUED for state in states.values())
            assert of_space == self._lengths.get(space, 0), "records of a namespace are counted otherwise"
            for block, state in states.items():
                assert state, "nothing is kept of what is not here"
                assert bool(state & _CELL) == ((space, block) in own), (
                    "a cell that is not known, or known and not there"
                )
                if state & _QUEUED:
                    length += 1
                    record = self._find(space, block)
                    assert record is not None, "it is queued, and the index has no record of it"
                    followers[space, record.parent] = followers.get((space, record.parent), 0) + 1
                    assert state & _CELL or state >= _FOLLOWER, "a leaf that would never be found"
        kept = {
            (space, block): state // _FOLLOWER
            for space, states in self._states.items()
            for block, state in states.items()
            if state >= _FOLLOWER
        }
        assert kept == followers, "followers were counted wrongly"
        assert length == self._length
        valid = sum(self._entries[entry & _CELL_MASK] == entry for entry in dict.fromkeys(self._heap))
        assert valid + len(self._spared) == len(self._cells) - len(self._vacant), "a cell without its entry"

    # ------------------------------------------------------------------------------------- what has changed

    def _catch_up(self, max_inspected: int) -> None:
        """Gives fresh leaves their place, brings back what was spared, and scores some leaves again."""
        while self._fresh:
            self._give_cell(self._fresh.popleft())
        self._compact()
        for _ in range(min(len(self._spared), max_inspected // 2)):
            cell = self._spared.popleft()
            record = self._leaf(cell)
            if record is not None:
                self._enter(record, cell)
        if not self._policy.falls:
            return
        for _ in range(min(RESCORED, len(self._cells))):
            cell = self._hand = (self._hand + 1) % len(self._cells)
            entry = self._entries[cell]
            record = self._leaf(cell) if entry is not None else None
            if record is not None and entry != self._scored(record, cell):
                self._enter(record, cell)

    def _compact(self) -> None:
        """Drops cells and entries of what is no leaf any more, if there are too many. It looks at each."""
        occupied = len(self._cells) - len(self._vacant)
        if occupied > 2 * self._length + _COMPACT_ABOVE:
            spared = dict.fromkeys(self._spared)
            for cell in range(len(self._cells)):
                if self._cells[cell] is not None:
                    self._leaf(cell)
            self._spared = deque(cell for cell in spared if self._cells[cell] is not None)
            occupied = len(self._cells) - len(self._vacant)
        if len(self._heap) > 2 * occupied + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._entries if entry is not None]
            heapify(self._heap)

    # ------------------------------------------------------------------------------------------- one record

    def _leave(self, record: R, bits: int) -> None:
        """It is queued no longer: it loses these bits. What it follows may be a leaf now."""
        states = self._states[record.space]
        self._keep(states, record.hash, states[record.hash] - bits)
        self._lengths[record.space] -= 1
        self._length -= 1
        parent = states[record.parent] - _FOLLOWER
        if parent == _QUEUED:  # without a follower, and without a cell
            states[record.parent] = parent | _CELL
            self._enter_new(record.space, record.parent)
        else:
            self._keep(states, record.parent, parent)

    def _give_cell(self, record: R) -> None:
        """Gives a fresh record its cell if it is a leaf."""
        states = self._states[record.space]
        state = states[record.hash]
        if self._is_leaf(state):
            self._enter_new(record.space, record.hash)
        else:
            self._keep(states, record.hash, state - _CELL)

    def _enter_new(self, space: NamespaceId, block: BlockHash) -> None:
        record = self._find(space, block)
        assert record is not None, "it is queued, and the index has no record of it"
        if self._vacant:
            cell = self._vacant.pop()
        else:
            cell = len(self._cells)
            assert cell <= _CELL_MASK
            self._cells.append(None)
            self._entries.append(None)
            self._owners.append(None)
        self._cells[cell], self._owners[cell] = record, self._states[space]
        self._enter(record, cell)

    def _leaf(self, cell: int) -> R | None:
        """The present record of a cell; None where it is no leaf any more, and then the cell is vacant."""
        record = self._cells[cell]
        assert record is not None, "an entry without its record"
        states = self._states.get(record.space)
        if states is None or states is not self._owners[cell]:  # the namespace was forgotten since
            self._vacate(cell)
            return None
        state = states[record.hash]
        if not self._is_leaf(state):
            self._keep(states, record.hash, state - _CELL)
            self._vacate(cell)
            return None
        present = self._find(record.space, record.hash)
        assert present is not None, "it is queued, and the index has no record of it"
        self._cells[cell] = present  # it may have gone and come back, as another object
        return present

    def _vacate(self, cell: int) -> None:
        self._cells[cell] = self._owners[cell] = None
        self._entries[cell] = None
        self._vacant.append(cell)

    def _enter(self, record: R, cell: int) -> None:
        self._entries[cell] = entry = self._scored(record, cell)
        heappush(self._heap, entry)

    def _scored(self, record: R, cell: int) -> int:
        return self._policy.score(record, self._now) << _CELL_BITS | cell

    @staticmethod
    def _is_leaf(state: int) -> bool:
        """Of what has a cell: is it queued, and without a follower?"""
        return state == _QUEUED | _CELL

    @staticmethod
    def _keep(states: dict[BlockHash, int], block: BlockHash, state: int) -> None:
        if state:
            states[block] = state
        else:
            del states[block]
