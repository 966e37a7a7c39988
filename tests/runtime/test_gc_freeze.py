"""The cycle collector of a process with large tables: how much it walks, and that calls leave it nothing to find."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kvcluster.core.coordinator.block_tables import BlockTables, Outcome
from kvcluster.core.ids import (
    HASH_BYTES,
    HOLDER_BYTES,
    SEQUENCE_BYTES,
    BlockHash,
    Holder,
    NamespaceId,
    SequenceId,
    Tenant,
)
from kvcluster.core.messages import TableChange
from kvcluster.core.spec import KVSpec
from kvcluster.runtime.gc_freeze import THRESHOLDS, GarbageKeeper
from kvcluster.testing.cluster import MemoryCluster
from kvcluster.testing.conformance import open_world
from kvcluster.testing.conformance.content import Content, load, write
from kvcluster.testing.conformance.world import ONE
from tests.transport import test_grpc, test_tcp

SEQUENCES, BLOCKS = 64, 4_096
WALKED = 3 * THRESHOLDS[0] * THRESHOLDS[1] * THRESHOLDS[2]
"""Containers that one collection may walk: a fraction of SEQUENCES * BLOCKS."""

SPEC = KVSpec.uniform(
    model="tiny", weights="sha256:1", num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16", block_tokens=16
)


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """What a test has had frozen is collected when it is over."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def walked() -> Iterator[list[int]]:
    """The number of containers that each collection of the oldest generation walks."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def fill(tables: BlockTables) -> None:
    """Opens sequences whose tables have blocks that a worker has made up, as SyncTables does."""
    tenant, space = Tenant("one"), NamespaceId(bytes(HASH_BYTES))
    claims = tables.claims_in(space, tenant, private=False, block_bytes=1, block_tokens=1)
    for number in range(SEQUENCES):
        owner = tenant, Holder(number.to_bytes(HOLDER_BYTES, "big"))
        first = number * BLOCKS
        blocks = tuple(BlockHash(at.to_bytes(HASH_BYTES, "big")) for at in range(first, first + BLOCKS))
        change = TableChange(SequenceId(bytes(SEQUENCE_BYTES)), 0, blocks)
        assert tables.change(owner, change, claims, None, capacity_bytes=None) is Outcome.DONE


def test_a_collection_walks_what_was_made_since_the_last_however_large_the_tables_are() -> None:
    before = [[at] for at in range(5 * WALKED)]
    keeper, tables = GarbageKeeper(), BlockTables(0.5)
    keeper.start()
    try:
        with walked() as found:
            fill(tables)
            fill_walked = len(found)
            gc.collect()
    finally:
        keeper.close()
    assert fill_walked, "the tables are larger than what is walked between two collections"
    assert max(found) <= WALKED < SEQUENCES * BLOCKS, "nor however much there was before"
    assert before


def test_the_collector_runs_as_before_once_the_keeper_is_closed() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    keeper = GarbageKeeper()
    keeper.start()
    assert gc.get_threshold() == THRESHOLDS
    keeper.close()
    assert (gc.get_threshold(), gc.callbacks) == before


def left_by(work: Callable[[], object]) -> list[str]:
    """The types of what `work` leaves in cycles that nothing refers to."""
    work()  # what is made once is made
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return [f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_calls_of_a_worker_leave_no_cycles_in_coordinator_shards_and_client() -> None:
    with MemoryCluster(shards=2, ram_bytes="1MiB") as cluster, cluster.client(SPEC) as client:
        values = torch.zeros(16, 2, 2, 16, 1, 8, dtype=torch.float16)
        numbers = iter(range(1_000))

        def work() -> None:
            for _ in range(8):  # more than there is room for
                tokens = [next(numbers), *range(255)]
                client.store(tokens, values)
                client.flush()
                client.load(tokens, values)
                client.load([*tokens, 1], values)
                client.explain(tokens)
                client.pin(tokens, 1)
                with client.sequence(tokens):
                    """Its table is synced, and dropped."""

        assert left_by(work) == []


@pytest.mark.parametrize("served", [test_tcp.Served, test_grpc.Served])
def test_exchanges_and_connections_leave_no_cycles(served: type[test_tcp.Served]) -> None:
    with open_world(served) as world:

        def work() -> None:
            content = Content.of(world, 2, 2, 4_096)
            for _ in range(4):
                transport = world.served.open(ONE)
                write(transport, content)
                load(transport, content)
                transport.close()

        assert left_by(work) == []
