"""Calls to the coordinator that an engine makes and never waits long for.

CallPolicy decides and is pure: it starts no thread and reads no clock. It admits at most `limit` calls at a time. The
asker of a call waits at most `patience_ns`. After `failures` failed calls in a row the policy's circuit breaker opens:
it refuses calls at once, and now and then admits one as a probe. The asker of a probe does not wait for it.

Each admission gets at most one verdict, the first of these:

    answered    the coordinator answered; a failure if it took longer than `allowed_ns`
    failed      it could not be reached, or did not answer within the call's own deadline
    late        the asker waited for its patience, and the coordinator had not answered
    ended       none of the above: the call says nothing about the coordinator. A probe that ends so leaves the
                breaker open, and the next call probes

So an answer that arrives after its asker stopped waiting does not clear the failure that the asker saw. The breaker
drops verdicts of calls that it admitted before it last changed its state.

BoundedCalls is the shell: it runs calls on a few threads and hands their verdicts to the policy when its owner calls
`tend`. A result that arrives after its asker has left is released. An engine that already calls on threads of its own,
each with a deadline, uses CallPolicy alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcluster.client.breaker import FREE_DOUBLINGS, Breaker, BreakerState, PermitNumber
from kvcluster.core.miss import Miss, MissReason

R = TypeVar("R")

LIMIT = 64
"""Calls at a time. A call may hold a ticket, so this is a part of limits.TICKETS_PER_HOLDER; and behind more than this
many calls no asker's patience is long enough."""

FAILURES = 2
"""In a row, until the breaker opens. One may be this process's own fault: its thread got no CPU time to read."""

OPEN_NS = 500_000_000
"""How long the breaker stays open before the first probe. A probe costs no asker any time, so this is short."""


@dataclass(eq=False, slots=True)
class Admission:
    """One call that CallPolicy admitted."""

    permit: PermitNumber
    probe: bool
    until_ns: int  # when its asker stops waiting; for a probe, when it was admitted
    allowed_ns: int  # an answer that takes longer counts as a failure
    judged: bool = False
    over: bool = False


class CallPolicy:
    """Which calls may be made, and what their ends say about the coordinator. Times are in nanoseconds."""

    def __init__(
        self,
        *,
        patience_ns: int,
        probe_patiences: int = 1,
        limit: int = LIMIT,
        failures: int = FAILURES,
        open_ns: int = OPEN_NS,
        doublings: int = FREE_DOUBLINGS,
    ) -> None:
        assert patience_ns >= 0 and probe_patiences >= 1 and limit >= 1
        self.under_way = 0  # admitted and not ended: 0 to `limit`
        self._patience_ns = patience_ns
        self._probe_allowed_ns = patience_ns * probe_patiences
        self._limit = limit
        self._breaker = Breaker(failures=failures, open_ns=open_ns, doublings=doublings)

    @property
    def healthy(self) -> bool:
        """True while the breaker is closed: calls are made, and their askers wait for them."""
        return self._breaker.state is BreakerState.CLOSED

    def open_for(self, now: int) -> int:
        """For how long from now no call is admitted; 0 unless the breaker is open."""
        return self._breaker.open_for(now)

    def ask(self, now: int) -> Admission | Miss | None:
        """Admits a call; every admission must be given to `ended` once. Returns the miss that stands for the call if
        the breaker refuses it, and None if too many calls are under way."""
        if self.under_way >= self._limit:
            return None
        permit = self._breaker.ask(now)
        if isinstance(permit, Miss):
            return permit
        self.under_way += 1
        if self.healthy:
            return Admission(permit, probe=False, until_ns=now + self._patience_ns, allowed_ns=self._patience_ns)
        return Admission(permit, probe=True, until_ns=now, allowed_ns=self._probe_allowed_ns)

    def answered(self, call: Admission, now: int, *, took_ns: int = 0) -> None:
        """The coordinator answered, after `took_ns` where that was measured."""
        if took_ns > call.allowed_ns:
            self.failed(call, Miss(MissReason.DEADLINE, "the coordinator answers too slowly"), now)
        elif self._first_verdict(call):
            self._breaker.succeeded(call.permit)

    def failed(self, call: Admission, why: Miss, now: int) -> None:
        """The coordinator did not answer."""
        if self._first_verdict(call):
            self._breaker.failed(call.permit, why, now)

    def late(self, call: Admission, now: int) -> None:
        """The asker stopped waiting while the coordinator was being asked. Of a probe this says nothing: its asker did
        not wait at all."""
        if not call.probe:
            self.failed(call, Miss(MissReason.DEADLINE, "no answer from the coordinator in time"), now)

    def ended(self, call: Admission) -> None:
        """The call is over and makes room for another."""
        assert not call.over and self.under_way > 0, "a call ends once"
        if self._first_verdict(call):
            self._breaker.gave_up(call.permit)
        call.over = True
        self.under_way -= 1

    def _first_verdict(self, call: Admission) -> bool:
        assert not call.over, "nothing is learned from a call that has ended"
        first, call.judged = not call.judged, True
        return first


class Call(Generic[R]):
    """One call of BoundedCalls. Its asker reads `done` and `result` and ends it with `leave`; the work that runs on
    the call's thread reports with the other members."""

    def __init__(self, admission: Admission, release: Callable[[R], object]) -> None:
        self.admission = admission
        self.done: Future[None] = Future()
        """Completes when the work has returned; never with an exception."""
        self.result: R | None = None
        """What the work returned: None until `done`, after `leave`, and if the work raised."""
        self.asking = False
        """Set by the work while it waits for the coordinator: only then is a late answer the coordinator's fault."""
        self.failure: Miss | None = None
        """Set by the work if the coordinator did not answer."""
        self.took_ns: int | None = None
        self._release = release
        self._left = False
        self._lock = threading.Lock()

    def answered(self, took_ns: int = 0) -> None:
        """Called by the work: the coordinator answered. Of several exchanges the longest counts."""
        self.took_ns = max(took_ns, self.took_ns or 0)

    def leave(self) -> None:
        """The asker needs no result any more: one that is there, or comes, is released. May be called again."""
        with self._lock:
            self._left = True
            result, self.result = self.result, None
        if result is not None:
            self._release(result)

    def run(self, work: Callable[[Call[R]], R]) -> None:
        """On the call's thread."""
        try:
            result = work(self)
            with self._lock:
                left = self._left
                if not left:
                    self.result = result
            if left:
                self._release(result)
        finally:
            self.asking = False
            self.done.set_result(None)


class BoundedCalls(Generic[R]):
    """Calls of one owner. `start`, `late` and `tend` belong to one thread; no method waits. Work should return a result
    whatever happens: of work that raises the asker learns only that it is done."""

    def __init__(
        self, name: str, policy: CallPolicy, *, threads: int, release: Callable[[R], object] = lambda result: None
    ) -> None:
        self._policy = policy
        self._release = release
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._open: dict[Call[R], None] = {}  # in the order of their starts

    @property
    def healthy(self) -> bool:
        """As of CallPolicy, from what `tend` has heard."""
        return self._policy.healthy

    def start(self, work: Callable[[Call[R]], R], now: int) -> Call[R] | Miss | None:
        """Runs `work` on a thread. Otherwise as CallPolicy.ask: the miss in its place, or None for too many calls."""
        self.tend(now)
        admitted = self._policy.ask(now)
        if not isinstance(admitted, Admission):
            return admitted
        call = Call(admitted, self._release)
        self._open[call] = None
        self._threads.submit(call.run, work)
        return call

    def late(self, call: Call[R], now: int) -> None:
        """The asker waited for its patience; the call was not done."""
        if call in self._open and call.asking:
            self._policy.late(call.admission, now)

    def tend(self, now: int) -> None:
        """Tells the policy of the calls that are done. To be called regularly: they count as under way until then."""
        for call in [one for one in self._open if one.done.done()]:
            del self._open[call]
            if call.failure is not None:
                self._policy.failed(call.admission, call.failure, now)
            elif call.took_ns is not None:
                self._policy.answered(call.admission, now, took_ns=call.took_ns)
            self._policy.ended(call.admission)

    def close(self) -> None:
        """Leaves every call that `tend` has not seen done; others are their askers' to leave. Work that runs goes on to
        its end."""
        for call in list(self._open):
            call.leave()
        self._threads.shutdown(wait=False, cancel_futures=True)
