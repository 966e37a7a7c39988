"""What shards of a real cluster offer, and that pages go by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.doctor import examine
from tests.actors.worker import PATIENT, SPEC, kv, tokens

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with kvcluster.local(shards=2, device_bytes="64MiB") as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc"])
def test_a_client_that_takes_one_transport_stores_and_loads_by_it(cluster: LocalCluster, name: str) -> None:
    seed = ("shm", "tcp", "grpc").index(name) + 1
    with kvcluster.connect(cluster.address, SPEC, config=replace(PATIENT, transports=(name,))) as client:
        stored = client.store(tokens(seed), kv(seed))
        assert (stored.blocks, stored.miss) == (8, None)
        assert client.flush()
        out = torch.zeros_like(kv(seed))
        assert client.load(tokens(seed), out) == len(tokens(seed))
        assert torch.equal(out, kv(seed))
        used = {way["name"] for way in client.status()["transports"].values()}
    assert used == {name}


def test_a_client_of_the_same_host_takes_shared_memory_unasked(cluster: LocalCluster) -> None:
    with kvcluster.connect(cluster.address, SPEC, config=PATIENT) as client:
        client.store(tokens(9), kv(9))
        assert list(client.status()["transports"].values()) == [{"name": "shm", "refused": {}}]


def test_the_doctor_finds_all_of_them(cluster: LocalCluster) -> None:
    found = examine(cluster.address, None)
    assert found["healthy"]
    works = [[path["transport"] for path in shard["transports"] if path["works"]] for shard in found["shards"]]
    assert works == [["shm", "tcp", "grpc"]] * 2
