"""What tenants have beside what their quotas grant them, for the status and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import TenantStatus, TenantTier, Tier
from kvcluster.core.quotas import over_committed

_WARNING_CHARS = 1_000
"""No more of a text is sent than the wire takes."""


def tenant_statuses(state: CoordinatorState) -> tuple[TenantStatus, ...]:
    """Returns what each tenant has that has a namespace or a quota of its own, by name, of at most
    limits.LISTED_TENANTS. Looks once at what each shard has of each."""
    known = dict.fromkeys((*state.namespaces.owners(), *state.quotas.quotas.tenants))
    used: dict[Tenant, dict[Tier, int]] = {}
    for member in state.members.all():
        for tier, stored in member.stored.items():
            for tenant, nbytes in stored.tenants.items():
                of = used.setdefault(tenant, {})
                of[tier] = of.get(tier, 0) + nbytes
    listed = islice(sorted(known), limits.LISTED_TENANTS)
    return tuple(_status(state, tenant, used.get(tenant, {})) for tenant in listed)


def tenant_status(state: CoordinatorState, tenant: Tenant) -> TenantStatus:
    """Returns what one tenant has, and what it is granted."""
    return _status(state, tenant, {tier: state.members.stored_bytes(tier, tenant) for tier in Tier})


def _status(state: CoordinatorState, tenant: Tenant, used: Mapping[Tier, int]) -> TenantStatus:
    """A tier is left out in which the tenant has nothing, and that its quota does not name."""
    quota = state.quotas.quotas.of(tenant)
    tiers = (TenantTier(tier, used.get(tier, 0), quota.of(tier).floor, quota.of(tier).limit) for tier in Tier)
    calls = quota.requests_per_second
    return TenantStatus(
        tenant,
        tuple(tier for tier in tiers if tier[1:] != (0, None, None)),
        pinned_bytes=state.namespaces.pins.charged.held(tenant),
        most_pinned_bytes=quota.pinned,
        sequences=state.tables.sequences(tenant),
        most_sequences=quota.sequences,
        engines=state.engines.count(tenant),
        most_engines=quota.engines,
        calls_per_1000_s=None if calls is None else int(calls * 1_000),
        bytes_per_s=quota.bytes_per_second,
    )


def quota_warnings(state: CoordinatorState) -> tuple[str, ...]:
    """Returns what an operator should know about the quotas."""
    floors = [tier for tier in Tier if state.quotas.quotas.floors_bytes(tier)]
    sizes = {tier: nbytes for tier in floors if (nbytes := state.members.capacity_bytes(tier))}
    trouble = (state.quotas.trouble,) if state.quotas.trouble else ()
    return tuple(text[:_WARNING_CHARS] for text in (*trouble, *over_committed(state.quotas.quotas, sizes)))
