"""Floors: how much of each tenant's cache one tier of one shard keeps, whatever other tenants store.

Where there are several tenants, a part of the tier's bytes (`coordinator.tenant_floor`) is divided evenly among those
that have blocks there, unless a quota gives one another floor or weight (tenant_limits.py). What a tenant has beyond
its floor may be evicted for any tenant, in the policy's order. What it has below its floor is evicted only for its own
waiting reservations. All floors together are less than the tier, so while there are blocks and no room, some tenant has
more than its floor.

A page on several shards counts once, on the shard that joined first: the others are replicas that the policy made. They
are charged to no tenant, and are evicted first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvcluster.core.coordinator.replica_sets import Replica, ReplicaSet
from kvcluster.core.groups import Part
from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.core.messages import TierUse


class StoredBytes:
    """The bytes that tenants are charged for on one tier of one shard."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, tuple[Tenant, int]] = {}
        self._tenants: dict[Tenant, int] = {}

    @property
    def tenants(self) -> Mapping[Tenant, int]:
        """The bytes of each tenant that has any."""
        return self._tenants

    def add(self, space: NamespaceId, tenant: Tenant, nbytes: int) -> None:
        """Charges a tenant for so many bytes more in one of its namespaces; for less if negative."""
        held = self._spaces.get(space, (tenant, 0))[1] + nbytes
        total = self._tenants.get(tenant, 0) + nbytes
        assert 0 <= held <= total, "bytes were charged wrongly"
        self._set(space, tenant, held, total)

    def forget(self, space: NamespaceId) -> None:
        """Forgets a namespace, of which nothing is stored any more."""
        tenant, held = self._spaces.get(space, (Tenant(""), 0))
        if held:
            self._set(space, tenant, 0, self._tenants[tenant] - held)

    def _set(self, space: NamespaceId, tenant: Tenant, held: int, total: int) -> None:
        if held:
            self._spaces[space] = tenant, held
        else:
            self._spaces.pop(space, None)
        if total:
            self._tenants[tenant] = total
        else:
            self._tenants.pop(tenant, None)


def floors_bytes(share: float, use: TierUse, stored: Mapping[Tenant, int]) -> int:
    """Returns what all floors of a tier have together, in the bytes that tenants are charged for: this share of what
    would fill the tier. Pages take more of a tier than they have bytes, where it rounds them up to its extents."""
    taken = use.capacity_bytes - use.free_bytes - use.writing_bytes
    charged_bytes = sum(stored.values())
    return int(share * use.capacity_bytes * min(1.0, charged_bytes / taken if taken > 0 else 1.0))


class TenantBudget(Protocol):
    """What one order may take of each tenant. `charged_only`: only blocks that their tenants are charged for."""

    @property
    def charged_only(self) -> bool: ...

    def closed(self, tenant: Tenant) -> bool:
        """Whether nothing more of this tenant may be taken."""

    def take(self, tenant: Tenant, nbytes: int) -> None:
        """Counts what is to be taken; what was counted and stays is given back as a negative amount."""


class TenantExcess:
    """What one order is to take of tenants beyond their limits: of each so many bytes, and nothing of all others. To
    evict a replica brings its tenant no nearer to its limit."""

    def __init__(self, excess: Mapping[Tenant, int]) -> None:
        self.charged_only = True
        self.left = dict(excess)

    def closed(self, tenant: Tenant) -> bool:
        return self.left.get(tenant, 0) <= 0

    def take(self, tenant: Tenant, nbytes: int) -> None:
        self.left[tenant] = self.left.get(tenant, 0) - nbytes


class TenantFloors:
    """What one order may evict of each tenant, so that none falls below its floor for another."""

    charged_only = False

    def __init__(
        self, stored: Mapping[Tenant, int], floors: Mapping[Tenant, int], pressing: Mapping[Tenant, int]
    ) -> None:
        """`floors`: of each tenant that has anything. `pressing`: what the tenants' own waiting reservations lack."""
        self._left = {
            tenant: max(0, held - floors[tenant]) + pressing.get(tenant, 0) for tenant, held in stored.items()
        }

    def closed(self, tenant: Tenant) -> bool:
        """Whether nothing more of this tenant may be evicted."""
        return self._left.get(tenant, 0) <= 0

    def take(self, tenant: Tenant, nbytes: int) -> None:
        """Counts what is to be evicted; what was counted and stays is given back as a negative amount."""
        self._left[tenant] = self._left.get(tenant, 0) - nbytes


def charged(copies: ReplicaSet, group: int, part: Part) -> tuple[Replica, ...]:
    """Returns the copies of this part that its tenant is charged for: those in the tiers of the shard that joined
    first of those that have it."""
    slots = copies.slots
    for slot in sorted(slots) if len(slots) > 1 else slots:
        at = end = copies.find(slot, group, part)
        while end < len(copies.entries) and copies.entries[end][:3] == (slot, group, part):
            end += 1
        if end > at:
            return copies.entries[at:end]
    return ()
