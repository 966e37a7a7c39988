"""A lock that says when a thread waits for it, so that a test knows without waiting itself."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WatchedGate:
    """A lock that calls `waits` when a thread has to wait for it."""

    def __init__(self, waits: Callable[[], object]) -> None:
        self._lock, self._waits = threading.Lock(), waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def waits_for_gate(gate_in: Callable[[WatchedGate], object], stop: Callable[[], object]) -> bool:
    """Whether `stop`, made by another thread while the gate is held, returns only afterwards. `gate_in` puts the gate
    where it belongs."""
    goes_on, over = threading.Event(), threading.Event()
    gate = WatchedGate(goes_on.set)
    gate_in(gate)

    def make() -> None:
        stop()
        over.set()
        goes_on.set()

    thread = threading.Thread(target=make)
    with gate:
        thread.start()
        goes_on.wait()
        waited = not over.is_set()
    thread.join()
    return waited and over.is_set()
