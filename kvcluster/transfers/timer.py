"""A timer: one thread per client that calls plans when something may be due. Started with the first plan.

The called methods must return at once. Entries hold their objects weakly, so that a transfer that has ended is not kept
alive until its deadline. An entry that is no longer needed is left to expire, which wakes the thread less often than
removing it would.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable

from kvcluster.transport.thread_start import start_thread


class Timer:
    """Calls bound methods at set times. Thread-safe. `close` waits for the call in progress."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int, weakref.WeakMethod[Callable[[], object]]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the thread, unless it runs or the timer is closed. Raises KVClusterError if there is no room for
        one."""
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="kvcluster-timer", daemon=True)
                start_thread(thread)
                self._thread = thread

    def call_at(self, when_ns: int, method: Callable[[], object]) -> None:
        """Calls the bound method at `when_ns` of the monotonic clock, if its object still exists then. Raises as
        `start`, which is called if it was not."""
        with self._changed:
            if self._closed:
                return
            self.start()
            heapq.heappush(self._due, (when_ns, next(self._numbers), weakref.WeakMethod(method)))
            if self._due[0][0] == when_ns:
                self._changed.notify()

    def close(self) -> None:
        """Calls nothing more, and ends the thread. May be called again, but not from a called method."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_ns = self._due[0][0] - time.monotonic_ns() if self._due else None
                if self._closed:
                    return
                if wait_ns is None or wait_ns > 0:
                    self._changed.wait(None if wait_ns is None else wait_ns / 1e9)
                    continue
                _, _, entry = heapq.heappop(self._due)
            method = entry()
            if method is not None:
                method()
            del method
