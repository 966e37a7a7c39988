"""Memory that the connections of a listener hold for what their tenants send, by shares of tenants
(core/tenant_shares.py).

An amount is taken for what a header claims, before any of it is read, so that a request that has begun never waits for
another one: a request that waits here holds nothing of the same memory. Up to limits.SMALL_BODY_BYTES are free of
charge, which are nearly all frames: those take no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.tenant_shares import Shares
from kvcluster.transport.base import Deadline, Unavailable


class TenantMemory:
    """`most` bytes, of which a tenant alone may hold half."""

    def __init__(self, most: int) -> None:
        self._shares = Shares(most)
        self._freed = threading.Condition()
        self._closed = False

    @property
    def total(self) -> int:
        """Bytes that are held."""
        return self._shares.total

    def take(self, tenant: Tenant, nbytes: int, deadline: Deadline) -> None:
        """Takes this amount, once the tenant's share has room for it. Raises Unavailable at the deadline, or if the
        listener ends."""
        with self._freed:
            while self._shares.full(tenant, nbytes):
                if self._closed:
                    raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))
                deadline.check("requests of this tenant hold its share of memory; send fewer or smaller ones at once")
                self._freed.wait(deadline.remaining_s())
            self._shares.add(tenant, nbytes)

    def try_take(self, tenant: Tenant, nbytes: int) -> bool:
        """Takes this amount if the tenant's share has room for it."""
        with self._freed:
            if self._shares.full(tenant, nbytes):
                return False
            self._shares.add(tenant, nbytes)
            return True

    def give_back(self, tenant: Tenant, nbytes: int) -> None:
        """Gives back what was taken."""
        with self._freed:
            self._shares.remove(tenant, nbytes)
            self._freed.notify_all()

    def close(self) -> None:
        """Ends all waits."""
        with self._freed:
            self._closed = True
            self._freed.notify_all()


class Account:
    """What one connection of a tenant holds of a TenantMemory. Used by the thread of its connection."""

    def __init__(self, memory: TenantMemory | None, tenant: Tenant, wait_ms: float = 0.0) -> None:
        """`memory`: None if nothing is charged. `wait_ms`: the longest wait for room."""
        self._memory = memory
        self._tenant = tenant
        self._wait_ms = wait_ms
        self.held = 0

    def take(self, nbytes: int, deadline: Deadline) -> None:
        """As TenantMemory.take, beside what it already holds."""
        if self._memory is not None and nbytes > limits.SMALL_BODY_BYTES:
            self._memory.take(
                self._tenant, nbytes, min(deadline, Deadline.after_ms(self._wait_ms), key=lambda one: one.at_ns)
            )
            self.held += nbytes

    def try_take(self, nbytes: int) -> bool:
        """As TenantMemory.try_take, beside what it already holds."""
        if self._memory is None or nbytes <= limits.SMALL_BODY_BYTES:
            return True
        if not self._memory.try_take(self._tenant, nbytes):
            return False
        self.held += nbytes
        return True

    def release(self) -> None:
        """Gives back all that it holds."""
        if self._memory is not None and self.held:
            self._memory.give_back(self._tenant, self.held)
            self.held = 0

    @contextmanager
    def charged(self, nbytes: int, deadline: Deadline) -> Iterator[None]:
        """Holds this amount for as long as its context."""
        self.take(nbytes, deadline)
        try:
            yield
        finally:
            self.release()


UNCHARGED = Account(None, Tenant(""))
"""The account of a connection whose other side is trusted with memory: a worker's to its shard."""
