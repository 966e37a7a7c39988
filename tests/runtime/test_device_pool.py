"""The GPU tier of a shard, over a twin of a GPU: its store against plain bytes, and a cluster that has it against plain
tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.config import ShardConfig
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import PageKey, PageSlot, Tier
from kvcluster.core.miss import Loss
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.runtime import device_pool
from kvcluster.runtime.device_pool import DevicePool, open_device_pool
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Unavailable
from tests.runtime.device_readers import read_on_device
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, loaded_or_missed, prompt, tiers_of

EACH = BLOCKS * SPEC.block_bytes
PROMPTLY = {"promote_loads": 1, "low_free": 0.1, "high_free": 0.3}


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[Twin]:
    """The devices that shards have taken, each its own."""
    taken: list[Twin] = []
    machine = Machine(random.Random(5))

    def open_device(config: ShardConfig) -> Twin:
        taken.append(Twin(machine, f"twin-{len(taken)}", nbytes=1 << 24, pinnable=1 << 25))
        return taken[-1]

    monkeypatch.setattr(device_pool, "open_device", open_device)
    return taken


@contextmanager
def cluster(disk: Path | None = None, *, shards: int = 1, **sizes: int) -> Iterator[tuple[MemoryCluster, Client]]:
    """A cluster whose shards have room for so many prompts in each tier, and a client of it."""
    shard: dict[str, object] = {name: count * EACH for name, count in sizes.items() if name != "ram_bytes"}
    if disk is not None:
        shard |= {"disk_bytes": "16MiB", "disk_file_bytes": "1MiB", "disk_dir": str(disk)}
    config = {"shard": shard, "coordinator": {"host_codec": "raw", **PROMPTLY}}
    with MemoryCluster(shards=shards, ram_bytes=sizes["ram_bytes"] * EACH, config=config) as there:
        yield there, there.client(SPEC)


def until(there: MemoryCluster, tier: Tier, load: list[int], client: Client) -> None:
    """Loads a prompt until pages lie in that tier."""
    out = torch.zeros_like(kv(0))
    for _ in range(2_000):
        client.load(load, out)
        read_on_device(there)
        if tier in tiers_of(there):
            return
    raise AssertionError(f"nothing comes into {tier.name}")


def test_pages_are_what_was_last_written_whoever_reads_meanwhile() -> None:
    twin = Twin(Machine(random.Random(1)), nbytes=1 << 20, pinnable=1 << 22)
    pool, held = DevicePool(twin, 1 << 19), dict[int, bytes]()
    size = 1 << 14

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(40):
            slot = slot_at((4 * draw.randrange(8) + number) * size, draw.randrange(1, size))
            data = draw.randbytes(slot.nbytes)
            with pool.fill(slot) as room:
                room[:] = data
            start = draw.randrange(slot.nbytes)
            assert pool.read(slot) == data and pool.read(slot, start) == data[start:]
            into = bytearray(slot.nbytes)
            pool.read_into(slot, memoryview(into))
            assert into == data
            held[slot.offset] = data

    with ThreadPoolExecutor(4) as threads:  # one more than there are slots
        list(threads.map(work, range(4)))
    for offset, data in held.items():
        assert pool.read(slot_at(offset, len(data))) == data
    assert len(held) > 20
    pool.close()
    with pytest.raises(Unavailable, match="the shard is ending"):
        pool.read(slot_at(0, 1))


def slot_at(offset: int, nbytes: int) -> PageSlot:
    key = PageKey(BlockHash(bytes(32)), 0, Part(0, 1, 0, 1))
    return PageSlot(key, offset, nbytes, 1, Loss.EXACT, tier=Tier.GPU)


@pytest.mark.usefixtures("twins")
def test_what_was_stored_is_loaded_from_every_tier_or_missed_and_never_other_bytes(tmp_path: Path) -> None:
    draw = random.Random(11)
    with cluster(tmp_path, shards=2, gpu_bytes=2, ram_bytes=3, host_bytes=3) as (there, _):

        def numbers() -> Iterator[int]:
            for _ in range(400):
                read_on_device(there)
                yield draw.choice((0, 1, draw.randrange(12)))

        loaded, seen = loaded_or_missed(there, numbers())
    assert loaded > BLOCKS and seen == set(Tier), (loaded, seen)


@pytest.mark.usefixtures("twins")
def test_what_is_left_on_a_gpu_alone_is_read_through_the_host_tier() -> None:
    with cluster(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (there, client):
        client.store(prompt(1), kv(1))
        until(there, Tier.GPU, prompt(1), client)
        (host,) = there.shards.values()

        def only_there() -> None:
            for page in list(host.core.pool.ready()):
                if page.tier is not Tier.GPU:
                    host.core.state.withdraw(page)

        host.inspect(only_there)
        assert tiers_of(there) == {Tier.GPU}
        out = torch.zeros_like(kv(0))
        blocks = client.load(prompt(1), out) // SPEC.block_tokens
        assert blocks and torch.equal(out[:blocks], kv(1)[:blocks])
        assert dict(host.core.info().counters)["staged"]


def loads_until(done: Callable[[], object], there: MemoryCluster, client: Client) -> None:
    """Stores and loads prompts, which the shard then promotes, until something has come."""
    for turn in range(500):
        client.store(prompt(10 + turn % 5), kv(10 + turn % 5))
        client.load(prompt(10 + turn % 5), torch.zeros_like(kv(0)))
        read_on_device(there)
        if done():
            return
    raise AssertionError("it did not come")


def test_a_gpu_that_fails_is_lost_with_its_pages_and_nothing_else_is(twins: list[Twin]) -> None:
    with cluster(gpu_bytes=3, ram_bytes=6, host_bytes=3) as (there, client):
        client.store(prompt(1), kv(1))
        until(there, Tier.GPU, prompt(1), client)
        twins[0].fail()
        loads_until(lambda: client.status()["shards"][0]["trouble"], there, client)
        (shard,) = client.status()["shards"]
        assert shard["above"] == [] and "goes on without its GPU tier: twin-0 has failed" in shard["trouble"]
        assert Tier.GPU not in tiers_of(there)
        for number in range(1, 5):
            client.store(prompt(number), kv(number))
            assert client.flush()
            out = torch.zeros_like(kv(0))
            for _ in range(20):
                assert client.load(prompt(number), out) == BLOCKS * SPEC.block_tokens
                assert torch.equal(out, kv(number))


def test_without_a_driver_a_shard_runs_without_the_tier_and_says_so() -> None:
    with cluster(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (there, client):
        (shard,) = client.status()["shards"]
        assert shard["above"] == [] and "the shard runs without its GPU tier: libcuda" in shard["trouble"]
        client.store(prompt(1), kv(1))
        assert client.flush()
        assert client.load(prompt(1), torch.zeros_like(kv(1))) == BLOCKS * SPEC.block_tokens
        assert Tier.GPU not in tiers_of(there)


def test_a_trial_without_a_gpu_says_so_in_its_configuration() -> None:
    shard = {"gpu_bytes": 3 * EACH, "gpu_device": "twin", "host_bytes": 3 * EACH}
    config = {"shard": shard, "coordinator": PROMPTLY}
    with MemoryCluster(ram_bytes=3 * EACH, config=config) as there:
        client = there.client(SPEC)
        client.store(prompt(1), kv(1))
        until(there, Tier.GPU, prompt(1), client)
        (status,) = client.status()["shards"]
        (use,) = status["above"]
        assert use["tier"] == "gpu" and use["pages"] and not status["trouble"]


def test_more_than_the_device_has_is_refused_with_its_reason(twins: list[Twin]) -> None:
    pool, found = open_device_pool(ShardConfig(gpu_bytes=1 << 30, host_bytes=1 << 20), ShardId("s0"))
    assert pool is None and not found.capacity_bytes and "runs without its GPU tier" in found.trouble and twins


def test_a_trial_may_have_a_large_pool() -> None:
    config = ShardConfig(gpu_bytes=300 << 20, host_bytes=1 << 20, gpu_device="twin")
    pool, found = open_device_pool(config, ShardId("s0"))
    assert pool is not None and found.capacity_bytes == 300 << 20 and not found.trouble
    pool.close()


@pytest.mark.parametrize("nbytes", [1 << 47, 1 << 62, 1 << 70])
def test_a_trial_with_more_than_there_is_runs_without_the_tier(nbytes: int) -> None:
    config = ShardConfig(gpu_bytes=nbytes, host_bytes=1 << 20, gpu_device="twin")
    pool, found = open_device_pool(config, ShardId("s0"))
    assert pool is None and f"runs without its GPU tier: twin-0 has no {nbytes} bytes" in found.trouble
