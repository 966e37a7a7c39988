"""Threads beside a driver, for what would block it: each does one job after the other, and cannot fail unheard.

A driver hands a job over under its lock, so `submit` never waits. How many jobs may wait is known beforehand, since
a core asks for so much and no more until it is answered; one more is a mistake, and found as one. A job that raises
has met what its author did not foresee: the thread reports it and ends, and with it the process, because a shard
that no longer reports or verifies, and looks well, is worse than one that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

J = TypeVar("J")


def be_nice(niceness: int) -> None:
    """Lowers the priority of the calling thread alone, where the system can do that. `niceness` should stay small: a
    thread that hardly ever runs may hold, when it is stopped, what others wait for."""
    if niceness:
        with contextlib.suppress(OSError):  # only Linux gives threads priorities of their own
            tid = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, tid, os.getpriority(os.PRIO_PROCESS, tid) + niceness)


class JobThread(Generic[J]):
    """Runs `do` with each job, in order. At most `most` jobs wait, besides the one under way. `niceness` as in
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
        self._thread.start()

    def submit(self, job: J) -> None:
        """Has the job done after those that wait. Never blocks; nothing is begun after `close`."""
        assert self._jobs.qsize() < self._most, f"{self._thread.name} has {self._most} jobs waiting already"
        self._jobs.put(job)

    def close(self) -> None:
        """Drops what waits, and returns when the job under way has ended. Whoever calls makes that soon."""
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
            log.critical("%s broke", self._thread.name, exc_info=True)
            self._on_failure(error)
