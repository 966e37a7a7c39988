"""Cleans up the index, some records in each step (docs/adr/0034): removes the copies of lost shards, and remembers
purged blocks as evicted.

Once a shard is lost, no answer names its slot, so its records can be cleaned up in later steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.miss import MissReason

SWEEP_BLOCKS = 4_096
"""Records examined in one step, to remove lost shards from them or because they were purged."""

COPIES_SWEPT = 16
"""This many copies of a record count as one more record."""


class RecordSweeper:
    """Sweeps the records of a coordinator's index."""

    def __init__(self, state: CoordinatorState, replicator: Replicator) -> None:
        self._state = state
        self._replicator = replicator
        # The names of the records, and the slot if what it held is lost.
        self._slots: list[tuple[Iterator[tuple[NamespaceId, BlockHash]], int | None]] = []
        self._purged: list[dict[BlockHash, BlockRecord]] = []

    @property
    def sweeping(self) -> bool:
        """Whether records may still name lost shards, or purged blocks are yet to be remembered as evicted."""
        return bool(self._slots or self._purged)

    @property
    def of_lost_shards(self) -> bool:
        """Whether records may still name lost shards."""
        return bool(self._slots)

    def forget(self, member: Member, *, lost: bool) -> None:
        """Plans to remove the slot of this shard from its records. `lost`: whether what it held is lost."""
        names = chain.from_iterable([cold.drain() for cold in member.cold.values()])
        self._slots.append((names, member.slot if lost else None))

    def purge(self, purged: Iterable[dict[BlockHash, BlockRecord]], now: int) -> int:
        """Plans to remember these blocks, which the index has forgotten, as evicted. Returns how many there are."""
        new = [records for records in purged if records]
        self._purged += new
        blocks = sum(map(len, new))
        self._note_purged(now)
        return blocks

    def sweep_some(self, now: int) -> None:
        """Removes lost shards from some records. Blocks that are left with fewer copies are to be replicated again."""
        self._note_purged(now)
        left = SWEEP_BLOCKS
        while self._slots and left > 0:
            left -= 1
            names, slot = self._slots[-1]
            name = next(names, None)
            if name is None:
                self._slots.pop()
            else:
                left -= self._sweep(*name, slot, now) // COPIES_SWEPT

    def _sweep(self, namespace: NamespaceId, block: BlockHash, slot: int | None, now: int) -> int:
        """Removes lost shards from one record. Returns how many copies it had."""
        state = self._state
        space = state.namespaces.known(namespace)
        record = space.index.get(block) if space is not None else None
        if space is None or record is None:
            return 0
        before = record.copies
        bare = space.index.sweep(record)
        parts = dict.fromkeys((copy.group, copy.part) for copy in before.entries)
        state.members.charge(space, before, record.copies, parts)
        if bare:
            state.evicted.add(space.id, record.hash, now, MissReason.SHARD_LOST)
            space.pinned.discard(record.hash)
        elif slot is not None:
            self._replicator.repair(space, record, before, slot)
        else:
            self._replicator.replica_lost(record)
        return len(before.entries)

    def _note_purged(self, now: int) -> None:
        """Remembers some of the purged blocks as evicted, so that `explain` can report it."""
        state = self._state
        for _ in range(SWEEP_BLOCKS):
            while self._purged and not self._purged[-1]:
                self._purged.pop()
            if not self._purged:
                return
            block, record = self._purged[-1].popitem()
            if state.namespaces.record(record.space, block) is None:
                state.evicted.add(record.space, block, now, MissReason.EVICTED)
