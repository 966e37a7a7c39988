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
from kvcluster.core.messages import Answer, Reserve, WriteGrant, Written
from kvcluster.core.pool import PagePool
from kvcluster.core.spaces import Spaces


@dataclass(slots=True)
class _WaitingWrite:
    """A reservation that waits until then, and the bytes that it lacked when the pool had changed so many times."""

    m: Reserve
    until: int
    lacked: int
    changes: int


class WaitingRoom:
    """The waiting reservations of one shard, by call."""

    def __init__(self, pool: PagePool, spaces: Spaces) -> None:
        self._pool = pool
        self._spaces = spaces
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

    def must_wait(self, m: Reserve) -> bool:
        """Is there no room for it, or somebody before it? Where too many wait already, nobody does."""
        room = len(self._waiting) < limits.WAITING_WRITES and self._pages + len(m.pages) <= limits.WAITING_PAGES
        return room and bool(self._waiting or self.lacking(m))

    def add(self, m: Reserve, until: int) -> None:
        self._waiting[m.call] = _WaitingWrite(m, until, 0, -1)
        self._pages += len(m.pages)

    def waits(self, attempt: Attempt) -> bool:
        return any(waiting.m.attempt == attempt for waiting in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [waiting.m.namespace for waiting in self._waiting.values()]

    def withdraw(self, attempt: Attempt) -> list[Reserve]:
        """Its writer has gone, and with it the wish."""
        return self._take([waiting.m for waiting in self._waiting.values() if waiting.m.attempt == attempt])

    def withdraw_namespaces(self, namespaces: Container[NamespaceId]) -> list[Reserve]:
        return self._take([waiting.m for waiting in self._waiting.values() if waiting.m.namespace in namespaces])

    def next_served(self, now: int) -> Reserve | None:
        """The next that is to be granted what fits, taken out: the first one, once there is room for it, or any that
        has waited long enough."""
        for at, waiting in enumerate(self._waiting.values()):
            if now >= waiting.until or (at == 0 and not self._lacked(waiting)):
                return self._take([waiting.m])[0]
        return None

    def everyone(self) -> list[Reserve]:
        """All of them, taken out."""
        return self._take([waiting.m for waiting in self._waiting.values()])

    def lacking(self, m: Reserve) -> int:
        """Bytes that `m` would want and does not find. What can never fit is not waited for."""
        space = self._spaces.known(m.namespace)
        assert space is not None, "a reservation of a namespace that is not known"
        wanted: dict[int, int] = {}
        for new in m.pages:
            if self._pool.taken(m.namespace, new) is None:
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

    def _take(self, those: list[Reserve]) -> list[Reserve]:
        for m in those:
            del self._waiting[m.call]
            self._pages -= len(m.pages)
        return those

    def _lacked(self, waiting: _WaitingWrite) -> int:
        """What it lacks now. It is worked out again only where pages have changed: each step asks."""
        if waiting.changes != self._pool.changes:
            waiting.lacked, waiting.changes = self.lacking(waiting.m), self._pool.changes
        return waiting.lacked


def lost(m: Reserve) -> Answer:
    """Nothing of this reservation may be written here, or nobody is left to write it."""
    return Answer(m.call, WriteGrant((Written.LOST,) * len(m.pages)))
