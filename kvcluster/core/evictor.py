"""Who goes when room is wanted: turns watermarks and pressure into eviction orders, and spares what is promised.

A tier is to be relieved when its free bytes fall under `low_free`, until `high_free` is free, or when reservations
wait for room: by eviction out of the lowest tier of a shard, and by demotion out of those above it (tiering.py), which
asks here for its victims. One order a shard is under way at a time; the next is worked out when the shard has carried
it out, from what it then reports. Held blocks (a load was promised them a moment ago) and pinned ones (a user asked)
are spared. Which of the rest goes first the eviction queue says (eviction_queue.py), by the score of a policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member
from kvcluster.core.messages import EvictOrder, Tier
from kvcluster.core.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.tiers import ADDRESSABLE

BATCH = 64
"""Victims looked for at a time, until their bytes suffice."""


class Evictor:
    """Finds victims, works out eviction orders, and keeps the pins of users."""

    def __init__(self, config: CoordinatorConfig, directory: NamespaceTable) -> None:
        self._low = config.low_free
        self._high = config.high_free
        self._pinned_share = config.pinned_share
        self._directory = directory

    def order(self, member: Member, tier: Tier, pressure_bytes: int, now: int) -> None:
        """Gives this shard its next order, unless nothing is to go, or nothing can."""
        blocks = tuple((record.space, record.hash) for record in self.victims(member, tier, pressure_bytes, now))
        if blocks:
            member.orders.give(lambda number: EvictOrder(number, blocks, tier))

    def victims(self, member: Member, tier: Tier, pressure_bytes: int, now: int) -> list[BlockRecord]:
        """The coldest blocks of that tier, in which so many bytes are waited for, taken off its queue: about as many as
        it is to have free."""

        def spares(record: BlockRecord) -> bool:
            return self._spares(record, now)

        wanted = self._wanted(member, tier, pressure_bytes)
        cold, victims, found = member.cold[tier], list[BlockRecord](), 0
        while found < wanted and len(victims) < limits.EVICTIONS_PER_ORDER:
            batch = cold.coldest(min(BATCH, limits.EVICTIONS_PER_ORDER - len(victims)), spares, now)
            for at, record in enumerate(batch):
                if found >= wanted:  # the batch held more than was wanted: those stay
                    for spare in batch[at:]:
                        cold.push(spare)
                    break
                victims.append(record)
                found += self._directory.bytes_on(record, member.slot, tier)
            if not batch or cold.cut_short:
                break
        return victims

    def settle(self, member: Member, order: EvictOrder) -> None:
        """The order has ended, or its shard is gone: what it named and is still recorded is queued again."""
        for space_id, block in order.blocks:
            record = self._directory.record(space_id, block)
            if record is not None and record.copies.on(member.slot, order.tier):
                member.cold[order.tier].push(record)

    def pin(
        self, space: CoordinatorNamespace, blocks: Sequence[BlockHash], until: int, members: Sequence[Member], now: int
    ) -> int:
        """Spares the leading blocks that are cached and fit the share that pins may take; how many."""
        # Where most of what is pinned stays.
        capacity = sum(member.info.use(tier).capacity_bytes for member in members for tier in ADDRESSABLE)
        room = int(self._pinned_share * capacity) - self._pinned_bytes(now)
        count = 0
        for block in blocks:
            record = space.index.get(block)
            if record is None:
                break
            if block not in space.pinned:
                room -= self._directory.bytes_on(record)
                if room < 0:
                    break
            space.pinned[block] = until
            count += 1
        return count

    def unpin(self, space: CoordinatorNamespace, blocks: Sequence[BlockHash]) -> int:
        """How many of these were pinned."""
        return sum(space.pinned.pop(block, None) is not None for block in blocks)

    def _wanted(self, member: Member, tier: Tier, pressure_bytes: int) -> int:
        use = member.info.use(tier)
        if use.free_bytes < self._low * use.capacity_bytes:
            return max(pressure_bytes, int(self._high * use.capacity_bytes) - use.free_bytes)
        return pressure_bytes

    def _spares(self, record: BlockRecord, now: int) -> bool:
        """Is it held or pinned? Then its chain before it is so too, or of no use without it."""
        space = self._directory.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        return record.held_until > now or space.pinned.get(record.hash, 0) > now

    def _pinned_bytes(self, now: int) -> int:
        """Bytes pinned at present; forgets pins that have run out."""
        total = 0
        for space in self._directory:
            for block, until in list(space.pinned.items()):
                record = space.index.get(block)
                if until <= now or record is None:
                    del space.pinned[block]
                else:
                    total += self._directory.bytes_on(record)
        return total
