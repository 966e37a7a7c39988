"""The driver: mailbox -> step -> effects, for a core that has neither threads nor a clock.

Any thread may ask. A message goes into the mailbox, and the thread that gets the lock steps every message in it, so
that a question which the core answers at once costs no thread switch. Tenants take turns (tenant_turns.py), except for
messages that return a lease: if one were dropped because the tenant is busy, the pages of its lease would never be
freed.

One timer thread steps a Tick when the core's next deadline has passed. Messages that have arrived are stepped before a
deadline is judged; if the timer thread itself woke late by more than `stall_ns`, the process was stalled, and the core
gets Stalled before the Tick.

A core that raises has broken its own rules, and its state cannot be trusted. From then on the driver answers nothing;
it reports the failure, so that the process ends and restarts.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from kvcluster.core.ids import CLUSTER, CallId, Tenant
from kvcluster.core.messages import Abort, Answer, Commit, Effect, Reply, Request, Stalled, Tick, Unpin
from kvcluster.core.miss import Miss, MissReason
from kvcluster.runtime.tenant_turns import FairLock, TenantTurns
from kvcluster.runtime.uninterrupted import without_interrupt
from kvcluster.transport.base import Unavailable
from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
M = TypeVar("M")
T = TypeVar("T")
_IDLE_S = 3600.0


class StateMachine(Protocol[MessageT_contra]):
    """A pure state machine."""

    def step(self, message: MessageT_contra, now: int) -> list[Effect]: ...

    def next_deadline(self) -> int | None: ...


class _Waiter:
    """A caller that is answered in a later step."""

    __slots__ = ("event", "reply")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reply: Reply | None = None


def _tenant_of(message: object) -> Tenant:
    """Returns the tenant that asks; CLUSTER for a message that is not a tenant's question."""
    return message.tenant if isinstance(message, Request) else CLUSTER


def _turn_of(message: object) -> Tenant:
    """Returns the tenant whose turn the message waits for; CLUSTER if it waits for no turn."""
    ends_lease = isinstance(message, Request) and isinstance(message.question, Abort | Commit | Unpin)
    return CLUSTER if ends_lease else _tenant_of(message)


class Driver(Generic[M]):
    """Runs one core. `perform` gets every effect except answers, in order, under the lock: it must not block or ask."""

    def __init__(
        self,
        core: StateMachine[M | Tick | Stalled],
        perform: Callable[[Effect], None],
        *,
        stall_ns: int,
        on_failure: Callable[[BaseException], None],
        clock: Callable[[], int] = time.monotonic_ns,
        name: str = "core",
        call_s: float = 0.0,
    ) -> None:
        """`call_s` as in TenantTurns."""
        self._core = core
        self._perform = perform
        self._stall_ns = stall_ns
        self._on_failure = on_failure
        self._clock = clock
        self._name = name
        self._mailbox: deque[M] = deque()
        self._turns = TenantTurns(call_s)
        self._lock = FairLock()
        self._wake = threading.Condition(self._lock)  # type: ignore[arg-type] # it needs no more than acquire and release
        self._calls = itertools.count(1)
        self._replies: dict[CallId, Reply] = {}
        self._waiters: dict[CallId, _Waiter] = {}
        self._abandoned: dict[CallId, None] = {}
        self._sleeping_until: int | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._timer = threading.Thread(target=self._run_timer, name=f"kvcluster-{name}-timer", daemon=True)

    def start(self) -> None:
        """Starts the timer; from now on the core gets its ticks."""
        start_thread(self._timer)

    def close(self) -> None:
        """Ends the timer. Later questions are answered with Unavailable."""
        with self._lock:
            self._closed = True
            for waiter in self._waiters.values():
                waiter.event.set()
            self._wake.notify()
        if self._timer.is_alive() and self._timer is not threading.current_thread():
            self._timer.join()

    @without_interrupt()
    def ask(self, build: Callable[[CallId], M], wait_s: float, decodes_of: Tenant | None = None) -> Reply:
        """Steps the message that `build` makes for a call id and returns the core's answer to it.

        With `decodes_of`, `build` decodes a message of that tenant. It is called in the tenant's turn, which lasts
        until the message is stepped: of each tenant one decoded message is in memory at a time. What it raises is
        raised.

        Raises Unavailable(DEADLINE) if the answer takes longer, Unavailable(SHARD_LOST) if this process is ending. A
        message that returns a lease is stepped even if `wait_s` is over.
        """
        call = CallId(next(self._calls))
        give_up = time.monotonic() + wait_s
        if decodes_of is None:
            message = build(call)
            with self._turns.of(_turn_of(message), wait_s):
                answered = self._stepped(call, message)
        else:
            with self._turns.of(decodes_of, wait_s):
                with self._turns.decoding(decodes_of):
                    message = build(call)
                answered = self._stepped(call, message)
        if not isinstance(answered, _Waiter):
            return answered
        waiter = answered
        del message  # it may be long, and its answer may take long
        waiter.event.wait(give_up - time.monotonic())
        with self._lock:
            if waiter.reply is not None:
                return waiter.reply
            if self._waiters.pop(call, None) is not None:
                self._abandoned[call] = None
            self._check_alive()
        raise Unavailable(Miss(MissReason.DEADLINE, f"{self._name} has not answered after {wait_s:.1f} s"))

    def _stepped(self, call: CallId, message: M) -> Reply | _Waiter:
        """Steps a message. Returns its answer, or the waiter that a later step gives the answer to."""
        self._mailbox.append(message)
        with self._lock:
            self._drain()
            reply = self._replies.pop(call, None)
            if reply is not None:
                return reply
            self._check_alive()
            self._waiters[call] = waiter = _Waiter()
            return waiter

    @contextmanager
    def decoding(self, tenant: Tenant, wait_s: float) -> Iterator[None]:
        """Within the context, one of the tenant's messages is decoded in its turn: Python does nothing else meanwhile.
        Raises Unavailable(DEADLINE) if the turn does not begin within `wait_s`."""
        with self._turns.of(tenant, wait_s), self._turns.decoding(tenant):
            yield

    def tell(self, message: M) -> None:
        """Steps a message that is not answered."""
        self._mailbox.append(message)
        with self._lock:
            self._drain()

    @without_interrupt()
    def inspect(self, look: Callable[[], T]) -> T:
        """Calls `look` while no step runs: for status and for tests that check invariants."""
        with self._lock:
            self._drain()
            return look()

    @property
    def failure(self) -> str:
        """Why the core answers nothing any more; "" while it does."""
        return f"{self._name} failed: {self._failure}" if self._failure is not None else ""

    # ------------------------------------------------------------------------------- under the lock

    def _drain(self) -> None:
        if self._failure is not None or self._closed:
            self._mailbox.clear()
            return
        while self._mailbox:
            self._step(self._mailbox.popleft())
        deadline = self._next_deadline()
        if deadline is not None and (self._sleeping_until is None or deadline < self._sleeping_until):
            self._wake.notify()

    def _step(self, message: M | Tick | Stalled) -> None:
        if self._failure is not None:
            return
        began = time.monotonic()
        try:
            for effect in self._core.step(message, self._clock()):
                if isinstance(effect, Answer):
                    self._answer(effect.call, effect.reply)
                else:
                    self._perform(effect)
        except Exception as error:
            what = message.question if isinstance(message, Request) else message
            self._fail(type(what).__name__, error)
        self._turns.spent(_tenant_of(message), time.monotonic() - began)

    def _next_deadline(self) -> int | None:
        try:
            return self._core.next_deadline()
        except Exception as error:
            self._fail("next_deadline", error)
            return None

    def _fail(self, what: str, error: Exception) -> None:
        log.critical("%s failed on %s", self._name, what, exc_info=True)
        self._failure = error
        for waiter in self._waiters.values():
            waiter.event.set()
        self._wake.notify()
        self._on_failure(error)

    def _answer(self, call: CallId, reply: Reply) -> None:
        waiter = self._waiters.pop(call, None)
        if waiter is not None:
            waiter.reply = reply
            waiter.event.set()
        elif call in self._abandoned:
            del self._abandoned[call]
        else:
            self._replies[call] = reply

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise Unavailable(Miss(MissReason.SHARD_LOST, self.failure))
        if self._closed:
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._name} is ending"))

    def _run_timer(self) -> None:
        with self._lock:
            while not self._closed and self._failure is None:
                self._drain()
                deadline = self._next_deadline()
                now = self._clock()
                if deadline is not None and deadline <= now:
                    self._step(Tick())
                    # Other threads wait for the lock; a core whose ticks follow one another closely must not keep them
                    # out.
                    self._lock.release()
                    self._lock.acquire()
                    continue
                self._sleeping_until = deadline
                self._wake.wait(_IDLE_S if deadline is None else (deadline - now) / 1e9)
                woke = self._clock()
                if self._sleeping_until is not None and woke - self._sleeping_until > self._stall_ns:
                    late_ns = woke - self._sleeping_until
                    log.warning("%s was stalled for %.1f s", self._name, late_ns / 1e9)
                    self._step(Stalled(late_ns))
                self._sleeping_until = None
