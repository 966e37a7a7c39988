"""The wall clock is set forwards and back while everything runs: it decides nothing but the next epoch."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvcluster.testing import MemoryCluster
from tests.client.build import SPEC, kv, prompt, room, same

HOUR_NS = 3_600 * 10**9
STEPS = (HOUR_NS, -HOUR_NS, -24 * HOUR_NS, 0)
"""What the wall clock is set to, beside the right time."""


class WallClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_ns = 0
        right: Callable[[], int] = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: right() + self.ahead_ns)
        monkeypatch.setattr(time, "time", lambda: (right() + self.ahead_ns) / 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def loaded(cluster: MemoryCluster, seed: int) -> int:
    client, out = cluster.client(SPEC), room(4)
    blocks = client.load(prompt(4, seed), out) // SPEC.block_tokens
    assert same(out[:blocks], kv(4, seed)[:blocks]), "a wrong byte"
    return blocks


def test_steps_of_the_wall_clock_end_no_ticket_lease_pin_or_membership(clock: WallClock) -> None:
    with MemoryCluster(shards=2) as cluster:
        client = cluster.client(SPEC)
        assert client.store(prompt(4, 0), kv(4, 0)).blocks == 4 and client.flush()
        assert client.pin(prompt(4, 0), 60).blocks == 4
        epochs = {shard: host.core.epoch for shard, host in cluster.shards.items()}
        with client.prepare_load(client.hashes(prompt(4, 0))) as ticket:
            for seed, clock.ahead_ns in enumerate(STEPS, 1):
                assert client.store(prompt(4, seed), kv(4, seed)).blocks == 4 and client.flush()
                assert [loaded(cluster, one) for one in range(seed + 1)] == [4] * (seed + 1)
            out = room(4)
            assert client.begin_load(ticket, out).result().blocks == 4 and same(out, kv(4, 0))
        assert {shard: host.core.epoch for shard, host in cluster.shards.items()} == epochs
        assert client.unpin(prompt(4, 0)).blocks == 4
        cluster.wait_until_idle()
        cluster.check()


@pytest.mark.parametrize("ahead_ns", STEPS)
def test_what_starts_under_another_wall_clock_knows_all_that_was_stored(clock: WallClock, ahead_ns: int) -> None:
    with MemoryCluster() as cluster:
        assert cluster.client(SPEC).store(prompt(4, 1), kv(4, 1)).blocks == 4
        cluster.client(SPEC).flush()
        clock.ahead_ns = ahead_ns
        cluster.stop_coordinator()
        cluster.start_coordinator()
        cluster.wait_until_up()
        assert loaded(cluster, 1) == 4
        cluster.start_shard(1)
        cluster.wait_until_up()
        assert loaded(cluster, 1) == 4
