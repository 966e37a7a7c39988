"""Clusters that are checked at the end, and one thread of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvcluster.engines.transformers import spec_of
from kvcluster.testing import MemoryCluster


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these spend more time on waking threads than on computing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(shards=2, ram_bytes="32MiB") as running:
        yield running
        settle(running)


def settle(cluster: MemoryCluster) -> None:
    """No sequence, ticket or lease is left behind, and no invariant is broken."""
    cluster.wait_until(lambda: cluster.coordinator_core().state.tables.claimed_blocks == 0)
    cluster.wait_until_idle()
    cluster.check()


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts clusters whose clients keep only so many tokens of a model resident, in blocks of 16."""
    with ExitStack() as stack:
        started: list[MemoryCluster] = []

        def begin(*, resident_tokens: int, model: Any, ram: str = "64MiB", **config: Any) -> MemoryCluster:
            nbytes = int(resident_tokens * spec_of(model, block_tokens=16).token_bytes)
            settings = {"client": {"resident_bytes": nbytes}, **config}
            started.append(stack.enter_context(MemoryCluster(shards=2, ram_bytes=ram, config=settings)))
            return started[-1]

        yield begin
        for cluster in started:
            settle(cluster)
