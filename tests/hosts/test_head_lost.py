"""The head's host is lost: with Redis its successor on another host finds every shard with all that it holds, even with
a clock an hour behind; without, every node joins it anew."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.clocks import an_hour_late_by_faketime
from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.waiting import eventually

ADDRESS = "10.203.0.100"
"""The address of the head, which moves from host to host."""

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() or not all(map(shutil.which, ("redis-server", "faketime"))) else ["network namespaces"]
"""None where the machine gives us none, or lacks a program: then nothing here runs."""


class Redis:
    """A Redis with a password on the worker's host, which is not lost, and its data on a disk. Use as a context
    manager."""

    def __init__(self, cluster: Cluster) -> None:
        command = ["redis-server", "--bind", cluster.network.addresses["worker"], "--requirepass", "redis-password"]
        command += ["--save", "", "--appendonly", "yes", "--dir", str(cluster.folder)]
        self._command = cluster.network.command("worker", command)

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it with the data that it had."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()


@contextmanager
def running(more: str = "") -> Iterator[tuple[Cluster, Redis]]:
    """A cluster of two nodes whose head has an address that can move, and a Redis beside it."""
    changes = {'host = "0.0.0.0"': f'host = "0.0.0.0"\nadvertise = "{ADDRESS}"'}
    with Cluster(more, changes, address=ADDRESS) as cluster:
        cluster.network.move(ADDRESS, "head")
        with Redis(cluster) as redis:
            (cluster.folder / "redis-password").write_text("redis-password\n", encoding="ascii")
            (cluster.folder / "redis-password").chmod(0o600)
            cluster.up("head", "--node-ip", cluster.network.addresses["head"])
            cluster.join("one")
            cluster.join("two")
            cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
            yield cluster, redis


def with_redis() -> str:
    return """
[ray]
redis = "10.203.0.5:6379"
redis_password_file = "/etc/kvcluster/redis-password"
"""


@pytest.mark.parametrize("on", NETWORKS)
def test_with_redis_the_shards_go_on_whatever_the_next_clock_says(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(with_redis()) as (cluster, _):
        assert cluster.worker("worker", "store", 0, 6)["stored"] == 96
        epoch = cluster.status()["epoch"]
        cluster.kill("head")
        began = time.monotonic()
        cluster.network.move(ADDRESS, "spare")
        late = an_hour_late_by_faketime(cluster.folder)
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
def test_the_head_ends_with_its_redis_and_comes_back_with_it(on: str) -> None:
    with running(with_redis()) as (cluster, redis):
        assert cluster.worker("worker", "store", 0, 6)["stored"] == 96
        redis.kill()
        assert cluster.processes["head"].wait(60) == 1
        assert "Ray has ended on this node; start this command again" in cluster.said("head")
        redis.start()
        cluster.up("head", "--node-ip", cluster.network.addresses["head"])
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
        assert eventually(lambda: _whole(cluster, 6))["wrong"] == 0
        assert all(cluster.said(host).count("joined ") == 1 for host in ("one", "two"))


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
