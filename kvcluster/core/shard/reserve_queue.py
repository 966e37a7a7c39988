"""The queue of reservations that wait for space.

A full shard reports the bytes that it lacks, and the coordinator orders evictions (docs/adr/0008). The writers of a
tenant wait in order of arrival, so that small stores do not starve a large one; no tenant's wait for another's. Each
has its own time limit, after which it gets what fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, NamespaceId, Tenant
from kvcluster.core.messages import Answer, NewPage, Request, Reserve, WriteGrant, Written
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.tenant_shares import Shares


@dataclass(slots=True)
class _WaitingWrite:
    """A reservation that waits until `until`. It lacked `lacked` bytes when `pool.changes` was `changes`."""

    request: Request[Reserve]
    space: ShardNamespace
    until: int
    lacked: int
    changes: int


class ReserveQueue:
    """The waiting reservations of one shard, by call."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._waiting: dict[CallId, _WaitingWrite] = {}  # in order of arrival
        self._writes = Shares(limits.WAITING_WRITES)
        self._pages = Shares(limits.WAITING_PAGES)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_deadline(self) -> int | None:
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    @property
    def pressure(self) -> tuple[tuple[Tenant, int], ...]:
        """The bytes that the waiting reservations of each tenant lack."""
        lacked: dict[Tenant, int] = {}
        for waiting in self._waiting.values():
            lacked[waiting.space.tenant] = lacked.get(waiting.space.tenant, 0) + self._lacked(waiting)
        return tuple((tenant, nbytes) for tenant, nbytes in lacked.items() if nbytes)

    def must_wait(self, m: Reserve, space: ShardNamespace) -> bool:
        """Whether `m` must queue: there is no room for it, or others of its tenant wait. False if the tenant has its
        share of the queue."""
        if self._writes.full(space.tenant) or self._pages.full(space.tenant, len(m.pages)):
            return False
        return self._writes.held(space.tenant) > 0 or self.lacking(m, space) > 0

    def add(self, request: Request[Reserve], space: ShardNamespace, until: int) -> None:
        self._waiting[request.call] = _WaitingWrite(request, space, until, 0, -1)
        self._writes.add(space.tenant)
        self._pages.add(space.tenant, len(request.question.pages))

    def waits(self, attempt: Attempt) -> bool:
        return any(waiting.request.question.attempt == attempt for waiting in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [waiting.space.id for waiting in self._waiting.values()]

    def withdraw(self, attempt: Attempt) -> list[Request[Reserve]]:
        """Removes and returns the reservations of an attempt whose writer has stopped."""
        requests = [waiting.request for waiting in self._waiting.values()]
        return self._take([request for request in requests if request.question.attempt == attempt])

    def withdraw_namespaces(self, namespaces: Container[NamespaceId]) -> list[Request[Reserve]]:
        return self._take([waiting.request for waiting in self._waiting.values() if waiting.space.id in namespaces])

    def next_served(self, now: int) -> tuple[Request[Reserve], ShardNamespace] | None:
        """Removes and returns the next reservation to be granted what fits, with its namespace: a tenant's first one if
        there is room for it, or any that has waited long enough. None if there is none."""
        passed: dict[Tenant, None] = {}
        for waiting in self._waiting.values():
            tenant = waiting.space.tenant
            if now >= waiting.until or (tenant not in passed and not self._lacked(waiting)):
                return self._take([waiting.request])[0], waiting.space
            passed[tenant] = None
        return None

    def everyone(self) -> list[Request[Reserve]]:
        """Removes and returns all reservations."""
        return self._take([waiting.request for waiting in self._waiting.values()])

    def lacking(self, m: Reserve, space: ShardNamespace) -> int:
        """Returns the bytes that `m` lacks. Pages beyond the capacity are not counted, since waiting would not help."""
        if not self._lacking(m.pages, space):
            return 0  # it fits even if all its pages are new, the usual case: no page is looked up
        pool = self._pool
        return self._lacking([n for n in m.pages if pool.taken(pool.there(space.id, n.key), n.loss) is None], space)

    def _lacking(self, pages: Sequence[NewPage], space: ShardNamespace) -> int:
        """As `lacking`, for pages none of which the pool has."""
        wanted: dict[int, int] = {}
        for (group, part), count in Counter([new.key[1:] for new in pages]).items():
            nbytes = space.page_bytes(group, part)
            wanted[nbytes] = wanted.get(nbytes, 0) + count
        allocator = self._pool.allocator
        most = allocator.capacity_bytes
        wanted = {nbytes: min(count, most // allocator.size_class(nbytes)) for nbytes, count in wanted.items()}
        lacking = sum(
            max(0, count - allocator.room(nbytes)) * allocator.size_class(nbytes) for nbytes, count in wanted.items()
        )
        if len(wanted) > 1:  # sizes that fit alone may not fit together
            lacking = max(lacking, allocator.extents_lacking(wanted) * allocator.extent_bytes)
        return min(lacking, most)

    def _take(self, those: list[Request[Reserve]]) -> list[Request[Reserve]]:
        for request in those:
            tenant = self._waiting.pop(request.call).space.tenant
            self._writes.remove(tenant)
            self._pages.remove(tenant, len(request.question.pages))
        return those

    def _lacked(self, waiting: _WaitingWrite) -> int:
        """Returns the bytes that it lacks now. Computed only if pages have changed, since each step calls this."""
        if waiting.changes != self._pool.changes:
            waiting.lacked = self.lacking(waiting.request.question, waiting.space)
            waiting.changes = self._pool.changes
        return waiting.lacked


def lost(request: Request[Reserve]) -> Answer:
    """Returns the answer LOST for all pages: they may not be written here, or the writer has stopped."""
    return Answer(request.call, WriteGrant((Written.LOST,) * len(request.question.pages)))
