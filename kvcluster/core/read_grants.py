"""Whose KV an attach is about: the caller's own, or that of a tenant who is granted to it (docs/adr/0103).

A grant lets a tenant read the KV of another, its owner. Everything that is read is charged to the reader; all that is
stored, and the namespaces themselves, to the owner. So a reader creates none: what it attaches to must be there.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Attach, AttachShard, Refused, RefusedKind, Request
from kvcluster.core.spec import KVSpec


def may_read(tenant: Tenant, reads: Collection[Tenant], owner: Tenant, spec: KVSpec) -> bool:
    """Whether a tenant, who may also read the KV of the tenants `reads`, may read this namespace of an owner. The id of
    a namespace is no secret: it can be computed from the spec and the tenant, for private pages too."""
    return owner == tenant or (owner in reads and not spec.private)


def owner_of(request: Request[Attach] | Request[AttachShard]) -> Tenant | Refused:
    """Returns the tenant whose KV this attach is about, or why the caller may not read that. Tenants that do not exist
    are refused in the same words as those that are not granted."""
    owner, spec = request.question.owner, request.question.spec
    if owner is None or owner == request.tenant:
        return request.tenant
    if owner not in request.reads:
        return Refused(
            RefusedKind.BAD,
            f"this credential may not read the KV of tenant {owner!r}: a line `grant  {request.tenant}  reads  {owner}`"
            " in the token file of every server permits it",
        )
    if spec.private:
        return Refused(RefusedKind.BAD, "the private pages of a sequence are read by their owner alone")
    return owner
