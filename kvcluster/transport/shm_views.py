"""Borrowed: pages that a worker reads where they lie in a shard's arena, without a copy, while a pin lease lives.

What is read so can be verified beforehand only: once, when it is borrowed. Whether the bytes were still those of their
pages when they were used is told afterwards, as by a sequence lock: compute, and then ask `valid`. The shard itself
answers, since no clock of this process can know that a lease was revoked before its time. A result that was computed
from pages which are not valid any more is thrown away.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Protocol, runtime_checkable

from kvcluster.core.messages import ReadRequest
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum, codec
from kvcluster.transport.base import Deadline
from kvcluster.transport.shm_control import ShmConnection, Turn
from kvcluster.wire import shm_frames
from kvcluster.wire.streams import Kind


class NotLent(Exception):
    """The way to a shard leads over no memory that both ends see. What it leads over instead, and why, is its text."""


@runtime_checkable
class Lends(Protocol):
    """A way to a shard that may lead over memory which both ends see. Not every Transport can."""

    def borrow(self, request: ReadRequest, deadline: Deadline) -> AbstractContextManager[BorrowedPages]:
        """What is wanted, where it lies, until the context ends. Raises as Transport.read, and NotLent."""


class BorrowedPages:
    """Use as a context manager. Thread-safe: one thread may renew what another computes with.

    `outcome` is for each want None or its miss, CORRUPT where its bytes did not verify. `views` holds the wanted layers
    of each, read-only, or None. What was made of a view (an array, a tensor) keeps the memory after the end, and shows
    whatever comes to lie in it. Unless it is renewed, the lease ends `lease_ttl_ns` after it was asked for.
    """

    def __init__(
        self,
        control: ShmConnection,
        outcome: Sequence[Miss | None],
        views: Sequence[memoryview | None],
        *,
        end: Callable[[], None],
    ) -> None:
        self.outcome = outcome
        self.views = views
        self.lease_ttl_ns = control.lease_ttl_ns
        self._control = control
        self._end = end
        self._lock = threading.Lock()
        self._lives = True

    def renew(self, deadline: Deadline) -> bool:
        """Says that they are still used: to be called now and then, several times within a lease. Waits for nothing,
        nor for a thread that asks `valid`, which renews it too. False once it is known to have ended."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            return self._while_it_lives(lambda: self._control.renew_now(deadline))
        finally:
            self._lock.release()

    def valid(self, deadline: Deadline) -> bool:
        """Was every view that of its page until now? One round trip, which renews the lease; False where the shard
        does not say so by the deadline, and from then on."""

        def ask() -> None:
            deadline.check()
            self._control.say(Kind.RENEW, shm_frames.encode_renew(answer=True), deadline)
            self._control.hear(Kind.RENEW, deadline, then=Turn.OURS)

        with self._lock:
            return self._while_it_lives(ask)

    def close(self) -> None:
        """Gives the pages back; the views are not to be had any more. May be called again."""
        with self._lock:
            self._finish()
            views, self.views = self.views, [None] * len(self.views)
        for view in views:
            if view is not None:
                _release(view)

    def _while_it_lives(self, work: Callable[[], object]) -> bool:
        """Under the lock."""
        if self._lives:
            try:
                work()
            except KVClusterError:
                self._finish()
        return self._lives

    def _finish(self) -> None:
        if self._lives:
            self._lives = False
            self._end()

    def __enter__(self) -> BorrowedPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _release(view: memoryview) -> None:
    """Nobody reads through it any more, and yet its memory stays as long as the view does: torch.frombuffer keeps the
    view, but not its buffer."""
    with suppress(ValueError, BufferError):  # released before, or something was made of it
        keeper = memoryview(view)
        view.release()
        weakref.finalize(view, keeper.release).atexit = False


def borrow(
    control: ShmConnection, request: ReadRequest, deadline: Deadline, *, end: Callable[[], None]
) -> BorrowedPages:
    """Asks for the pages and verifies them. `end` ends the exchange of `control` that this begins. Raises as a load."""
    outcome, places = control.ask_to_read(request, deadline)
    views: list[memoryview | None] = [None] * len(outcome)
    for item, (offset, layer_bytes, sums, codec_id) in places.items():
        deadline.check()
        control.renew(deadline)
        if codec_id != codec.RAW:
            outcome[item] = Miss(
                MissReason.LOSSY, "it lies there encoded, and what is borrowed is not decoded: load it"
            )
            continue
        want = request.wants[item]
        view = control.arena.view(offset + want.layer_start * layer_bytes, len(sums) * layer_bytes)
        identity = checksum.identity(request.namespace, want.key, codec.RAW)
        if checksum.first_mismatch(identity, want.layer_start, sums, view) is None:
            views[item] = view
        else:
            outcome[item] = Miss(MissReason.CORRUPT)
    return BorrowedPages(control, outcome, views, end=end)
