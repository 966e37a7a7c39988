"""What the quotas (core/quotas.py) mean for the shards and tenants that there are now: how much a tenant may still
store, what it has beyond its limits, and what it keeps as its floor.

A limit is of the whole cluster, in the bytes that tenants are charged for (tenant_floors.py). It is treated as a
tier's size is: a tenant that leaves less than `coordinator.low_free` of its limit free loses its coldest blocks until
`high_free` of it is free, and a store that finds no room below the limit is refused, and has as much evicted for the
next one. So a limit that is lowered takes effect by the same orders as everything else, and neither pinned nor held
nor claimed blocks are lost. Each shard evicts the part of the excess that it has of what the tenant stores: two shards
with orders under way at the same time never evict more than the excess together.

A floor is divided among the shards by the sizes of their tiers: if each judged the tenant by what it has in all, two of
them could evict the same excess twice. Floors that do not fit into limits.FLOORS_SHARE of a tier are scaled down
evenly.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.members import Member, Membership
from kvcluster.core.coordinator.tenant_floors import floors_bytes
from kvcluster.core.coordinator.tickets import TicketBook
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Tier
from kvcluster.core.quotas import NO_QUOTAS, Quotas
from kvcluster.core.tiers import INGEST


class QuotaHolder:
    """The quotas in force. `trouble`: why a newer version of their file is not; "" if there is none."""

    def __init__(self) -> None:
        self.quotas: Quotas = NO_QUOTAS
        self.trouble = ""

    def pinned(self, tenant: Tenant) -> int | None:
        """Returns the most bytes that a tenant may pin; None for no bound but that of all tenants."""
        return self.quotas.of(tenant).pinned

    def sequences(self, tenant: Tenant) -> int | None:
        """As `pinned`, of open sequences."""
        return self.quotas.of(tenant).sequences

    def engines(self, tenant: Tenant) -> int | None:
        """As `pinned`, of registered engines."""
        return self.quotas.of(tenant).engines


class TenantLimits:
    """Applies the quotas of `held` to what `members` have stored and `tickets` let tenants write."""

    def __init__(self, config: CoordinatorConfig, held: QuotaHolder, members: Membership, tickets: TicketBook) -> None:
        self._low = config.low_free
        self._high = config.high_free
        self._share = config.tenant_floor
        self._held = held
        self._members = members
        self._tickets = tickets
        self._lacking: dict[Tenant, int] = {}  # bytes of stores that were refused, until as much is evicted

    def limit(self, tenant: Tenant, tier: Tier) -> int | None:
        """Returns the most bytes that a tenant may have in a tier; None for no limit."""
        return self._held.quotas.of(tenant).of(tier).limit

    def room(self, tenant: Tenant, tier: Tier) -> int | None:
        """Returns the bytes that a tenant may store more in a tier, with what it is writing counted as stored; never
        negative. None for no limit."""
        limit = self.limit(tenant, tier)
        return None if limit is None else max(0, limit - self._coming(tenant, tier))

    def refused(self, tenant: Tenant, nbytes: int) -> None:
        """Notes that stores of a tenant lacked so many bytes below its limit: as much is to be evicted."""
        most = self.limit(tenant, INGEST) or 0
        self._lacking[tenant] = min(most, max(self._lacking.get(tenant, 0), nbytes))

    def is_beyond(self, tenant: Tenant) -> bool:
        """Whether a tenant is to lose something in any tier because of its limit."""
        return any(self._beyond(tenant, tier) for tier in self._held.quotas.of(tenant).tiers)

    def excess(self, member: Member, tier: Tier) -> dict[Tenant, int]:
        """Returns the bytes that each tenant has beyond its limit, as far as this shard is to evict them."""
        out: dict[Tenant, int] = {}
        for tenant, here in member.stored[tier].tenants.items():
            beyond = self._beyond(tenant, tier)
            if beyond:
                out[tenant] = -(-beyond * here // self._members.stored_bytes(tier, tenant))
        return out

    def ordered(self, tenant: Tenant, tier: Tier, nbytes: int) -> None:
        """Notes that so many bytes of a tenant are to leave a tier by an order."""
        if tier is INGEST and tenant in self._lacking:
            left = self._lacking.pop(tenant) - nbytes
            if left > 0:
                self._lacking[tenant] = left

    def floors(self, member: Member, tier: Tier, tenants: Mapping[Tenant, object]) -> dict[Tenant, int]:
        """Returns the floor of each of these tenants in that tier of that shard. `coordinator.tenant_floor` of the tier
        is divided by weight, as far as floors of the quotas leave anything of it: evenly without quotas."""
        use, stored = member.info.use(tier), member.stored[tier].tenants
        granted = {tenant: self._held.quotas.of(tenant).of(tier) for tenant in tenants}
        in_all = self._members.capacity_bytes(tier)
        floors = {
            tenant: quota.floor * use.capacity_bytes // max(1, in_all) if quota.floor is not None else 0
            for tenant, quota in granted.items()
        }
        named = sum(floors.values())
        most = floors_bytes(limits.FLOORS_SHARE, use, stored)
        if named > most:
            floors = {tenant: floor * most // named for tenant, floor in floors.items()}
        left = max(0, floors_bytes(self._share, use, stored) - sum(floors.values()))
        weights = sum(quota.parts for quota in granted.values())
        if weights:
            for tenant, quota in granted.items():
                floors[tenant] += int(left * quota.parts / weights)
        return floors

    def _coming(self, tenant: Tenant, tier: Tier) -> int:
        """Returns what a tenant has in a tier, and will have once it has written what it was granted."""
        writing = self._tickets.writing_bytes(tenant) if tier is INGEST else 0
        return self._members.stored_bytes(tier, tenant) + writing

    def _beyond(self, tenant: Tenant, tier: Tier) -> int:
        """Returns the bytes that a tenant is to lose in a tier, on all shards together."""
        limit = self.limit(tenant, tier)
        if limit is None:
            return 0
        coming = self._coming(tenant, tier)
        beyond = coming - limit + (self._lacking.get(tenant, 0) if tier is INGEST else 0)
        if coming > limit - int(self._low * limit):
            beyond = max(beyond, coming - limit + int(self._high * limit))
        return min(max(0, beyond), self._members.stored_bytes(tier, tenant))
