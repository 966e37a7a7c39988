"""A shard served over shared memory, and a peer of it that sends whatever it likes."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

from kvcluster.core.ids import HOLDER_BYTES, Attempt, Epoch, Holder, Tenant
from kvcluster.errors import KVClusterError
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.testing.conformance import World
from kvcluster.testing.conformance.content import Content
from kvcluster.testing.conformance.world import BOUND_S, ONE, TWO
from kvcluster.testing.over import Over
from kvcluster.transport.memory import MemoryTransport
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmHost, ShmServer
from kvcluster.wire import streams
from kvcluster.wire.streams import HEADER, Kind


def token(tenant: Tenant) -> str:
    return f"token of {tenant}"


class _ShortLease:
    """A host whose workers are told that leases run for no time at all, so that they renew with every chunk."""

    lease_ttl_ns = 0

    def __init__(self, host: ShmHost) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class Served:
    """A server before a shard, with a token for each tenant."""

    def __init__(self, host: ShmHost) -> None:
        authenticator = Authenticator({digest(token(tenant)): tenant for tenant in (ONE, TWO)}, "a secret")
        self._host = host
        self._server = ShmServer(_ShortLease(host), lambda given: authenticator.caller(given).tenant)
        self._server.start()
        self.address = self._server.address

    def open(self, tenant: Tenant) -> Over:
        return Over(MemoryTransport(self._host, tenant), ShmPages(self.address, token(tenant)))

    def close(self) -> None:
        self._server.close()


def path(world: World) -> ShmPages:
    """Pages alone, without control; to be closed."""
    return ShmPages(world.served.address, token(ONE))  # type: ignore[attr-defined]


def unserved(pages: int, layers: int, layer_bytes: int, *, epoch: int = 1) -> Content:
    """Content for a shard that is not of this process."""
    attempt = Attempt(Holder(os.urandom(HOLDER_BYTES)), 1)
    return Content.of(SimpleNamespace(epoch=Epoch(epoch), attempt=lambda: attempt), pages, layers, layer_bytes)


class Raw:
    """A peer that sends whatever bytes it likes, with a good token where it says so."""

    def __init__(self, world: World, *, hello: bool = True) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(BOUND_S)
        self._socket.connect("\0" + world.served.address[1:])  # type: ignore[attr-defined]
        self.fds: list[int] = []
        if hello:
            self.send(Kind.HELLO, token(ONE).encode())
            assert self.frame()[0] is Kind.WELCOME

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        for fd in self.fds:
            os.close(fd)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        self.send_bytes(streams.encode_header(kind, len(body)) + body)

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self) -> tuple[Kind, bytes]:
        kind, nbytes = streams.decode_header(self._exactly(HEADER.size))
        return kind, self._exactly(nbytes)

    def refusal(self) -> KVClusterError:
        """What the server says next, instead of an answer."""
        kind, body = self.frame()
        assert kind is Kind.FAILED
        return streams.decode_failure(body)

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
