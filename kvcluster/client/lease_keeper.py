"""Keeps the tickets of a client alive while it means to use them.

An engine prepares a load when it schedules a request and may begin it much later; until then somebody has to tell
the coordinator that the promise still matters. One thread a client, started with the first ticket; it renews each
ticket at a third of its time. What cannot be renewed is let go: a hold is a hint, and the load finds out by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcluster.core.ids import Attempt


class LeaseKeeper:
    """Calls `renew(attempt)` for each kept attempt every `ttl_ns` / 3, until that returns False."""

    def __init__(self, renew: Callable[[Attempt], bool]) -> None:
        self._renew = renew
        self._due: dict[Attempt, tuple[int, int]] = {}  # (when to renew, how often)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, attempt: Attempt, ttl_ns: int) -> None:
        """Renews this ticket from now on."""
        every = max(1, ttl_ns // 3)
        with self._changed:
            self._due[attempt] = (time.monotonic_ns() + every, every)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvcluster-lease-keeper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def let_go(self, attempt: Attempt) -> bool:
        """Renews it no longer. False where it was not kept."""
        with self._changed:
            return self._due.pop(attempt, None) is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._due:
                    self._changed.wait()
                    continue
                attempt, (when, every) = min(self._due.items(), key=lambda entry: entry[1][0])
                wait_ns = when - time.monotonic_ns()
                if wait_ns > 0:
                    self._changed.wait(wait_ns / 1e9)
                    continue
                self._due[attempt] = (time.monotonic_ns() + every, every)
            if not self._renew(attempt):
                self.let_go(attempt)
