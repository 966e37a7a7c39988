"""A pool of threads for plans: a job is given to the thread that became idle last, and no thread is started for one
that another is about to take.

concurrent.futures starts a thread whenever none is idle at that moment. A thread that tells the outcome of a transfer
is not idle while it does, but will be when the caller that it wakes begins its next transfer: so every transfer would
start a thread, until the pool is full of threads that take turns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], None]


class _Worker:
    """A thread, and what it is to do next. `wake` is held while there is nothing."""

    __slots__ = ("wake", "work")

    def __init__(self, work: Work | None) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.work = work


class WorkerPool:
    """At most `limit` threads, started as they are needed; `begin` is called on each first. What it runs must not
    raise. Thread-safe."""

    def __init__(self, limit: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._limit = limit
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._parked: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._soon_idle = 0  # threads that will look for work in a moment
        self._closed = False

    def submit(self, work: Work) -> None:
        """Runs it on a thread, at once or when one is idle. Raises RuntimeError once the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this pool is closed")
            if self._parked:
                worker = self._parked.pop()
                worker.work = work
                worker.wake.release()
            else:
                self._waiting.append(work)
                self._start_if_needed()

    @contextmanager
    def soon_idle(self) -> Iterator[None]:
        """A thread of the pool does something short within; what is submitted meanwhile it will find."""
        with self._lock:
            self._soon_idle += 1
        try:
            yield
        finally:
            with self._lock:
                self._soon_idle -= 1

    def busy_again(self) -> None:
        """The thread that was soon to be idle is not: what was left for it gets another."""
        with self._lock:
            self._start_if_needed()

    def close(self) -> None:
        """Runs what was submitted, and ends the threads; waits for them. May be called again."""
        with self._lock:
            self._closed = True
            for worker in self._parked:
                worker.wake.release()
            self._parked.clear()
        for thread in self._threads:
            thread.join()

    def _start_if_needed(self) -> None:
        """Under the lock."""
        if len(self._waiting) > self._soon_idle and len(self._threads) < self._limit:
            worker = _Worker(self._waiting.popleft())
            number = len(self._threads)
            thread = threading.Thread(target=self._run, args=(worker,), name=f"{self._name}_{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, worker: _Worker) -> None:
        self._begin()
        while worker.work is not None:
            worker.work()
            worker.work = None  # nothing that it knew is kept while this thread waits
            self._take(worker)

    def _take(self, worker: _Worker) -> None:
        """Its next work; none once the pool is closed."""
        with self._lock:
            if self._waiting:
                worker.work = self._waiting.popleft()
                return
            if self._closed:
                return
            self._parked.append(worker)
        worker.wake.acquire()
