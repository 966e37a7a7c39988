"""Pages through shared memory: a worker on the shard's host maps its arena, and each page is copied once.

Control goes over a unix socket, a connection for each exchange that is under way; the bytes of pages never do. What is
copied out of the arena is verified as it was written to its place, like what came from elsewhere: a reader that stood
still past its lease finds another page there, which does not verify. A writer stands still for as long as it
likes: the shard gives its pages to nobody before it has said that it has stopped, or its connection has ended
(shm_server.py). So no connection is ended while a byte is on its way into the arena.

    load    -> READ   <- GRANT  -> RENEW ..., DONE
    store   -> WRITE  <- GRANT  -> WRITTEN or RENEW ..., DONE  <- TAIL     or ABORT in the place of DONE
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence

from kvcluster.core import limits
from kvcluster.core.messages import ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.pages.copy_endpoints import MappedMemory
from kvcluster.transport import cpu_affinity
from kvcluster.transport.base import Deadline, PageSink, PageSource, Streams
from kvcluster.transport.connection_pool import ConnectionPool
from kvcluster.transport.exchange_copies import granted_records, open_load, open_store, reserved_records
from kvcluster.transport.sessions import check_length
from kvcluster.transport.shm_control import Maps, ShmConnection, Turn, reach
from kvcluster.transport.shm_views import BorrowedPages, borrow
from kvcluster.wire import shard, shm_frames
from kvcluster.wire.shm_frames import Place, Progress
from kvcluster.wire.streams import Kind

WRITTEN_BYTES = 4 * limits.FRAME_BYTES
"""So much is told to be written at once. To wake the shard costs the writer as much as to copy 256 KiB, and what it has
to verify when all is written should be little."""

_FAREWELL_MS = 200

_LOADS = 2 if (os.cpu_count() or 1) > 1 else 1
"""A load is copied and decoded by its reader alone, and two threads of it are nearly twice as fast as one. A store is
verified by the shard meanwhile, which wants the other processor."""

_NAME_BYTES = 100
"""Of the 108 that the name of a unix socket may have."""


class ShmPages:
    """A worker's data path to a shard of its own host and user. Connects, and maps, when it is first used.

    Where that cannot be, Trouble says why: another host or network namespace, another user, a platform without it.
    """

    name = "shm"
    streams = Streams(loads=_LOADS, decoding=_LOADS)

    def __init__(self, address: str, token: str | None) -> None:
        if not address.startswith("@") or not 1 < len(address.encode()) <= _NAME_BYTES or "\0" in address:
            raise ConfigError(f"{address!r} is no address of shared memory; those look like @name")
        self.address = address
        maps = Maps()
        self._connections: ConnectionPool[ShmConnection] = ConnectionPool(
            address, lambda deadline: reach(address, token, maps, deadline)
        )

    def connect(self, deadline: Deadline) -> None:
        """Has a connection ready, and the arena mapped. Raises Trouble, CredentialError or ProtocolError."""
        self._connections.keep(self._connections.take(deadline))

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        control = self._connections.take(deadline)
        try:
            outcome, places = control.ask_to_read(request, deadline)
            yield from _copies(control, request, places, sink, deadline)
            control.say(Kind.DONE, b"", deadline, then=Turn.IDLE)
            return outcome
        finally:
            self._end(control, Kind.DONE)

    def borrow(self, request: ReadRequest, deadline: Deadline) -> BorrowedPages:
        """What is wanted, where it lies in the arena, without a copy: see BorrowedPages. Raises as `read`."""
        control = self._connections.take(deadline)
        try:
            return borrow(control, request, deadline, end=lambda: self._end(control, Kind.DONE))
        except BaseException:
            self._end(control, Kind.DONE)
            raise

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        control = self._connections.take(deadline)
        try:
            _, places = control.ask_to_write(request, deadline)
            _store(control, request, places, source, deadline)
            source.drained()
            control.say(Kind.DONE, b"", deadline, then=Turn.THEIRS)
            tail = shard.decode_write_tail(control.hear(Kind.TAIL, deadline, then=Turn.IDLE))
            check_length(tail, request.pages, self.address)
            return tail
        finally:
            self._end(control, Kind.ABORT)

    def tidy(self) -> None:
        """Lets go of the memory of a shard that has ended, as far as nobody views it: for whoever holds this for long
        without using it."""
        self._connections.tidy()

    def close(self) -> None:
        """Ends what is under way, when the chunk in hand is copied. May be called from any thread, and again."""
        self._connections.close()

    def _end(self, control: ShmConnection, last: Kind) -> None:
        """Of an exchange that has not come to its end: by that frame where the shard waits for one, else with its
        connection."""
        if control.turn is Turn.OURS:
            try:
                control.say(last, b"", Deadline.after_ms(_FAREWELL_MS), then=Turn.IDLE)
            except KVClusterError:
                """It is the shard that has ended it."""
        if control.turn is Turn.IDLE:
            self._connections.keep(control)
        else:
            self._connections.discard(control)


def _copies(
    control: ShmConnection, request: ReadRequest, places: Mapping[int, Place], sink: PageSink, deadline: Deadline
) -> Generator[None, None, None]:
    """Copies what was granted, in the order of use; yields after each slice of about FRAME_BYTES."""
    records = granted_records(request, places)
    arena = control.arena
    copies = open_load(sink, records, MappedMemory(arena), arena, between=lambda: control.renew(deadline))
    for start, stop in records.slices(limits.FRAME_BYTES):
        if start:
            yield
            control.listen(deadline)
        control.renew(deadline)
        copies.run(start, stop)
    if len(records):
        yield
        control.listen(deadline)


def _store(
    control: ShmConnection, request: WriteRequest, places: Mapping[int, Place], source: PageSource, deadline: Deadline
) -> None:
    """Page after page from the source into the arena. Each is told when it is whole, small ones together, so that the
    shard verifies one while the next is copied."""
    if not places:
        return
    records = reserved_records(request.pages, places)
    arena = control.writable
    copies = open_store(source, records, MappedMemory(arena), arena, between=lambda: control.renew(deadline))
    whole: list[tuple[int, Sequence[int]]] = []  # of which the shard has not been told
    nbytes = 0
    for start, stop in records.slices(limits.FRAME_BYTES):
        deadline.check()
        with control.unbroken:
            control.check_open()
            copies.run(start, stop)
        for item, sums in records.ended_items(start, stop):
            whole.append((item, sums))
            nbytes += len(sums) * places[item].layer_bytes
        if nbytes >= WRITTEN_BYTES or stop == len(records):
            control.listen(deadline)
            control.say(Kind.WRITTEN, shm_frames.encode_written(Progress(whole, cpu_affinity.here())), deadline)
            whole, nbytes = [], 0
        else:
            control.renew(deadline)
