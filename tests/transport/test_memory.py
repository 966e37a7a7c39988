"""The transport of tests holds what every transport holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster.core.ids import Tenant
from kvcluster.testing.conformance import TransportConformance, World, open_world
from kvcluster.transport.memory import MemoryTransport
from kvcluster.transport.seam import PageHost


class _Served:
    """Nothing stands between a shard and its worker here."""

    def __init__(self, host: PageHost) -> None:
        self._host = host

    def open(self, tenant: Tenant) -> MemoryTransport:
        return MemoryTransport(self._host, tenant)

    def close(self) -> None:
        """Nothing listens."""


class TestMemory(TransportConformance):
    @pytest.fixture
    def world(self) -> Iterator[World]:
        with open_world(_Served) as world:
            yield world
