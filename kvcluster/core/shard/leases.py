"""Pin leases: which attempt may read or write which pages, until when, on the shard's own clock.

A lease belongs to one attempt of one holder. The holder keeps it alive by moving bytes or by Renew. When the lease
expires it is *revoked*: it can no longer be renewed or committed, and the shell's transfer under it is ordered to
stop (Revoke). Its pages are freed only when that transfer has stopped and the shell has confirmed it (Unpin, Abort):
time alone never frees a page that a transfer might still be writing or reading.

All leases of a book have the same duration, so that the order of renewal is the order of expiry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, HOLDER_BYTES, Attempt, Epoch, Holder, ShardId, Tenant
from kvcluster.core.shard.page import Page
from kvcluster.core.tenant_shares import HolderShares, Owner, Shares


class LeaseKind(Enum):
    """The purpose of a lease."""

    READ = "read"
    WRITE = "write"


class Lease:
    """The pages that an attempt reads or writes. `pages` has one entry per requested page, None if it was refused."""

    __slots__ = ("attempt", "expires_at", "kind", "nbytes", "pages", "tenant")

    def __init__(
        self, attempt: Attempt, kind: LeaseKind, pages: list[Page | None], expires_at: int, tenant: Tenant
    ) -> None:
        writes = kind is LeaseKind.WRITE and tenant != CLUSTER
        self.nbytes = sum(page.nbytes for page in pages if page is not None) if writes else 0
        self.tenant = tenant
        self.attempt = attempt
        self.kind = kind
        self.pages = pages
        self.expires_at = expires_at


class OwnAttempts:
    """Draws attempts for the leases that a shard incarnation takes itself, as a holder like any other."""

    def __init__(self, shard: ShardId, epoch: Epoch) -> None:
        self._holder = Holder(hashlib.sha256(f"{shard} {epoch}".encode()).digest()[:HOLDER_BYTES])
        self._counter = 0

    def next(self) -> Attempt:
        self._counter += 1
        return Attempt(self._holder, self._counter)

    def owns(self, attempt: Attempt) -> bool:
        """Whether `attempt` has this shard's holder. Workers must be refused it: the holder can be computed by
        anyone."""
        return attempt.holder == self._holder


class LeaseBook:
    """The leases of one shard. `written` is the bytes that tenants have reserved and not committed yet, of the
    `capacity_bytes` that they share."""

    def __init__(self, ttl_ns: int, capacity_bytes: int) -> None:
        self.ttl_ns = ttl_ns
        self.written = Shares(capacity_bytes)
        self._running: dict[Attempt, Lease] = {}  # in order of expiry
        self._revoked: dict[Attempt, Lease] = {}
        self._shares = HolderShares(limits.LEASES_PER_HOLDER, limits.LEASES)

    def __len__(self) -> int:
        return len(self._running) + len(self._revoked)

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._running or attempt in self._revoked

    @property
    def next_expiry(self) -> int | None:
        """When the next running lease ends."""
        return next(iter(self._running.values())).expires_at if self._running else None

    def all(self) -> list[Lease]:
        """Returns the running and the revoked leases."""
        return [*self._running.values(), *self._revoked.values()]

    def full(self, owner: Owner) -> bool:
        """Whether this holder, or its tenant, has reached its limit of leases, or the tenant that of holders."""
        return self._shares.full(owner)

    def grant(
        self, attempt: Attempt, kind: LeaseKind, pages: list[Page | None], now: int, tenant: Tenant = CLUSTER
    ) -> Lease:
        """`tenant`: of the worker; CLUSTER for a shard's own leases and those of other shards."""
        assert attempt not in self, "one lease per attempt"
        lease = Lease(attempt, kind, pages, now + self.ttl_ns, tenant)
        self._running[attempt] = lease
        self._shares.add((tenant, attempt.holder))
        if lease.nbytes:
            self.written.add(tenant, lease.nbytes)
        return lease

    def renew(self, attempt: Attempt, now: int) -> bool:
        """Restarts the lease's duration. Returns False if it was revoked or has ended."""
        lease = self._running.pop(attempt, None)
        if lease is None:
            return False
        lease.expires_at = now + self.ttl_ns
        self._running[attempt] = lease
        return True

    def running(self, attempt: Attempt) -> bool:
        return attempt in self._running

    def holds(self, lease: Lease) -> bool:
        """Whether this lease itself, not another of the same attempt, is still running."""
        return self._running.get(lease.attempt) is lease

    def end(self, attempt: Attempt) -> Lease | None:
        """Removes the lease of an attempt that has stopped and returns it, or None. The caller frees its pages."""
        lease = self._running.pop(attempt, None) or self._revoked.pop(attempt, None)
        if lease is not None:
            self._shares.remove((lease.tenant, attempt.holder))
            if lease.nbytes:
                self.written.remove(lease.tenant, lease.nbytes)
        return lease

    def revoke_expired(self, now: int) -> list[Attempt]:
        """Revokes the leases that have expired by `now` and returns their attempts."""
        out: list[Attempt] = []
        for attempt, lease in self._running.items():
            if lease.expires_at > now:
                break
            out.append(attempt)
        return self.revoke(out)

    def revoke(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Revokes these running leases and returns their attempts."""
        out = list(attempts)
        for attempt in out:
            self._revoked[attempt] = self._running.pop(attempt)
        return out

    def revoke_all(self) -> list[Attempt]:
        """Revokes all running leases and returns their attempts."""
        return self.revoke(list(self._running))

    def writers(self) -> list[Lease]:
        """Returns the running leases of kind WRITE."""
        return [lease for lease in self._running.values() if lease.kind is LeaseKind.WRITE]

    def extend(self, late_ns: int) -> None:
        """Extends all running leases by `late_ns`: the process was stalled and could not process renewals."""
        for lease in self._running.values():
            lease.expires_at += late_ns
