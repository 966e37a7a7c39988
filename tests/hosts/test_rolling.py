"""Nodes are replaced and restarted one after another, and the whole cluster is stopped and started, while a worker
replays the same prompts: what is lost, and that nothing is wrong.

The pools are full to at least 85 %. The worker stores nothing after the first pass, so that what is lost stays lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.hosts import ROOT, Cluster
from tests.hosts.netns import missing
from tests.hosts.replay import KEPT, Round, judge, part_kept, replaying
from tests.hosts.worker import BLOCKS

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""

NODES = ("one", "two", "worker")
PROMPTS = 168
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
def full(more: str = "") -> Iterator[Cluster]:
    """A cluster of three nodes whose pools are full."""
    with Cluster(more, SIZES) as cluster:
        cluster.up()
        for host in NODES:
            cluster.join(host)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES))
        assert cluster.worker("head", "store", 0, PROMPTS)["stored"] == PROMPTS * BLOCKS
        shards = cluster.status()["shards"]
        assert sum(each["free_bytes"] for each in shards) < (1 - FULL) * sum(each["capacity_bytes"] for each in shards)
        yield cluster


@contextmanager
def replayed(cluster: Cluster) -> Iterator[list[Round]]:
    """Replays the prompts on the head's host, as `replaying` does."""
    command = [sys.executable, "-m", "tests.hosts.worker", f"{cluster.address}:7070", "replay", "0", str(PROMPTS)]
    process = subprocess.Popen(
        cluster.network.command("head", command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"KVCLUSTER_TOKEN": cluster.token},
    )
    with replaying(process) as rounds:
        yield rounds


@pytest.mark.parametrize("on", NETWORKS)
def test_nodes_are_replaced_one_after_another(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with full() as cluster:
        with replayed(cluster) as rounds:
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
        with replayed(cluster) as rounds:
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
