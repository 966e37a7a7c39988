"""Which transports the shards of a real cluster offer, and that pages use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.doctor import examine
from kvcluster.transport.credentials import ANONYMOUS
from tests.actors.worker import PATIENT, SPEC, kv, tokens

pytestmark = pytest.mark.cluster


OWN = replace(SPEC, model="transports")
"""Other tests store in the same cluster."""


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc"])
def test_a_client_that_takes_one_transport_stores_and_loads_by_it(shared_cluster: LocalCluster, name: str) -> None:
    seed = ("shm", "tcp", "grpc").index(name) + 1
    with kvcluster.connect(shared_cluster.address, OWN, config=replace(PATIENT, transports=(name,))) as client:
        stored = client.store(tokens(seed), kv(seed))
        assert (stored.blocks, stored.miss) == (8, None)
        assert client.flush()
        out = torch.zeros_like(kv(seed))
        assert client.load(tokens(seed), out) == len(tokens(seed))
        assert torch.equal(out, kv(seed))
        used = {way["name"] for way in client.status()["transports"].values()}
    assert used == {name}


def test_a_client_of_the_same_host_takes_shared_memory_unasked(shared_cluster: LocalCluster) -> None:
    with kvcluster.connect(shared_cluster.address, OWN, config=PATIENT) as client:
        client.store(tokens(9), kv(9))
        assert list(client.status()["transports"].values()) == [{"name": "shm", "refused": {}}]


def test_the_doctor_finds_all_of_them(shared_cluster: LocalCluster) -> None:
    found = examine(shared_cluster.address, ANONYMOUS)
    assert found["healthy"]
    works = [[path["transport"] for path in shard["transports"] if path["works"]] for shard in found["shards"]]
    assert works == [["shm", "tcp", "grpc"]] * 2
