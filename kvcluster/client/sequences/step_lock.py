"""The lock of the sequences of one client, which knows whether what it guards is whole.

Whatever changes sequences does so in this lock, and checks before it begins to change: what raises a KVClusterError has
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
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from kvcluster.errors import CallerError, KVClusterError

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

    def failed(self, error: BaseException) -> None:
        """A call has ended with this exception."""
        if not isinstance(error, KVClusterError) and error is not self._interrupted:
            self.broken = True
            if self.acquire(blocking=False):
                self._condition.notify_all()
                self.release()

    def notify_all(self) -> None:
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        return self._waited(lambda: self._condition.wait(timeout))

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        return self._waited(lambda: bool(self._condition.wait_for(predicate, timeout)))

    def _waited(self, wait: Callable[[], bool]) -> bool:
        try:
            return wait()
        except BaseException as error:
            self._interrupted = error
            raise


def whole(kind: type[T]) -> type[T]:
    """Has each public method of a class, whose instances have a `_runner`, tell its lock of the exception that it ends
    with."""

    def telling(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                self._runner.lock.failed(error)
                raise

        return call

    for name, method in [*vars(kind).items()]:
        if not name.startswith("_") and callable(method):
            setattr(kind, name, telling(method))
    return kind
