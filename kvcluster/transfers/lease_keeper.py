"""Renews the tickets of a client until it releases them, and ends them at the coordinator when it does.

An engine prepares a load when it schedules a request and may begin it much later; until then the ticket must be renewed
at the coordinator. Each client has one thread for that, started with the first ticket; it renews each ticket every
third of its TTL. A ticket that cannot be renewed is dropped: a hold is a hint, and the load itself finds out whether
its blocks are still cached.

The same thread ends released tickets, so that the caller of `release` does not wait: a coordinator that hangs must not
delay an engine past its deadline, and a ticket whose end it does not receive expires.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcluster.core.ids import Attempt
from kvcluster.errors import KVClusterError
from kvcluster.transport.forks import OwnProcess
from kvcluster.transport.thread_start import start_thread


class LeaseKeeper:
    """Calls `renew(attempt)` for each kept attempt every `ttl_ns` / 3, until it returns False; and `end(attempt)` once
    for each released attempt. If `end` returns False, because the coordinator cannot be reached, all attempts that are
    still to be ended are dropped."""

    def __init__(self, renew: Callable[[Attempt], bool], end: Callable[[Attempt], bool]) -> None:
        self._process = OwnProcess()
        self._renew = renew
        self._end = end
        self._due: dict[Attempt, tuple[int, int]] = {}  # (when to renew, how often)
        self._released: dict[Attempt, None] = {}  # to be ended, in order
        self._abandoned: deque[Attempt] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, attempt: Attempt, ttl_ns: int) -> None:
        """Renews this ticket from now on; if there is no room for the thread now, from a later call on."""
        every = max(1, ttl_ns // 3)
        with self._changed:
            self._due[attempt] = (time.monotonic_ns() + every, every)
            self._wake()

    def release(self, attempt: Attempt) -> None:
        """Stops renewing the ticket and has the thread end it, if it was kept. Returns at once. In a forked child it
        does nothing: the ticket is the parent's, and so is the thread."""
        if self._process.forked:
            return
        with self._changed:
            if self._due.pop(attempt, None) is not None:
                self._released[attempt] = None
                self._wake()

    def abandon(self, attempts: Sequence[Attempt]) -> bool:
        """Releases tickets that have no user any more. The garbage collector calls this in any thread, perhaps in one
        that holds the lock: so the thread does it later. Returns whether one of them was still kept."""
        if self._closed or self._process.forked or not any(attempt in self._due for attempt in attempts):
            return False
        self._abandoned.extend(attempts)
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()
        return True

    def close(self) -> None:
        """Ends every ticket that is still kept, on the calling thread if there was no room for another; then ends the
        thread."""
        with self._changed:
            self._closed = True
            self._released.update(dict.fromkeys(self._due))
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        else:
            self._run()

    def _wake(self) -> None:
        """Has the thread look for work; starts it if there is room for one. Called in the lock."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._run, name="kvcluster-lease-keeper", daemon=True)
            with suppress(KVClusterError):  # tried again by the next call
                start_thread(thread)
                self._thread = thread
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._release_abandoned()
                if self._released:
                    attempt, renewing = next(iter(self._released)), False
                    del self._released[attempt]
                elif self._closed:
                    return
                elif not self._due:
                    self._changed.wait()
                    continue
                else:
                    attempt, (when, every) = min(self._due.items(), key=lambda entry: entry[1][0])
                    wait_ns, renewing = when - time.monotonic_ns(), True
                    if wait_ns > 0:
                        self._changed.wait(wait_ns / 1e9)
                        continue
                    self._due[attempt] = (time.monotonic_ns() + every, every)
            if renewing:
                if not self._renew(attempt):
                    self._let_go(attempt)
            elif not self._end(attempt):
                self._give_up()

    def _release_abandoned(self) -> None:
        while self._abandoned:
            attempt = self._abandoned.popleft()
            if self._due.pop(attempt, None) is not None:
                self._released[attempt] = None

    def _let_go(self, attempt: Attempt) -> None:
        with self._changed:
            self._due.pop(attempt, None)

    def _give_up(self) -> None:
        """Drops the released tickets, which expire, so that `close` does not wait for an unreachable coordinator."""
        with self._changed:
            self._released.clear()
