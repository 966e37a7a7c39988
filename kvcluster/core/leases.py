"""Pin leases: who may read or write which pages, until when, on the shard's own clock.

A lease belongs to one attempt of one holder. Its holder shows that it lives by moving bytes or by Renew.
When it does not, the lease is *revoked*: it can no longer be renewed or committed, and whoever moves its bytes
for it is told to stop. Its pages are given back only when that has stopped and said so (Unpin, Abort): time
alone never frees a page that somebody might still be writing to or reading from.

All leases of a book run equally long, so that the order of renewal is the order of expiry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import HOLDER_BYTES, Attempt, Epoch, Holder, ShardId
from kvcluster.core.pool import Page


class LeaseKind(Enum):
    """What a lease is for."""

    READ = "read"
    WRITE = "write"


class Lease:
    """Pages that an attempt reads or writes. `pages` is as long as what was asked for, None where refused."""

    __slots__ = ("attempt", "expires_at", "kind", "pages")

    def __init__(self, attempt: Attempt, kind: LeaseKind, pages: list[Page | None], expires_at: int) -> None:
        self.attempt = attempt
        self.kind = kind
        self.pages = pages
        self.expires_at = expires_at


class OwnAttempts:
    """Names what a shard incarnation does by itself: it is a holder of leases like any other."""

    def __init__(self, shard: ShardId, epoch: Epoch) -> None:
        self._holder = Holder(hashlib.sha256(f"{shard} {epoch}".encode()).digest()[:HOLDER_BYTES])
        self._counter = 0

    def next(self) -> Attempt:
        self._counter += 1
        return Attempt(self._holder, self._counter)

    def owns(self, attempt: Attempt) -> bool:
        """Would this be one of them? A worker that says so lies: the name is no secret."""
        return attempt.holder == self._holder


class LeaseBook:
    """The leases of one shard."""

    def __init__(self, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._running: dict[Attempt, Lease] = {}  # in order of expiry
        self._revoked: dict[Attempt, Lease] = {}
        self._held: dict[Holder, int] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._revoked)

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._running or attempt in self._revoked

    @property
    def next_expiry(self) -> int | None:
        """When the next running lease ends."""
        return next(iter(self._running.values())).expires_at if self._running else None

    def all(self) -> list[Lease]:
        """Running and revoked ones."""
        return [*self._running.values(), *self._revoked.values()]

    def full(self, holder: Holder) -> bool:
        """Does this holder have as many as one may, or are there too many holders or leases?"""
        if len(self) >= limits.LEASES:
            return True
        held = self._held.get(holder)
        return held >= limits.LEASES_PER_HOLDER if held is not None else len(self._held) >= limits.HOLDERS

    def grant(self, attempt: Attempt, kind: LeaseKind, pages: list[Page | None], now: int) -> Lease:
        assert attempt not in self, "one lease an attempt"
        lease = Lease(attempt, kind, pages, now + self.ttl_ns)
        self._running[attempt] = lease
        self._held[attempt.holder] = self._held.get(attempt.holder, 0) + 1
        return lease

    def renew(self, attempt: Attempt, now: int) -> bool:
        """False where it has been revoked or ended: too late."""
        lease = self._running.pop(attempt, None)
        if lease is None:
            return False
        lease.expires_at = now + self.ttl_ns
        self._running[attempt] = lease
        return True

    def running(self, attempt: Attempt) -> bool:
        return attempt in self._running

    def holds(self, lease: Lease) -> bool:
        """Does this very lease run still?"""
        return self._running.get(lease.attempt) is lease

    def end(self, attempt: Attempt) -> Lease | None:
        """Its holder has stopped: the lease, whose pages the caller now gives back."""
        lease = self._running.pop(attempt, None) or self._revoked.pop(attempt, None)
        if lease is not None:
            left = self._held[attempt.holder] - 1
            if left:
                self._held[attempt.holder] = left
            else:
                del self._held[attempt.holder]
        return lease

    def revoke_expired(self, now: int) -> list[Attempt]:
        """Those that ran out just now."""
        out: list[Attempt] = []
        for attempt, lease in self._running.items():
            if lease.expires_at > now:
                break
            out.append(attempt)
        return self.revoke(out)

    def revoke(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Ends these running ones before their time."""
        out = list(attempts)
        for attempt in out:
            self._revoked[attempt] = self._running.pop(attempt)
        return out

    def revoke_all(self) -> list[Attempt]:
        """All that still run."""
        return self.revoke(list(self._running))

    def writers(self) -> list[Lease]:
        """The running leases under which something is written."""
        return [lease for lease in self._running.values() if lease.kind is LeaseKind.WRITE]

    def extend(self, late_ns: int) -> None:
        """This process stood still: renewals that arrived meanwhile could not be heard."""
        for lease in self._running.values():
            lease.expires_at += late_ns
