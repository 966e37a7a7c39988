"""The connections of one data path to one shard. Each carries one exchange at a time and is kept for the next.

The pool knows the busy connections, so that `close` can end them from any thread. Connections belong to the process
that made them: a forked child shares their streams but cannot use them, and nothing it does to them reaches the shard.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport.base import Deadline, Unavailable

_IDLE = 8
"""Idle connections kept for later. More were opened only for a burst of threads."""


class PooledConnection(Protocol):
    """The methods of a connection that the pool needs (framed_socket.py)."""

    def is_quiet(self) -> bool:
        """Whether it is open, with nothing to read."""
        ...

    def shutdown(self) -> None:
        """Ends its stream for both sides, even if another process has it open. Any thread may call."""

    def close(self) -> None:
        """Releases its descriptor."""


C = TypeVar("C", bound=PooledConnection)


class ConnectionPool(Generic[C]):
    """A pool of connections. Thread-safe. `connect` opens one by a deadline; `address` appears in errors."""

    def __init__(self, address: str, connect: Callable[[Deadline], C]) -> None:
        self._address = address
        self._connect = connect
        self._idle: list[C] = []
        self._busy: dict[C, None] = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    def __bool__(self) -> bool:
        """Whether there is any connection."""
        with self._lock:
            return bool(self._idle or self._busy)

    def take(self, deadline: Deadline) -> C:
        """Returns an idle connection that is still open, or a new one. The caller must `keep` or `discard` it. Raises
        Unavailable if the pool is closed or was made before a fork, and as `connect`."""
        deadline.check(self._address)
        if os.getpid() != self._owner:
            raise self._lost("this connection belongs to the process that this one was forked from; connect again")
        while True:
            with self._lock:
                if self._closed:
                    raise self._was_closed()
                one = self._idle.pop() if self._idle else None
                if one is not None:
                    self._busy[one] = None
            if one is None:
                break
            if one.is_quiet():
                return one
            self.discard(one)  # the shard has closed it in the meantime
        one = self._connect(deadline)
        with self._lock:
            self._busy[one] = None
        if self._is_closed():  # in the meantime
            self.discard(one)
            raise self._was_closed()
        return one

    def keep(self, one: C) -> None:
        """Keeps a connection whose exchange has ended, for the next one."""
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE:
                self._busy.pop(one, None)
                self._idle.append(one)
                return
        self.discard(one)

    def discard(self, one: C) -> None:
        """Closes a connection that broke or whose exchange was abandoned, and idle ones that the shard has closed."""
        with self._lock:
            self._busy.pop(one, None)
        self._end(one)
        self.tidy()

    def tidy(self) -> None:
        """Closes idle connections that the shard has closed."""
        with self._lock:
            ended = [one for one in self._idle if not one.is_quiet()]
            self._idle = [one for one in self._idle if one not in ended]
        for one in ended:
            self._end(one)

    def close(self) -> None:
        """Ends exchanges that are under way. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for one in idle:
            self._end(one)
        if os.getpid() == self._owner:
            for one in busy:
                one.shutdown()

    def _end(self, one: C) -> None:
        if os.getpid() == self._owner:  # otherwise a child forked in the meantime would keep the stream open
            one.shutdown()
        one.close()

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _was_closed(self) -> Unavailable:
        return self._lost("this connection was closed")

    def _lost(self, why: str) -> Unavailable:
        return Unavailable(Miss(MissReason.SHARD_LOST, f"{self._address}: {why}"))
