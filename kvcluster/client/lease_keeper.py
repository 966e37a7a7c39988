"""Keeps the tickets of a client alive while it means to use them, and gives them back when it does not.

An engine prepares a load when it schedules a request and may begin it much later; until then somebody has to tell
the coordinator that the promise still matters. One thread a client, started with the first ticket; it renews each
ticket at a third of its time. What cannot be renewed is let go: a hold is a hint, and the load finds out by itself.

The same thread says which tickets are over, so that whoever releases one waits for nobody: a coordinator that hangs
must not keep an engine past its deadline, and one that does not hear it ends the ticket by time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcluster.core.ids import Attempt


class LeaseKeeper:
    """Calls `renew(attempt)` for each kept attempt every `ttl_ns` / 3, until that returns False; and `end(attempt)`
    once for each that is released, until that returns False for want of anybody who hears it."""

    def __init__(self, renew: Callable[[Attempt], bool], end: Callable[[Attempt], bool]) -> None:
        self._renew = renew
        self._end = end
        self._due: dict[Attempt, tuple[int, int]] = {}  # (when to renew, how often)
        self._released: dict[Attempt, None] = {}  # to be told, in order
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

    def release(self, attempt: Attempt) -> None:
        """Renews it no longer and has it ended, if it was kept. Returns at once."""
        with self._changed:
            if self._due.pop(attempt, None) is not None:
                self._released[attempt] = None
                self._changed.notify()

    def close(self) -> None:
        """Ends every ticket that is still kept, and the thread."""
        with self._changed:
            self._closed = True
            self._released.update(dict.fromkeys(self._due))
            self._due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
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

    def _let_go(self, attempt: Attempt) -> None:
        with self._changed:
            self._due.pop(attempt, None)

    def _give_up(self) -> None:
        """Nobody hears: what is released ends by time, and nobody is kept waiting for it."""
        with self._changed:
            self._released.clear()
