"""Threads beside a driver, for work that would block it: each runs one job after the other, and reports every failure.

A driver submits jobs under its lock, so `submit` never waits. The number of jobs that may wait is known beforehand,
since a core waits for an answer before it asks for more; one job too many is a bug, and an assertion finds it. A job
that raises is a bug as well: the thread reports it and ends, and with it the process, because a shard that looks
healthy but no longer reports or verifies is worse than one that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

J = TypeVar("J")


def be_nice(niceness: int) -> None:
    """Lowers the priority of the calling thread alone, if the system supports that. `niceness` should stay small: a
    thread that hardly ever runs may be stopped while it holds a lock that others wait for."""
    if niceness:
        with contextlib.suppress(OSError):  # only Linux gives threads priorities of their own
            tid = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, tid, os.getpriority(os.PRIO_PROCESS, tid) + niceness)


class JobThread(Generic[J]):
    """Runs `do` with each job, in order. At most `most` jobs wait, besides the one under way. `niceness` is as in
    `be_nice`."""

    def __init__(
        self,
        do: Callable[[J], None],
        *,
        name: str,
        on_failure: Callable[[BaseException], None],
        most: int = 1,
        niceness: int = 0,
    ) -> None:
        self._do = do
        self._most = most
        self._on_failure = on_failure
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvcluster-{name}", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def submit(self, job: J) -> None:
        """Queues a job behind those that wait. Never blocks; no job begins after `close`."""
        assert self._jobs.qsize() < self._most, f"{self._thread.name} has {self._most} jobs waiting already"
        self._jobs.put(job)

    @property
    def waiting(self) -> int:
        """The number of jobs that wait."""
        return self._jobs.qsize()

    def close(self) -> None:
        """Drops the jobs that wait, and returns when the job under way has ended. The caller makes that job end
        soon."""
        self._closing = True
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        be_nice(self._niceness)
        try:
            while (job := self._jobs.get()) is not None and not self._closing:
                self._do(job)
        except Exception as error:
            log.critical("%s failed", self._thread.name, exc_info=True)
            self._on_failure(error)
