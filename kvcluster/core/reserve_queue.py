"""Reservations that wait for room: who wants how much, in which order, until when.

A shard that is full says so with its next report, and the coordinator orders evictions (docs/adr/0008). Writers
wait in order of arrival, so that a large store is not overtaken for ever by small ones; each waits for a time of
its own, after which it gets what fits.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, NamespaceId
from kvcluster.core.messages import Answer, Request, Reserve, WriteGrant, Written
from kvcluster.core.pool import PagePool
from kvcluster.core.shard_namespaces import ShardNamespace


@dataclass(slots=True)
class _WaitingWrite:
    """A reservation that waits until then, and the bytes that it lacked when the pool had changed so many times."""

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
        self._pages = 0  # of all of them

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_deadline(self) -> int | None:
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    @property
    def pressure_bytes(self) -> int:
        """What all of them want and do not find."""
        return sum(map(self._lacked, self._waiting.values()))

    def must_wait(self, m: Reserve, space: ShardNamespace) -> bool:
        """Is there no room for it, or somebody before it? Where too many wait already, nobody does."""
        room = len(self._waiting) < limits.WAITING_WRITES and self._pages + len(m.pages) <= limits.WAITING_PAGES
        return room and bool(self._waiting or self.lacking(m, space))

    def add(self, request: Request[Reserve], space: ShardNamespace, until: int) -> None:
        self._waiting[request.call] = _WaitingWrite(request, space, until, 0, -1)
        self._pages += len(request.question.pages)

    def waits(self, attempt: Attempt) -> bool:
        return any(waiting.request.question.attempt == attempt for waiting in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [waiting.space.id for waiting in self._waiting.values()]

    def withdraw(self, attempt: Attempt) -> list[Request[Reserve]]:
        """Its writer has gone, and with it the wish."""
        requests = [waiting.request for waiting in self._waiting.values()]
        return self._take([request for request in requests if request.question.attempt == attempt])

    def withdraw_namespaces(self, namespaces: Container[NamespaceId]) -> list[Request[Reserve]]:
        return self._take([waiting.request for waiting in self._waiting.values() if waiting.space.id in namespaces])

    def next_served(self, now: int) -> tuple[Request[Reserve], ShardNamespace] | None:
        """The next that is to be granted what fits, taken out, and its namespace: the first one, once there is room for
        it, or any that has waited long enough."""
        for at, waiting in enumerate(self._waiting.values()):
            if now >= waiting.until or (at == 0 and not self._lacked(waiting)):
                return self._take([waiting.request])[0], waiting.space
        return None

    def everyone(self) -> list[Request[Reserve]]:
        """All of them, taken out."""
        return self._take([waiting.request for waiting in self._waiting.values()])

    def lacking(self, m: Reserve, space: ShardNamespace) -> int:
        """Bytes that `m` would want and does not find. What can never fit is not waited for."""
        wanted: dict[int, int] = {}
        for new in m.pages:
            if self._pool.taken(space.id, new) is None:
                nbytes = space.page_bytes(new.key.group, new.key.part)
                wanted[nbytes] = wanted.get(nbytes, 0) + 1
        allocator = self._pool.allocator
        most = allocator.capacity_bytes
        wanted = {nbytes: min(count, most // allocator.size_class(nbytes)) for nbytes, count in wanted.items()}
        lacking = sum(
            max(0, count - allocator.room(nbytes)) * allocator.size_class(nbytes) for nbytes, count in wanted.items()
        )
        if len(wanted) > 1:  # what each size finds for itself, they may not find together
            lacking = max(lacking, allocator.extents_lacking(wanted) * allocator.extent_bytes)
        return min(lacking, most)

    def _take(self, those: list[Request[Reserve]]) -> list[Request[Reserve]]:
        for request in those:
            del self._waiting[request.call]
            self._pages -= len(request.question.pages)
        return those

    def _lacked(self, waiting: _WaitingWrite) -> int:
        """What it lacks now. It is worked out again only where pages have changed: each step asks."""
        if waiting.changes != self._pool.changes:
            waiting.lacked = self.lacking(waiting.request.question, waiting.space)
            waiting.changes = self._pool.changes
        return waiting.lacked


def lost(request: Request[Reserve]) -> Answer:
    """Nothing of this reservation may be written here, or nobody is left to write it."""
    return Answer(request.call, WriteGrant((Written.LOST,) * len(request.question.pages)))
