"""The doctor of a third host names the two hosts whose link is cut, and the one whose clock is an hour off; and any
host's status says what the cluster waits for.

The tests of the cluster run in order, each on what the one before has left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.clocks import an_hour_late
from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""


@pytest.fixture(scope="module", params=NETWORKS)
def cluster() -> Iterator[Cluster]:
    """The head, and no node yet."""
    with Cluster() as cluster:
        cluster.up()
        yield cluster


def doctor(cluster: Cluster, status: int = 0) -> dict[str, Any]:
    """What it finds on a host that is no node of the cluster."""
    said = cluster.kvcluster("worker", "doctor", "--address", f"{cluster.address}:7070", "--json", status=status)
    found: dict[str, Any] = json.loads(said)
    return found


def test_status_on_another_host_says_what_the_cluster_waits_for(cluster: Cluster) -> None:
    (waiting,) = eventually(lambda: cluster.status().get("waiting"), 60)
    assert waiting.startswith("a shard of group shard waits for a node with kvcluster_shard 1")
    cluster.join("one")
    cluster.join("two")
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
    eventually(lambda: cluster.status()["waiting"] == [], 60)


def test_every_shard_reaches_every_other_over_both_transports(cluster: Cluster) -> None:
    found = doctor(cluster)["cluster"]
    tried = {(pair["source"], pair["target"], pair["transport"]): pair["trip_ms"] for pair in found["pairs"]}
    between = [("shard-0", "shard-1"), ("shard-1", "shard-0"), ("this host", "shard-0"), ("this host", "shard-1")]
    assert set(tried) == {(*pair, transport) for pair in between for transport in ("grpc", "tcp")}
    assert all(tried.values())
    assert found["problems"] == []
    rows = {row["process"]: row for row in found["processes"]}
    assert {port["use"]: port["port"] for port in rows["shard-1"]["ports"]} == {"grpc": 7100, "tcp": 7101}
    assert rows["shard-0"]["pool_bytes"] == 64 * 2**20 < rows["shard-0"]["limit_bytes"]
    assert abs(rows["shard-0"]["clock_ms"]) < 1_000
    assert rows["coordinator"]["config_hash"] == rows["shard-0"]["config_hash"] != ""


def test_a_link_that_is_cut_between_two_hosts_is_named_on_a_third(cluster: Cluster) -> None:
    where = {host: shard for shard, host in cluster.shards().items()}
    cluster.network.cut("one", "two")
    found = doctor(cluster, status=1)
    cluster.network.heal("one", "two")
    assert found["healthy"]  # from here every shard is reached
    (problem,) = found["cluster"]["problems"]
    assert problem["severe"]
    for host in ("one", "two"):
        assert f"{where[host]} ({cluster.network.addresses[host]}:7100)" in problem["what"]
    assert "do not reach each other over grpc: no answer within 2 s" in problem["what"]
    assert f"TCP port 7100 from {cluster.network.addresses['one']}" in problem["advice"]
    assert doctor(cluster)["cluster"]["problems"] == []


def test_a_clock_that_is_an_hour_off_is_named(cluster: Cluster) -> None:
    cluster.join("spare", wrapper=an_hour_late(cluster.folder))
    shards = cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "spare", "two"])
    (late,) = [shard for shard, host in shards.items() if host == "spare"]
    (problem,) = doctor(cluster)["cluster"]["problems"]
    assert not problem["severe"]
    assert (
        f"({late}, {cluster.network.addresses['spare']}:7100) is 60.0 min behind the coordinator's" in problem["what"]
    )
