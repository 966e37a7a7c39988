"""Reservations that wait for room: who wants how much, in which order, until when.

A shard that is full says so with its next report, and the coordinator orders evictions (docs/adr/0008). Writers
wait in order of arrival, so that a large store is not overtaken for ever by small ones; each waits for a time of
its own, after which it gets what fits.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, NamespaceId
from kvcluster.core.messages import Answer, Reserve, WriteGrant, Written
from kvcluster.core.pool import PagePool
from kvcluster.core.spaces import Spaces


class WaitingRoom:
    """The waiting reservations of one shard, by call."""

    def __init__(self, pool: PagePool, spaces: Spaces) -> None:
        self._pool = pool
        self._spaces = spaces
        self._waiting: dict[CallId, tuple[Reserve, int]] = {}  # in order of arrival, with when to give up

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_deadline(self) -> int | None:
        return min((until for _, until in self._waiting.values()), default=None)

    @property
    def pressure_bytes(self) -> int:
        """What all of them want and do not find."""
        return sum(self.lacking(m) for m, _ in self._waiting.values())

    def must_wait(self, m: Reserve) -> bool:
        """Is there no room for it, or somebody before it? Where too many wait already, nobody does."""
        return len(self._waiting) < limits.WAITING_WRITES and bool(self._waiting or self.lacking(m))

    def add(self, m: Reserve, until: int) -> None:
        self._waiting[m.call] = (m, until)

    def waits(self, attempt: Attempt) -> bool:
        return any(m.attempt == attempt for m, _ in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [m.namespace for m, _ in self._waiting.values()]

    def withdraw(self, attempt: Attempt) -> list[Reserve]:
        """Its writer has gone, and with it the wish."""
        return self._take([m for m, _ in self._waiting.values() if m.attempt == attempt])

    def withdraw_namespace(self, namespace: NamespaceId) -> list[Reserve]:
        return self._take([m for m, _ in self._waiting.values() if m.namespace == namespace])

    def next_served(self, now: int) -> Reserve | None:
        """The next that is to be granted what fits, taken out: the first one, once there is room for it, or any that
        has waited long enough."""
        for at, (m, until) in enumerate(self._waiting.values()):
            if now >= until or (at == 0 and not self.lacking(m)):
                del self._waiting[m.call]
                return m
        return None

    def everyone(self) -> list[Reserve]:
        """All of them, taken out."""
        return self._take([m for m, _ in self._waiting.values()])

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
        return those


def lost(m: Reserve) -> Answer:
    """Nothing of this reservation may be written here, or nobody is left to write it."""
    return Answer(m.call, WriteGrant((Written.LOST,) * len(m.pages)))
