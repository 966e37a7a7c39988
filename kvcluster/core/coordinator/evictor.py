"""Eviction: turns watermarks and pressure into eviction orders, and spares promised blocks.

A tier is relieved if its free bytes fall below `low_free`, until `high_free` is free, or if reservations wait for room:
the lowest tier of a shard by eviction, and those above it by demotion (tiering.py), which asks here for its victims. A
shard has one order at a time; the next is computed from its report when the shard has carried it out. Held blocks (a
load was promised them a moment ago) and pinned ones (a user asked) are spared, but a hold yields where a tenant that
waits for room has less than its floor and the holder has more. Blocks that open sequences claim
(block_tables.py), and private ones in their grace (eraser.py), are spared from eviction, and demoted only if there is
room below. The eviction queue (eviction_queue.py) orders the others by the score of a policy. The last copy of a block
that others follow on other shards or tiers is evicted only if nothing else can be: without it no lookup reaches them
(report_handler.py). No tenant's blocks are evicted below its floor for another tenant (tenant_floors.py). What tenants
have beyond the limits of their quotas (tenant_limits.py) is the first that an order takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.coordinator.index import BlockRecord, each_follower
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.coordinator.tenant_floors import TenantBudget, TenantExcess, TenantFloors
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import EvictOrder, Tier

FOLLOWERS = 16
"""The most followers of one block that are examined. If it has more, one of them is assumed to lie elsewhere."""

BATCH = 64
"""Victims taken from the queue at a time, until their bytes suffice."""


class Evictor:
    """Selects victims, gives eviction orders, and keeps the pins of users."""

    def __init__(self, config: CoordinatorConfig, state: CoordinatorState) -> None:
        self._low = config.low_free
        self._high = config.high_free
        self._state = state

    def order(self, member: Member, tier: Tier, pressure_bytes: int, pressing: Mapping[Tenant, int], now: int) -> None:
        """Gives this shard its next order, unless nothing has to be evicted, or nothing can be. `pressing`: what the
        waiting reservations of each tenant lack."""

        def keeps(record: BlockRecord) -> bool:
            return self._leads_on(record, (member.slot, tier)) or self.claimed(record)

        beyond = self.victims_beyond_limits(member, tier, now, keeps, self.claimed)
        victims = beyond + self._victims_beside(beyond, member, tier, pressure_bytes, pressing, now, keeps)
        blocks = tuple((record.space, record.hash) for record in victims)
        if blocks:
            member.orders.give(lambda number: EvictOrder(number, blocks, tier))

    def _victims_beside(
        self,
        leaving: Sequence[BlockRecord],
        member: Member,
        tier: Tier,
        pressure_bytes: int,
        pressing: Mapping[Tenant, int],
        now: int,
        keeps: Callable[[BlockRecord], bool],
    ) -> list[BlockRecord]:
        """Returns the victims of an order that takes those `leaving` anyway."""
        lacking = self._lacking(member, tier, pressing)
        others = {tenant: nbytes for tenant, nbytes in pressing.items() if tenant not in lacking}
        floors = self._floors(member, tier, pressing, own=others, leaving=leaving)
        victims = self.victims(member, tier, pressure_bytes, now, keeps, floors, leaving=leaving)
        if not victims:  # blocks elsewhere follow all that may be evicted: those become orphans
            victims = self.victims(member, tier, pressure_bytes, now, self.claimed, floors, leaving=leaving)
        if not victims and lacking:
            victims = self.victims_for_floors(
                member, tier, pressure_bytes, pressing, now, self.claimed, leaving=leaving
            )
        if not victims and lacking:  # tenants below their floors give up blocks of their own
            floors = self._floors(member, tier, pressing, own=pressing, leaving=leaving)
            victims = self.victims(member, tier, pressure_bytes, now, self.claimed, floors, leaving=leaving)
        return victims

    def victims_beyond_limits(
        self, member: Member, tier: Tier, now: int, *keeps: Callable[[BlockRecord], bool]
    ) -> list[BlockRecord]:
        """As `victims`, of what tenants have there beyond the limits of their quotas, whatever is free. Of their
        replicas, which are charged to no tenant, it takes some only if no other block can be taken, since a block that
        they follow stays as long as they do. If the first of `keeps` leaves nothing to take, the next one holds."""
        excess = self._state.limits.excess(member, tier)
        if not excess:
            return []
        budget, wanted, most = TenantExcess(excess), sum(excess.values()), limits.EVICTIONS_PER_ORDER
        victims: list[BlockRecord] = []
        for kept, budget.charged_only in product(keeps, (True, False)):
            victims = victims or self._take(member, tier, wanted, most, now, kept, budget)
        for tenant, nbytes in excess.items():
            self._state.limits.ordered(tenant, tier, nbytes - budget.left[tenant])
        return victims

    def victims_for_floors(
        self,
        member: Member,
        tier: Tier,
        pressure_bytes: int,
        pressing: Mapping[Tenant, int],
        now: int,
        keeps: Callable[[BlockRecord], bool],
        *,
        leaving: Sequence[BlockRecord] = (),
    ) -> list[BlockRecord]:
        """As `victims`, for those of the tenants `pressing` that have less than their floors: of what others have
        beyond theirs, in spite of holds. Returns none if there is no such tenant."""
        wanted = min(pressure_bytes, sum(self._lacking(member, tier, pressing).values()))
        if not wanted:
            return []
        floors = self._floors(member, tier, pressing, own={}, leaving=leaving)
        return self.victims(member, tier, wanted, now, keeps, floors, despite_holds=True, leaving=leaving)

    def claimed(self, record: BlockRecord) -> bool:
        """Whether an open sequence claims the block, or, as it is private and in its grace, may still claim it. Then
        the chain before it is claimed too."""
        name = record.space, record.hash
        return self._state.tables.claims(*name) > 0 or self._state.eraser.in_grace(name)

    def victims(
        self,
        member: Member,
        tier: Tier,
        pressure_bytes: int,
        now: int,
        keeps: Callable[[BlockRecord], bool],
        floors: TenantFloors | None = None,
        *,
        despite_holds: bool = False,
        leaving: Sequence[BlockRecord] = (),
    ) -> list[BlockRecord]:
        """Takes the coldest blocks of that tier off its queue and returns them: about enough to free the bytes that it
        lacks for its watermark or for waiting reservations (`pressure_bytes`), beside those that are `leaving` by the
        same order. Pinned blocks are spared, held ones unless `despite_holds`, those that `keeps` names, and what lies
        below the `floors` of tenants."""
        freed = sum(self._state.namespaces.bytes_on(record, member.slot, tier) for record in leaving)
        wanted, most = self._wanted(member, tier, pressure_bytes, freed), limits.EVICTIONS_PER_ORDER - len(leaving)
        return self._take(member, tier, wanted, most, now, keeps, floors, despite_holds=despite_holds)

    def _take(
        self,
        member: Member,
        tier: Tier,
        wanted: int,
        most: int,
        now: int,
        keeps: Callable[[BlockRecord], bool],
        budget: TenantBudget | None,
        *,
        despite_holds: bool = False,
    ) -> list[BlockRecord]:
        """As `victims`, at most so many, to free `wanted` bytes, and of each tenant no more than its `budget`."""
        namespaces, slot = self._state.namespaces, member.slot

        def closed(space_id: NamespaceId) -> bool:
            space = namespaces.known(space_id)
            return budget is not None and space is not None and budget.closed(space.tenant)

        def spares(record: BlockRecord) -> bool:
            if self._spares(record, now, despite_holds) or keeps(record):
                return True
            if budget is not None:
                nbytes = namespaces.charged_bytes(record, slot, tier)
                if budget.charged_only and not nbytes:
                    return True
                budget.take(namespaces.tenant(record.space), nbytes)
            return False

        cold, victims, found = member.cold[tier], list[BlockRecord](), 0
        while found < wanted and len(victims) < most:
            batch = cold.pop_coldest(min(BATCH, most - len(victims)), spares, now, closed)
            for at, record in enumerate(batch):
                if found >= wanted:  # the batch held more than was wanted: put the rest back
                    for spare in batch[at:]:
                        cold.push(spare)
                        if budget is not None:
                            nbytes = namespaces.charged_bytes(spare, slot, tier)
                            budget.take(namespaces.tenant(spare.space), -nbytes)
                    break
                victims.append(record)
                found += namespaces.bytes_on(record, slot, tier)
            if not batch or cold.cut_short:
                break
        return victims

    def settle(self, member: Member, order: EvictOrder) -> None:
        """Handles the end of an order, or of its shard: the named blocks that are still recorded are queued again."""
        for space_id, block in order.blocks:
            record = self._state.namespaces.record(space_id, block)
            if record is not None and record.copies.on(member.slot, order.tier):
                member.cold[order.tier].push(record)

    def pin(self, space: CoordinatorNamespace, blocks: Sequence[BlockHash], until: int, now: int, copies: int) -> int:
        """Pins the leading blocks that are cached and fit the tenant's share of all addressable bytes, charged as if
        unencoded and on so many shards. Returns the number pinned."""
        pins = self._state.namespaces.pins
        pins.forget_ended(now, limits.BLOCKS_PER_CALL)
        pins.charged.most = self._state.members.addressable_bytes
        for count, block in enumerate(blocks):
            record = space.index.get(block)
            if record is None:
                return count
            nbytes = self._state.namespaces.bytes_on(record, raw=True)
            nbytes = max(nbytes, nbytes * copies // len(record.copies.slots))
            if not space.pinned.pin(block, until, nbytes):
                return count
        return len(blocks)

    def unpin(self, space: CoordinatorNamespace, blocks: Sequence[BlockHash]) -> int:
        """Returns the number of these blocks that were pinned."""
        return sum(map(space.pinned.discard, blocks))

    def _floors(
        self,
        member: Member,
        tier: Tier,
        pressing: Mapping[Tenant, int],
        *,
        own: Mapping[Tenant, int],
        leaving: Sequence[BlockRecord],
    ) -> TenantFloors | None:
        """Returns what may be evicted of each tenant beside those `leaving`; None if one has the tier for itself, and
        no other is among those `pressing`. `own`: what tenants may evict of what they have themselves below their
        floors."""
        stored = member.stored[tier].tenants
        if len({**stored, **pressing}) < 2:
            return None
        floors = TenantFloors(stored, self._state.limits.floors(member, tier, stored), own)
        namespaces = self._state.namespaces
        for record in leaving:
            floors.take(namespaces.tenant(record.space), namespaces.charged_bytes(record, member.slot, tier))
        return floors

    def _lacking(self, member: Member, tier: Tier, pressing: Mapping[Tenant, int]) -> dict[Tenant, int]:
        """Returns how much more each of these tenants may store below its floor, if any, up to what it lacks."""
        stored = member.stored[tier].tenants
        tenants = {**stored, **pressing}
        if not pressing or len(tenants) < 2:
            return {}
        floors = self._state.limits.floors(member, tier, tenants)
        below = {tenant: min(nbytes, floors[tenant] - stored.get(tenant, 0)) for tenant, nbytes in pressing.items()}
        return {tenant: nbytes for tenant, nbytes in below.items() if nbytes > 0}

    def _wanted(self, member: Member, tier: Tier, pressure_bytes: int, freed: int) -> int:
        """Returns the bytes to free beside so many that are `freed` anyway."""
        use = member.info.use(tier)
        free_bytes, pressure_bytes = use.free_bytes + freed, max(0, pressure_bytes - freed)
        if free_bytes < self._low * use.capacity_bytes:
            return max(pressure_bytes, int(self._high * use.capacity_bytes) - free_bytes)
        return pressure_bytes

    def _spares(self, record: BlockRecord, now: int, despite_holds: bool) -> bool:
        """Whether the block is pinned, or held. Then the chain before it is spared too, or is useless without it."""
        space = self._state.namespaces.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        return space.pinned.until(record.hash) > now or (record.held_until > now and not despite_holds)

    def _leads_on(self, record: BlockRecord, here: tuple[int, Tier]) -> bool:
        """Whether blocks elsewhere follow this leaf of the queue of `here`, and a lookup reaches them only by its copy
        there. Followers that lie `here` alone do not count: they are being evicted."""
        if record.followers is None or record.stamp < 0:
            return False
        elsewhere = {copy[1:3] for copy in record.copies.entries if (copy.slot, copy.tier) != here}
        if all(copy[1:3] in elsewhere for copy in record.copies.entries if (copy.slot, copy.tier) == here):
            return False
        get = self._state.namespaces.record
        some = islice(each_follower(record.followers), FOLLOWERS)
        found = [follower for block in some if (follower := get(record.space, block)) is not None]
        return len(found) == FOLLOWERS or any(list(follower.copies.places) != [here] for follower in found)
