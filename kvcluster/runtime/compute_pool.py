"""The threads on which a shard computes attention, and the bounded queue before them.

Compute takes a processor for milliseconds, loads only while they copy. So compute has threads of its own, which are
niced: loads, stores and the core go before them. The jobs are bounded, by shares of tenants; one more is
declined at once, and its worker loads the pages instead. A job that is still waiting at its deadline never runs.

At most `threads` jobs compute at once, and tenants take turns at that (ComputeTurns): not after whole jobs, which may
take seconds, but after pieces of them. Between two pieces a job calls `ComputeTurn.give_way`, in which it pauses while
another tenant is to compute. A job that pauses keeps its thread, so there may be more threads than compute, but no more
than jobs.

An exception of a job is raised in its caller, which waits for the job on another thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.tenant_shares import Shares
from kvcluster.errors import KVClusterError
from kvcluster.runtime.threads import be_nice
from kvcluster.transport.base import ComputeBusy, ComputeTurn, Deadline, Unavailable
from kvcluster.transport.thread_start import start_thread

T = TypeVar("T")

NICENESS = 10
"""Niceness of the compute threads: about a tenth of a processor while loads want all of it."""

_LOOK_UP_S = 0.02
"""How often a paused job looks after what it holds (`meanwhile`): a lease is at least five times as long
(lease_ttl_ms)."""


class _Job(Generic[T]):
    """One job and its outcome. `go` is set while it may compute; `ended` when it has run or never will."""

    def __init__(self, tenant: Tenant, work: Callable[[ComputeTurn], T], deadline: Deadline) -> None:
        self.tenant = tenant
        self.work = work
        self.deadline = deadline
        self.go = threading.Event()
        self.since = 0.0  # when it began to compute, or was last accounted for
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self, turn: ComputeTurn) -> None:
        try:
            self.deadline.check("it waited for a thread until then")
            self.result = self.work(turn)
        except BaseException as error:
            self.error = error


class ComputePool:
    """`threads` threads compute at once, from `start` to `close`; with 0, half as many as there are processors."""

    def __init__(self, threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = threads or max(1, (os.cpu_count() or 1) // 2)
        self._thread_name = f"kvcluster-{name}-compute"
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)  # of threads that wait for a job
        self._idle = 0  # those threads
        self._ready: deque[_Job[Any]] = deque()  # begun, and not yet taken by a thread
        self._waiting: dict[Tenant, deque[_Job[Any]]] = {}  # not begun
        self._paused: dict[Tenant, deque[_Job[Any]]] = {}  # begun
        self._turns = ComputeTurns()
        self._shares = Shares(limits.ATTENDS_WAITING)
        self._computing = 0
        self._threads: dict[threading.Thread, None] = {}
        self._started = self._closed = False

    def start(self) -> None:
        """From now on jobs run."""
        with self._lock:
            self._started = True
            self._dispatch()

    @property
    def waiting(self) -> int:
        """The number of jobs that wait to begin."""
        return sum(map(len, list(self._waiting.values())))

    def run(self, tenant: Tenant, work: Callable[[ComputeTurn], T], deadline: Deadline) -> T:
        """Returns what `work` returns, on one of the threads. Raises what it raises; ComputeBusy if the tenant has its
        share of the jobs; Unavailable at the deadline, if it has not begun, or once the pool is closed."""
        job = _Job(tenant, work, deadline)
        with self._lock:
            if self._closed:
                raise _ending()
            if self._shares.full(tenant):
                raise ComputeBusy(f"{self._shares.held(tenant)} computes of this tenant wait or are under way")
            self._shares.add(tenant)
            self._turns.enter(tenant)
            self._waiting.setdefault(tenant, deque()).append(job)
            self._dispatch()
        if not job.ended.wait(deadline.remaining_s()):
            self._withdraw(job)
            job.ended.wait()
        if job.error is not None:
            raise job.error
        result: T = job.result  # type: ignore[assignment] # None only if T is None
        return result

    def close(self) -> None:
        """Ends the jobs that wait, and returns when those under way have ended, which they do after the piece that they
        are in. May be called again."""
        with self._lock:
            self._closed = True
            for jobs in list(self._waiting.values()):
                for job in list(jobs):
                    self._remove(job, _ending())
            for jobs in self._paused.values():
                for job in jobs:
                    job.go.set()
            self._wake.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # ------------------------------------------------------------------------------------- under the lock

    def _dispatch(self) -> None:
        """Lets as many jobs compute as may."""
        while self._started and not self._closed and self._computing < self._most:
            tenant = self._turns.next_of({**self._paused, **self._waiting})
            if tenant is None:
                return
            self._computing += 1
            if tenant in self._paused:
                job = _first(self._paused, tenant)
                job.since = self._clock()
                job.go.set()
                continue
            job = _first(self._waiting, tenant)
            job.since = self._clock()
            job.go.set()
            self._ready.append(job)
            if self._idle >= len(self._ready):
                self._wake.notify()
            else:
                thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
                try:
                    start_thread(thread)
                    self._threads[thread] = None
                except KVClusterError as error:
                    if not self._threads:  # otherwise it waits for one of them
                        self._ready.pop()
                        self._stop(job)
                        self._remove(job, ComputeBusy(str(error)))

    def _account(self, job: _Job[Any]) -> None:
        now = self._clock()
        self._turns.spent(job.tenant, now - job.since)
        job.since = now

    def _stop(self, job: _Job[Any]) -> None:
        """Records that the job does not compute for now."""
        self._account(job)
        job.go.clear()
        self._computing -= 1

    def _remove(self, job: _Job[Any], error: BaseException) -> None:
        """Ends a job that has not begun."""
        _drop(self._waiting, job)
        self._forget(job)
        job.error = error
        job.ended.set()

    def _forget(self, job: _Job[Any]) -> None:
        self._shares.remove(job.tenant)
        self._turns.leave(job.tenant)

    # ------------------------------------------------------------------------------------------- threads

    def _withdraw(self, job: _Job[Any]) -> None:
        """Called at the deadline of a job: ends it if it has not begun."""
        with self._lock:
            if job in self._waiting.get(job.tenant, ()):
                self._remove(job, Unavailable(Miss(MissReason.DEADLINE, "it waited for a thread until then")))

    def _run(self) -> None:
        be_nice(NICENESS)
        while (job := self._next_job()) is not None:
            job.run(_JobTurn(self, job))
            with self._lock:
                if not _drop(self._paused, job):  # it ended while it paused, or while it computed
                    self._stop(job)
                self._forget(job)
                self._dispatch()
            job.ended.set()

    def _next_job(self) -> _Job[Any] | None:
        """Returns the next job for this thread; None if the thread is to end, since as many others wait as compute."""
        with self._lock:
            while not self._ready and not self._closed and self._idle < self._most:
                self._idle += 1
                self._wake.wait()
                self._idle -= 1
            if self._ready:
                return self._ready.popleft()
            del self._threads[threading.current_thread()]
            return None

    def give_way(self, job: _Job[Any], meanwhile: Callable[[], object]) -> None:
        """As ComputeTurn.give_way, of a job that computes."""
        with self._lock:
            if self._closed:
                raise _ending()
            self._account(job)
            if not self._turns.due_before(job.tenant, {**self._paused, **self._waiting}):
                return
            self._stop(job)
            self._paused.setdefault(job.tenant, deque()).append(job)
            self._dispatch()
        while not job.go.wait(_LOOK_UP_S):
            meanwhile()
        if self._closed:
            raise _ending()


class _JobTurn:
    """The turn of one job (transport/base.py)."""

    def __init__(self, pool: ComputePool, job: _Job[Any]) -> None:
        self._pool = pool
        self._job = job

    def give_way(self, meanwhile: Callable[[], object]) -> None:
        self._pool.give_way(self._job, meanwhile)


def _first(jobs: dict[Tenant, deque[_Job[Any]]], tenant: Tenant) -> _Job[Any]:
    job = jobs[tenant].popleft()
    if not jobs[tenant]:
        del jobs[tenant]
    return job


def _drop(jobs: dict[Tenant, deque[_Job[Any]]], job: _Job[Any]) -> bool:
    """Removes a job, and returns whether it was there."""
    mine = jobs.get(job.tenant, deque())
    if job not in mine:
        return False
    mine.remove(job)
    if not mine:
        del jobs[job.tenant]
    return True


def _ending() -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))


class ComputeTurns:
    """Decides which tenant computes next: of those that want to, the one that has computed for the fewest seconds.

    A tenant that has not computed for a while starts with no more credit than the least of those that have: it
    cannot save up time. So tenants that always want to compute get equal shares of it, whatever their computes are
    like, and one that seldom does is served at the next piece (start-time fair queueing; Goyal, Vin and Cheng,
    SIGCOMM 1996). Pure: seconds come from outside.
    """

    def __init__(self) -> None:
        self._spent: dict[Tenant, float] = {}
        self._active: dict[Tenant, int] = {}  # computes that wait or are under way

    def enter(self, tenant: Tenant) -> None:
        """Records that the tenant has one more compute."""
        if tenant not in self._active:
            least = min((self._spent[other] for other in self._active), default=0.0)
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: Tenant) -> None:
        """Records that one of its computes has ended."""
        left = self._active[tenant] - 1
        if left:
            self._active[tenant] = left
        else:
            del self._active[tenant]

    def spent(self, tenant: Tenant, seconds: float) -> None:
        """Takes into account that the tenant has computed for so long."""
        self._spent[tenant] += seconds

    def next_of(self, tenants: Iterable[Tenant]) -> Tenant | None:
        """Returns the one of these that is to compute next, of equal ones the first; None if there are none."""
        return min(tenants, key=self._spent.__getitem__, default=None)

    def due_before(self, tenant: Tenant, others: Iterable[Tenant]) -> bool:
        """Whether one of the others has computed less than this tenant."""
        mine = self._spent[tenant]
        return any(self._spent[other] < mine for other in others if other != tenant)
