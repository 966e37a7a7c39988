"""Helpers for tests of several transports: tokens, malformed frames, and a peer that sends any bytes."""

from __future__ import annotations

import copy
import os
import socket
import struct
from collections.abc import Callable

from typing_extensions import Self

from kvcluster.core.ids import Caller, Epoch, Tenant
from kvcluster.errors import KVClusterError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.testing.conformance.world import ONE, TWO
from kvcluster.transport.base import PageHost
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.wire import socket_frames
from kvcluster.wire.methods import Method
from kvcluster.wire.socket_frames import HEADER, FrameKind

SECRET = "between the actors"
"""What a shard shows."""


def of_a_shard(token: str) -> Epoch | None:
    """As shard_credentials.py, for the one token of shards in tests."""
    return Epoch(1) if token == SECRET else None


TERABYTE = struct.pack("<HBBI", socket_frames.MAGIC, PROTOCOL_VERSION, FrameKind.READ, 2**32 - 1)
OTHER_VERSION = struct.pack("<HBBI", socket_frames.MAGIC, PROTOCOL_VERSION + 1, FrameKind.READ, 0)
OTHER_KIND = struct.pack("<HBBI", socket_frames.MAGIC, PROTOCOL_VERSION, 99, 0)
NO_FRAMES = [
    (b"GET / HTTP/1.1\r\n\r\n", "another service"),
    (bytes(64), "another service"),
    (OTHER_VERSION, "upgrade this side"),
    (OTHER_KIND, "kind 99"),
    (TERABYTE, "exceeds the limit|expected"),
    (socket_frames.encode_header(FrameKind.PAGES, 4), "expected"),
]
"""What a peer may send instead of a frame, and a pattern of the error that it gets."""


def token(tenant: Tenant) -> str:
    return f"token of {tenant}"


def authenticator() -> Authenticator:
    """With a token for each tenant."""
    return Authenticator({digest(token(tenant)): tenant for tenant in (ONE, TWO)}, "", epoch_of=of_a_shard)


def altered(method: Method, **functions: Callable[..., object]) -> Method:
    """The method, with these functions in place of its own."""
    other = copy.copy(method)
    vars(other).update(functions)
    return other


class InProcess:
    """The serving side of the transport within one process: no server stands between a shard and its worker."""

    def __init__(self, host: PageHost) -> None:
        self._host = host

    def open(self, tenant: Tenant) -> MemoryTransport:
        return MemoryTransport(self._host, Caller(tenant))

    def close(self) -> None:
        """There is no server to stop."""


class StreamPeer:
    """A peer on a stream socket that sends whatever bytes it likes, after a good token where it says `hello`."""

    def __init__(self, connected: socket.socket, *, hello: bool) -> None:
        self.fds: list[int] = []
        self._socket = connected
        if hello:
            self.send(FrameKind.HELLO, token(ONE).encode())
            assert self.frame()[0] is FrameKind.WELCOME

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        for fd in self.fds:
            os.close(fd)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        self.send_bytes(socket_frames.encode_header(kind, len(body)) + body)

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self) -> tuple[FrameKind, bytes]:
        header = self._exactly(HEADER.size)
        kind, nbytes = socket_frames.decode_header(header, socket_frames.version_of(header))
        return kind, self._exactly(nbytes)

    def refusal(self) -> KVClusterError:
        """What the server says next, instead of an answer."""
        kind, body = self.frame()
        assert kind is FrameKind.FAILED
        return socket_frames.decode_failure(body)

    def is_closed(self) -> bool:
        """Waits for the end of the stream."""
        while True:
            try:
                if not self._socket.recv(65_536):
                    return True
            except ConnectionResetError:
                return True

    def end(self) -> None:
        """Sends no more."""
        self._socket.shutdown(socket.SHUT_WR)

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            got, fds, _, _ = socket.recv_fds(self._socket, nbytes - len(data), 4)
            self.fds += fds
            assert got, "the connection ended within a frame"
            data += got
        return data
