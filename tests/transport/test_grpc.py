"""Pages over gRPC: what every transport holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster.core.ids import Tenant
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.server import Gate, Server, unary_handlers
from kvcluster.testing.conformance import TransportConformance
from kvcluster.testing.world import ONE, TWO, World, open_world
from kvcluster.transport.grpc_pages import GrpcPages, page_handlers
from kvcluster.transport.seam import PageHost
from kvcluster.wire.methods import SHARD

SECRET = "between the actors"


def token(tenant: Tenant) -> str:
    return f"token of {tenant}"


class Served:
    """A server before a shard, on loopback, with a token for each tenant."""

    def __init__(self, host: PageHost) -> None:
        gate = Gate(Authenticator({digest(token(tenant)): tenant for tenant in (ONE, TWO)}, SECRET))
        handlers = unary_handlers(SHARD, gate, host.ask) | page_handlers(host, lambda c: gate.caller(c).tenant)
        self._server = Server(handlers, "127.0.0.1", 0, threads=8)
        self._server.start()
        self.address = self._server.address

    def open(self, tenant: Tenant) -> GrpcPages:
        return GrpcPages(self.address, token(tenant))

    def close(self) -> None:
        self._server.close(grace_s=0)


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestGrpc(TransportConformance):
    """On the fixture of this module."""
