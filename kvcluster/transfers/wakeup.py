"""Waits that may be interrupted: a KeyboardInterrupt in a Condition may leave its lock taken, for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue


class Wakeup:
    """Threads wait until something holds; who makes it hold calls `notify`. There is no lock: each waiter has a queue,
    and looks after it has added that."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[None]] = []

    def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `holds()`, at most so long. Returns whether it does."""
        until = time.monotonic() + timeout_s
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(woken)
        try:
            while not holds():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                with suppress(Empty):
                    woken.get(timeout=left)
            return True
        finally:
            self._waiting.remove(woken)

    def notify(self) -> None:
        """Wakes all threads that wait."""
        for woken in list(self._waiting):
            woken.put(None)
