"""Forks: a process is forked while none of its calls is within gRPC.

A forked child has only the thread that forked. gRPC prepares itself for that, but only if no other thread is within it
at that moment; otherwise a call of the child may end it (SIGSEGV or SIGABRT). So a fork waits until the calls that are
under way have ended, and calls that begin meanwhile wait for the fork. A call that takes too long is not waited for;
then the child may not use gRPC, and its connections raise KVClusterError.

This knows the calls of `Connection` (rpc.py) alone, and not what else in the process uses gRPC.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcluster.errors import CallerError, KVClusterError
from kvcluster.transport.base import Deadline

WAIT_S = 1.0
"""The longest that a fork waits for calls. Most take milliseconds; the thread that forks stands still meanwhile."""


class ForkGate:
    """Counts the calls that are within gRPC. `before`, `in_parent` and `in_child` are hooks of os.fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._forking = 0
        self._usable = True

    def check(self) -> None:
        """Raises KVClusterError in a process that was forked from the middle of a call."""
        if not self._usable:
            raise KVClusterError(
                "this process was forked while calls of kvcluster were under way in its parent, so gRPC cannot be used "
                "here: fork when they have ended, or before the first connect, or start processes by spawn"
            )

    def enter(self, deadline: Deadline) -> None:
        """Begins a call; it must `leave` once. Waits while the process is being forked. Raises Unavailable if that
        takes until the deadline."""
        with self._changed:
            if self._forking and not self._changed.wait_for(lambda: not self._forking, deadline.remaining_s()):
                deadline.check()
            self._inside += 1

    def leave(self) -> None:
        """Ends a call. Any thread may call."""
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def call(self, deadline: Deadline) -> Iterator[None]:
        """A call that begins and ends with the block. Raises as `enter`."""
        self.enter(deadline)
        try:
            yield
        finally:
            self.leave()

    def before(self) -> None:
        """Waits until no call is under way, at most WAIT_S, and keeps others from beginning."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._inside, WAIT_S)

    def in_parent(self) -> None:
        """Lets calls go on."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def in_child(self) -> None:
        """Begins afresh, without the threads that were within a call."""
        self._changed = threading.Condition()  # a thread of the parent may have held the other one's lock
        self._usable = self._usable and not self._inside
        self._inside = self._forking = 0


FORKS = ForkGate()
"""The gate of this process."""

os.register_at_fork(before=FORKS.before, after_in_parent=FORKS.in_parent, after_in_child=FORKS.in_child)


class OwnProcess:
    """The process that made an object whose threads and connections no forked child has."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of that process."""
        return os.getpid() != self._pid

    def check(self, what: str) -> None:
        """Raises CallerError in a forked child."""
        if self.forked:
            raise CallerError(
                f"this {what} belongs to the process that this one was forked from: connect again in the child"
            )
