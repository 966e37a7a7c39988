"""Judges what coordinators do with quotas: which stores they grant, what their orders take, and what is left at rest.

It counts for itself what tenants have, and what their tickets let them write. A coordinator is judged by the quotas
that it was told last, and at rest by those that are in force.
"""

from __future__ import annotations

from typing import Protocol

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.members import Member
from kvcluster.core.ids import Attempt, Tenant
from kvcluster.core.messages import (
    Decision,
    EvictOrder,
    PinBlocks,
    PrepareStore,
    Request,
    SetQuotas,
    StoreGrant,
    Tier,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.quotas import NO_QUOTAS, Quotas
from kvcluster.core.tiers import INGEST
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.evictions import held_bytes
from tests.sim.oracle import namespace_of
from tests.sim.surroundings import Setting
from tests.sim.violation import require


class ClusterQuotas(Setting, Protocol):
    """`quotas` are those in force, and `coordinator` is the newest one."""

    quotas: Quotas
    coordinator: CoordinatorProcess


class QuotaOracle:
    """Judges the coordinators of one world."""

    def __init__(self, world: ClusterQuotas) -> None:
        self._world = world
        self._told: dict[str, Quotas] = {}
        self._refused: dict[tuple[str, Tenant], int] = {}  # the most bytes that a store lacked
        self._pinned: dict[tuple[str, Tenant], int] = {}
        self._granted: dict[tuple[str, Tenant, Attempt], None] = {}

    def told(self, c: CoordinatorProcess) -> Quotas:
        """Returns the quotas that this coordinator was told last."""
        return self._told.get(c.name, NO_QUOTAS)

    def stepped(self, c: CoordinatorProcess, message: object, reply: object) -> None:
        """Judges a step: a store that was granted keeps its tenant within its limit, and a pin within its quota."""
        if isinstance(message, SetQuotas):
            self._told[c.name] = message.quotas
        elif isinstance(message, Request) and isinstance(message.question, PrepareStore):
            self._store_prepared(c, message, reply)
        elif isinstance(message, Request) and isinstance(message.question, PinBlocks):
            self._pins_taken(c, message.tenant)

    def _store_prepared(self, c: CoordinatorProcess, request: Request[PrepareStore], grant: object) -> None:
        tenant, name = request.tenant, (c.name, request.tenant, request.question.attempt)
        if not isinstance(grant, StoreGrant):
            return
        writes = any(run.decision is Decision.WRITE for run in grant.runs)
        first = writes and name not in self._granted  # a repeat gets the same answer, whatever the limit is by then
        if writes:
            self._granted[name] = None
        limit = self.told(c).of(tenant).of(INGEST).limit
        if limit is None:
            return
        space = c.core.state.namespaces.known(namespace_of(request))
        assert space is not None
        block_bytes = sum(space.page_bytes(group, part) for group, part in request.question.parts)
        full = (run for run in grant.runs if run.miss is not None and run.miss.reason is MissReason.FULL)
        lacked = sum(run.count for run in full) * block_bytes
        self._refused[c.name, tenant] = max(lacked, self._refused.get((c.name, tenant), 0))
        if first:
            coming = _stored(c.core, tenant, INGEST) + _writing(c.core, tenant)
            require(coming <= limit, f"{tenant} may store {coming} bytes, beyond its limit of {limit}")

    def may_lose(self, c: CoordinatorProcess, member: Member, tier: Tier, tenant: Tenant) -> int:
        """Returns the bytes that an order may take of a tenant on this shard because of its limit."""
        limit = self.told(c).of(tenant).of(tier).limit
        stored = _stored(c.core, tenant, tier)
        if limit is None or not stored:
            return 0
        config = self._world.scenario.config.coordinator
        coming = stored + (_promised(c.core, tenant) if tier is INGEST else 0)
        beyond = coming - limit
        if tier is INGEST:
            beyond += min(limit, self._refused.get((c.name, tenant), 0))
        if coming > limit - int(config.low_free * limit):
            beyond = max(beyond, coming - limit + int(config.high_free * limit))
        here = held_bytes(c.core, member, tier).get(tenant, 0)
        return min(here, -(-max(0, beyond) * here // stored))

    def ordered(self, c: CoordinatorProcess, member: Member, order: EvictOrder, pressing: object) -> None:
        """While there is room, an order takes blocks of tenants beyond their limits alone."""
        use = member.info.use(order.tier)
        low_bytes = self._world.scenario.config.coordinator.low_free * use.capacity_bytes
        spaces = [space for space_id, _ in order.blocks if (space := c.core.state.namespaces.known(space_id))]
        if pressing or len(member.info.tiers) > 1 or use.free_bytes < low_bytes:
            return
        if any(space.spec.private for space in spaces):
            return  # it erases what no sequence claims any more
        for tenant in dict.fromkeys(space.tenant for space in spaces):
            within = not self.may_lose(c, member, order.tier, tenant)
            require(not within, f"an order takes blocks of {tenant}, which is within its limit, while there is room")

    def at_rest(self) -> None:
        """No tenant has more than its limit in a tier, unless all that could be evicted of it is pinned or held."""
        c = self._world.coordinator
        for tenant, quota in self._world.quotas.tenants.items():
            for tier in Tier:
                limit, stored = quota.of(tier).limit, _stored(c.core, tenant, tier)
                if limit is not None and stored > limit:
                    spared = not any(_has_victim(c, member, tier, tenant) for member in c.core.state.members.all())
                    require(spared, f"{tenant} has {stored} bytes of {tier.name}, and its limit is {limit}")

    def _pins_taken(self, c: CoordinatorProcess, tenant: Tenant) -> None:
        pinned = sum(space.pinned.nbytes for space in c.core.state.namespaces.of(tenant))
        before = self._pinned.get((c.name, tenant), 0)
        self._pinned[c.name, tenant] = pinned
        most = self.told(c).of(tenant).pinned
        fits = most is None or pinned <= most or pinned <= before
        require(fits, f"{tenant} has pinned {pinned} bytes, and its quota is {most}")


def _stored(core: Coordinator, tenant: Tenant, tier: Tier) -> int:
    return sum(held_bytes(core, member, tier).get(tenant, 0) for member in core.state.members.all())


def _writing(core: Coordinator, tenant: Tenant) -> int:
    """Returns the bytes of the pages that tickets of a tenant name, and that no shard has reported."""
    nbytes = 0
    for ticket in core.state.tickets.all():
        space = core.state.namespaces.known(ticket.space)
        if ticket.tenant == tenant and space is not None:
            for block in ticket.writes:
                for group, part in ticket.places:
                    if core.state.tickets.writers.writer(space.id, block, (group, part)) == ticket.attempt:
                        nbytes += space.page_bytes(group, part)
    return nbytes


def _promised(core: Coordinator, tenant: Tenant) -> int:
    """Returns the bytes of all pages that tickets of a tenant name. A page that two of them name counts twice: both may
    write it, as far as a coordinator knows."""
    nbytes = 0
    for ticket in core.state.tickets.all():
        space = core.state.namespaces.known(ticket.space)
        if ticket.tenant == tenant and space is not None:
            nbytes += len(ticket.writes) * sum(space.page_bytes(group, part) for group, part in ticket.places)
    return nbytes


def _has_victim(c: CoordinatorProcess, member: Member, tier: Tier, tenant: Tenant) -> bool:
    """Whether an order could take a block of a tenant there: a block that none follows, and that is not promised."""
    if not held_bytes(c.core, member, tier).get(tenant, 0):
        return False
    for space in c.core.state.namespaces.of(tenant):
        here = [record for record in space.index if record.copies.on(member.slot, tier)]
        followed = {record.parent for record in here}
        for record in here:
            promised = record.held_until > c.now() or space.pinned.until(record.hash) > c.now()
            if record.hash not in followed and not promised:
                return True
    return False
