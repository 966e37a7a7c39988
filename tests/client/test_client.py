"""What a client says of the cluster: `explain`, `status`, estimates; and the life of a client itself."""

from __future__ import annotations

import json
import os
import threading

import pytest

from kvcluster.core import limits
from kvcluster.core.miss import MissReason
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.transfer import BlockExplanation, Stored
from kvcluster.transport.base import Deadline
from tests.client.build import (
    BLOCK,
    BOUND_S,
    PAGE_BYTES,
    SPEC,
    Hold,
    Port,
    Steps,
    kv,
    prompt,
    room,
    same,
    watched_client,
)
from tests.client.conftest import Start

TOKENS = prompt(3)


def test_a_store_of_more_pages_than_one_exchange_may_have_takes_several(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WRITE_PAGES", 2)
    cluster = start(shards=1, ram_bytes="1MiB")
    written: list[int] = []
    with watched_client(cluster, Steps(write=lambda: written.append(1))) as client:
        assert client.store(prompt(5), kv(5)).blocks == 5
        client.flush()
        assert len(written) == 3
        out = room(5)
        assert client.load(prompt(5), out) == 5 * BLOCK
    assert same(out, kv(5))


# ---------------------------------------------------------------------------------------------- explain


def test_explain_says_of_each_block_where_it_is_or_why_it_is_not(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB")
    client, hold = cluster.client(SPEC), Hold()
    client.store(TOKENS, kv(3))
    client.flush()
    longer = TOKENS + prompt(1, seed=1)
    with watched_client(cluster, Steps(send=hold)) as writer:
        transfer = writer.begin_store(writer.hashes(longer), kv(4))
        hold.wait_reached()
        explained = client.explain([*longer, *prompt(1, seed=2), 1, 2])
        hold.let_go()
        assert transfer.result() == Stored(1, 3, 0, PAGE_BYTES)
    assert explained == [
        *(BlockExplanation(block, True, "ram", "shard-0") for block in range(3)),
        BlockExplanation(3, False, reason=MissReason.PENDING),
        BlockExplanation(4, False, reason=MissReason.NEVER_SEEN),
        BlockExplanation(5, False, reason=MissReason.BELOW_BLOCK, detail=f"2 tokens fill no block of {BLOCK}"),
    ]
    assert [str(e) for e in explained[2:]] == [
        "block 2: hit (ram, shard-0)",
        "block 3: miss, pending",
        "block 4: miss, never_seen",
        "block 5: miss, below_block (2 tokens fill no block of 4)",
    ]


def test_explain_promises_and_touches_nothing(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    client.store(TOKENS, kv(3))
    client.flush()
    stamps = [record.stamp for space in cluster.coordinator_core().state.namespaces for record in space.index]
    assert all(e.hit for e in client.explain(TOKENS))
    assert [record.stamp for space in cluster.coordinator_core().state.namespaces for record in space.index] == stamps
    assert client.status()["tickets"] == 0
    assert client.status()["counters"]["asked_blocks"] == 0


def test_explain_of_nothing_is_nothing(cluster: MemoryCluster) -> None:
    assert cluster.client(SPEC).explain([]) == []


def test_a_lookup_promises_nothing(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    client.store(TOKENS, kv(3))
    client.flush()
    assert client.lookup(TOKENS).blocks == 3
    assert client.status()["tickets"] == 0


# ----------------------------------------------------------------------------------------------- status


def test_status_tells_shards_counters_and_hit_rate_as_plain_values(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    status = client.status()
    assert (status["hit_rate"], status["transports"], status["blocks"]) == (None, {}, 0)
    client.store(TOKENS, kv(3))
    client.flush()
    client.lookup(TOKENS + prompt(3, seed=1))

    status = client.status()
    assert status == json.loads(json.dumps(status))
    assert (status["state"], status["namespaces"], status["blocks"]) == ("serving", 1, 3)
    assert status["hit_rate"] == 0.5
    assert status["counters"]["committed_pages"] == status["counters"]["write_blocks"] == 3
    assert [shard["shard"] for shard in status["shards"]] == ["shard-0", "shard-1"]
    assert {shard["state"] for shard in status["shards"]} == {"up"}
    assert sum(shard["pages"] for shard in status["shards"]) == 3
    used = sum(shard["capacity_bytes"] - shard["free_bytes"] for shard in status["shards"])
    assert used >= 3 * PAGE_BYTES, "and what is left over behind them in their extents"
    assert list(status["transports"].values()) == [{"name": "memory", "refused": {}}]


def test_a_lookup_estimates_the_load_once_there_was_one(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    client.store(TOKENS, kv(3))
    client.flush()
    assert client.lookup(TOKENS).load_seconds is None
    client.load(TOKENS, room(3))
    whole, first = client.lookup(TOKENS).load_seconds, client.lookup(TOKENS[:BLOCK]).load_seconds
    assert whole is not None and first is not None
    assert whole == pytest.approx(3 * first, abs=1e-8) and first > 0  # whole nanoseconds
    assert client.lookup(prompt(1, seed=5)).load_seconds == 0


# ------------------------------------------------------------------------------------- the client itself


def test_a_spec_is_named_to_the_cluster_once(cluster: MemoryCluster) -> None:
    port = Port(cluster)
    with watched_client(cluster, port=port) as client:
        assert port.asked == [], "nothing is asked before the first call"
        client.attach(Deadline.after_ms(BOUND_S * 1e3))
        client.hashes(TOKENS)
        client.hashes(Prompt(TOKENS, adapter=""))
        assert len(port.asked) == 1
        client.hashes(Prompt(TOKENS, adapter="sha256:lora"))
        client.hashes(Prompt(TOKENS, adapter="sha256:lora"))
        assert len(port.asked) == 2


def test_threads_share_a_client(cluster: MemoryCluster) -> None:
    client, together, failed = cluster.client(SPEC), threading.Barrier(4), []

    def use(seed: int) -> None:
        tokens = prompt(3, seed)
        together.wait(BOUND_S)
        try:
            for _ in range(5):
                client.store(tokens, kv(3, seed))
                assert client.flush()
                into = room(3)
                assert client.load(tokens, into) == 3 * BLOCK
                assert same(into, kv(3, seed))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert failed == [] and not any(thread.is_alive() for thread in threads)
    assert client.status()["counters"]["write_blocks"] == 12


def test_a_client_leaves_no_thread_behind(cluster: MemoryCluster) -> None:
    before = threading.active_count()
    with watched_client(cluster) as client:
        client.store(TOKENS, kv(3))
        client.flush()
        ticket = client.prepare_load(client.hashes(TOKENS))
        assert client.load(TOKENS, room(3)) == 3 * BLOCK
        assert ticket.blocks
        assert threading.active_count() == before + 4, "to load, to read a shard, to store, to keep tickets"
    assert threading.active_count() == before


def test_threads_that_store_yield_to_those_that_compute_where_the_caller_says_so(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="4MiB", config={"client": {"store_niceness": 7}})
    before = set(threading.enumerate())
    client = cluster.client(SPEC)
    assert client.store(prompt(2), kv(2)).blocks == 2 and client.flush()
    assert client.load(prompt(2), room(2)) == 2 * BLOCK
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    by_name = {
        thread.name.rstrip("_0123456789"): os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) - mine
        for thread in set(threading.enumerate()) - before
    }
    assert by_name["kvcluster-store"] == 7
    assert by_name["kvcluster-load"] == by_name["kvcluster-timer"] == 0


def test_ways_that_were_opened_before_are_there_when_pages_are_moved(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="4MiB")
    client = cluster.client(SPEC)
    assert client.status()["transports"] == {}
    client.warm_up()
    assert sorted(client.status()["transports"]) == sorted(cluster.shards)
    gone, there = sorted(cluster.shards)
    cluster.stop_shard(gone)
    late = cluster.client(SPEC)
    late.warm_up()
    assert there in late.status()["transports"], "a shard that does not answer does not delay the others"
