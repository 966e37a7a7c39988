"""Orphans: blocks that follow a block which is no longer recorded on any shard. No lookup reaches them.

They are evicted first on every shard: their stamps are moved below all others, so that every policy finds them cold.
When a block leaves the index, those that directly follow it are noted; here they are made cold, and those behind them
noted in turn, a bounded number at a time. If it comes back, they become as warm as they were, as does a block that a
load or a store touches. What was reported before the block that it follows is no orphan: that block is on its way.
"""

from __future__ import annotations

from collections import deque

from kvcluster.core import limits
from kvcluster.core.coordinator.followers import each_follower
from kvcluster.core.coordinator.index import COLD, BlockRecord
from kvcluster.core.coordinator.members import Membership
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.ids import BlockHash, NamespaceId


class Orphans:
    """The blocks that are still to be looked at, because the one before them was removed or has come back."""

    def __init__(self, namespaces: NamespaceTable, members: Membership) -> None:
        self._namespaces = namespaces
        self._members = members

    def settle(self) -> None:
        """Looks at up to limits.ORPHANS_PER_STEP blocks: makes orphans cold, and those warm that are none any more."""
        waiting = self._namespaces.orphans
        for _ in range(limits.ORPHANS_PER_STEP):
            if not waiting:
                return
            self._settle(waiting, *waiting.popleft())

    def _settle(self, waiting: deque[tuple[NamespaceId, BlockHash]], space_id: NamespaceId, block: BlockHash) -> None:
        space = self._namespaces.known(space_id)
        record = space.index.get(block) if space is not None else None
        if space is None or record is None:
            return
        parent = space.index.get(record.parent)
        cold = parent is None or parent.stamp < 0
        if cold == (record.stamp < 0):
            return
        record.stamp += -COLD if cold else COLD
        for slot, tier in record.copies.places if cold else ():
            member = self._members.at(slot)
            if member is not None:
                member.cold[tier].scores_fell()
        waiting.extend((space_id, follower) for follower in each_follower(record.followers))


def last_used(record: BlockRecord) -> int:
    """Returns the time of the last use of a block, also of an orphan."""
    return record.stamp + COLD if record.stamp < 0 else record.stamp
