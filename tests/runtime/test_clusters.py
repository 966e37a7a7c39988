"""Whole clusters in one process: pages that rot, copies, drains and purges, through all layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcluster.client import Client
from kvcluster.core.ids import HOLDER_BYTES, Attempt, Holder, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    BlocksPinned,
    CoordinatorQuestion,
    Done,
    Drain,
    Pin,
    PinBlocks,
    Purge,
    Purged,
    Reply,
    Unpin,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline, Unavailable
from tests.client.build import BOUND_S, SPEC, kv, prompt, room, same, spec_of

FIRST = ShardId("shard-0")


@contextmanager
def clustered(**settings: Any) -> Iterator[MemoryCluster]:
    """A cluster that reads no page again by itself, and is whole at the end."""
    config = settings.pop("config", {})
    config["shard"] = {"scrub_bytes": 0, **config.get("shard", {})}
    with MemoryCluster(ram_bytes="4MiB", config=config, **settings) as cluster:
        yield cluster
        cluster.wait_until_idle()
        cluster.check()


def ask(cluster: MemoryCluster, question: CoordinatorQuestion, namespace: NamespaceId | None = None) -> Reply:
    return cluster.port().ask(question, Deadline.after_ms(BOUND_S * 1e3), namespace)


def stored(client: Client, seed: int, blocks: int = 8) -> None:
    assert client.store(prompt(blocks, seed), kv(blocks, seed)).blocks == blocks
    assert client.flush()


def loaded(client: Client, seed: int, blocks: int = 8) -> int:
    """How many blocks of that prompt come, all of them right."""
    out = room(blocks)
    got = client.load(prompt(blocks, seed), out) // SPEC.block_tokens
    assert same(out[:got], kv(blocks, seed)[:got]), "a wrong byte"
    return got


def where(client: Client, seed: int, blocks: int = 8) -> set[str]:
    """The shards that a load of that prompt would come to."""
    return {str(block.shard) for block in client.explain(prompt(blocks, seed))}


def shards(client: Client) -> dict[str, Any]:
    return {shard["shard"]: shard for shard in client.status()["shards"]}


# ------------------------------------------------------------------------------------------------------ rot


@pytest.mark.parametrize("bit", [0, 8 * 1000 + 3, -1])
def test_a_page_that_rots_is_a_miss_and_then_gone_and_can_be_stored_again(bit: int) -> None:
    with clustered() as cluster:
        client = cluster.client(SPEC)
        stored(client, 1)
        key = cluster.corrupt(FIRST, block=client.hashes(prompt(8, 1))[5], bit=bit)
        assert loaded(client, 1) <= 5
        cluster.wait_until(lambda: shards(client)["shard-0"]["counters"]["corrupt"] == 1)
        cluster.wait_until(lambda: client.explain(prompt(8, 1))[5].reason is MissReason.CORRUPT)
        assert client.status()["counters"]["corrupt_pages"] == 1
        assert client.lookup(prompt(8, 1)).blocks == 5
        assert key.hash == client.hashes(prompt(8, 1))[5]
        again = client.store(prompt(8, 1), kv(8, 1))
        assert (again.blocks, again.deduplicated) == (1, 7)
        assert client.flush()
        assert loaded(client, 1) == 8


def test_a_page_that_is_never_read_is_found_by_the_scrubber(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.core.shard.scrubber.ROUND_NS", 0)
    with clustered(config={"shard": {"scrub_bytes": 4 * 2**20}}) as cluster:
        client = cluster.client(SPEC)
        stored(client, 1)
        cluster.corrupt(FIRST, bit=12_345)
        cluster.wait_until(lambda: bool(shards(client)["shard-0"]["counters"]["corrupt"]))
        cluster.wait_until(lambda: client.explain(prompt(8, 1))[0].reason is MissReason.CORRUPT)
        assert shards(client)["shard-0"]["pages"] == 7


def test_there_is_nothing_to_corrupt_where_nothing_lies() -> None:
    with clustered() as cluster, pytest.raises(LookupError, match="shard-0 holds no such page"):
        cluster.corrupt(FIRST)


# --------------------------------------------------------------------------------------------------- copies


def pinned(cluster: MemoryCluster, client: Client, seed: int, replicas: int) -> None:
    """Has the blocks of that prompt copied, and waits until they are."""
    namespace = client._control.namespace(SPEC, Deadline.after_ms(BOUND_S * 1e3))
    pin = PinBlocks(tuple(client.hashes(prompt(8, seed))), 60 * 10**9, replicas)
    before = pages(cluster)
    assert ask(cluster, pin, namespace) == BlocksPinned(8)
    cluster.wait_until(lambda: pages(cluster) == before + 8 * (replicas - 1))
    assert client.flush()


def pages(cluster: MemoryCluster) -> int:
    return sum(sum(1 for _ in host.core.pool.ready()) for host in cluster.shards.values())


def test_blocks_that_are_to_have_copies_survive_their_shard() -> None:
    with clustered(shards=2) as cluster:
        client = cluster.client(SPEC)
        stored(client, 1)
        pinned(cluster, client, 1, replicas=2)
        (holder,) = where(client, 1)
        cluster.stop_shard(ShardId(holder))
        cluster.wait_until(lambda: loaded(client, 1) == 8)


def test_a_rotten_copy_is_made_anew_from_the_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.core.shard.scrubber.ROUND_NS", 0)
    with clustered(shards=2, config={"shard": {"scrub_bytes": 2**20}}) as cluster:
        client = cluster.client(SPEC)
        stored(client, 1)
        pinned(cluster, client, 1, replicas=2)
        block = client.hashes(prompt(8, 1))[3]
        for rotten in list(cluster.shards):
            cluster.corrupt(rotten, block=block)
            cluster.wait_until(lambda rotten=rotten: counters(cluster, rotten)["corrupt"] == 1)  # type: ignore[misc]
            cluster.wait_until(lambda: pages(cluster) == 16)
            assert loaded(client, 1) == 8
        cluster.wait_until(lambda: client.status()["totals"]["corrupt"] == 2)


def counters(cluster: MemoryCluster, shard: ShardId) -> dict[str, int]:
    return dict(cluster.shards[shard].core.info().counters)


# --------------------------------------------------------------------------------------------------- drains


def test_a_drained_shard_goes_for_good_and_leaves_nothing_behind() -> None:
    with clustered(shards=2) as cluster:
        client = cluster.client(SPEC)
        for seed in range(20):
            stored(client, seed)
        assert {shard for seed in range(20) for shard in where(client, seed)} == {"shard-0", "shard-1"}
        assert ask(cluster, Drain(FIRST)) == Done(True)
        cluster.wait_until(lambda: cluster.drained == [FIRST])
        assert list(cluster.shards) == ["shard-1"]
        assert list(shards(client)) == ["shard-1"]
        assert [loaded(client, seed) for seed in range(20)] == [8] * 20


def test_what_is_stored_and_loaded_during_a_drain_is_not_lost() -> None:
    with clustered(shards=2) as cluster:
        client, other = cluster.client(SPEC), cluster.client(SPEC)
        for seed in range(10):
            stored(client, seed)
        done, failed = threading.Event(), list[BaseException]()
        last = [9]

        def work() -> None:
            try:
                while not done.is_set() and last[0] < 60:
                    last[0] += 1
                    stored(other, last[0])
                    assert loaded(other, last[0] - 5) == 8
            except BaseException as error:
                failed.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        cluster.wait_until(lambda: last[0] > 12)
        assert ask(cluster, Drain(FIRST)) == Done(True)
        cluster.wait_until(lambda: cluster.drained == [FIRST])
        done.set()
        worker.join()
        assert failed == []
        assert [loaded(client, seed) for seed in range(last[0])] == [8] * last[0]


def test_a_coordinator_that_restarts_goes_on_with_a_drain() -> None:
    with clustered(shards=2, config={"coordinator": {"drain_ms": 20_000}}) as cluster:
        client = cluster.client(SPEC)
        for seed in range(10):
            stored(client, seed)
        held = cluster.shards[FIRST]
        with reading(held):  # while its pages are read it stays
            assert ask(cluster, Drain(FIRST)) == Done(True)
            cluster.wait_until(lambda: held.core.state.draining)
            cluster.stop_coordinator()
            cluster.start_coordinator()
            cluster.wait_until_up()
            assert shards(client)["shard-0"]["state"] == "draining"
        cluster.wait_until(lambda: cluster.drained == [FIRST])
        assert [loaded(client, seed) for seed in range(10)] == [8] * 10


@contextmanager
def reading(host: ShardHost) -> Iterator[None]:
    """A lease on that shard."""
    attempt = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
    tenant = Tenant("default")
    host.ask(build_request(Pin(attempt, host.core.epoch, ()), tenant, SPEC.namespace(tenant)), BOUND_S)
    try:
        yield
    finally:
        host.ask(build_request(Unpin(attempt), tenant), BOUND_S)


# --------------------------------------------------------------------------------------------------- purges


def test_what_was_purged_is_not_found_after_any_restart(tmp_path: Path) -> None:
    with clustered(shards=2, config={"coordinator": {"state_dir": str(tmp_path)}}) as cluster:
        client, others = cluster.client(SPEC), cluster.client(spec_of(model="other"))
        stored(client, 1)
        assert others.store(prompt(8, 1), kv(8, 1)).blocks == 8
        assert others.flush()
        assert ask(cluster, Purge(model="tiny")) == Purged(8)
        assert loaded(client, 1) == 0
        assert others.lookup(prompt(8, 1)).blocks == 8
        for _ in range(2):
            cluster.stop_coordinator()
            cluster.start_coordinator()
            cluster.wait_until_up()
            assert loaded(client, 1) == 0
            assert others.lookup(prompt(8, 1)).blocks == 8
        cluster.wait_until(lambda: pages(cluster) == 8)
        stored(client, 1)
        assert loaded(client, 1) == 8


@pytest.mark.parametrize("remembers", ["the disk", "the other shard"])
def test_a_shard_that_was_cut_off_during_a_clear_does_not_bring_it_back(tmp_path: Path, remembers: str) -> None:
    folder = str(tmp_path) if remembers == "the disk" else ""
    with clustered(shards=2, config={"coordinator": {"state_dir": folder}}) as cluster:
        client = cluster.client(SPEC)
        for seed in range(10):
            stored(client, seed)
        deaf, told = cluster.shards[FIRST], cluster._tell

        def unheard(message: Any, deadline: Deadline) -> Reply:
            raise Unavailable(Miss(MissReason.SHARD_LOST))

        deaf._tell = unheard
        assert ask(cluster, Purge()) == Purged(80)
        if remembers == "the disk":
            cluster.stop_shard(ShardId("shard-1"))
        else:
            cluster.wait_until(lambda: len(cluster.shards[ShardId("shard-1")].core.pool) == 0)
        cluster.stop_coordinator()
        assert len(deaf.core.pool) > 0, "it has not heard of it"
        cluster.start_coordinator()
        deaf._tell = told
        if remembers == "the disk":
            cluster.start_shard(1)
        cluster.wait_until_up()
        cluster.wait_until(lambda: len(deaf.core.pool) == 0)
        assert [client.lookup(prompt(8, seed)).blocks for seed in range(10)] == [0] * 10
