"""A cluster of several hosts, each a network namespace, started by the commands that docs/operations.md prints.

The tests of one cluster run in order, each on what the one before has left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""
MORE = """
[ray]
node_timeout_ms = 8000
"""


@pytest.fixture(scope="module", params=NETWORKS)
def cluster() -> Iterator[Cluster]:
    """The head and two nodes with a shard each."""
    with Cluster(MORE) as cluster:
        cluster.up()
        cluster.join("one")
        cluster.join("two")
        cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
        yield cluster


def test_what_one_host_stores_another_loads_over_the_network(cluster: Cluster) -> None:
    assert cluster.worker("one", "store", 0, 2)["stored"] == 32
    found = cluster.worker("two", "load", 0, 2)
    assert (found["blocks"], found["wrong"]) == (32, 0)
    assert cluster.worker("worker", "load", 0, 2)["blocks"] == 32


def test_the_doctor_of_any_host_reaches_every_shard(cluster: Cluster) -> None:
    said = cluster.kvcluster("worker", "doctor", "--address", f"{cluster.address}:7070", "--json")
    assert '"healthy": true' in said
    assert "another network namespace" in said  # why it does not share memory: these hosts are one machine


def test_hosts_listen_at_the_ports_of_the_table_and_at_no_others(cluster: Cluster) -> None:
    table = json.loads(cluster.kvcluster("head", "doctor", "--ports", str(cluster.folder / "cluster.toml"), "--json"))
    known: set[int] = set()
    for row in table:
        first, _, last = str(row["port"]).partition("-")
        known |= set(range(int(first), int(last or first) + 1))
    for host in ("head", "one", "two"):
        listening = subprocess.check_output(cluster.network.command(host, ["ss", "-Hltn"]), text=True)
        addresses = [line.split()[3].rpartition(":") for line in listening.splitlines()]
        open_to_others = {int(port) for address, _, port in addresses if not address.startswith(("127.", "[::1]"))}
        assert open_to_others, host
        assert open_to_others <= known, f"{host}: {sorted(open_to_others - known)}"


def test_a_second_head_on_the_same_ports_is_refused_by_name(cluster: Cluster) -> None:
    config = str(cluster.folder / "cluster.toml")
    said = cluster.kvcluster("head", "up", "--foreground", "--config", config, status=1)
    assert f"cannot listen on {cluster.address}:6379: Address already in use" in said
    assert cluster.shards()


def test_a_node_with_another_secret_is_a_stranger(cluster: Cluster) -> None:
    other, secret = cluster.folder / "other.toml", cluster.folder / "other-secret"
    secret.write_text("x" * 40, encoding="ascii")
    secret.chmod(0o600)
    text = (cluster.folder / "cluster.toml").read_text(encoding="utf-8")
    other.write_text(text.replace(f"{cluster.folder}/secret", str(secret)), encoding="utf-8")
    said = cluster.kvcluster("spare", "join", cluster.address, "--config", str(other), status=1)
    assert "does not know this node: server.secret_file differs" in said
    said = cluster.kvcluster("spare", "join", f"{cluster.address}:7070", "--config", str(other), status=1)
    assert "is not the head of a Ray" in said
    assert cluster.network.pids("spare") == []


def test_a_node_that_is_killed_loses_its_shard_and_nothing_else(cluster: Cluster) -> None:
    cluster.kill("two")
    cluster.wait_shards(lambda shards: list(shards.values()) == ["one"])
    assert cluster.worker("one", "load", 0, 2)["wrong"] == 0
    cluster.join("two")
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])


def test_a_node_that_was_cut_off_joins_again_when_the_link_is_back(cluster: Cluster) -> None:
    for pair in (("head", "one"), ("one", "head")):
        cluster.network.cut(*pair)
    cluster.wait_shards(lambda shards: list(shards.values()) == ["two"])
    cluster.wait_said("head", f"address: {cluster.network.addresses['one']} and node name")  # Ray gives it up, too
    for pair in (("head", "one"), ("one", "head")):
        cluster.network.heal(*pair)
    # Its shard may be heard again for a moment, before its Ray learns that it was given up.
    eventually(lambda: cluster.said("one").count("joined ") == 2, 150)
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"], 150)


def test_a_node_that_leaves_hands_its_pages_to_its_replacement(cluster: Cluster) -> None:
    stored = cluster.worker("worker", "store", 10, 18)["stored"]
    assert stored == 128
    cluster.join("spare")
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "spare", "two"])
    assert cluster.end("one") == 0
    assert "left: every shard of this node has drained" in cluster.said("one")
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["spare", "two"])
    found = cluster.worker("worker", "load", 10, 18)
    assert (found["blocks"], found["wrong"]) == (128, 0)
    assert cluster.network.pids("one") == []


def test_a_changed_configuration_is_followed_and_an_invalid_one_is_not(cluster: Cluster) -> None:
    cluster.configure(MORE, {"per_node = true ": "per_node = 3 "})
    cluster.wait_said("head", "the changed configuration is not used: groups.shard.per_node must be of type bool")
    cluster.configure(MORE, {"per_node = true ": "shards = 1 "})
    cluster.wait_said("head", "the configuration has changed: groups.shard.per_node is True, not False")
    cluster.wait_shards(lambda shards: len(shards) == 1)
    assert cluster.worker("worker", "load", 10, 18)["wrong"] == 0


def test_pools_that_are_too_large_for_a_node_are_named(cluster: Cluster) -> None:
    cluster.configure(MORE, {"20GiB": "900GiB", "per_node = true ": "shards = 2 "})
    cluster.wait_said("head", "none is large enough; the largest has ")
    assert len(cluster.shards()) == 1
    cluster.configure(MORE)
    cluster.wait_shards(lambda shards: sorted(shards.values()) == ["spare", "two"])


def test_the_end_of_the_head_leaves_nothing_behind(cluster: Cluster) -> None:
    for host in ("spare", "two"):
        os.kill(cluster.processes[host].pid, signal.SIGTERM)
    for host in ("spare", "two"):
        assert cluster.processes[host].wait(60) == 0
    assert cluster.end("head") == 0
    assert [cluster.network.pids(host) for host in ("head", "spare", "two")] == [[], [], []]
