"""The bytes of a connected stream socket: plain, with file descriptors beside them (unix sockets), or within TLS.

`send` and `receive_into` move what they can and never wait; FramedSocket waits. Both raise OSError if the stream broke.
"""

from __future__ import annotations

import array
import ctypes
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

MOST_FDS = 4
"""The most descriptors that arrive with one frame."""

ENDED = -1
"""What `receive_into` returns at the end of the stream."""

_RECORD_BYTES = 16 * 1024
"""The most bytes of one record of TLS."""

_AHEAD_BYTES = _RECORD_BYTES + 512
"""What OpenSSL may have taken from the socket of a record that is not complete, its header and padding included."""


class ByteStream(Protocol):
    """How the bytes of one socket are moved. `fds`: the descriptors that have arrived. `too_many_fds`: more than
    MOST_FDS have."""

    fds: list[int]
    too_many_fds: bool

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Sends some of the first bytes of these buffers, and returns how many; 0 if there is no room. After 0 the next
        call must begin with the same buffer."""

    def receive_into(self, view: memoryview) -> int:
        """Receives what has arrived, and returns the number of bytes; 0 if nothing has, ENDED at the end."""

    def least_in_socket(self, wanted: int) -> int:
        """Returns how many bytes must have arrived at the socket for so many to be available, or fewer."""


class PlainStream:
    """A TCP socket as it is."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.fds: list[int] = []
        self.too_many_fds = False

    def send(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive_into(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view) or ENDED
        except BlockingIOError:
            return 0

    def least_in_socket(self, wanted: int) -> int:
        return wanted


class UnixStream(PlainStream):
    """A unix socket, with whose bytes descriptors may come."""

    def receive_into(self, view: memoryview) -> int:
        space = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
        try:
            got, ancillary, flags, _ = self._socket.recvmsg_into([view], space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return 0
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.fds.extend(fds)
        self.too_many_fds = self.too_many_fds or bool(flags & socket.MSG_CTRUNC) or len(self.fds) > MOST_FDS
        return got or ENDED


class TlsStream:
    """A TLS socket after its handshake. Each record is encrypted and verified by OpenSSL, without the interpreter's
    lock; what has arrived whole is taken in one call."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self.fds: list[int] = []
        self.too_many_fds = False

    def send(self, buffers: Sequence[memoryview]) -> int:
        sent = 0
        try:
            for buffer in buffers:
                at = 0
                while at < buffer.nbytes:
                    at += (done := self._socket.send(buffer[at : at + _SENT_BYTES]))
                    sent += done
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            """There is no room."""
        return sent

    def receive_into(self, view: memoryview) -> int:
        got, most, receive = 0, view.nbytes, self._socket.recv_into
        try:
            while got < most:
                done = receive(view[got:])
                if not done:
                    return got or ENDED
                got += done
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            """All that has arrived is taken."""
        except ssl.SSLEOFError:
            return got or ENDED
        return got

    def least_in_socket(self, wanted: int) -> int:
        return max(1, wanted - _AHEAD_BYTES)


_SENT_BYTES = 256 * 1024
"""The most that is encrypted at once, so that the other side can begin with it."""


def stream_of(connected: socket.socket) -> ByteStream:
    """Returns the stream of a socket, by its kind."""
    if isinstance(connected, ssl.SSLSocket):
        return TlsStream(connected)
    return UnixStream(connected) if connected.family == socket.AF_UNIX else PlainStream(connected)


def shut_down(connected: socket.socket, how: int) -> None:
    """Shuts a socket down below TLS, if it speaks that: its own method would take TLS off first, and a thread that is
    sending could send in the clear. Raises OSError if it is not connected any more."""
    socket.socket.shutdown(connected, how)


def break_off(connected: socket.socket) -> None:
    """Ends a connection that another thread reads or writes, which notices at once and closes it; the caller knows that
    it has not done so yet. A TCP connection that is only shut down still gives what arrives to a thread that reads
    without a pause, for as long as the other side sends."""
    with suppress(OSError):
        shut_down(connected, socket.SHUT_RDWR)
    if connected.family != socket.AF_UNIX and (descriptor := connected.fileno()) >= 0:
        _LIBC.connect(descriptor, bytes(_ADDRESS_BYTES), _ADDRESS_BYTES)  # the address of no family, AF_UNSPEC


_LIBC = ctypes.CDLL(None)
_ADDRESS_BYTES = 16
