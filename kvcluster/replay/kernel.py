"""Simulated time: one heap of events, clocks that disagree, processes that are stopped or killed, and scripts.

An event is due at an instant and belongs to a process. A dead process never gets it; a stopped process gets it when it
is resumed, in the order of arrival. Nothing else happens by itself, and two events of one instant are run in the order
in which they were made: so a run is a function of its seed.

What a process does over time is a *script*: a generator that yields what it waits for and is sent the result. A script
has no `finally` that acts, because a killed process does nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

MS = 1_000_000
SECOND = 1_000 * MS

MOST_AT_ONCE = 100_000
"""The limit of events that `Kernel.settle` runs in one instant: beyond it, processes answer one another without end."""

TIMED_OUT = object()
"""What a script is sent if nothing arrived in time."""


class Promise:
    """A future value, for the one script that waits for it. The first value counts: answers may come twice."""

    __slots__ = ("ready", "value", "waiter")

    def __init__(self) -> None:
        self.ready = False
        self.value: Any = None
        self.waiter: _Task | None = None

    def fulfil(self, value: Any) -> None:
        if not self.ready:
            self.ready = True
            self.value = value
            if self.waiter is not None:
                self.waiter.go_on(value)


Wait = tuple[Promise | None, int]
"""What a script yields: a promise, or None, and the most nanoseconds of its own clock to wait for it."""
Script = Generator[Wait, Any, Any]


class Clock:
    """A machine's clock: ahead by `offset_ns`, and fast by `ppm` millionths."""

    __slots__ = ("_offset", "_rate")

    def __init__(self, offset_ns: int, ppm: int) -> None:
        self._offset = offset_ns
        self._rate = 1_000_000 + ppm

    def read(self, at: int) -> int:
        """Returns what the clock shows at that instant of simulated time."""
        return self._offset + at * self._rate // 1_000_000

    def when(self, shown: int) -> int:
        """Returns the first instant at which the clock shows `shown` or more."""
        return -(-(shown - self._offset) * 1_000_000 // self._rate)

    def lasts(self, nanoseconds: int) -> int:
        """Returns the simulated duration that this clock measures as `nanoseconds`."""
        return nanoseconds * 1_000_000 // self._rate


class Kernel:
    """The current time and the events that are due."""

    __slots__ = ("_heap", "_made", "now")

    def __init__(self) -> None:
        self.now = 0
        self._made = 0
        self._heap: list[tuple[int, int, Process | None, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, when: int, process: Process | None, act: Callable[..., Any], *arguments: Any) -> None:
        """Has `process` call `act` at that instant, or now if it is past. None as the process is the world itself."""
        self._made += 1
        heappush(self._heap, (when if when > self.now else self.now, self._made, process, act, arguments))

    def run(self, until: int) -> None:
        """Runs everything that is due before `until`, and sets the time to `until`."""
        while self._heap and self._heap[0][0] < until:
            self._run_next()
        self.now = until

    def settle(self) -> None:
        """Runs everything that is due now, including what that makes due at this instant. No time passes.

        Raises AssertionError if that does not end.
        """
        now = self.now
        for _ in range(MOST_AT_ONCE):
            if not self._heap or self._heap[0][0] > now:
                return
            self._run_next()
        raise AssertionError(f"{MOST_AT_ONCE:,} events at one instant, without an end")

    def _run_next(self) -> None:
        self.now, _, process, act, arguments = heappop(self._heap)
        if process is None or process.running:
            act(*arguments)
        elif process.stopped:
            process.backlog.append((act, arguments))


class Process:
    """One incarnation of anything that can be stopped and killed."""

    def __init__(self, kernel: Kernel, name: str, node: int, clock: Clock) -> None:
        self.kernel = kernel
        self.name = name
        self.node = node
        self.clock = clock
        self.running = True
        self.stopped = False
        self.backlog: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.lines: dict[Any, None] = {}  # connections, which are reset when it dies

    @property
    def dead(self) -> bool:
        return not (self.running or self.stopped)

    def now(self) -> int:
        """Returns the time on this process's clock."""
        return self.clock.read(self.kernel.now)

    def start(self, script: Script) -> Promise:
        """Starts a script; the returned promise is fulfilled with its result."""
        done = Promise()
        _Task(self, script, done).go_on(None)
        return done

    def stop(self) -> None:
        """Stops the process, as SIGSTOP, a long pause of its machine or a debugger would."""
        if self.running:
            self.running, self.stopped = False, True

    def resume(self) -> None:
        """Resumes a stopped process with the events that arrived meanwhile."""
        if self.stopped:
            self.running, self.stopped = True, False
            self.catch_up()

    def catch_up(self) -> None:
        backlog, self.backlog = self.backlog, []
        for act, arguments in backlog:
            if not self.running:
                return
            act(*arguments)

    def kill(self) -> None:
        """Kills the process; other processes are not notified."""
        self.running = self.stopped = False
        self.backlog.clear()


class _Task:
    """A running script. `_waits` numbers its waits, so that the timeout of an earlier wait is recognised and
    ignored."""

    __slots__ = ("_done", "_process", "_promise", "_script", "_waits")

    def __init__(self, process: Process, script: Script, done: Promise) -> None:
        self._process = process
        self._script = script
        self._done = done
        self._waits = 0
        self._promise: Promise | None = None

    def go_on(self, value: Any) -> None:
        self._waits += 1
        if self._promise is not None:
            self._promise.waiter = None
        process = self._process
        while process.running:
            try:
                promise, patience_ns = self._script.send(value)
            except StopIteration as end:
                self._done.fulfil(end.value)
                return
            self._promise = promise
            if promise is not None and promise.ready:
                value = promise.value
                continue
            if promise is not None:
                promise.waiter = self
            kernel = process.kernel
            kernel.at(kernel.now + process.clock.lasts(patience_ns), process, self._give_up, self._waits)
            return

    def _give_up(self, waits: int) -> None:
        if waits == self._waits:
            self.go_on(TIMED_OUT)
