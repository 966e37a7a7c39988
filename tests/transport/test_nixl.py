"""Pages by torch.distributed over Gloo: the claims of every transport, and what only a pair can do wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster.core.ids import Tenant
from kvcluster.testing.conformance import TransportConformance, World, open_world
from kvcluster.testing.split_transport import SplitTransport
from kvcluster.transport.base import PageHost
from kvcluster.transport.memory import MemoryTransport
from kvcluster.transport.nixl_pages import NixlPages, NixlServer
from tests.transport.peers import authenticator, token

HOST = "127.0.0.1"


class Served:
    """A server before a shard, on loopback, with a token for each tenant."""

    def __init__(self, host: PageHost) -> None:
        known = authenticator()
        self._host = host
        self._server = NixlServer(host, lambda given: known.caller(given).tenant, HOST)
        self._server.start()
        self.address = self._server.address

    def open(self, tenant: Tenant) -> SplitTransport:
        return SplitTransport(MemoryTransport(self._host, tenant), NixlPages(self.address, token(tenant)))

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestNixl(TransportConformance):
    """On the fixtures of this module."""
