"""The eviction queue: the records of one tier of one shard, and which of them to evict first.

A policy scores (kvcluster/eviction); the queue finds the lowest score among the *leaves*. A leaf is a queued record
that no queued record follows: so a block is never evicted before a block that follows it in the same tier of the same
shard, whatever its score. When a leaf is taken, the record before it becomes a leaf at once if it has no other
follower.

A lookup touches hundreds of records and must not pay for order: it writes into records and notifies no queue. The queue
catches up when a victim is wanted. It is a heap of (score when queued, leaf). An entry that reaches the top is scored
again; if its score has risen, it is put back with the new score. What this guarantees:

- If scores never fall (`policy.scores_fall` is False), the result is exact: of all leaves the one of the lowest score.
  An entry is then at most its record's present score, so the least entry that equals its record's score is the least.
  Those of orphans fall once (`scores_fell`): all leaves are then scored again, as in the next case.
- If they may fall, a victim scores no higher than any other leaf did when that leaf was last scored; and each leaf
  is scored again at least once in every ceil(cells / RESCORED) searches, where the number of cells is that of the
  leaves or less than twice as many. Until then a leaf whose score has fallen stays longer than it should.

The queue is notified of each record that enters its tier (`push`) and leaves it (`remove`, `forget`), and it counts and
returns a record only between the two. For each record it keeps one small integer: the number of queued records that
follow it, whether it is queued, and whether it has a cell. Only records that have been a leaf have a cell and a heap
entry. The cells of a namespace that was forgotten are vacated as their entries come up, so that a purge looks at no
record (docs/adr/0034).

An entry is one integer: the score in the upper bits, the number of a cell in the lower. Hence ties are broken by cell
and records are never compared, and a comparison is one of integers. Nothing that the queue allocates for a record is
visited by the garbage collector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.eviction import Block, EvictionPolicy

INSPECTED = 4_096
"""Entries that one search inspects: at most 20 ms in a queue of a million, however many are spared or were touched."""

RESCORED = 256
"""Leaves that one search scores again, if scores may fall: a sixteenth of the work that INSPECTED allows."""

FRESH = 64
"""New records that have no cell yet: a chain arrives from its first block on, and only its last block is a leaf."""

_CELL_BITS = 32
_CELL_MASK = (1 << _CELL_BITS) - 1
_COMPACT_ABOVE = 1_024
"""Up to this number of superseded entries, compaction does not pay."""

# The state of a record: the number of queued records that follow it, above two bits.
_QUEUED = 1
_CELL = 2  # it has a cell, or is fresh and may get one
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
    """The records of one tier of one shard. `find` returns the index's present record of a block, or None."""

    def __init__(self, policy: EvictionPolicy, find: Callable[[NamespaceId, BlockHash], R | None]) -> None:
        self._policy = policy
        self._find = find
        self._states: dict[NamespaceId, dict[BlockHash, int]] = {}
        self._lengths: dict[NamespaceId, int] = {}
        self._length = 0
        self._fresh: deque[R] = deque()
        self._heap: list[int] = []
        self._cells: list[R | None] = []
        # By cell: its valid entry; None while it is spared or vacant. Any other entry of that cell in the heap is
        # superseded.
        self._entries: list[int | None] = []
        # By cell: the states of its record's namespace; no longer the present dict if the namespace was forgotten
        # since.
        self._owners: list[dict[BlockHash, int] | None] = []
        self._vacant: list[int] = []
        # Cells without an entry in the heap; every other occupied one has an entry.
        self._spared: deque[int] = deque()
        self._closed: dict[NamespaceId, deque[int]] = {}
        self._now = 0  # time of the last search: later entries are scored as of then
        self._hand = 0  # the next cell to be scored again
        self._more = False  # records of open namespaces are still set aside
        self._fell = 0  # cells that are still to be scored again because scores fell that otherwise never do
        self.cut_short = False  # the last search stopped at its bound: another may find more victims

    def __len__(self) -> int:
        """Returns the number of queued records."""
        return self._length

    def __contains__(self, record: R) -> bool:
        return bool(self._states.get(record.space, {}).get(record.hash, 0) & _QUEUED)

    def push(self, record: R) -> None:
        """Queues a record, unless it is queued already."""
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
        """Removes a record that has left the tier. Does nothing if it is not queued."""
        if record in self:
            self._leave(record, _QUEUED)

    def scores_fell(self) -> None:
        """Has all leaves scored again by the next searches: the scores of some fell, as those of orphans do under any
        policy."""
        self._fell = len(self._cells) + len(self._fresh)

    def forget(self, space: NamespaceId) -> None:
        """Removes all records of a namespace whose index was cleared, without a look at any of them."""
        if self._states.pop(space, None) is not None:
            self._length -= self._lengths.pop(space, 0)
            self._fresh = deque(record for record in self._fresh if record.space != space)

    def drain(self) -> Iterator[tuple[NamespaceId, BlockHash]]:
        """Removes all records and returns an iterator over their names, in no order. Each name costs constant time."""
        states, self._states, self._lengths, self._length = self._states, {}, {}, 0
        self._heap, self._cells, self._entries, self._owners, self._vacant = [], [], [], [], []
        self._fresh.clear()
        self._spared.clear()
        self._closed.clear()
        return ((space, block) for space, of in states.items() for block, state in of.items() if state & _QUEUED)

    def pop_coldest(
        self,
        count: int,
        spares: Callable[[R], bool],
        now: int,
        closed: Callable[[NamespaceId], bool] = lambda space: False,
        *,
        max_inspected: int = INSPECTED,
    ) -> list[R]:
        """Removes and returns the `count` coldest records that `spares` does not spare, in eviction order. Returns
        fewer if there are no more, or if `max_inspected` entries were inspected (`cut_short`).

        Spared records are set aside until the next call, and all their ancestors stay with them. The next call brings
        back as many as half of its inspections can handle, those set aside longest first. So the order is exact while
        no more are spared at a time; beyond that a crowd of pinned records delays nothing for ever. Records of `closed`
        namespaces are set aside, too, and come back, the coldest first, when their namespace is open again.
        """
        self._now = now
        self._catch_up(max_inspected, closed)
        taken: list[R] = []
        heap, inspected = self._heap, 0
        while heap and len(taken) < count and inspected < max_inspected:
            inspected += 1
            entry = heap[0]
            cell = entry & _CELL_MASK
            record = self._leaf(cell) if self._entries[cell] == entry else None
            if record is None:
                heappop(heap)
                continue
            if closed(record.space):
                heappop(heap)
                self._entries[cell] = None
                self._closed.setdefault(record.space, deque()).append(cell)
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
            self._policy.evicted(present >> _CELL_BITS, now)
            taken.append(record)
        self.cut_short = len(taken) < count and (inspected == max_inspected or self._more)
        return taken

    def check(self) -> None:
        """Checks that the states of all records are consistent with the rest. Raises AssertionError."""
        followers: dict[tuple[NamespaceId, BlockHash], int] = {}
        owned = zip(self._cells, self._owners, strict=True)
        known = [record for record, owner in owned if record is not None and owner is self._states.get(record.space)]
        with_cell = [*known, *self._fresh]
        own = dict.fromkeys((record.space, record.hash) for record in with_cell)
        assert len(own) == len(with_cell), "a record with two cells"
        length = 0
        for space, states in self._states.items():
            of_space = sum(state & _QUEUED for state in states.values())
            assert of_space == self._lengths.get(space, 0), "the records of a namespace are counted wrongly"
            for block, state in states.items():
                assert state, "an empty state is kept"
                assert bool(state & _CELL) == ((space, block) in own), "a state is wrong about its record's cell"
                if state & _QUEUED:
                    length += 1
                    record = self._find(space, block)
                    assert record is not None, "a queued record is not in the index"
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
        aside = len(self._spared) + sum(map(len, self._closed.values()))
        assert valid + aside == len(self._cells) - len(self._vacant), "a cell without its entry"

    # ------------------------------------------------------------------------------------- what has changed

    def _catch_up(self, max_inspected: int, closed: Callable[[NamespaceId], bool]) -> None:
        """Gives fresh leaves their cells, brings back spared records and those of open namespaces, and scores some
        leaves again."""
        while self._fresh:
            self._give_cell(self._fresh.popleft())
        self._compact()
        left = max_inspected // 2
        for aside in (self._spared, *(self._closed[space] for space in list(self._closed) if not closed(space))):
            back = min(len(aside), left)
            left -= back
            for _ in range(back):
                cell = aside.popleft()
                record = self._leaf(cell)
                if record is not None:
                    self._enter(record, cell)
        self._closed = {space: aside for space, aside in self._closed.items() if aside}
        self._more = not all(map(closed, self._closed))
        rescored = min(RESCORED, len(self._cells) if self._policy.scores_fall else min(self._fell, len(self._cells)))
        self._fell = max(0, self._fell - rescored)
        for _ in range(rescored):
            cell = self._hand = (self._hand + 1) % len(self._cells)
            entry = self._entries[cell]
            record = self._leaf(cell) if entry is not None else None
            if record is not None and entry != self._scored(record, cell):
                self._enter(record, cell)

    def _compact(self) -> None:
        """Drops cells and entries of records that are no longer leaves, if there are too many. Looks at each of
        them."""
        occupied = len(self._cells) - len(self._vacant)
        if occupied > 2 * self._length + _COMPACT_ABOVE:
            for cell in range(len(self._cells)):
                if self._cells[cell] is not None:
                    self._leaf(cell)
            self._spared = deque(cell for cell in self._spared if self._cells[cell] is not None)
            for space, aside in self._closed.items():
                self._closed[space] = deque(cell for cell in aside if self._cells[cell] is not None)
            occupied = len(self._cells) - len(self._vacant)
        if len(self._heap) > 2 * occupied + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._entries if entry is not None]
            heapify(self._heap)

    # ------------------------------------------------------------------------------------------- one record

    def _leave(self, record: R, bits: int) -> None:
        """Takes a record out of the queue by clearing these bits of its state. Its parent may become a leaf."""
        states = self._states[record.space]
        self._keep(states, record.hash, states[record.hash] - bits)
        self._lengths[record.space] -= 1
        self._length -= 1
        parent = states[record.parent] - _FOLLOWER
        if parent == _QUEUED:  # no follower, and no cell yet
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
        assert record is not None, "a queued record is not in the index"
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
        """Returns the present record of a cell; None if it is no longer a leaf, in which case the cell is vacated."""
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
        assert present is not None, "a queued record is not in the index"
        self._cells[cell] = present  # the record may have been replaced by another object
        return present

    def _vacate(self, cell: int) -> None:
        self._cells[cell] = self._owners[cell] = self._entries[cell] = None
        self._vacant.append(cell)

    def _enter(self, record: R, cell: int) -> None:
        self._entries[cell] = entry = self._scored(record, cell)
        heappush(self._heap, entry)

    def _scored(self, record: R, cell: int) -> int:
        return self._policy.score(record, self._now) << _CELL_BITS | cell

    @staticmethod
    def _is_leaf(state: int) -> bool:
        """Whether a record that has a cell is queued and has no follower."""
        return state == _QUEUED | _CELL

    @staticmethod
    def _keep(states: dict[BlockHash, int], block: BlockHash, state: int) -> None:
        if state:
            states[block] = state
        else:
            del states[block]
