"""The gate that reserves this process's devices for an engine while it captures a graph: in CUDA's usual mode, a call
of another thread meanwhile would make the capture fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """Open, or closed for all threads but one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread = threading.local()
        """`depth`: how many nested calls of the thread are under way."""
        self._inside = 0
        self._owner: int | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Returns a context in which no other thread calls a device. Entering it waits for calls that are under way,
        which is less than a millisecond. Loads and stores begin nothing on a device until it is left, and end at their
        deadlines all the same; but the work of a device for one of them can be waited for only then."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner is None)
            self._owner = threading.get_ident()
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    def enter(self) -> None:
        """Begins a call of a device: waits until the gate is open for this thread, unless a call of it is under way.
        `leave` ends it."""
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            with self._changed:
                self._changed.wait_for(self._is_open)
                self._inside += 1
        self._thread.depth = depth + 1

    def leave(self) -> None:
        """Ends a call that `enter` has begun."""
        self._thread.depth -= 1
        if not self._thread.depth:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Returns a context for one call of a device."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is open for this thread. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(self._is_open, timeout_s)

    def _is_open(self) -> bool:
        return self._owner in (None, threading.get_ident())


GATE = CaptureGate()
"""The gate of all devices of this process."""
