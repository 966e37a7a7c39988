"""Connections: those of one data path to one shard. One carries one exchange at a time and is kept for the next.

What is under way is known, so that `close` can end it from any thread. They belong to the process that made them: in a
forked child, which shares their streams, they are of no use, and nothing that is done to them there reaches the shard.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport.base import Deadline, Unavailable

_IDLE = 8
"""Kept for later: more were opened only for a burst of threads."""


class PooledConnection(Protocol):
    """As much of a link as is needed here (framed_socket.py)."""

    def is_quiet(self) -> bool:
        """Is it open, with nothing to read?"""
        ...

    def shut(self) -> None:
        """Ends its stream, for the other side as well, whoever else may have it open. Any thread may call."""

    def close(self) -> None:
        """Gives it back."""


C = TypeVar("C", bound=PooledConnection)


class ConnectionPool(Generic[C]):
    """Thread-safe. `connect` opens one by a deadline; `address` is for the words of errors."""

    def __init__(self, address: str, connect: Callable[[Deadline], C]) -> None:
        self._address = address
        self._connect = connect
        self._idle: list[C] = []
        self._busy: dict[C, None] = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    def take(self, deadline: Deadline) -> C:
        """An idle one that is still open, or a new one: to be kept or discarded. Raises as `connect` does."""
        deadline.check(self._address)
        if os.getpid() != self._owner:
            raise self._lost("this connection is of the process that this one was forked from; connect anew")
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
            self.discard(one)  # the shard has closed it meanwhile
        one = self._connect(deadline)
        with self._lock:
            self._busy[one] = None
        if self._is_closed():  # meanwhile
            self.discard(one)
            raise self._was_closed()
        return one

    def keep(self, one: C) -> None:
        """The other side waits for the next exchange on it."""
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE:
                self._busy.pop(one, None)
                self._idle.append(one)
                return
        self.discard(one)

    def discard(self, one: C) -> None:
        """It is within an exchange that has ended here, or broken. What the shard has closed is closed with it."""
        with self._lock:
            self._busy.pop(one, None)
        self._end(one)
        self.tidy()

    def tidy(self) -> None:
        """Closes those that lie idle and that the shard has closed."""
        with self._lock:
            ended = [one for one in self._idle if not one.is_quiet()]
            self._idle = [one for one in self._idle if one not in ended]
        for one in ended:
            self._end(one)

    def close(self) -> None:
        """Ends what is under way. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for one in idle:
            self._end(one)
        if os.getpid() == self._owner:
            for one in busy:
                one.shut()

    def _end(self, one: C) -> None:
        if os.getpid() == self._owner:  # a child that was forked meanwhile must not keep the stream open
            one.shut()
        one.close()

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _was_closed(self) -> Unavailable:
        return self._lost("this connection was closed")

    def _lost(self, why: str) -> Unavailable:
        return Unavailable(Miss(MissReason.SHARD_LOST, f"{self._address}: {why}"))
