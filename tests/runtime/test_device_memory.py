"""Everything that a shard does with pages, over memory that the CPU may not touch but on one thread."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import Tier
from kvcluster.runtime import tier_store
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance import TransportConformance, World, open_world
from tests.runtime import test_clusters
from tests.runtime.device_memory import DeviceStore
from tests.transport.peers import InProcess
from tests.transport.test_tcp import Served as OverTcp

SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16
)
BLOCKS = 8
SEED = 11


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory of shards is of that kind."""
    monkeypatch.setattr(tier_store, "RegionStore", DeviceStore)


class TestMemory(TransportConformance):
    @pytest.fixture
    def world(self) -> Iterator[World]:
        with open_world(InProcess) as world:
            yield world


class TestTcp(TransportConformance):
    @pytest.fixture
    def world(self) -> Iterator[World]:
        with open_world(OverTcp) as world:
            yield world


def prompt(number: int) -> list[int]:
    return [number, *range(BLOCKS * SPEC.block_tokens - 1)]


def kv(number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(BLOCKS, 4, 2, 16, 2, 64, generator=draw).bfloat16()


def loaded_or_missed(cluster: MemoryCluster, numbers: Iterable[int]) -> tuple[int, set[Tier]]:
    """Loads these prompts one after another and stores what was missed. Returns how many blocks came, each the one that
    was stored, and the tiers in which pages were seen."""
    client, loaded, tiers = cluster.client(SPEC), 0, set[Tier]()
    for turn, number in enumerate(numbers):
        out = torch.zeros_like(kv(0))
        blocks = client.load(prompt(number), out) // SPEC.block_tokens
        assert torch.equal(out[:blocks], kv(number)[:blocks]), f"turn {turn}"
        loaded += blocks
        if blocks < BLOCKS:
            client.store(prompt(number), kv(number))
        tiers.update(tiers_of(cluster))
    return loaded, tiers


def tiers_of(cluster: MemoryCluster) -> set[Tier]:
    """The tiers that have pages, of all shards."""
    return {page.tier for host in cluster.shards.values() for page in list(host.core.pool.ready())}


def test_what_was_stored_is_loaded_from_every_tier_or_missed_and_never_other_bytes(tmp_path: Path) -> None:
    """Demotion, staging, promotion and pulls, in too little memory, against plain tensors."""
    bytes_each = BLOCKS * SPEC.block_bytes
    config = {
        "shard": {
            "host_bytes": 3 * bytes_each,
            "disk_bytes": "16MiB",
            "disk_file_bytes": "1MiB",
            "disk_dir": str(tmp_path),
        },
        "coordinator": {"host_codec": "raw"},
    }
    draw = random.Random(SEED)
    with MemoryCluster(shards=2, ram_bytes=3 * bytes_each, config=config) as cluster:
        loaded, tiers = loaded_or_missed(cluster, (draw.randrange(12) for _ in range(300)))
    assert loaded > BLOCKS and tiers == set(Tier) - {Tier.GPU}, (loaded, tiers)


def test_a_rotten_copy_is_found_by_the_scrubber_and_made_anew_from_the_good_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_clusters.test_a_rotten_copy_is_made_anew_from_the_good_one(monkeypatch)


def test_a_drained_shard_leaves_nothing_behind() -> None:
    test_clusters.test_a_drained_shard_goes_for_good_and_leaves_nothing_behind()
