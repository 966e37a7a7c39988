"""The worker's end of shm's control: one connection, the arena received over it, and which side sends next.

Connections of one data path share the arena's mappings: one for reading and, after the first store, one for writing. A
mapping ends with the last connection, exchange or view that refers to it, so that no worker keeps the memory of a shard
that has ended. One that a device reads lasts until the path is closed, or finds that the shard has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from enum import Enum

from kvcluster.core.messages import AttendRequest, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.device.device import Allocation, Device, DeviceFailed, NoMemory
from kvcluster.device.endpoints import RegisteredMemory
from kvcluster.errors import ProtocolError
from kvcluster.memory.region import Mapping
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.attend_session import SpanResults, ask_to_attend
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.local_sockets import connect
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire import shm_frames, socket_frames
from kvcluster.wire.shm_frames import Places
from kvcluster.wire.socket_frames import FrameKind

_RENEWALS = 8
"""A worker shows that it is alive this many times per lease, however slow its sink or source is."""

_REGISTER_S = 0.1
"""The first load towards a device waits so long for the arena to be registered. Until it is, the CPU brings pages."""


class Turn(Enum):
    """Which side of a connection sends next. Only an IDLE connection can be kept for another exchange."""

    IDLE = "no exchange is under way"
    OURS = "an exchange is, and the shard waits for our next frame"
    THEIRS = "an answer is to come, or the stream has broken within a frame"


class ShmConnection:
    """One connection. `shutdown` may be called from any thread; all else belongs to one thread at a time."""

    def __init__(self, link: FramedSocket, welcome: shm_frames.Welcome, maps: ArenaMappings) -> None:
        self.arena = maps.get(link, welcome.arena_bytes, writable=False)
        self.pool: OpenPool | None = None
        """The shard's pool on a device, once it has been opened."""
        self._registering: dict[Device, Registering] = {}
        self.turn = Turn.IDLE
        self._link = link
        self._maps = maps
        self._writable: Mapping | None = None
        self.lease_ttl_ns = welcome.lease_ttl_ns
        self._renew_ns = welcome.lease_ttl_ns // _RENEWALS
        self._sent_ns = 0
        self._owner = os.getpid()
        self.unbroken = threading.Lock()
        """Held while a slice is on its way into the arena: `shutdown` waits for it."""
        self._ended = False

    # ------------------------------------------------------------------------------------------ frames

    def open_pool(self, device: Device, deadline: Deadline) -> None:
        """Opens the shard's pool on this device. Raises NoMemory if the device does not open it, and as
        `ask_to_read`."""
        body = self._ask(FrameKind.POOL, b"", deadline, answer=FrameKind.POOL)
        self.pool = self._maps.pool(self._link, shm_frames.decode_pool(body), device)
        self.turn = Turn.IDLE

    def registered(self, device: Device, deadline: Deadline) -> RegisteredMemory | None:
        """Returns the arena as this device reads it itself; None as long as it is being registered, for which the first
        call waits a little. Raises NoMemory if it cannot be, and KVClusterError if there is no room for the thread that
        does it."""
        if device not in self._registering:
            self._registering[device] = self._maps.registering(self.arena, device)
            self._registering[device].wait(min(_REGISTER_S, deadline.remaining_s()))
        return self._registering[device].result()

    def ask_to_read(self, request: ReadRequest, deadline: Deadline) -> tuple[list[Miss | None], Places]:
        """Returns the outcome for each want, and where the granted pages lie: in the pool behind the end of the arena.
        Raises Unavailable, RefusedByShard or ProtocolError."""
        asked = socket_frames.encode_read(request, deadline.remaining_ns())
        body = self._ask(FrameKind.READ, asked, deadline, most=shm_frames.read_grant_bytes(request.wants))
        pool_bytes = self.pool.memory.nbytes if self.pool is not None and request.on_device else 0
        answer = shm_frames.decode_read_grant(body, request.wants, self.arena.nbytes, pool_bytes)
        self.turn = Turn.OURS
        return answer

    def ask_to_write(self, request: WriteRequest, deadline: Deadline) -> tuple[list[Written | None], Places]:
        """As `ask_to_read`. The first time, the arena is mapped for writing."""
        asked = socket_frames.encode_write(request, deadline.remaining_ns())
        body = self._ask(FrameKind.WRITE, asked, deadline, most=shm_frames.write_grant_bytes(len(request.pages)))
        if self._writable is None:
            self._writable = self._maps.get(self._link, self.arena.nbytes, writable=True)
        answer = shm_frames.decode_write_grant(body, request.pages, self.arena.nbytes)
        self.turn = Turn.OURS
        return answer

    def ask_to_attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        """Returns the shard's answer to an Attend, and its results. Raises as `ask_to_read`."""
        self.turn = Turn.THEIRS
        self._check_process()
        try:
            results = ask_to_attend(self._link, request, query, deadline)
        except RefusedByShard:
            self.turn = Turn.IDLE
            raise
        self.turn = Turn.IDLE
        return results

    def send(self, kind: FrameKind, body: bytes, deadline: Deadline, *, then: Turn = Turn.OURS) -> None:
        """Sends a frame, after which the turn is `then`."""
        self.turn = Turn.THEIRS
        self._check_process()
        self._link.send(kind, body, deadline)
        self._sent_ns = time.monotonic_ns()
        self.turn = then

    def receive(self, kind: FrameKind, deadline: Deadline, *, then: Turn) -> bytes:
        """Returns the body of the next frame, which must be of that kind; after it the turn is `then`."""
        self.turn = Turn.THEIRS
        _, body = self._link.receive(kind, deadline=deadline)
        self.turn = then
        return body

    def raise_failure(self, deadline: Deadline) -> None:
        """Raises the shard's error, if it has sent one: without a question it sends only when the exchange is over."""
        deadline.check(self._link.peer)
        if not self._link.is_quiet():
            self.receive(FrameKind.FAILED, deadline, then=Turn.THEIRS)

    def renew(self, deadline: Deadline) -> None:
        """Renews the lease if this side has sent nothing for a while; does not wait for an answer."""
        if time.monotonic_ns() - self._sent_ns >= self._renew_ns:
            self.renew_now(deadline)

    def renew_now(self, deadline: Deadline) -> None:
        """As `renew`, unconditionally."""
        self.raise_failure(deadline)
        self.send(FrameKind.RENEW, shm_frames.encode_renew(answer=False), deadline)

    def _ask(
        self,
        kind: FrameKind,
        body: bytes,
        deadline: Deadline,
        answer: FrameKind = FrameKind.GRANT,
        most: int | None = None,
    ) -> bytes:
        """Returns the body of the answer, of at most so many bytes. The turn stays THEIRS until the caller sets it:
        after an invalid answer it is not known whose turn it is."""
        self.send(kind, body, deadline, then=Turn.THEIRS)
        kind, body = self._link.receive(answer, FrameKind.REFUSED, deadline=deadline, most=most)
        if kind is FrameKind.REFUSED:
            refused = socket_frames.decode_refused(body)
            self.turn = Turn.IDLE
            raise RefusedByShard(refused)
        return body

    def _check_process(self) -> None:
        """Raises Unavailable in a forked child. A child forked in the middle of an exchange must neither continue nor
        end it: the shard would take its frames for those of the parent, which still writes."""
        if os.getpid() != self._owner:
            raise _lost(self._link.peer, "this exchange belongs to the process that this one was forked from")

    # ------------------------------------------------------------------------------------------- bytes

    @property
    def writable(self) -> Mapping:
        """The arena, writable only where pages were granted, one slice at a time under `unbroken`."""
        assert self._writable is not None
        return self._writable

    def check_open(self) -> None:
        """Raises Unavailable if this is closed. Must be called under `unbroken`, before anything is written."""
        assert self.turn is Turn.OURS
        self._check_process()
        if self._ended:
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._link.peer}: this connection was closed"))

    # ------------------------------------------------------------------------------------- a connection

    def is_quiet(self) -> bool:
        return self._link.is_quiet()

    def shutdown(self) -> None:
        """Ends the stream, after waiting for the slice in progress: at the end of the stream the shard gives the pages
        that were being written to others."""
        with self.unbroken:
            self._ended = True
            self._link.shutdown()

    def close(self) -> None:
        self._link.close()


class OpenPool:
    """A shard's pool on a device, as this process has opened it. It lasts as long as anything refers to it."""

    def __init__(self, device: Device, opened: Allocation) -> None:
        self.device = device
        self.memory = opened.range
        weakref.finalize(self, opened.release).atexit = False


class Registering:
    """A mapped arena that a device reads itself, as soon as a thread has registered it: locking a pool of hundreds of
    GiB takes seconds. It lasts as long as anything refers to it, and keeps the mapping."""

    def __init__(self, device: Device, arena: Mapping) -> None:
        self.memory = RegisteredMemory(arena, device)
        self._ended = threading.Event()
        self._refused = ""
        taken: list[Allocation] = []
        weakref.finalize(self, _release, taken).atexit = False  # then the system gives all back
        start_thread(
            threading.Thread(target=self._register, args=(arena, taken), name="kvcluster-register", daemon=True)
        )

    def wait(self, wait_s: float) -> None:
        """Waits until it has ended, or so long."""
        self._ended.wait(wait_s)

    def result(self) -> RegisteredMemory | None:
        """Returns the memory, None until it is registered. Raises NoMemory if it cannot be."""
        if not self._ended.is_set():
            return None
        if self._refused:
            raise NoMemory(self._refused)
        return self.memory

    def _register(self, arena: Mapping, taken: list[Allocation]) -> None:
        try:
            if not arena.is_resident:
                raise NoMemory("its memory file has less memory than its size")
            for piece in self.memory.pieces(0, arena.nbytes):
                taken.append(self.memory.device.register(piece))
        except (NoMemory, DeviceFailed) as refused:
            self._refused = str(refused)
            _release(taken)
        self._ended.set()


def _release(taken: list[Allocation]) -> None:
    while taken:
        taken.pop().release()


class ArenaMappings:
    """The mappings of one arena, and the pool of its shard, that connections share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[bool, Mapping] = weakref.WeakValueDictionary()
        self._pools: weakref.WeakValueDictionary[Device, OpenPool] = weakref.WeakValueDictionary()
        self._registered: dict[Device, Registering] = {}

    def release(self) -> None:
        """Has the arena unregistered from its devices when the work under way has ended. Until this call it stays
        registered, however many connections open and close: locking its pages takes longer than a load."""
        with self._lock:
            _ended, self._registered = self._registered, {}  # it is unregistered when the lock is free again

    def registering(self, arena: Mapping, device: Device) -> Registering:
        """Returns the registration for this device; begins one if there is none. Raises KVClusterError if no thread can
        be started."""
        with self._lock:
            known = self._registered.get(device)
            if known is None:  # else it keeps the mapping, which is that of all connections
                known = self._registered[device] = Registering(device, arena)
            return known

    def pool(self, link: FramedSocket, nbytes: int, device: Device) -> OpenPool:
        """Returns the pool that is open already, or opens it by the descriptor just received. Raises ProtocolError and
        NoMemory."""
        with _received_fd(link, "pool") as fd, self._lock:
            known = self._pools.get(device)
            if known is None:
                known = self._pools[device] = OpenPool(device, device.open_shared(fd, nbytes))
            return known

    def get(self, link: FramedSocket, nbytes: int, *, writable: bool) -> Mapping:
        """Returns the existing mapping, or maps the arena by the descriptor just received. Raises ProtocolError or
        Unavailable."""
        with _received_fd(link, "arena") as fd, self._lock:
            known = self._known.get(writable)
            if known is None:
                try:
                    known = self._known[writable] = Mapping(fd, nbytes, writable=writable)
                except OSError as error:
                    raise _lost(link.peer, str(error)) from None
            return known


@contextlib.contextmanager
def _received_fd(link: FramedSocket, what: str) -> Iterator[int]:
    """The one descriptor just received, that of the shard's pool or arena, which is closed with the block. Raises
    ProtocolError if another number of them has arrived."""
    fds = link.take_fds()
    try:
        if len(fds) != 1:
            raise ProtocolError(f"{link.peer} sent {len(fds)} descriptors, expected one, that of its {what}")
        yield fds[0]
    finally:
        for fd in fds:
            _close(fd)


def _close(fd: int) -> None:
    """Closes a received descriptor. One of a socket may be set to wait then, for as long as its sender has chosen."""
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(fd)


def open_connection(
    address: str, credentials: Credentials, maps: ArenaMappings, deadline: Deadline, version: int = PROTOCOL_VERSION
) -> ShmConnection:
    """Opens a new connection. Raises Unavailable, CredentialError or ProtocolError."""
    connected = connect(address, deadline)
    link, body = dial(connected, address, credentials, deadline, version)
    try:
        return ShmConnection(link, shm_frames.decode_welcome(body), maps)
    except BaseException:
        link.close()
        raise


def _lost(address: str, why: str) -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, f"{address}: {why}"))
