"""What follows a `clear` at once: a store waits for its shards, and a load by a ticket of before is as the docs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcluster.client import Client
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Reply
from kvcluster.core.miss import PURGING, Miss, MissReason
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline, Unavailable
from tests.client.build import kv, prompt, room, same, spec_of
from tests.client.conftest import Start

SPEC = spec_of()


def test_a_store_right_after_a_clear_is_stored(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="4MiB", config={"shard": {"report_interval_ms": 500}})
    client = cluster.client(SPEC)
    for round_ in range(3):
        assert client.store(prompt(8), kv(8, round_)).blocks == 8, "it waited for the shards"
        assert client.flush()
        into = room(8)
        assert client.load(prompt(8), into) == 8 * SPEC.block_tokens and same(into, kv(8, round_))
        assert client.clear() == 8


def purging(cluster: MemoryCluster) -> tuple[Client, Callable[[], None]]:
    """Returns a client whose purge the only shard does not learn of, and a function by which it does."""
    client = cluster.client(SPEC)
    client.store(prompt(2), kv(2))
    client.flush()
    shard, tell = cluster.shards[ShardId("shard-0")], cluster._tell

    def unheard(message: Any, deadline: Deadline) -> Reply:
        raise Unavailable(Miss(MissReason.SHARD_LOST))

    shard._tell = unheard
    client.clear()
    return client, lambda: setattr(shard, "_tell", tell)


def test_a_store_waits_no_longer_than_it_may(start: Start) -> None:
    cluster = start(ram_bytes="4MiB", config={"client": {"store_wait_ms": 100}})
    client, hear = purging(cluster)
    assert client.store(prompt(2), kv(2)).miss == PURGING
    hear()
    assert client.store(prompt(2), kv(2), deadline_ms=0).miss == Miss(MissReason.DEADLINE)
    cluster.wait_until(lambda: client.store(prompt(2), kv(2)).miss is None)


def test_a_store_that_waits_ends_with_its_client(start: Start) -> None:
    cluster = start(ram_bytes="4MiB", config={"client": {"store_wait_ms": 600_000, "deadline_ms": 600_000}})
    client, hear = purging(cluster)
    transfer = client.begin_store(client.hashes(prompt(2)), kv(2))
    client.close()
    assert transfer.result().blocks == 0
    hear()
