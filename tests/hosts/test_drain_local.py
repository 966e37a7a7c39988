"""`kvcluster drain --local` on a host of a cluster whose `join` still runs: every page is elsewhere, the reconciler
starts nothing there again, and SIGTERM of `join` then returns at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""


@pytest.fixture(scope="module", params=NETWORKS)
def cluster() -> Iterator[Cluster]:
    """The head and two nodes with a shard each."""
    with Cluster() as cluster:
        cluster.up()
        cluster.join("one")
        cluster.join("two")
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
        yield cluster


def drain(cluster: Cluster, host: str, *more: str, status: int = 0) -> str:
    return cluster.kvcluster(host, "drain", "--local", "--address", f"{cluster.address}:7070", *more, status=status)


def test_a_host_without_a_shard_has_nothing_to_drain(cluster: Cluster) -> None:
    assert "no shard runs on this machine" in drain(cluster, "worker")
    assert len(cluster.shards()) == 2


def test_a_drained_host_keeps_no_page_and_gets_no_shard_while_join_runs(cluster: Cluster) -> None:
    assert cluster.worker("worker", "store", 0, 4)["stored"] == 64
    where = {host: shard for shard, host in cluster.shards().items()}
    said = drain(cluster, "one", "--yes", "--deadline", "60")
    assert f"left here: {where['one']} with" in said
    assert said.rstrip().endswith(f"drained: {where['one']}")
    found = cluster.worker("worker", "load", 0, 4)
    assert (found["blocks"], found["wrong"]) == (64, 0)
    passes = _passes(cluster, 3)
    assert list(cluster.shards().values()) == ["two"], passes
    assert cluster.processes["one"].poll() is None  # `join` runs on
    began = time.monotonic()
    assert cluster.end("one") == 0
    assert "left: every shard of this node has drained" in cluster.said("one")
    assert time.monotonic() - began < 15


def test_a_node_that_joins_again_gets_its_shard_again(cluster: Cluster) -> None:
    cluster.join("one")
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])


def test_a_coordinator_that_cannot_be_reached_is_said_within_the_deadline(cluster: Cluster) -> None:
    for pair in (("head", "one"), ("one", "head")):
        cluster.network.cut(*pair)
    began = time.monotonic()
    assert "does not answer, so nothing was drained" in drain(cluster, "one", "--deadline", "3", status=4)
    assert time.monotonic() - began < 15


def _passes(cluster: Cluster, many: int) -> float:
    """Waits for as long as the reconciler takes for so many passes, and looks meanwhile. Returns the seconds."""
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 2.0 * many + 1.0, 60)
    return time.monotonic() - began
