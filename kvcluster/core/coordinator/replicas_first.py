"""Replicas first: a shard evicts copies of blocks that another shard keeps before any block that only it has."""

from __future__ import annotations

from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.eviction import Block, EvictionPolicy

_BEFORE_ALL = -1
"""No policy's score is negative."""


class ReplicasFirst:
    """The eviction policy of the shard with that slot: replicas in no order, then other blocks as `policy` scores.

    Of the shards that hold a block, the one that joined first keeps it, so that two do not each take the other's copy
    for the one that stays.
    """

    def __init__(self, policy: EvictionPolicy, book: ReplicaTable, slot: int) -> None:
        self.scores_fall = policy.scores_fall
        self._policy = policy
        self._book = book
        self._slot = slot

    def score(self, block: Block, now: int) -> int:
        assert isinstance(block, BlockRecord)
        if len(block.copies.places) > 1 and self._is_kept_elsewhere(block):
            return _BEFORE_ALL
        return self._policy.score(block, now)

    def evicted(self, score: int, now: int) -> None:
        if score != _BEFORE_ALL:
            self._policy.evicted(score, now)

    def _is_kept_elsewhere(self, record: BlockRecord) -> bool:
        copies = record.copies
        return any(
            slot < self._slot
            and self._book.stays(slot)
            and all(copies.holds(slot, here.group, here.part) for here in copies.of(self._slot))
            for slot in copies.slots
        )
