"""The lock of the sequences of one client, which knows whether what it guards is whole.

Every change of sequences is made in this lock, and checked before it begins: a call that raises a KVClusterError has
changed nothing. Any other exception, such as KeyboardInterrupt by Ctrl-C or a lack of memory in the middle of a copy,
may leave half of a change behind. Then the sequences are `broken`, for good: nothing more of them is read, and nothing
of them is stored. A wait in the lock is no change, so it may be interrupted.

Python delivers Ctrl-C between any two of its instructions, those of a lock's `__exit__` included, if it is written in
Python: then the lock would be held for ever. So this one is an RLock, whose `__exit__` is not, and what an exception
means is decided outside of it (`whole`).
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from kvcluster.errors import CallerError, KVClusterError, ResidentSetFull
from kvcluster.transport.base import Deadline

T = TypeVar("T")
_RLock: Any = _thread.RLock  # which its annotations call final


class StepLock(_RLock):  # type: ignore[misc]
    """A lock that its holder may take again, with the methods of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(self)
        self.broken = False
        self._interrupted: BaseException | None = None  # within a wait

    def check(self) -> None:
        """Raises CallerError if the sequences are broken."""
        if self.broken:
            raise CallerError(
                "a call was interrupted while it changed a sequence, so what the sequences of this client hold is not "
                "known: close the client, connect again, and compute what they held"
            )

    def failed(self, error: BaseException, undo: Callable[[], object] = lambda: None) -> None:
        """A call has ended with this exception. If that breaks the sequences, calls `undo`, and wakes all waits."""
        if not isinstance(error, KVClusterError) and error is not self._interrupted:
            self.broken = True
            with self:
                undo()
                self._condition.notify_all()

    def notify_all(self) -> None:
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        return self._waited(lambda: self._condition.wait(timeout))

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        return self._waited(lambda: bool(self._condition.wait_for(predicate, timeout)))

    def holds_by(self, predicate: Callable[[], object], deadline: Deadline) -> bool:
        """Waits until this holds, at most until the deadline. Returns whether it does. Raises CallerError if the
        sequences are broken, since it might never hold then."""
        held = self.wait_for(lambda: self.broken or predicate(), deadline.remaining_s())
        self.check()
        return held

    def _waited(self, wait: Callable[[], bool]) -> bool:
        try:
            return wait()
        except BaseException as error:
            self._interrupted = error
            raise


class StepTurn:
    """A turn that one thread at a time may have. It is guarded by the lock, and is no lock itself: if the call of a
    thread that has it is interrupted, the sequences are broken, and no thread waits for the turn any more."""

    def __init__(self, lock: StepLock, why: str) -> None:
        self._lock = lock
        self._why = why
        self._holder = 0  # the thread that has it

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._holder == threading.get_ident()

    @contextmanager
    def taken(self, deadline: Deadline) -> Iterator[None]:
        """Within it this thread has the turn. Raises ResidentSetFull if another still has it at the deadline."""
        with self._lock:
            if not self._lock.holds_by(lambda: not self._holder, deadline):
                raise ResidentSetFull(f"{self._why}: the deadline has passed meanwhile")
            self._holder = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._holder = 0
                self._lock.notify_all()


def whole(kind: type[T]) -> type[T]:
    """Has each public method of a class pass the exception that it ends with to `failed` of its `_runner`."""

    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                self._runner.failed(error)
                raise

        return call

    for name, method in [*vars(kind).items()]:
        if not name.startswith("_") and callable(method):
            setattr(kind, name, reporting(method))
    return kind
