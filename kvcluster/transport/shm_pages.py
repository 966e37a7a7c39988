"""Pages through shared memory: a worker on the shard's host maps its arena, and each page is copied once.

Control goes over a unix socket, with one connection for each exchange that is under way; the bytes of pages never do.
Bytes copied from the arena are verified at their destination, as on every other path: a reader that paused past its
lease may find another page there, which does not verify. A writer may pause for any time: the shard gives its pages to
no other writer before the worker has reported that it has stopped, or its connection has ended (shm_server.py). So no
connection is ended while a byte is being written into the arena.

If a worker's blocks lie on a device, and the system lets the arena be registered, the device reads the arena itself. If
it also reads the memory in which the shard has a pool on a device, its own or a peer's, the worker opens that pool as
well, for reading only, and is granted pages of it: a batch of its own. The device carries out either batch
(device/pool_copies.py).

    pool    -> POOL   <- POOL                                              before the first load from there
    load    -> READ   <- GRANT  -> RENEW ..., DONE
    store   -> WRITE  <- GRANT  -> WRITTEN or RENEW ..., DONE  <- TAIL     or ABORT in the place of DONE
    attend  -> ATTEND <- PARTIALS                                          (attend_session.py)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import replace

from kvcluster.copies.batch import CopyEndpoint, CopyRecords, MappedMemory
from kvcluster.core import limits
from kvcluster.core.messages import AttendRequest, Offer, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.device.device import Device, DeviceFailed, NoMemory
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DevicePoolMemory, RegisteredMemory
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.memory.codec import RAW
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport import cpu_affinity
from kvcluster.transport.attend_session import SpanResults
from kvcluster.transport.base import Deadline, PageSink, PageSource, RefusedByShard, Streams, Unavailable
from kvcluster.transport.connection_pool import ConnectionPool
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.listener import CallerOf, ListenAt
from kvcluster.transport.shm_control import ArenaMappings, ShmConnection, Turn, open_connection
from kvcluster.transport.shm_server import ShmHost, ShmServer
from kvcluster.transport.shm_views import BorrowedPages, borrow
from kvcluster.transport.worker_exchange import (
    check_answer_length,
    granted_records,
    open_store,
    reserved_records,
    split_places,
)
from kvcluster.wire import shard, shm_frames
from kvcluster.wire.shm_frames import Places, Progress
from kvcluster.wire.socket_frames import FrameKind

_LOG = logging.getLogger(__name__)

SLICE_BYTES = 8 * limits.FRAME_BYTES
"""The most that one native call loads. Between two calls threads of this process wait for one another, some 30 us; a
caller that waits for layers is notified after each call."""

_DEVICE_SLICE_BYTES = 32 * SLICE_BYTES
"""As SLICE_BYTES, for copies by a device: it should have its next chunk while this process handles the last one, and
has none at the end of a slice."""

_SLICES = 8
"""A load of less is copied in so many slices, so that its first layers can be used while others are copied."""

WRITTEN_BYTES = 4 * limits.FRAME_BYTES
"""A writer copies so much by one call, and reports the written pages to the shard. Waking the shard costs the writer as
much as copying 256 KiB, but little should be left to verify when everything is written."""

_LAST_MESSAGE_MS = 200


def load_streams(processors: int) -> int:
    """Returns by how many threads a load is copied in a process that may run on so many processors.

    Only the reader copies and decodes a load, and two threads are nearly twice as fast as one; on 16 processors four
    are 1.7 times as fast as two, and more gain little (docs/measurements.md). A store is verified by the shard at the
    same time, which needs another processor."""
    return min(8, max(min(2, processors), processors // 4))


_LOADS = load_streams(len(os.sched_getaffinity(0)))

_NAME_BYTES = 100
"""The longest abstract name accepted; that of a unix socket may have 108 bytes."""


class ShmPages:
    """A worker's data path to a shard on the same host. Connects and maps when it is first used.

    If that is impossible, Unavailable says why: another host or network namespace, another user, a socket directory
    that is not to be trusted, or an unsupported platform.
    """

    name = "shm"
    streams = Streams(loads=_LOADS, decoding=_LOADS, device=1)
    """One stream for a device that reads the arena itself: more would share its link."""

    def __init__(
        self, address: str, credentials: Credentials, version: int = PROTOCOL_VERSION, *, device: str = ""
    ) -> None:
        """`address`: "@NAME", or the path of a socket in a socket directory. `device`: the name of the one with the
        shard's pool, "" if it has none."""
        is_name = address.startswith("@") and 1 < len(address.encode()) <= _NAME_BYTES
        if not (is_name or address.startswith("/")) or "\0" in address:
            raise ConfigError(
                f"{address!r} is not an address of the shared-memory transport, which is @name or the path of a socket"
            )
        self.address = address
        self._device = device
        self._refused: set[Device] = set()
        self._maps = maps = ArenaMappings()

        def connect(deadline: Deadline) -> ShmConnection:
            try:
                return open_connection(address, credentials, maps, deadline, version)
            except Unavailable as error:
                if error.miss.reason is MissReason.SHARD_LOST:
                    maps.release()
                raise

        self._connections: ConnectionPool[ShmConnection] = ConnectionPool(address, connect)

    def connect(self, deadline: Deadline) -> None:
        """Opens a connection and maps the arena, if none is idle. Raises Unavailable, CredentialError or
        ProtocolError."""
        self._connections.keep(self._connections.take(deadline))

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        control = self._connections.take(deadline)
        try:
            device, arena = sink.device, MappedMemory(control.arena)
            if device is not None:
                arena = self._registered(control, device, deadline) or arena
                if self._reads_pool(control, device, deadline):
                    request = replace(request, on_device=True)
            outcome, places = control.ask_to_read(request, deadline)
            yield from _copies(control, request, places, arena, sink, deadline)
            control.send(FrameKind.DONE, b"", deadline, then=Turn.IDLE)
            return outcome
        finally:
            self._end(control, FrameKind.DONE)

    def borrow(self, request: ReadRequest, deadline: Deadline) -> BorrowedPages:
        """Returns the wanted pages in place in the arena, without a copy: see BorrowedPages. Raises as `read`."""
        control = self._connections.take(deadline)
        try:
            return borrow(control, request, deadline, end=lambda: self._end(control, FrameKind.DONE))
        except BaseException:
            self._end(control, FrameKind.DONE)
            raise

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        control = self._connections.take(deadline)
        try:
            _, places = control.ask_to_write(request, deadline)
            _store(control, request, places, source, deadline)
            source.drained()
            control.send(FrameKind.DONE, b"", deadline, then=Turn.THEIRS)
            tail = shard.decode_write_tail(control.receive(FrameKind.TAIL, deadline, then=Turn.IDLE))
            check_answer_length(tail, request.pages, self.address)
            return tail
        finally:
            self._end(control, FrameKind.ABORT)

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        control = self._connections.take(deadline)
        try:
            return control.ask_to_attend(request, query, deadline)
        finally:
            self._end(control, FrameKind.DONE)

    def tidy(self) -> None:
        """Releases the memory of a shard that has ended, unless a view still refers to it. For owners that keep this
        path unused for a long time."""
        self._connections.tidy()
        if not self._connections:
            self._maps.release()

    def close(self) -> None:
        """Ends exchanges that are under way, after the chunk in progress. May be called from any thread, and again."""
        self._connections.close()
        self._maps.release()

    def _registered(self, control: ShmConnection, device: Device, deadline: Deadline) -> RegisteredMemory | None:
        """Returns the arena if the device reads it itself. If the registration is refused it is not tried again."""
        if device in self._refused:
            return None
        try:
            return control.registered(device, deadline)
        except (NoMemory, KVClusterError) as refused:
            _LOG.warning("the CPU brings pages of %s, which %s cannot read: %s", self.address, device.name, refused)
            self._refused.add(device)
            return None

    def _reads_pool(self, control: ShmConnection, device: Device, deadline: Deadline) -> bool:
        """Whether this device can read pages of the shard's pool. Opens the pool first, if it is on this device or on
        one whose memory this device reads; if that fails it is not tried again."""
        if self._device not in device.reads:
            return False
        if control.pool is None:
            try:
                control.open_pool(device, deadline)
            except (NoMemory, DeviceFailed, RefusedByShard) as error:
                _LOG.warning("the pool of %s on %s is not read there: %s", self.address, self._device, error)
                self._device = ""
                return False
        return control.pool is not None and control.pool.device is device

    def _end(self, control: ShmConnection, last: FrameKind) -> None:
        """Ends an unfinished exchange: with the frame `last` if the shard waits for one, otherwise by closing the
        connection. Keeps the connection if no exchange is under way."""
        if control.turn is Turn.OURS:
            try:
                control.send(last, b"", Deadline.after_ms(_LAST_MESSAGE_MS), then=Turn.IDLE)
            except KVClusterError:
                """The shard has ended the exchange."""
        if control.turn is Turn.IDLE:
            self._connections.keep(control)
        else:
            self._connections.discard(control)


def _copies(
    control: ShmConnection,
    request: ReadRequest,
    places: Places,
    arena: MappedMemory,
    sink: PageSink,
    deadline: Deadline,
) -> Generator[None, None, None]:
    """Copies the granted layers in the order of use, first those from the pool; yields after each slice."""
    for records, memory, keeps in _by_memory(control, request, places, arena):
        copies = sink.copies(records, memory, keeps)
        by_device = isinstance(memory, (DevicePoolMemory, RegisteredMemory))
        for start, stop in records.slices(_DEVICE_SLICE_BYTES if by_device else _slice_bytes(records)):
            control.renew(deadline)
            copies.run(start, stop)
            yield
            control.raise_failure(deadline)


def _by_memory(
    control: ShmConnection, request: ReadRequest, places: Places, arena: MappedMemory
) -> Iterator[tuple[CopyRecords, CopyEndpoint, object]]:
    """Yields the records in the pool and those in the arena, each with their memory and what keeps it."""
    pool, end = control.pool, control.arena.nbytes
    if pool is not None and max(places.offsets, default=0) >= end:
        places, far = split_places(request.wants, places, end)
        large = granted_records(request.wants, far, DEVICES.pool_record_bytes(pool.device))
        yield large, DevicePoolMemory(pool.device, pool.memory), pool
    record_bytes = None
    if isinstance(arena, RegisteredMemory):
        coded = any(codec != RAW for codec in places.codecs)
        record_bytes = DEVICES.pool_record_bytes(arena.device, coded=coded)
    yield granted_records(request.wants, places, record_bytes), arena, control


def _slice_bytes(records: CopyRecords) -> int:
    """Returns how many bytes of a load are copied by one call."""
    return min(SLICE_BYTES, max(limits.FRAME_BYTES, sum(records.nbytes) // _SLICES))


def _store(
    control: ShmConnection, request: WriteRequest, places: Places, source: PageSource, deadline: Deadline
) -> None:
    """Copies page after page from the source into the arena. Reports complete pages to the shard, small ones together,
    so that the shard verifies one while the next is copied."""
    if not places.items:
        return
    records = reserved_records(request.pages, places)
    arena = control.writable
    copies = open_store(source, records, MappedMemory(arena), arena)
    begin = 0  # the first record that is not reported to the shard yet
    for start, stop in records.slices(WRITTEN_BYTES):
        deadline.check()
        arena.populate(records.offsets[start:stop], records.nbytes[start:stop])
        with control.unbroken:
            control.check_open()
            copies.run(start, stop)
        items, sums = records.ended_items(begin, stop)
        if items:
            control.raise_failure(deadline)
            progress = Progress(items, sums, cpu_affinity.here())
            control.send(FrameKind.WRITTEN, shm_frames.encode_written(progress), deadline)
            begin = stop
        else:
            control.renew(deadline)


def open_path(offer: Offer, credentials: Credentials) -> ShmPages:
    """As path_selector.Opener."""
    return ShmPages(offer.address, credentials, offer.protocol_version, device=offer.details.decode(errors="replace"))


def serve(host: ShmHost, caller_of: CallerOf, at: ListenAt) -> ShmServer:
    """As transport_servers.Serve. It listens at a random name, in the socket directory if there is one."""
    return ShmServer(host, caller_of, at.socket_dir)
