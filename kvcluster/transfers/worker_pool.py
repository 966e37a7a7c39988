"""A pool of threads for plans: a job goes to the thread that became idle last, and no thread is started for a job that
a thread about to become idle will take.

concurrent.futures starts a thread whenever none is idle at that moment. A thread that reports the outcome of a transfer
is not idle while it does so, but is when the caller that it wakes begins its next transfer: so every transfer would
start a thread, until the pool is full of threads that take turns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcluster.errors import KVClusterError
from kvcluster.transport.thread_start import start_thread

Work = Callable[[], None]


class _Worker:
    """A thread and its next work. `wake` is held while there is none."""

    __slots__ = ("wake", "work")

    def __init__(self, work: Work | None) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.work = work


class WorkerPool:
    """At most `limit` threads, started as needed; each calls `begin` first. Work must not raise. Thread-safe."""

    def __init__(self, limit: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._limit = limit
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._parked: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._about_to_idle = 0  # threads that will look for work next
        self._closed = False

    def start(self) -> None:
        """Starts the first thread, unless there is one or the pool is closed. Raises KVClusterError if there is no room
        for it. From then on submitted work is run: by this thread, if there is no room for others."""
        with self._lock:
            if not self._threads and not self._closed:
                self._start_thread(_Worker(None))
                self._about_to_idle += 1  # until it has begun

    def submit(self, work: Work) -> None:
        """Runs `work` on a thread, at once or when one is idle. Raises RuntimeError once the pool is closed; as `start`
        if it has no thread."""
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
    def about_to_idle(self) -> Iterator[None]:
        """Marks the calling thread of the pool as about to become idle: within, it does something short, and then
        takes work that was submitted in the meantime."""
        with self._lock:
            self._about_to_idle += 1
        try:
            yield
        finally:
            with self._lock:
                self._about_to_idle -= 1

    def start_thread_if_needed(self) -> None:
        """Starts a thread for waiting work unless a thread is about to take it. Called by a thread that was about to
        become idle, so that no thread was started for that work, and that now has other work."""
        with self._lock:
            self._start_if_needed()

    def close(self) -> None:
        """Runs the submitted work, ends the threads and waits for them. May be called again."""
        with self._lock:
            self._closed = True
            for worker in self._parked:
                worker.wake.release()
            self._parked.clear()
        for thread in self._threads:
            thread.join()

    def _start_if_needed(self) -> None:
        """Starts a thread unless the threads that are about to become idle suffice. Called under the lock."""
        if len(self._waiting) > self._about_to_idle and len(self._threads) < self._limit:
            work = self._waiting.popleft()
            try:
                self._start_thread(_Worker(work))
            except KVClusterError:
                if not self._threads:
                    raise
                self._waiting.appendleft(work)  # the threads that run take it later

    def _start_thread(self, worker: _Worker) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, args=(worker,), name=f"{self._name}_{number}", daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def _run(self, worker: _Worker) -> None:
        self._begin()
        if worker.work is None:
            self._take(worker, begins=True)
        while worker.work is not None:
            worker.work()
            worker.work = None  # so that a waiting thread keeps no object alive
            self._take(worker)

    def _take(self, worker: _Worker, *, begins: bool = False) -> None:
        """Waits for the worker's next work; leaves it None once the pool is closed. `begins`: as `start` has counted
        it."""
        with self._lock:
            self._about_to_idle -= begins
            if self._waiting:
                worker.work = self._waiting.popleft()
                return
            if self._closed:
                return
            self._parked.append(worker)
        worker.wake.acquire()
