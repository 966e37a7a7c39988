"""Turns: no tenant keeps a core from the others, however many calls it makes and however long their steps are.

Python runs one thread at a time and a core one step at a time, so while it works for one tenant, all others wait. Of
each tenant one message at a time waits for the core; and while another tenant calls too, a tenant waits before its next
step REST times as long as its last one took. A tenant that is alone never waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcluster.core.ids import CLUSTER, Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport.base import Unavailable

REST = 2.0
"""A tenant gets a third of the time of a core, beside another that calls at all."""

ACTIVE_S = 1.0
"""A tenant that has not called for this long lets the others go on without rests."""


class FairLock:
    """A lock that is passed on in order of arrival: a thread that releases it and wants it again waits behind all
    others."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # held for a moment only
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Returns whether the lock is held now; waits for it if `blocking`."""
        with self._guard:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()
        return True

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Turn:
    """What is known of one tenant: when it called last, when its next turn may begin, and how long the message of the
    turn under way took to decode."""

    __slots__ = ("called", "decoded_s", "lock", "rests_until")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.called = 0.0
        self.decoded_s = 0.0
        self.rests_until = 0.0


class TenantTurns:
    """The turns of all tenants at one core. Shards of the cluster, which act for all tenants, need none.

    `call_s`: what a call takes of the interpreter beside its step: to receive, decode and encode it.
    """

    def __init__(
        self,
        call_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._call_s = call_s
        self._clock = clock
        self._sleep = sleep
        self._turns: dict[Tenant, _Turn] = {}

    @contextmanager
    def of(self, tenant: Tenant, wait_s: float) -> Iterator[None]:
        """Waits for the tenant's turn, which ends with the context. Raises Unavailable(DEADLINE) if it does not come
        within `wait_s`."""
        if tenant == CLUSTER:
            yield
            return
        turn = self._turns.get(tenant) or self._turns.setdefault(tenant, _Turn())
        began = self._clock()
        if not turn.lock.acquire(timeout=max(0.0, wait_s)):
            raise _late(wait_s)
        try:
            turn.called = now = self._clock()
            rest = turn.rests_until - now
            if rest > 0 and self._others_call(tenant, now):
                self._sleep(min(rest, max(0.0, began + wait_s - now)))
                if began + wait_s - now < rest:
                    raise _late(wait_s)
            yield
        finally:
            turn.decoded_s = 0.0
            turn.lock.release()

    def spent(self, tenant: Tenant, seconds: float) -> None:
        """Takes into account that a step of this tenant took so long, and what its call takes besides: to decode its
        message, if that was done in this turn, and `call_s`."""
        turn = self._turns.get(tenant)
        if turn is not None:
            turn.rests_until = self._clock() + REST * (seconds + turn.decoded_s + self._call_s)

    @contextmanager
    def decoding(self, tenant: Tenant) -> Iterator[None]:
        """Within the context, a message of the tenant is decoded in its turn (`of`): what that takes is spent, whether
        or not the message is sound, and whether or not it is stepped."""
        began = self._clock()
        try:
            yield
        finally:
            turn = self._turns.get(tenant)
            if turn is not None:
                now = self._clock()
                turn.decoded_s = now - began
                turn.rests_until = now + REST * turn.decoded_s

    def _others_call(self, tenant: Tenant, now: float) -> bool:
        return any(other != tenant and turn.called > now - ACTIVE_S for other, turn in list(self._turns.items()))


def _late(wait_s: float) -> Unavailable:
    why = f"waited {wait_s:.1f} s for the turn of this tenant: its other calls keep the core busy"
    return Unavailable(Miss(MissReason.DEADLINE, why))
