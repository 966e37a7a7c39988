"""`make compat`: real processes of this release beside real processes of the releases of the two versions before.

Of a version that is next to ours everything works, whichever side has it, over each transport; of one further away
nothing does, and it is refused by name and counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcluster.release import PROTOCOL_VERSION, __version__
from tests.compat.processes import Cluster, work
from tests.compat.releases import RECORDED, installed
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # the first test of a release builds it

BLOCKS = 256
TRANSPORTS = ("grpc", "tcp", "shm")
_folders: dict[int, Path] = {}


def release(age: int) -> Path:
    """The release of the version that is `age` before ours, installed."""
    version = PROTOCOL_VERSION - age
    if version not in _folders:
        _folders[version] = installed(version)
    return _folders[version]


def store(age: int, cluster: Cluster, transport: str, seed: int) -> None:
    did = work(release(age), cluster.coordinator.address, transport, "store", seed)
    assert did.get("error") is None and did["blocks"] == BLOCKS and did["flushed"], did
    assert set(did["transports"].values()) == {transport}


def load(age: int, cluster: Cluster, transport: str, seed: int) -> None:
    did = work(release(age), cluster.coordinator.address, transport, "load", seed)
    assert did.get("error") is None and did["blocks"] == BLOCKS and did["same"], did
    assert set(did["transports"].values()) == {transport}


def up(cluster: Cluster, *names: str) -> bool:
    return cluster.states() == dict.fromkeys(names, "up")


def test_every_version_before_ours_has_its_commit() -> None:
    assert list(RECORDED) == list(range(1, PROTOCOL_VERSION))


# ---------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize(("worker", "cluster"), [(1, 0), (0, 1), (0, 0)])
def test_a_worker_stores_and_loads_in_a_cluster_of_a_neighbouring_version(worker: int, cluster: int) -> None:
    with Cluster(release(cluster), release(cluster)) as served:
        eventually(lambda: up(served, "shard-0"))
        for seed, transport in enumerate(TRANSPORTS):
            store(worker, served, transport, seed)
            load(worker, served, transport, seed)
            load(cluster, served, transport, seed)
        refused = [process.look()["refused"] for process in (served.coordinator, *served.shards)]
        assert not any(sum(reasons.values()) for reasons in refused), "nothing was tried in vain"


@pytest.mark.parametrize(("coordinator", "shards"), [(0, (1, 0)), (1, (0, 1)), (0, (1, 1)), (1, (0, 0))])
def test_shards_of_two_versions_serve_one_cluster_and_copy_from_one_another(
    coordinator: int, shards: tuple[int, int]
) -> None:
    with Cluster(release(coordinator), *map(release, shards)) as served:
        eventually(lambda: up(served, "shard-0", "shard-1"))
        # The pages of a worker of this host come to the first shard, and the second copies them: the two mixed clusters
        # have them the other way round.
        for seed, worker in enumerate((0, 1)):
            store(worker, served, TRANSPORTS[seed], seed)  # which also pins: every block is to lie on both shards
        seen = eventually(lambda: _all_copied(served))
        assert sum(shard["pulled"] for shard in seen.values()) == 2 * BLOCKS, seen
        for seed, worker in enumerate((1, 0)):
            for transport in TRANSPORTS:
                load(worker, served, transport, seed)


def _all_copied(served: Cluster) -> dict[str, dict[str, int]]:
    shards = served.coordinator.look()["shards"]
    return shards if all(shard["pages"] == 2 * BLOCKS for shard in shards.values()) else {}


def test_the_status_tells_what_each_process_of_a_mixed_cluster_says_about_itself() -> None:
    with Cluster(release(0), release(0), release(1)) as served:
        eventually(lambda: up(served, "shard-0", "shard-1"))
        told = served.coordinator.look()["shards"]
        assert (told["shard-0"]["release"], told["shard-0"]["node"]) == (__version__, "node-s")
        assert told["shard-0"]["config_hash"] == "5bad"
        assert told["shard-1"]["release"] == ("" if PROTOCOL_VERSION == 2 else served.shards[1].told["release"])


# ---------------------------------------------------------------------------------------- further away

if PROTOCOL_VERSION > 2:

    def test_a_worker_two_versions_older_is_refused_by_name_and_counted() -> None:
        with Cluster(release(0), release(0)) as served:
            eventually(lambda: up(served, "shard-0"))
            did = work(release(2), served.coordinator.address, "grpc", "store", 1)
            _names_both(did["error"], "upgrade the caller")
            assert served.coordinator.look()["refused"]["version"] > 0

    def test_a_cluster_two_versions_older_is_named_to_a_worker() -> None:
        with Cluster(release(2), release(2)) as served:
            eventually(lambda: up(served, "shard-0"))
            did = work(release(0), served.coordinator.address, "grpc", "store", 1)
            _names_both(did["error"], "upgrade the server")

    def test_a_shard_two_versions_older_is_refused_by_name_and_counted() -> None:
        with Cluster(release(0), release(0), release(2)) as served:
            eventually(lambda: up(served, "shard-0"))
            (said,) = eventually(lambda: served.shards[1].look()["failures"])
            _names_both(said, "upgrade the caller")
            assert up(served, "shard-0"), "and is not in the cluster"
            assert served.coordinator.look()["refused"]["version"] > 0
            for seed, transport in enumerate(TRANSPORTS):
                store(0, served, transport, seed)

    def test_a_coordinator_two_versions_older_is_named_to_a_shard() -> None:
        with Cluster(release(2), release(0)) as served:
            (said,) = eventually(lambda: served.shards[0].look()["failures"])
            _names_both(said, "upgrade the server")

    def test_a_shard_that_an_upgrade_left_behind_is_a_miss_to_a_worker() -> None:
        with Cluster(release(1), release(2)) as served:  # the coordinator understands both
            eventually(lambda: up(served, "shard-0"))
            did = work(release(0), served.coordinator.address, "grpc", "store", 1)
            assert did.get("error") is None and did["blocks"] == 0, did

    def test_a_worker_that_an_upgrade_left_behind_is_refused_by_the_shard_and_counted_there() -> None:
        with Cluster(release(1), release(0)) as served:
            eventually(lambda: up(served, "shard-0"))
            did = work(release(2), served.coordinator.address, "grpc", "store", 1)
            _names_both(did["error"], "upgrade the caller")
            assert served.shards[0].look()["refused"]["version"] > 0


def _names_both(said: str, what_to_do: str) -> None:
    oldest = PROTOCOL_VERSION - 1
    for words in (f"kvcluster {__version__}, which speaks versions {oldest} to {PROTOCOL_VERSION}", what_to_do):
        assert words in said
    assert f"speaks version {PROTOCOL_VERSION - 2}" in said or f"to {PROTOCOL_VERSION - 2}" in said
