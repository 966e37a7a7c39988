"""The threads on which a shard computes attention, and the bounded queue before them.

Compute takes a processor for milliseconds, loads only while they copy. So compute has threads of its own, which are
niced: loads, stores and the core go before them. The jobs that wait are bounded, by shares of tenants; one more is
declined at once, and its worker loads the pages instead. A job that is still waiting at its deadline never runs.

A job's exceptions are those of its caller, which waits for it on another thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shares import Shares
from kvcluster.runtime.threads import be_nice
from kvcluster.transport.base import ComputeBusy, Deadline, Unavailable

T = TypeVar("T")

NICENESS = 10
"""About a tenth of a processor, where loads want all of it."""


class _Job(Generic[T]):
    """One job and its outcome. `ended` is set when it has run or never will."""

    def __init__(self, tenant: Tenant, work: Callable[[], T], deadline: Deadline) -> None:
        self.tenant = tenant
        self.work = work
        self.deadline = deadline
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.deadline.check("it waited for a thread until then")
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.ended.set()


class ComputePool:
    """`threads` threads, from `start` to `close`; with 0, half as many as there are processors."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: deque[_Job[Any]] = deque()
        self._shares = Shares(limits.ATTENDS_WAITING)
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvcluster-{name}-compute-{number}", daemon=True)
            for number in range(threads or max(1, (os.cpu_count() or 1) // 2))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a thread."""
        return len(self._waiting)

    def run(self, tenant: Tenant, work: Callable[[], T], deadline: Deadline) -> T:
        """Returns what `work` returns, on one of the threads. Raises what it raises; ComputeBusy if the tenant has its
        share of the queue; Unavailable at the deadline, if it has not begun, or once the pool is closed."""
        job = _Job(tenant, work, deadline)
        with self._wake:
            if self._closed:
                raise _ending()
            if self._shares.full(tenant):
                raise ComputeBusy(f"{len(self._waiting)} computes wait for {len(self._threads)} threads")
            self._shares.add(tenant)
            self._waiting.append(job)
            self._wake.notify()
        job.ended.wait()
        if job.error is not None:
            raise job.error
        result: T = job.result  # type: ignore[assignment] # None only if T is None
        return result

    def close(self) -> None:
        """Ends the jobs that wait, and returns when those under way have ended. May be called again."""
        with self._wake:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for job in left:
            job.error = _ending()
            job.ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _run(self) -> None:
        be_nice(NICENESS)
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job = self._waiting.popleft()
                self._shares.remove(job.tenant)
            job.run()


def _ending() -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))
