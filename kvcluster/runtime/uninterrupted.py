"""Work that an interrupt cannot tear in two: what the main thread asks for is done by another thread.

Python runs signal handlers on the main thread, between any two of its instructions. A KeyboardInterrupt raised there
may leave a lock taken, a plan half stepped, or a ticket that no object names; a threading.Condition alone may keep its
lock for ever. So the main thread changes nothing that other threads use: it hands the work to a thread that no signal
reaches, and waits. Only that wait can be interrupted. Then the call is abandoned: work that is done is undone, and
when the exception goes on, the caller's memory is not used any more. Other threads do their work themselves.

The threads are those of the process, started when they are needed, and wait for the next work for good.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import wraps
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")
log = logging.getLogger(__name__)

THREADS = 32
"""At most. One serves the main thread; each call that was abandoned while it waits for an answer keeps another until
its deadline."""

Done = SimpleQueue[None]  # a get of it takes no lock that an interrupt could leave taken


class Abandoned(Exception):
    """The caller of this work was interrupted, so the work does not go on."""


class MainCall(Generic[R]):
    """One piece of work of the main thread."""

    def __init__(self, work: Callable[[MainCall[R]], R], undo: Callable[[R], object], *, brief: bool) -> None:
        self._work = work
        self._undo = undo
        self._brief = brief
        self._abandoned = False
        self._using = threading.Lock()  # held while the caller's memory may be used
        self._results: list[R] = []  # at most one; taken by the caller, or to be undone
        self._cancel: Callable[[], object] | None = None
        self.error: BaseException | None = None

    def finish(self, begin: Callable[[], T], cancel: Callable[[T], object], wait: Callable[[T], W]) -> W:
        """Begins something that uses the caller's memory, and waits for it; it is cancelled if the call is abandoned.
        Raises Abandoned if it is already."""
        with self._using:
            if self._left():
                raise Abandoned
            begun = begin()
            self._cancel = lambda: cancel(begun)
            if self._left():
                cancel(begun)
            return wait(begun)

    def run(self) -> None:
        """Does the work, on a thread that is not interrupted."""
        with self._using if self._brief else nullcontext():
            if self._left():
                return
            try:
                self._results.append(self._work(self))
            except BaseException as error:
                self.error = error
        if self._left():
            self._undo_result()

    def outcome(self) -> R:
        """Returns what the work returned, or raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._results[0]

    def abandon(self) -> Callable[[], None]:
        """Prevents anything more from beginning. Returns a function for another thread to call: when that has returned,
        the caller's memory is not used any more, and the work is undone, now or once it is done."""
        self._abandoned = True
        return self._stop

    def _left(self) -> bool:
        return self._abandoned  # which another thread sets

    def _stop(self) -> None:
        if self._cancel is not None:
            self._cancel()
        with self._using:
            self._undo_result()

    def _undo_result(self) -> None:
        with suppress(IndexError):
            self._undo(self._results.pop())


class CallThreads:
    """The threads that work for the main thread. `submit` takes no lock."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], Done]] = SimpleQueue()
        self._lock = threading.Lock()  # not for the main thread
        self._idle = self._started = 0

    def submit(self, work: Callable[[], object]) -> Done:
        """Has a thread do `work`. Returns a queue that gets an item when it is done."""
        done: Done = SimpleQueue()
        self._work.put((work, done))
        if self._work.qsize() > self._idle:
            try:
                _thread.start_new_thread(self._start, ())  # Thread.start waits, and must not be interrupted
            except RuntimeError:
                self._work_here()
        return done

    def _start(self) -> None:
        """Starts threads until there is one for everything that waits. Not called by the main thread."""
        with self._lock:
            while self._work.qsize() > self._idle and self._started < THREADS:
                thread = threading.Thread(target=self._run, name=f"kvcluster-call_{self._started}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    break
                self._started += 1
                self._idle += 1
        if not self._started:
            self._work_here()

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            with self._lock:
                self._idle -= 1
            self._start()  # work that was submitted at this moment counted on this thread
            _do(work)
            with self._lock:
                self._idle += 1
            done.put(None)
            del work, done  # so that a waiting thread keeps no object alive

    def _work_here(self) -> None:
        """Does what waits, without room for another thread."""
        with suppress(Empty):
            while True:
                work, done = self._work.get_nowait()
                _do(work)
                done.put(None)


def _do(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        log.exception("what an interrupted call had done could not be undone")


_THREADS = CallThreads()


def _nothing(result: Any) -> None:
    """Undoes nothing."""


def uninterrupted(
    work: Callable[[MainCall[R]], R], undo: Callable[[R], object] = _nothing, *, brief: bool = False
) -> R:
    """Returns what `work` returns, and raises what it raises. If the wait for it is interrupted, `undo` is called with
    what it returns. `brief` work uses the caller's memory, or must be over when the exception goes on; work that takes
    long uses that memory within `MainCall.finish`."""
    call = MainCall(work, undo, brief=brief)
    if not _on_main_thread():
        return work(call)
    try:
        _THREADS.submit(call.run).get()
        return call.outcome()
    except BaseException as error:
        if error is not call.error:
            _THREADS.submit(call.abandon()).get()
        call.error = None  # it refers to this frame
        raise


def without_interrupt(
    undo: Callable[[Any], object] = _nothing, *, brief: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the whole of a call is done as `uninterrupted` does it."""

    def decorate(work: Callable[P, R]) -> Callable[P, R]:
        @wraps(work)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _on_main_thread():
                return work(*args, **kwargs)
            result: R = uninterrupted(lambda _: work(*args, **kwargs), undo, brief=brief)
            return result

        return call

    return decorate


def later(work: Callable[[], object]) -> None:
    """Does `work` without an interrupt; called on the main thread, does not wait for it."""
    if _on_main_thread():
        _THREADS.submit(work)
    else:
        work()


def _on_main_thread() -> bool:
    """False at the end of the interpreter, when no other thread runs any more."""
    return threading.get_ident() == threading.main_thread().ident and not sys.is_finalizing()
