"""Deadlines and waits of a client's calls.

The deadline of a call for which neither its caller nor the configuration gives one fits what the call is worth. A load
is worth the time in which its tokens could be computed, and a question before it far less: an engine waits for both,
and computes the blocks that are a miss. Nothing waits for a store in this way.

    QUESTION_MS               hashes, lookup, prepare_load, the questions of a load
    QUESTION_MS + 1 ms a MB   the bytes of a load
                + 0.2 ms a block
    OTHER_MS                  everything else: stores, flush, sequences, pins, explain, status, clear, purge

A `Timer` is one thread per client that calls plans when something may be due, started with the first plan. The called
methods must return at once. Entries hold their objects weakly, so that a transfer that has ended is not kept alive
until its deadline. An entry that is no longer needed is left to expire, which wakes the thread less often than removing
it would.

A `Wakeup` is for waits that may be interrupted: a KeyboardInterrupt in a Condition may leave its lock taken, for ever.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from kvcluster.transfers.layouts import check_deadline_ms
from kvcluster.transport.base import Deadline
from kvcluster.transport.thread_start import start_thread

QUESTION_MS = 1_000
"""A coordinator answers within a few milliseconds, and one whose process was stalled for as long as is allowed
(Config.stall_ms) still answers in time."""

LOAD_BYTES_PER_MS = 1_000_000
"""Slower loads do not pay: of a model with 128 KiB of KV a token, such as llama-3-8b, 1 GB/s are 7,600 tokens/s, which
one GPU computes as well."""

LOAD_BLOCKS_PER_MS = 5
"""A block costs a load time of its own, however small it is. To compute one of 16 tokens in that time takes 80,000
tokens/s."""

OTHER_MS = 10_000
"""Time for what is done beside requests: a store waits in line, then for room (ClientConfig.store_wait_ms)."""


def call_deadline(configured_ms: float, deadline_ms: float | None, default_ms: float = OTHER_MS) -> Deadline:
    """Returns the deadline of a call that begins now: `deadline_ms` if its caller gives it, otherwise that of the
    configuration, `default_ms` if that has 0. Raises CallerError as check_deadline_ms."""
    default_ms = configured_ms or default_ms
    return Deadline.after_ms(default_ms if deadline_ms is None else check_deadline_ms(deadline_ms))


def load_ms(nbytes: int, blocks: int) -> float:
    """Returns the deadline of loading so many bytes in so many blocks, in milliseconds."""
    return QUESTION_MS + nbytes / LOAD_BYTES_PER_MS + blocks / LOAD_BLOCKS_PER_MS


def remaining_ms(deadline: Deadline) -> float:
    """Returns the time that is left, as the `deadline_ms` of a call that is part of another."""
    return deadline.remaining_s() * 1e3


class Timer:
    """Calls bound methods at set times. Thread-safe. `close` waits for the call in progress."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int, weakref.WeakMethod[Callable[[], object]]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the thread, unless it runs or the timer is closed. Raises KVClusterError if there is no room for
        one."""
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="kvcluster-timer", daemon=True)
                start_thread(thread)
                self._thread = thread

    def call_at(self, when_ns: int, method: Callable[[], object]) -> None:
        """Calls the bound method at `when_ns` of the monotonic clock, if its object still exists then. Raises as
        `start`, which is called if it was not."""
        with self._changed:
            if self._closed:
                return
            self.start()
            heapq.heappush(self._due, (when_ns, next(self._numbers), weakref.WeakMethod(method)))
            if self._due[0][0] == when_ns:
                self._changed.notify()

    def close(self) -> None:
        """Calls nothing more, and ends the thread. May be called again, but not from a called method."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                wait_ns = self._due[0][0] - time.monotonic_ns() if self._due else None
                if self._closed:
                    return
                if wait_ns is None or wait_ns > 0:
                    self._changed.wait(None if wait_ns is None else wait_ns / 1e9)
                    continue
                _, _, entry = heapq.heappop(self._due)
            method = entry()
            if method is not None:
                method()
            del method


class Wakeup:
    """Threads wait until a condition holds; the thread that makes it hold calls `notify`. There is no lock: each waiter
    adds a queue of its own before it looks at the condition."""

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[None]] = []

    def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `holds()`, at most `timeout_s`. Returns whether it does."""
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
