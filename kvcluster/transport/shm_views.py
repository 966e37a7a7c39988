"""Borrowed pages: a worker reads pages in place in a shard's arena, without a copy, while a pin lease lasts.

Such bytes can be verified only beforehand: once, when they are borrowed. Whether they were still those of their pages
when they were used is determined afterwards, as with a sequence lock: compute, and then call `valid`. The shard itself
answers, since no clock of this process can know that a lease was revoked early. A result computed from pages that are
no longer valid must be discarded.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Protocol, runtime_checkable

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import ReadRequest
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.memory import checksum
from kvcluster.transport.base import Deadline
from kvcluster.transport.shm_control import ShmConnection, Turn
from kvcluster.wire import shm_frames
from kvcluster.wire.socket_frames import FrameKind


class NotLent(Exception):
    """The shard is not reached over memory that both ends share. The text says how it is reached instead, and why."""


@runtime_checkable
class Lends(Protocol):
    """A transport that may reach a shard over shared memory. Not every Transport can."""

    def borrow(self, request: ReadRequest, deadline: Deadline) -> AbstractContextManager[BorrowedPages]:
        """Lends the wanted pages in place until the context ends. Raises as Transport.read, and NotLent."""


class BorrowedPages:
    """Pages borrowed from one shard. Use as a context manager. Thread-safe: one thread may renew the lease while
    another computes.

    `outcome` is for each want None or its miss, CORRUPT if its bytes did not verify. `views` holds the wanted layers of
    each, read-only, or None; `codecs` how they are encoded. An array or tensor made from a view keeps the memory
    mapped after the end, and shows whatever is written there. Unless it is renewed, the lease ends `lease_ttl_ns`
    after the request.
    """

    def __init__(
        self,
        control: ShmConnection,
        outcome: Sequence[Miss | None],
        views: Sequence[memoryview | None],
        codecs: Sequence[Codec],
        *,
        end: Callable[[], None],
    ) -> None:
        self.outcome = outcome
        self.views = views
        self.codecs = codecs
        self.lease_ttl_ns = control.lease_ttl_ns
        self._control = control
        self._end = end
        self._lock = threading.Lock()
        self._lives = True

    def renew(self, deadline: Deadline) -> bool:
        """Renews the lease; must be called several times within its TTL. Does not wait, not even for a thread in
        `valid`, which renews the lease too. False once the lease is known to have ended."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            return self._while_it_lives(lambda: self._control.renew_now(deadline))
        finally:
            self._lock.release()

    def valid(self, deadline: Deadline) -> bool:
        """Whether every view was that of its page until now. One round trip, which renews the lease. False if the shard
        does not confirm by the deadline, and then always."""

        def ask() -> None:
            deadline.check()
            self._control.send(FrameKind.RENEW, shm_frames.encode_renew(answer=True), deadline)
            self._control.receive(FrameKind.RENEW, deadline, then=Turn.OURS)

        with self._lock:
            return self._while_it_lives(ask)

    def close(self) -> None:
        """Releases the views, and then returns the lease: no view can be read any more when the shard has it. May be
        called again."""
        with self._lock:
            views, self.views = self.views, [None] * len(self.views)
            for view in views:
                if view is not None:
                    _release(view)
            self._finish()

    def _while_it_lives(self, work: Callable[[], object]) -> bool:
        """Does the work, and ends the loan if it fails. Returns whether the loan still lives. Called under the lock."""
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
    """Releases a view, so that it cannot be read any more, but keeps its memory as long as the view object exists:
    torch.frombuffer keeps a reference to the view, but not to its buffer."""
    with suppress(ValueError, BufferError):  # released before, or something still uses its buffer
        keeper = memoryview(view)
        view.release()
        weakref.finalize(view, keeper.release).atexit = False


def borrow(
    control: ShmConnection, request: ReadRequest, deadline: Deadline, *, end: Callable[[], None]
) -> BorrowedPages:
    """Asks for the pages and verifies them. `end` ends the exchange of `control` that this begins. Raises as a load."""
    outcome, places = control.ask_to_read(request, deadline)
    views: list[memoryview | None] = [None] * len(outcome)
    codecs = [Codec.RAW] * len(outcome)
    left = iter(places.sums)
    for item, offset, layer_bytes, codec_id in zip(*places[:4], strict=True):
        want = request.wants[item]
        sums = tuple(itertools.islice(left, want.layer_stop - want.layer_start))
        deadline.check()
        control.renew(deadline)
        view = control.arena.view(offset + want.layer_start * layer_bytes, len(sums) * layer_bytes)
        identity = checksum.identity(request.namespace, want.key, codec_id)
        if checksum.first_mismatch(identity, want.layer_start, sums, view) is None:
            views[item], codecs[item] = view, Codec(codec_id)
        else:
            outcome[item] = Miss(MissReason.CORRUPT)
    return BorrowedPages(control, outcome, views, codecs, end=end)
