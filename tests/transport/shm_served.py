"""A shard served over shared memory, and a peer that sends it any bytes."""

from __future__ import annotations

import os
import socket
from typing import Any

from kvcluster.core.ids import Caller, Tenant
from kvcluster.testing.conformance import World
from kvcluster.testing.conformance.world import BOUND_S, ONE
from kvcluster.testing.split_transport import SplitTransport
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmHost, ShmServer
from tests.transport.peers import StreamPeer, authenticator, token


class _ShortLease:
    """A host whose workers are told that leases run for no time at all, so that they renew with every chunk."""

    lease_ttl_ns = 0

    def __init__(self, host: ShmHost) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


class Served:
    """A server before a shard, with a token for each tenant."""

    def __init__(self, host: ShmHost, socket_dir: str = "") -> None:
        self.known = authenticator()
        self._host = host
        self._server = ShmServer(_ShortLease(host), self.caller, socket_dir)
        self._server.start()
        name = self._server.address
        self.address = os.path.join(socket_dir, name) if socket_dir else name

    def caller(self, given: str | None) -> Caller:
        return self.known.caller(given)

    def open(self, tenant: Tenant) -> SplitTransport:
        device = self._server.details.decode()
        return SplitTransport(
            MemoryTransport(self._host, Caller(tenant)),
            ShmPages(self.address, Credentials(token(tenant)), device=device),
        )

    def close(self) -> None:
        self._server.close()


def path(world: World) -> ShmPages:
    """Pages alone, without control; to be closed."""
    return ShmPages(world.served.address, Credentials(token(ONE)))  # type: ignore[attr-defined]


class Raw(StreamPeer):
    """A peer of this server."""

    def __init__(self, world: World, *, hello: bool = True) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(BOUND_S)
        connected.connect("\0" + world.served.address[1:])  # type: ignore[attr-defined]
        super().__init__(connected, hello=hello)
