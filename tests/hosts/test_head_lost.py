"""The head's host is lost: with Redis its successor on another host finds every shard with all that it holds, even with
a clock an hour behind; without, every node joins it anew. And the Redis is lost: all goes on, and nothing is started
before it is back."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.clocks import an_hour_late_by_faketime
from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.hosts.processes import GCS, SHARD, processes, titled
from tests.hosts.redis import SETTINGS, Redis, is_installed
from tests.hosts.replay import replayed
from tests.hosts.worker import BLOCKS
from tests.waiting import eventually

ADDRESS = "10.203.0.100"
"""The address of the head, which moves from host to host."""
HOSTS = ("head", "one", "two")
AWAY_S = 75.0
"""How long Redis is away: longer than the minute after which a control store that waits for it ends."""

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() or not is_installed() else ["network namespaces"]
"""None where the machine gives us none, or has no Redis: then nothing here runs."""
CLOCKS = [*NETWORKS, *(["a clock an hour late"] if NETWORKS and shutil.which("faketime") else [])]


@contextmanager
def running(more: str = "") -> Iterator[tuple[Cluster, Redis]]:
    """A cluster of two nodes whose head has an address that can move, and a Redis beside it."""
    changes = {'host = "0.0.0.0"': f'host = "0.0.0.0"\nadvertise = "{ADDRESS}"'}
    with Cluster(more, changes, address=ADDRESS) as cluster:
        cluster.network.move(ADDRESS, "head")
        with Redis(cluster) as redis:
            cluster.up("head", "--node-ip", cluster.network.addresses["head"])
            cluster.join("one")
            cluster.join("two")
            cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
            yield cluster, redis


@pytest.mark.parametrize("clock", CLOCKS)
def test_with_redis_the_shards_go_on_whatever_the_next_clock_says(
    clock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(SETTINGS) as (cluster, _):
        assert cluster.worker("worker", "store", 0, 6)["stored"] == 96
        epoch = cluster.status()["epoch"]
        cluster.kill("head")
        began = time.monotonic()
        cluster.network.move(ADDRESS, "spare")
        late = an_hour_late_by_faketime(cluster.folder) if clock != NETWORKS[0] else ()
        cluster.up("spare", "--node-ip", cluster.network.addresses["spare"], wrapper=late)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"], 150)
        seconds = time.monotonic() - began
        found = eventually(lambda: _whole(cluster, 6), 60)
        with capsys.disabled():
            print(f"\nevery shard served again {seconds:.1f} s after the head's host was lost")
        assert found["wrong"] == 0
        assert cluster.status()["epoch"] > epoch
        assert cluster.worker("one", "store", 20, 21)["stored"] == 16
        assert all(cluster.said(host).count("joined ") == 1 for host in ("one", "two"))


@pytest.mark.parametrize("on", NETWORKS)
def test_all_goes_on_without_redis_until_it_is_back(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(SETTINGS) as (cluster, redis):
        assert cluster.worker("worker", "store", 0, 6)["stored"] == 6 * BLOCKS
        before = processes(cluster, HOSTS)
        store = cluster.network.pids("head")
        with replayed(cluster, "spare", 6) as rounds:
            redis.kill()
            lost = time.monotonic()
            (old,) = titled(store, GCS)
            eventually(lambda: old not in cluster.network.pids("head"), 30)
            ended = time.monotonic() - lost
            stored = asked = 0
            while time.monotonic() - lost < AWAY_S:
                asked += 1
                assert len(cluster.shards()) == 2
                stored += cluster.worker("worker", "store", 6 + asked, 7 + asked)["stored"]
            assert stored == asked * BLOCKS
            redis.start()
            back = time.monotonic()
            victim = titled(cluster.network.pids("one"), SHARD)
            assert processes(cluster, HOSTS) == before
        assert sum(each["wrong"] for each in rounds) == 0
        assert all(each["blocks"] == each["of"] for each in rounds)
        assert cluster.worker("worker", "load", 0, 6)["blocks"] == 6 * BLOCKS
        os.kill(victim[0], signal.SIGKILL)
        # Only Ray's control store starts it again.
        eventually(lambda: titled(cluster.network.pids("one"), SHARD) not in ([], victim), 90)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
        with capsys.disabled():
            said = f"Ray's control store ended {ended:.1f} s after Redis; in {AWAY_S:.0f} s without it {asked} statuses"
            said += f" and {stored} stored blocks, {len(rounds)} rounds of loads without a miss"
            print(f"\n{said}; a killed shard was back {time.monotonic() - back:.1f} s after Redis was")
        assert cluster.end("head") == 0


@pytest.mark.parametrize("on", NETWORKS)
def test_without_redis_every_node_joins_the_next_head_empty(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (cluster, _):
        assert cluster.worker("worker", "store", 0, 2)["stored"] == 32
        cluster.kill("head")
        began = time.monotonic()
        cluster.network.move(ADDRESS, "spare")
        cluster.up("spare", "--node-ip", cluster.network.addresses["spare"])
        cluster.wait_said("one", "Ray has ended on this node", 200)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"], 200)
        with capsys.disabled():
            print(f"\nevery node joined again {time.monotonic() - began:.1f} s after the head's host was lost")
        found = cluster.worker("worker", "load", 0, 2)
        assert (found["blocks"], found["wrong"]) == (0, 0)
        assert cluster.worker("worker", "store", 0, 2)["stored"] == 32


def _whole(cluster: Cluster, seeds: int) -> dict[str, float] | None:
    """What a load of all prompts has found, once it finds all of them."""
    found = cluster.worker("worker", "load", 0, seeds)
    return found if found["blocks"] == found["of"] else None
