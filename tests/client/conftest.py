"""Clusters for tests of the client, each checked at the end: after any test nothing is broken or left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Unavailable

Start = Callable[..., MemoryCluster]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts clusters of a test's own settings, and settles the bill of each when the test is over."""
    with ExitStack() as stack:
        started: list[MemoryCluster] = []

        def begin(**settings: Any) -> MemoryCluster:
            started.append(stack.enter_context(MemoryCluster(**settings)))
            return started[-1]

        yield begin
        for cluster in started:
            settle(cluster)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    """Two shards and a coordinator."""
    return start(shards=2, ram_bytes="4MiB")


def settle(cluster: MemoryCluster) -> None:
    """No invariant is broken; no ticket, lease, pin or half-written page is left. A cluster that has lost its
    coordinator gets one: what the shards then tell of themselves has to hold as well."""
    try:
        cluster.running_coordinator()
    except Unavailable:
        cluster.start_coordinator()
        cluster.wait_until_up()
    cluster.wait_until_idle()
    cluster.check()
