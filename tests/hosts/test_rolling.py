"""Nodes are replaced and restarted one after another, and the whole cluster is stopped and started, while a worker
replays the same prompts: what is lost, and that nothing is wrong.

The pools are full to at least 85 %. The worker stores nothing after the first pass, so that what is lost stays lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.hosts.redis import SETTINGS, Redis, is_installed
from tests.hosts.replay import KEPT, judge, part_kept, replayed
from tests.hosts.worker import BLOCKS

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""

REDISES = NETWORKS if is_installed() else []

NODES = ("one", "two", "worker")
PROMPTS = 168
FEW = 76
"""So many prompts fill the pools to 40 %."""
SIZES = {"20GiB": "256MiB"}
DISKS = """
host_bytes = "32MiB"
disk_bytes = "512MiB"
disk_dir = "/etc/kvcluster/disk"

[coordinator]
host_codec = "raw"             # so that every byte can be compared
"""
FULL = 0.85


@contextmanager
def full(more: str = "", prompts: int = PROMPTS) -> Iterator[Cluster]:
    """A cluster of three nodes, with a Redis if `more` says so, and so many prompts: by default its pools are full."""
    with Cluster(more, SIZES) as cluster, Redis(cluster) if more == SETTINGS else nullcontext():
        cluster.up()
        for host in NODES:
            cluster.join(host)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES))
        assert cluster.worker("head", "store", 0, prompts)["stored"] == prompts * BLOCKS
        assert prompts != PROMPTS or filled(cluster) > FULL
        yield cluster


def filled(cluster: Cluster) -> float:
    """Which part of all pools is full."""
    shards = cluster.status()["shards"]
    return 1 - float(sum(each["free_bytes"] for each in shards) / sum(each["capacity_bytes"] for each in shards))


@pytest.mark.parametrize("on", NETWORKS)
def test_nodes_are_replaced_one_after_another(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with full() as cluster:
        with replayed(cluster, "head", PROMPTS) as rounds:
            fresh = "spare"
            for old in NODES:
                cluster.join(fresh)
                cluster.wait_shards(lambda shards, fresh=fresh: fresh in shards.values())  # type: ignore[misc]
                assert cluster.end(old) == 0
                assert "left: every shard of this node has drained" in cluster.said(old)
                fresh = old
        assert sorted(cluster.shards().values()) == ["one", "spare", "two"]
        judge(rounds, cluster.worker("head", "load", 0, PROMPTS), capsys)
        assert part_kept(rounds) >= KEPT


@pytest.mark.parametrize("on", NETWORKS)
def test_nodes_with_disks_are_restarted_one_after_another(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with full(DISKS) as cluster:
        homes = cluster.shards()
        with replayed(cluster, "head", PROMPTS) as rounds:
            for host in NODES:
                assert cluster.end(host) == 0
                cluster.join(host)
                assert cluster.wait_shards(lambda shards: len(shards) == len(NODES)) == homes
        judge(rounds, cluster.worker("head", "load", 0, PROMPTS), capsys)
        assert part_kept(rounds) >= KEPT


@pytest.mark.parametrize("on", NETWORKS)
def test_a_whole_cluster_with_disks_is_stopped_and_started(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with full(DISKS) as cluster:
        homes = cluster.shards()
        for host in NODES:
            os.kill(cluster.processes[host].pid, signal.SIGTERM)
        assert [cluster.processes[host].wait(60) for host in NODES] == [0, 0, 0]
        assert cluster.end("head") == 0
        assert [cluster.network.pids(host) for host in ("head", *NODES)] == [[], [], [], []]
        cluster.up()
        for host in NODES:
            cluster.join(host)
        assert cluster.wait_shards(lambda shards: len(shards) == len(NODES)) == homes
        judge([], cluster.worker("head", "load", 0, PROMPTS), capsys)


@pytest.mark.parametrize("on", REDISES)
@pytest.mark.parametrize(
    ("name", "settings", "prompts", "least"),
    [
        ("with Redis", SETTINGS, FEW, 1.0),
        ("with Redis", SETTINGS, PROMPTS, 0.0),
        ("without Redis", "", FEW, 0.0),
    ],
)
def test_head_and_nodes_are_upgraded_one_after_another(
    on: str, name: str, settings: str, prompts: int, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an upgrade of the image does it: each process ends, and the next one of its host starts, before another
    does."""
    with full(settings, prompts) as cluster:
        part = filled(cluster)
        assert cluster.end("head") == 0
        cluster.up()
        cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES), 200)
        after_head = cluster.worker("head", "load", 0, prompts)
        for host in NODES:
            assert cluster.end(host) == 0
            cluster.join(host)
            cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES), 150)
        after = cluster.worker("head", "load", 0, prompts)
        with capsys.disabled():
            kept = f"{part_kept([after_head]):.1%} kept by the head's upgrade, {part_kept([after]):.1%} by all"
            print(f"\n{name}, pools {part:.0%} full: {kept}")
        assert (after_head["wrong"], after["wrong"]) == (0, 0)
        assert part_kept([after_head]) == (1.0 if settings else 0.0)
        assert part_kept([after]) >= least
