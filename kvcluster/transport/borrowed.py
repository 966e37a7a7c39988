"""Borrowed: pages that a worker reads where they lie in a shard's arena, without a copy, while a pin lease lives.

What is read so can be verified beforehand only: once, when it is borrowed. Whether the bytes were still those of their
pages when they were used is told afterwards, as by a sequence lock: compute, and then ask `valid`. The shard itself
answers, since no clock of this process can know that a lease was revoked before its time. A result that was computed
from pages which are not valid any more is thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from kvcluster.core.messages import ReadRequest
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum, codec
from kvcluster.transport.seam import Deadline
from kvcluster.transport.shm_control import Control, Turn
from kvcluster.wire import shm_frames
from kvcluster.wire.streams import Kind


class Borrowed:
    """Use as a context manager. Thread-safe: one thread may renew what another computes with.

    `outcome` is for each want None or its miss, CORRUPT where its bytes did not verify. `views` holds the wanted layers
    of each, read-only, or None. What was made of a view (an array, a tensor) keeps the memory after the end, and shows
    whatever comes to lie in it.
    """

    def __init__(
        self,
        control: Control,
        outcome: Sequence[Miss | None],
        views: Sequence[memoryview | None],
        *,
        end: Callable[[], None],
    ) -> None:
        self.outcome = outcome
        self.views = views
        self._control = control
        self._end = end
        self._lock = threading.Lock()
        self._lives = True

    def renew(self, deadline: Deadline) -> None:
        """Says that they are still used: to be called now and then, several times within a lease. Waits for nothing."""
        self._while_it_lives(lambda: self._control.renew_now(deadline))

    def valid(self, deadline: Deadline) -> bool:
        """Was every view that of its page until now? One round trip, which renews the lease; False where the shard
        does not say so by the deadline, and from then on."""

        def ask() -> None:
            deadline.check()
            self._control.say(Kind.RENEW, shm_frames.encode_renew(answer=True), deadline)
            self._control.hear(Kind.RENEW, deadline, then=Turn.OURS)

        return self._while_it_lives(ask)

    def close(self) -> None:
        """Gives the pages back; the views are not to be had any more. May be called again."""
        with self._lock:
            self._finish()
        for view in self.views:
            with suppress(BufferError):  # something was made of it
                if view is not None:
                    view.release()

    def _while_it_lives(self, work: Callable[[], object]) -> bool:
        with self._lock:
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

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def borrow(control: Control, request: ReadRequest, deadline: Deadline, *, end: Callable[[], None]) -> Borrowed:
    """Asks for the pages and verifies them. `end` ends the exchange of `control` that this begins. Raises as a load."""
    outcome, places = control.ask_to_read(request, deadline)
    views: list[memoryview | None] = [None] * len(outcome)
    for item, (offset, layer_bytes, sums) in places.items():
        deadline.check()
        control.renew(deadline)
        want = request.wants[item]
        view = control.arena.view(offset + want.layer_start * layer_bytes, len(sums) * layer_bytes)
        identity = checksum.identity(request.namespace, want.key, codec.RAW)
        if checksum.first_mismatch(identity, want.layer_start, sums, view) is None:
            views[item] = view
        else:
            outcome[item] = Miss(MissReason.CORRUPT)
    return Borrowed(control, outcome, views, end=end)
