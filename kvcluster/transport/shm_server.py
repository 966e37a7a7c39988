"""The shard's side of shm: grants leases over a unix socket, and follows them to their end. It does not move the bytes.

The socket has an abstract name, which a crash takes along, and accepts only processes of this user; or it is a file in
a socket directory, whose permissions say who may connect (local_sockets.py). A connection receives a descriptor of the
arena for reading, and one for writing with its first store.

A worker writes directly into a page under a write lease. It may pause for any time and then continue. So the lease ends
only when the worker has reported that it has stopped, or can no longer write: its stream has ended, which it does not
end before it has stopped; or its process has ended, which is watched separately, because a forked child has the stream
open as well. An expired lease commits nothing, and frees no page before that. While the shard itself is closing, it
cannot see a worker stop, and the worker's pages stay leased until the arena is closed.

A reader's lease ends when it expires: what it reads after that does not verify.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from kvcluster.core.ids import Caller
from kvcluster.core.messages import Refused, RefusedKind, Tier, WriteRequest
from kvcluster.device.device import DeviceFailed
from kvcluster.errors import CredentialError, KVClusterError, ProtocolError
from kvcluster.transport.attend_session import serve_attend_frames
from kvcluster.transport.base import Deadline, PageHost, RefusedByShard, Unavailable, decoded
from kvcluster.transport.cpu_affinity import AffinityGuard
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.listener import CallerNow, CallerOf, Exchange, Listener, bounded, patient, serve_exchanges
from kvcluster.transport.local_sockets import LocalListener, peer_of
from kvcluster.transport.sessions import ReadSession, WriteSession
from kvcluster.wire import shard, shm_frames, socket_frames
from kvcluster.wire.checks import must
from kvcluster.wire.socket_frames import FrameKind

NAME = "shm"
_LAST_MESSAGE_MS = 200

_SO_PEERPIDFD = 77  # Linux 6.5; Python does not name it


class ShmHost(PageHost, Protocol):
    """A PageHost whose arena other processes may map."""

    @property
    def arena_bytes(self) -> int: ...

    @property
    def region_starts(self) -> Mapping[Tier, int]:
        """Where the region of each addressable tier begins in that arena; that of the pool at the arena's end."""

    @property
    def lease_ttl_ns(self) -> int:
        """How long a lease lasts without renewal, in nanoseconds."""

    def open_arena(self, *, writable: bool) -> int:
        """Returns a new descriptor of the arena, which the caller closes. Raises ConfigError if the arena has none."""

    @property
    def pool(self) -> SharedPool | None:
        """The shard's pool on a device, if it has one that other processes may open."""


class SharedPool(Protocol):
    """A pool in a device's memory."""

    @property
    def device(self) -> str:
        """The device's name, which all processes know."""

    @property
    def nbytes(self) -> int:
        """All of it, which may be more than its pages take."""

    def descriptor(self) -> int:
        """Returns a new descriptor of it (Device.open_shared), which the caller closes. Raises DeviceFailed."""


class ShmServer:
    """Listens from its construction on, at `address`, a new random name: in `socket_dir`, or an abstract one if that is
    "". Raises ConfigError if this platform or arena cannot be shared, or the directory cannot be used."""

    def __init__(self, host: ShmHost, caller_of: CallerOf, socket_dir: str = "") -> None:
        self.details = host.pool.device.encode() if host.pool is not None else b""
        """The name of the device with the shard's pool."""
        os.close(host.open_arena(writable=False))  # an arena that cannot be shared must not be offered
        self._host = host
        self._closing = False
        self._local = local = LocalListener(socket_dir)
        self.address = local.address
        admit = partial(_admit, any_user=local.in_directory)
        refused = partial(host.connection_refused, NAME)
        self._listener = Listener(
            local.socket, caller_of, self._serve, name=NAME, admit=admit, refused=refused, descriptors=2
        )

    def start(self) -> None:
        self._listener.start()

    def close(self) -> None:
        """Ends every exchange. Workers may continue to write: their pages are never given to others again. May be
        called again."""
        self._closing = True
        self._listener.close()
        self._local.close()

    # ------------------------------------------------------------------------------------------ serving

    def _serve(self, link: FramedSocket, caller_now: CallerNow) -> None:
        host = self._host
        welcome = shm_frames.Welcome(host.arena_bytes, host.lease_ttl_ns)
        self._send_arena(link, FrameKind.WELCOME, shm_frames.encode_welcome(welcome), bounded(), writable=False)
        has_stored = False
        has_pool = False

        def pool(link: FramedSocket, caller: Caller, body: bytes) -> None:
            nonlocal has_pool
            must(not body, "a worker's POOL has no body")
            must(not has_pool, "a worker asks for the pool once: each answer has a descriptor")
            self._send_pool(link)
            has_pool = True

        def read(link: FramedSocket, caller: Caller, body: bytes) -> None:
            self._read(link, caller, body, has_pool=has_pool)

        def write(link: FramedSocket, caller: Caller, body: bytes) -> None:
            nonlocal has_stored
            self._write(link, caller, body, first=not has_stored)
            has_stored = True

        attend = partial(serve_attend_frames, host, NAME)
        serves: dict[FrameKind, Exchange] = {FrameKind.READ: read, FrameKind.WRITE: write, FrameKind.ATTEND: attend}
        if host.pool is not None:
            serves[FrameKind.POOL] = pool
        serve_exchanges(link, caller_now, serves)

    def _read(self, link: FramedSocket, caller: Caller, body: bytes, *, has_pool: bool) -> None:
        request, remaining_ns = decoded(self._host, caller.tenant, socket_frames.decode_read, body)
        if request.on_device and not has_pool:
            raise ProtocolError("a worker asked for pages of a pool that it has not opened")
        with ReadSession(self._host, caller, request, stop=link.shutdown_read, path=NAME, opens_pools=True) as session:
            grant = shm_frames.encode_read_grant(
                request.wants, session.outcome, session.granted, self._host.region_starts
            )
            try:
                link.send(FrameKind.GRANT, grant, bounded(remaining_ns))
                while True:
                    kind, body = link.receive(FrameKind.RENEW, FrameKind.DONE, deadline=patient())
                    if kind is FrameKind.DONE:
                        return
                    session.alive()
                    if shm_frames.decode_renew(body):
                        link.send(FrameKind.RENEW, shm_frames.encode_renew(answer=True), bounded())
            except Unavailable:
                session.alive()  # raises this instead if the lease ended and not the worker
                raise

    def _write(self, link: FramedSocket, caller: Caller, body: bytes, *, first: bool) -> None:
        request, remaining_ns = decoded(self._host, caller.tenant, socket_frames.decode_write, body)
        deadline = bounded(remaining_ns)
        with WriteSession(self._host, caller, request, deadline=deadline, path=NAME) as session:
            try:
                grant = shm_frames.encode_write_grant(session.outcome, session.granted, self._host.region_starts)
                if first:
                    self._send_arena(link, FrameKind.GRANT, grant, deadline, writable=True)
                else:
                    link.send(FrameKind.GRANT, grant, deadline)
                whole = self._until_written(link, session, request, deadline)
            except BaseException as error:
                self._until_stopped(link, error)
                if self._closing:
                    session.leave()
                raise
            if not whole:
                return
            tail = session.finish()
        link.send(FrameKind.TAIL, shard.encode_write_tail(tail), deadline)

    def _until_written(
        self, link: FramedSocket, session: WriteSession, request: WriteRequest, deadline: Deadline
    ) -> bool:
        """Verifies pages as they are written, until the worker has stopped. False if it has aborted."""
        with AffinityGuard() as thread:
            while True:
                kind, body = link.receive(
                    FrameKind.WRITTEN, FrameKind.RENEW, FrameKind.DONE, FrameKind.ABORT, deadline=deadline
                )
                if kind is FrameKind.DONE or kind is FrameKind.ABORT:
                    return kind is FrameKind.DONE
                session.alive()
                if kind is FrameKind.RENEW:
                    shm_frames.decode_renew(body)
                    continue
                progress = shm_frames.decode_written(body, request.pages)
                thread.keep_off(progress.processor)
                session.written(progress.items, progress.sums)

    def _until_stopped(self, link: FramedSocket, error: BaseException) -> None:
        """Tells the worker why its store has ended, and waits without limit until it can no longer write."""
        words = error if isinstance(error, KVClusterError) else ProtocolError("the shard failed; its log says how")
        link.fail(words, Deadline.after_ms(_LAST_MESSAGE_MS))
        while not link.ended:
            with contextlib.suppress(KVClusterError):
                kind, _ = link.receive(
                    FrameKind.WRITTEN, FrameKind.RENEW, FrameKind.DONE, FrameKind.ABORT, deadline=patient()
                )
                if kind is FrameKind.DONE or kind is FrameKind.ABORT:
                    return

    def _send_pool(self, link: FramedSocket) -> None:
        """Sends the worker what it opens the pool with."""
        pool = self._host.pool
        if pool is None:
            raise RefusedByShard(Refused(RefusedKind.BAD, "the shard's pool has failed"))
        try:
            descriptor = pool.descriptor()
        except DeviceFailed as failed:
            raise RefusedByShard(Refused(RefusedKind.BAD, f"the shard's pool cannot be opened: {failed}")) from None
        try:
            link.send_fds(FrameKind.POOL, shm_frames.encode_pool(pool.nbytes), [descriptor], bounded())
        finally:
            os.close(descriptor)

    def _send_arena(
        self, link: FramedSocket, kind: FrameKind, body: bytes, deadline: Deadline, *, writable: bool
    ) -> None:
        descriptor = self._host.open_arena(writable=writable)
        try:
            link.send_fds(kind, body, [descriptor], deadline)
        finally:
            os.close(descriptor)


def _admit(link: FramedSocket, *, any_user: bool) -> None:
    """Admits processes of this user, or of any, and ties the connection to the life of the process."""

    def look(connected: socket.socket) -> None:
        process, user = peer_of(connected)
        if user != os.getuid() and not any_user:
            raise CredentialError(
                f"shared memory is only for processes of user {os.getuid()}, but this process runs as user {user}"
            )
        descriptor = _process_of(connected, process)
        if descriptor is not None:
            link.end_with(descriptor)

    link.tune(look)


def _process_of(connected: socket.socket, process: int) -> int | None:
    """Returns a descriptor of the process at the other side. None if the system gives none: then only the end of the
    stream shows that the process has ended, and only late if it has forked."""
    with contextlib.suppress(OSError):
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(process) if process else None
    return None
