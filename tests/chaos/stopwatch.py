"""How long a call took, less the time in which it could not have ended: stopped, or waiting for a CPU.

A deadline binds the product, not the machine. What the calling thread waited for a CPU is told by the kernel
(`/proc/thread-self/schedstat`). What the whole process stood still is seen by a thread that beats and needs next to no
CPU: a beat that comes much too late was held up by a signal, or got no CPU. These two cannot be told apart, since a
thread that is to be stopped has to be given a CPU first; and neither is the product's doing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BEAT_NS = 20_000_000
_STOPPED_NS = 100_000_000
"""Less than this is Python's own lock, which is our doing."""


@dataclass(slots=True)
class Taken:
    """A call: when it began and ended, and for how long its thread waited for a CPU meanwhile."""

    began_ns: int
    ended_ns: int = 0
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """The process stood still for `stopped_ns` of this span."""

    began_ns: int
    ended_ns: int
    stopped_ns: int


def allowed_ns(deadline_ns: int) -> int:
    """Returns how long a call with this deadline may take."""
    return deadline_ns + max(deadline_ns // 10, 250_000_000)


def late_ns(deadline_ns: int, taken: Taken, stops: list[Stop]) -> int:
    """By how much a call took longer than it may; not positive where it did not."""
    stood = sum(
        min(stop.stopped_ns, min(stop.ended_ns, taken.ended_ns) - max(stop.began_ns, taken.began_ns))
        for stop in stops
        if stop.began_ns < taken.ended_ns and taken.began_ns < stop.ended_ns
    )
    # The same moment may have been seen by both.
    return taken.ended_ns - taken.began_ns - max(taken.waited_ns, stood) - allowed_ns(deadline_ns)


class Stopwatch:
    """Times calls of any thread of this process. A context manager: it beats from `with` on."""

    def __init__(self) -> None:
        self._stops: deque[Stop] = deque(maxlen=64)  # far more than fall into one call
        self._beaten = threading.Condition()
        self._last_ns = time.monotonic_ns()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="chaos-stopwatch", daemon=True)

    def __enter__(self) -> Stopwatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def timing(self) -> Iterator[Taken]:
        """Times what is done within."""
        waited = waited_for_cpu_ns()
        taken = Taken(time.monotonic_ns())
        try:
            yield taken
        finally:
            taken.ended_ns = time.monotonic_ns()
            taken.waited_ns = waited_for_cpu_ns() - waited

    def late_ns(self, deadline_ns: int, taken: Taken) -> int:
        """As the function of this name. Waits for the next beat where that decides."""
        if late_ns(deadline_ns, taken, []) <= 0:
            return 0
        with self._beaten:
            self._beaten.wait_for(lambda: self._last_ns >= taken.ended_ns or self._ended.is_set())
            return max(0, late_ns(deadline_ns, taken, list(self._stops)))

    def _beat(self) -> None:
        began = time.monotonic_ns()
        while not self._ended.wait(BEAT_NS / 1e9):
            ended = time.monotonic_ns()
            stopped = ended - began - BEAT_NS
            with self._beaten:
                if stopped > _STOPPED_NS:
                    self._stops.append(Stop(began, ended, stopped))
                self._last_ns = ended
                self._beaten.notify_all()
            began = ended
        with self._beaten:
            self._beaten.notify_all()


def waited_for_cpu_ns() -> int:
    """Returns for how long this thread has been ready to run without running, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
