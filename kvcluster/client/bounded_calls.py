"""Calls to the coordinator for which an engine waits only a short time.

CallPolicy decides and is pure: it starts no thread and reads no clock. It admits at most `limit` calls at a time. The
caller waits at most `patience_ns`. After `failures` failed calls in a row the policy's circuit breaker opens: it
refuses calls at once, and from time to time admits one as a probe. The caller does not wait for a probe.

Each admission gets at most one verdict, the first of these:

    answered    the coordinator answered; a failure if it took longer than `allowed_ns`
    failed      it could not be reached, or did not answer within the call's own deadline
    late        the caller waited for `patience_ns`, and the coordinator had not answered
    ended       none of the above: the call shows nothing about the coordinator. A probe that ends so leaves the
                breaker open, and the next call probes

So an answer that arrives after its caller stopped waiting does not clear the failure that the caller saw. The breaker
drops verdicts of calls that it admitted before it last changed its state.

BoundedCalls is the shell: it runs calls on a few threads and passes their verdicts to the policy when its owner calls
`tend`. A result that arrives after its caller has left is released. An engine that already calls on threads of its own,
each with a deadline, uses CallPolicy alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.breaker import FREE_DOUBLINGS, Breaker, BreakerState, PermitNumber

R = TypeVar("R")

LIMIT = 64
"""Calls at a time. A call may hold a ticket, so this is a part of limits.TICKETS_PER_HOLDER; and a call behind more
than this many others would not be answered within its caller's patience."""

FAILURES = 2
"""In a row, until the breaker opens. One may be this process's own fault: its thread got no CPU time to read."""

OPEN_NS = 500_000_000
"""How long the breaker stays open before the first probe. No caller waits for a probe, so this is short."""


@dataclass(eq=False, slots=True)
class Admission:
    """One call that CallPolicy admitted."""

    permit: PermitNumber
    probe: bool
    until_ns: int  # when its caller stops waiting; for a probe, when it was admitted
    allowed_ns: int  # an answer that takes longer counts as a failure
    judged: bool = False
    over: bool = False


class CallPolicy:
    """Admits calls, and learns from their verdicts whether the coordinator answers. Times are in nanoseconds."""

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
        """True while the breaker is closed: calls are made, and their callers wait for them."""
        return self._breaker.state is BreakerState.CLOSED

    def open_for(self, now: int) -> int:
        """Returns for how long from now no call is admitted; 0 unless the breaker is open."""
        return self._breaker.open_for(now)

    def ask(self, now: int) -> Admission | Miss | None:
        """Admits a call; every admission must be passed to `ended` once. Returns a miss instead of an admission if the
        breaker refuses the call, and None if too many calls are under way."""
        if self.under_way >= self._limit:
            return None
        permit = self._breaker.ask(now)
        if isinstance(permit, Miss):  # whatever ended the last call, the coordinator has been silent for several
            return Miss(MissReason.COORDINATOR_LOST, permit.detail)
        self.under_way += 1
        if self.healthy:
            return Admission(permit, probe=False, until_ns=now + self._patience_ns, allowed_ns=self._patience_ns)
        return Admission(permit, probe=True, until_ns=now, allowed_ns=self._probe_allowed_ns)

    def answered(self, call: Admission, now: int, *, took_ns: int = 0) -> None:
        """Records that the coordinator answered, after `took_ns` if that was measured."""
        if took_ns > call.allowed_ns:
            self.failed(call, Miss(MissReason.DEADLINE, "the coordinator answers too slowly"), now)
        elif self._first_verdict(call):
            self._breaker.succeeded(call.permit)

    def failed(self, call: Admission, why: Miss, now: int) -> None:
        """Records that the coordinator did not answer."""
        if self._first_verdict(call):
            self._breaker.failed(call.permit, why, now)

    def late(self, call: Admission, now: int) -> None:
        """Records that the caller stopped waiting before the coordinator answered. Ignored for a probe, because its
        caller did not wait at all."""
        if not call.probe:
            self.failed(call, Miss(MissReason.DEADLINE, "no answer from the coordinator in time"), now)

    def ended(self, call: Admission) -> None:
        """Records that the call is over, which makes room for another."""
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
    """One call of BoundedCalls. Its caller reads `done` and `result` and ends it with `leave`; the work that runs on
    the call's thread reports through the other members."""

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
        """Called by the work when the coordinator has answered. If it made several exchanges, the longest counts."""
        self.took_ns = max(took_ns, self.took_ns or 0)

    def leave(self) -> None:
        """Called when the caller no longer needs the result: it is released, now or when it arrives. May be called
        again."""
        with self._lock:
            self._left = True
            result, self.result = self.result, None
        if result is not None:
            self._release(result)

    def run(self, work: Callable[[Call[R]], R]) -> None:
        """Runs the work, on the call's thread."""
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
    """Calls of one owner. `start`, `late` and `tend` are called on one thread; no method waits. Work should return a
    result and not raise: if it raises, its caller sees only that it is done."""

    def __init__(
        self, name: str, policy: CallPolicy, *, threads: int, release: Callable[[R], object] = lambda result: None
    ) -> None:
        self._policy = policy
        self._release = release
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._open: dict[Call[R], None] = {}  # in the order of their starts

    @property
    def healthy(self) -> bool:
        """As CallPolicy.healthy, as of the last `tend`."""
        return self._policy.healthy

    def start(self, work: Callable[[Call[R]], R], now: int) -> Call[R] | Miss | None:
        """Runs `work` on a thread. Returns a miss instead if the breaker refuses the call, and None if too many calls
        are under way, or if there is no room for a thread."""
        self.tend(now)
        admitted = self._policy.ask(now)
        if not isinstance(admitted, Admission):
            return admitted
        call = Call(admitted, self._release)
        try:
            self._threads.submit(call.run, work)
        except RuntimeError:  # no room for its first thread; a later one may run the work, whose result is released
            call.leave()
            self._policy.ended(admitted)
            return None
        self._open[call] = None
        return call

    def late(self, call: Call[R], now: int) -> None:
        """Records that the caller waited for `patience_ns` and the call was not done."""
        if call in self._open and call.asking:
            self._policy.late(call.admission, now)

    def tend(self, now: int) -> None:
        """Passes the verdicts of the calls that are done to the policy. Must be called regularly: calls count as under
        way until then."""
        for call in [one for one in self._open if one.done.done()]:
            del self._open[call]
            if call.failure is not None:
                self._policy.failed(call.admission, call.failure, now)
            elif call.took_ns is not None:
                self._policy.answered(call.admission, now, took_ns=call.took_ns)
            self._policy.ended(call.admission)

    def close(self) -> None:
        """Leaves every call that `tend` has not seen done; callers leave the others themselves. Work that is running
        runs to its end."""
        for call in list(self._open):
            call.leave()
        self._threads.shutdown(wait=False, cancel_futures=True)
