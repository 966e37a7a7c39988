"""What tenants have beside what their quotas grant them, for the status and for metrics."""

from __future__ import annotations

from itertools import islice

from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import TenantStatus, TenantTier, Tier
from kvcluster.core.quotas import over_committed

_WARNING_CHARS = 1_000
"""No more of a text is sent than the wire takes."""


def tenants_of(state: CoordinatorState) -> list[Tenant]:
    """Returns the tenants that have a namespace or a quota of their own, by name, at most limits.LISTED_TENANTS."""
    known = dict.fromkeys((*(space.tenant for space in state.namespaces), *state.quotas.quotas.tenants))
    return list(islice(sorted(known), limits.LISTED_TENANTS))


def tenant_status(state: CoordinatorState, tenant: Tenant) -> TenantStatus:
    """Returns what a tenant has, and what it is granted. A tier is left out in which it has nothing, and that its quota
    does not name."""
    quota = state.quotas.quotas.of(tenant)
    tiers = (
        TenantTier(tier, state.members.stored_bytes(tier, tenant), quota.of(tier).floor, quota.of(tier).limit)
        for tier in Tier
    )
    calls = quota.requests_per_second
    return TenantStatus(
        tenant,
        tuple(tier for tier in tiers if tier[1:] != (0, None, None)),
        pinned_bytes=state.namespaces.pins.charged.held(tenant),
        most_pinned_bytes=quota.pinned,
        sequences=state.tables.held(tenant)[0],
        most_sequences=quota.sequences,
        engines=state.engines.count(tenant),
        most_engines=quota.engines,
        calls_per_1000_s=None if calls is None else int(calls * 1_000),
        bytes_per_s=quota.bytes_per_second,
    )


def quota_warnings(state: CoordinatorState) -> tuple[str, ...]:
    """Returns what an operator should know about the quotas."""
    sizes = {tier: nbytes for tier in Tier if (nbytes := state.members.capacity_bytes(tier))}
    trouble = (state.quotas.trouble,) if state.quotas.trouble else ()
    return tuple(text[:_WARNING_CHARS] for text in (*trouble, *over_committed(state.quotas.quotas, sizes)))
