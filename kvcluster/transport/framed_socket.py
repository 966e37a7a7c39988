"""A framed socket: sends and receives frames (wire/socket_frames.py) on one connected stream socket, TCP or unix, for
one exchange at a time.

Bytes are moved without a copy: `send` takes them from any memory, `Incoming` writes them to any memory. What they mean
is not known here. A header is only a claim: the memory of a body grows as its bytes arrive, and a server charges large
ones to the tenant of the connection (tenant_memory.py). Every wait ends at its deadline, or when the other side closes
the stream, or by `shutdown`. After an error the stream may have stopped within a frame, so it cannot be used again: the
owner closes the socket.

How bytes pass the socket, plain or within TLS, is for byte_streams.py.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
from collections.abc import Callable, Sequence

from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.byte_streams import ENDED, break_off, shut_down, stream_of
from kvcluster.transport.certificates import (
    CertificateNames,
    Certificates,
    accepting,
    certificate_of,
    connect_tls,
    handshake,
)
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.tenant_memory import UNCHARGED, Account
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import HEADER, FrameKind, PeerFailed
from kvcluster.wire.versions import check_version

_BUFFERS = 1_024
"""The most buffers that one sendmsg takes (IOV_MAX)."""

_ENDED: int = getattr(select, "POLLRDHUP", 0)
"""The other side sends no more. It has ended, since this protocol never closes half a stream. A sender that waits would
not notice otherwise: a kernel whose reader has ended keeps its window closed, and may answer no probe for a minute."""

_LAST_WORDS_MS = 1_000
"""How long a sender whose bytes are not taken waits for the other side's reason. That side sends it, if it can, and
then closes the connection, so the wait is rarely this long."""


class FramedSocket:
    """Owns its socket. `shutdown` may be called from any thread; all else belongs to one thread at a time.

    `version` is that of the protocol, for all frames in both directions. None on the side that listens: it takes that
    of the first frame, if it speaks it."""

    def __init__(self, connected: socket.socket, peer: str, version: int | None = PROTOCOL_VERSION) -> None:
        connected.setblocking(False)
        self.peer = peer
        self._version = version
        self._socket = connected
        self._stream = stream_of(connected)
        self._poll = select.poll()
        self._looking = select.poll()
        self._looking.register(connected, select.POLLIN)
        self._wanted = 0
        self._least = 1
        self._process: int | None = None
        self._ending = _ENDED
        self._is_shut = False
        self._arriving = self.requests = UNCHARGED
        self._frame_ms: float | None = None
        self.ended = False
        """Whether the other side is known to have closed the stream, or to have ended."""

    def tune(self, tune: Callable[[socket.socket], None]) -> None:
        """Calls `tune` with the socket, to set its options."""
        tune(self._socket)

    def accept_tls(self, certificates: Certificates, deadline: Deadline, *, mutual: bool) -> CertificateNames | None:
        """Carries out the handshake of the side that was connected to, before anything else is read or sent; a
        `mutual` one asks the other side for a certificate. Returns
        the other side's certificate, None if it has shown none. Raises Unavailable, CredentialError or
        ProtocolError."""
        try:
            connected = self._socket = accepting(self._socket, certificates, mutual=mutual)
        except OSError as error:
            raise self._lost(error) from None
        if self._is_shut:  # while it was wrapped, when that could not reach it
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self.peer}: this connection was ended"))
        handshake(connected, self.peer, deadline)
        self._stream = stream_of(connected)
        return certificate_of(connected)

    def charge(self, *, arriving: Account, requests: Account, frame_ms: float) -> None:
        """From now on large bodies are charged to these accounts, and a frame that has begun ends within `frame_ms`."""
        self._arriving, self.requests, self._frame_ms = arriving, requests, frame_ms

    # ------------------------------------------------------------------------------------------ frames

    def send(self, kind: FrameKind, body: bytes, deadline: Deadline, payloads: Sequence[memoryview] = ()) -> None:
        """Sends one frame, and the bytes that follow it. Raises Unavailable, or the other side's FAILED error."""
        left = [memoryview(self._header(kind, body) + body), *payloads]
        while left:
            try:
                sent = self._send(left[:_BUFFERS])
                if not sent:
                    self._wait(select.POLLOUT, deadline)
            except Unavailable as lost:
                raise self._why(lost, deadline) from None
            left = _after(left, sent)

    def receive(self, *kinds: FrameKind, deadline: Deadline, most: int | None = None) -> tuple[FrameKind, bytes]:
        """Returns the next frame, which must be of one of these kinds, and of at most so many bytes.

        Raises Unavailable, ProtocolError, or the error of a FAILED frame from the other side.
        """
        kind, nbytes = self._next_kind(kinds, deadline)
        if most is not None and nbytes > max(most, limits.SMALL_BODY_BYTES):
            raise ProtocolError(
                f"{self.peer} sent a {kind.name} frame of {nbytes} bytes; {most} answer all that was asked"
            )
        with self._arriving.charged(nbytes, deadline):
            return kind, self._body(kind, nbytes, deadline)

    def receive_request(self, *kinds: FrameKind, deadline: Deadline) -> tuple[FrameKind, bytes]:
        """As `receive`. The body stays charged to `requests` until the caller releases that."""
        kind, nbytes = self._next_kind(kinds, deadline)
        self.requests.take(nbytes, deadline)
        return kind, self._body(kind, nbytes, deadline)

    def receive_new(self, nbytes: int, deadline: Deadline) -> memoryview:
        """Returns the bytes that follow a frame, in new memory, of which only what has arrived is occupied. Raises
        Unavailable if they do not arrive."""
        data = memoryview(bytearray(nbytes) if nbytes <= limits.SMALL_BODY_BYTES else _untouched(nbytes))
        self.fill(data, deadline)
        return data

    def skip(self, nbytes: int, deadline: Deadline) -> None:
        """Reads as many bytes after a frame, and drops them."""
        scratch = memoryview(bytearray(min(nbytes, limits.SMALL_BODY_BYTES)))
        while nbytes:
            part = scratch[:nbytes]
            self.fill(part, deadline)
            nbytes -= part.nbytes

    def _next_kind(self, kinds: Sequence[FrameKind], deadline: Deadline) -> tuple[FrameKind, int]:
        kind, nbytes = self._next_header(deadline)
        if kind is not FrameKind.FAILED and kind not in kinds:
            raise ProtocolError(f"{self.peer} sent a {kind.name} frame, expected {_either(kinds)}")
        return kind, nbytes

    def _body(self, kind: FrameKind, nbytes: int, deadline: Deadline) -> bytes:
        body = bytes(self.receive_new(nbytes, self._within(deadline))) if nbytes else b""
        if kind is FrameKind.FAILED:
            raise _failure(socket_frames.decode_failure(body), self.peer)
        return body

    def incoming(self, nbytes: int, deadline: Deadline) -> Incoming:
        """Returns a Payload of the `nbytes` that follow a frame. The caller reads all of it before the next frame."""
        return Incoming(self, nbytes, deadline)

    def fail(self, error: KVClusterError, deadline: Deadline) -> None:
        """Sends the reason why this side ends, if it still can."""
        with contextlib.suppress(KVClusterError):  # the other side may have failed itself, and have said why
            self.send(FrameKind.FAILED, socket_frames.encode_failure(error), deadline)

    # ------------------------------------------------------------------------------------ file descriptors

    def send_fds(self, kind: FrameKind, body: bytes, fds: Sequence[int], deadline: Deadline) -> None:
        """Sends a frame with these file descriptors; for unix sockets only."""
        data = self._header(kind, body) + body
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._wait(select.POLLOUT, deadline)
        try:
            sent = self._socket.sendmsg([data], ancillary)
        except OSError as error:
            raise self._lost(error) from None
        rest = memoryview(data)[sent:]
        while rest:
            done = self._send([rest])
            if not done:
                self._wait(select.POLLOUT, deadline)
            rest = rest[done:]

    def take_fds(self) -> list[int]:
        """Returns the descriptors received so far; the caller owns them now."""
        fds, self._stream.fds = self._stream.fds, []
        return fds

    # -------------------------------------------------------------------------------------------- ending

    def shutdown(self) -> None:
        """Ends the exchange under way, and all later ones. Any thread may call; the descriptor stays until `close`."""
        self._is_shut = True
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_RDWR)

    def break_off(self) -> None:
        """As `shutdown`, also for a thread that reads without a pause. Its caller knows that it has not been closed."""
        self._is_shut = True
        break_off(self._socket)

    def shutdown_read(self) -> None:
        """Receives no more than has arrived already; sending still works. Any thread may call."""
        self._ending = 0  # from here on POLLRDHUP would also report this side's own shutdown
        with contextlib.suppress(OSError):
            shut_down(self._socket, socket.SHUT_RD)

    def end_with(self, process: int) -> None:
        """Takes ownership of a descriptor of the other side's process: its end ends the stream, even if another process
        has inherited the socket."""
        assert self._process is None
        self._process = process
        self._poll.register(process, select.POLLIN)

    def is_quiet(self) -> bool:
        """Whether it is open, with nothing to read. Checked before an idle connection is used again."""
        return not self._looking.poll(0)

    def close(self) -> None:
        """Closes the socket and the descriptors that it owns."""
        for fd in self.take_fds():
            os.close(fd)
        process, self._process = self._process, None
        if process is not None:
            os.close(process)
        self._socket.close()

    # ------------------------------------------------------------------------------------------- helpers

    def read_into(self, view: memoryview) -> int:
        """Reads what is available, at most len(view), and returns the number of bytes; 0 if there are none. Raises
        Unavailable at the end of the stream."""
        return self._receive_into(view) if view.nbytes else 0

    def wait_readable(self, deadline: Deadline, wanted: int) -> None:
        """Waits until `wanted` bytes are available, or CHUNK_BYTES of more, or the stream ends. Raises
        Unavailable(DEADLINE)."""
        # Waking up for every packet would cost more than receiving the bytes.
        least = self._stream.least_in_socket(min(wanted, limits.CHUNK_BYTES))
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        self._wait(select.POLLIN, deadline)

    def _header(self, kind: FrameKind, body: bytes) -> bytes:
        return socket_frames.encode_header(kind, len(body), self._version or PROTOCOL_VERSION)

    def _next_header(self, deadline: Deadline) -> tuple[FrameKind, int]:
        """Returns the kind and the body bytes of the next frame. Raises Unavailable or ProtocolError."""
        header = bytes(self.receive_new(HEADER.size, deadline))
        if self._version is None:
            self._version = socket_frames.version_of(header)  # kept even if it is refused, for the frame that says so
            check_version(self._version, newest=PROTOCOL_VERSION, of="a connection")
        return socket_frames.decode_header(header, self._version)

    def _why(self, lost: Unavailable, deadline: Deadline) -> KVClusterError:
        """Returns why the other side takes no more bytes: the error of its FAILED frame if it sent one, else `lost`."""
        if not deadline.remaining_s():
            return Unavailable(Miss(MissReason.DEADLINE, self.peer))
        words = min(deadline, Deadline.after_ms(_LAST_WORDS_MS), key=lambda one: one.at_ns)
        try:
            kind, nbytes = self._next_header(words)
            if kind is FrameKind.FAILED:
                return _failure(socket_frames.decode_failure(bytes(self.receive_new(nbytes, words))), self.peer)
        except (Unavailable, ProtocolError):
            """It sent none."""
        return lost

    def fill(self, view: memoryview, deadline: Deadline) -> None:
        """Reads the next bytes after a frame, until `view` is full. Raises Unavailable if they do not arrive."""
        while view:
            got = self._receive_into(view)
            if not got:
                self.wait_readable(deadline, view.nbytes)
            view = view[got:]

    def _within(self, deadline: Deadline) -> Deadline:
        """Returns the deadline for the rest of a frame that has begun."""
        if self._frame_ms is None:
            return deadline
        return min(deadline, Deadline.after_ms(self._frame_ms), key=lambda one: one.at_ns)

    def _send(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._stream.send(buffers)
        except OSError as error:
            raise self._lost(error) from None

    def _receive_into(self, view: memoryview) -> int:
        try:
            got = self._stream.receive_into(view)
        except OSError as error:
            self.ended = True
            raise self._lost(error) from None
        if self._stream.too_many_fds:
            raise ProtocolError(f"{self.peer} sent more file descriptors than allowed")
        if got == ENDED:
            self.ended = True
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self.peer} closed the connection"))
        return got

    def _wait(self, event: int, deadline: Deadline) -> None:
        if event == select.POLLOUT:
            event |= self._ending
        if event != self._wanted:
            self._poll.register(self._socket, event)
            self._wanted = event
        # Rounded up, so that a wait of less than a millisecond does not spin.
        ready = self._poll.poll(int(deadline.remaining_s() * 1e3) + 1)
        if not ready:
            raise Unavailable(Miss(MissReason.DEADLINE, self.peer))
        if all(fd == self._process for fd, _ in ready):
            self.ended = True
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self.peer} has ended"))
        if any(events & event & self._ending for _, events in ready):
            self.ended = True
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self.peer} closed the connection"))
        deadline.check(self.peer)

    def _lost(self, error: OSError) -> Unavailable:
        return Unavailable(Miss(MissReason.SHARD_LOST, f"{self.peer}: {error.strerror or error}"))


class Incoming:
    """Bytes that follow a frame: a Payload (transport/base.py)."""

    def __init__(self, link: FramedSocket, nbytes: int, deadline: Deadline) -> None:
        self.nbytes = nbytes
        self._left = nbytes
        self._link = link
        self._deadline = deadline

    @property
    def present(self) -> None:
        """None: the bytes are still on their way."""

    def read_into(self, view: memoryview) -> int:
        got = self._link.read_into(view[: self._left])
        self._left -= got
        return got

    def wait(self) -> None:
        self._link.wait_readable(self._deadline, self._left)


def _after(buffers: list[memoryview], sent: int) -> list[memoryview]:
    """Returns what is left of these buffers after `sent` bytes."""
    for at, buffer in enumerate(buffers):
        if sent < buffer.nbytes:
            return [buffer[sent:], *buffers[at + 1 :]]
        sent -= buffer.nbytes
    return []


def _untouched(nbytes: int) -> mmap.mmap:
    """Returns new memory whose pages are occupied when they are first written."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _either(kinds: Sequence[FrameKind]) -> str:
    return " or ".join(kind.name for kind in kinds)


def _failure(error: KVClusterError, peer: str) -> KVClusterError:
    """Returns the other side's error as this side raises it."""
    if isinstance(error, PeerFailed):
        return Unavailable(Miss(error.miss.reason, f"{peer}: {error.miss.detail}"))
    return error


def dial(
    connected: socket.socket,
    peer: str,
    credentials: Credentials,
    deadline: Deadline,
    version: int = PROTOCOL_VERSION,
) -> tuple[FramedSocket, bytes]:
    """Opens a framed socket of that version over a newly connected socket. Returns it and the body of the server's
    WELCOME. Over TCP, with certificates, it shows its token after it has verified the server's.

    Raises Unavailable, CredentialError or ProtocolError, and closes the socket.
    """
    if credentials.certificates is not None and connected.family != socket.AF_UNIX:
        connected = connect_tls(connected, credentials.name_at(peer), credentials.certificates, deadline)
    link = FramedSocket(connected, peer, version)
    try:
        link.send(FrameKind.HELLO, (credentials.token or "").encode(), deadline)
        _, body = link.receive(FrameKind.WELCOME, deadline=deadline)
    except BaseException:
        link.close()
        raise
    return link, body
