"""The in-memory transport keeps the claims of every transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster.testing.conformance import TransportConformance, World, open_world
from tests.transport.peers import InProcess


class TestMemory(TransportConformance):
    @pytest.fixture
    def world(self) -> Iterator[World]:
        with open_world(InProcess) as world:
            yield world
