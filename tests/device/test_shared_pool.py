"""Engines whose blocks lie on the device on which a shard has its pool: they read pages of it in place, over shm.
Engine and shard have machines of their own, as two processes have."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcluster import Dense
from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, Caller, Holder, NamespaceId
from kvcluster.core.messages import PageWant, ReadRequest, Tier
from kvcluster.device import pool_copies
from kvcluster.device.device import NoMemory
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DevicePoolMemory
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import TABLE_BYTES, DeviceStaging
from kvcluster.errors import ProtocolError
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ONE
from kvcluster.transport.sessions import ReadSession
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind
from tests.device.tensors import Engine
from tests.runtime.device_readers import read_on_device
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, prompt, tiers_of
from tests.transport import shm_served
from tests.waiting import eventually

EACH = BLOCKS * SPEC.block_bytes
SLOT_BYTES = limits.RECORD_BYTES + TABLE_BYTES

READERS = [("twin-0", ()), ("twin-1", ("twin-0",))]
"""An engine on the device of a shard's pool, and one on a peer of it."""


class Here:
    """An engine's blocks on a device of that name and with these peers, and a client that reaches the shards over
    shared memory."""

    def __init__(self, name: str, peers: Collection[str], client: Client) -> None:
        self.twin = Twin(Machine(random.Random(7)), name, nbytes=1 << 24, pinnable=1 << 28, peers=peers)
        DEVICES.add(DeviceStaging(self.twin, slot_bytes=SLOT_BYTES, slots=2))
        self.client = client
        self._engine = Engine(self.twin)
        self.tensor = self._engine.tensor(*kv(0).shape)

    def load(self, number: int) -> int:
        """Loads a prompt, and returns how many blocks came. All of them are right."""
        blocks = self.client.load(prompt(number), Dense(self.tensor)) // SPEC.block_tokens
        assert torch.equal(self._engine.read(self.tensor)[:blocks], kv(number)[:blocks]), number
        return blocks

    def store(self, number: int) -> None:
        self._engine.write(self.tensor, kv(number))
        self.client.store(prompt(number), Dense(self.tensor))
        assert self.client.flush()


def batches_from(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages of each batch that a device reads itself in memory of this kind, from now on."""
    batches: list[int] = []

    class Counted(pool_copies._PoolRun):
        def __init__(self, batch: Any, *arguments: Any) -> None:
            if isinstance(batch.source, kind):
                batches.append(len(set(batch.records.items)))
            super().__init__(batch, *arguments)

    monkeypatch.setattr(pool_copies, "_PoolRun", Counted)
    return batches


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages of each batch that was read from a pool."""
    return batches_from(DevicePoolMemory, monkeypatch)


@contextmanager
def world(
    *, name: str = "twin-0", peers: Collection[str] = (), shards: int = 1, **sizes: int
) -> Iterator[tuple[MemoryCluster, Here]]:
    """A cluster whose shards have room for so many prompts in each tier, and an engine on a device of that name and
    with these peers."""
    shard: dict[str, object] = {key: count * EACH for key, count in sizes.items() if key != "ram_bytes"}
    shard["gpu_device"] = "twin"
    promptly = {"host_codec": "raw", "promote_loads": 1, "low_free": 0.1, "high_free": 0.3}
    config = {"shard": shard, "coordinator": promptly}
    with (
        MemoryCluster(shards=shards, ram_bytes=sizes["ram_bytes"] * EACH, config=config) as cluster,
        ExitStack() as ends,
    ):
        served = {shard: shm_served.Served(host) for shard, host in cluster.shards.items()}
        for each in served.values():
            ends.callback(each.close)
        client = Client(cluster.port(ONE), lambda shard: served[shard.shard].open(ONE), SPEC)
        ends.callback(client.close)
        here = Here(name, peers, client)
        ends.callback(DEVICES.remove, here.twin)
        yield cluster, here


def promoted(cluster: MemoryCluster, here: Here, number: int) -> None:
    """Has a prompt's pages in the pool."""
    here.store(number)
    for _ in range(500):
        here.load(number)
        read_on_device(cluster, ONE)
        pages = [page for host in cluster.shards.values() for page in list(host.core.pool.ready())]
        if sum(page.tier is Tier.GPU for page in pages) == BLOCKS:
            return
    raise AssertionError("nothing comes into the pool")


def counted(cluster: MemoryCluster, name: str) -> int:
    return sum(dict(host.core.info().counters)[name] for host in cluster.shards.values())


@pytest.mark.parametrize(("name", "peers"), READERS)
def test_pages_of_the_pool_are_read_there_and_no_copy_is_made_in_memory(
    read: list[int], name: str, peers: Collection[str]
) -> None:
    with world(name=name, peers=peers, gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        (host,) = cluster.shards.values()

        def only_there() -> None:
            for page in list(host.core.pool.ready()):
                if page.tier is not Tier.GPU:
                    host.core.state.withdraw(page)

        host.inspect(only_there)
        assert tiers_of(cluster) == {Tier.GPU}
        read.clear()
        before = counted(cluster, "staged")
        for _ in range(10):
            assert here.load(1) == BLOCKS
        assert sum(read) == 10 * BLOCKS and counted(cluster, "staged") == before and tiers_of(cluster) == {Tier.GPU}
        assert counted(cluster, "read_on_device") >= 10 * BLOCKS


@pytest.mark.parametrize("peers", [(), ("twin-2",)])
def test_blocks_on_another_device_that_is_no_peer_get_copies(read: list[int], peers: Collection[str]) -> None:
    with world(name="twin-1", peers=peers, gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        assert here.load(1) == BLOCKS
        assert not read


def test_memory_of_the_cpu_gets_copies_beside_them(read: list[int]) -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        read.clear()
        out = torch.zeros_like(kv(0))
        assert here.client.load(prompt(1), out) == BLOCKS * SPEC.block_tokens
        assert torch.equal(out, kv(1)) and not read


@pytest.mark.parametrize(("name", "peers"), READERS)
def test_whatever_comes_is_what_was_stored_in_too_little_memory_of_every_tier(
    read: list[int], name: str, peers: Collection[str]
) -> None:
    """Some pages of a load lie in the pool, others in memory, and they move meanwhile."""
    draw, loaded, seen = random.Random(5), 0, set[Tier]()
    with world(name=name, peers=peers, shards=2, gpu_bytes=2, ram_bytes=3, host_bytes=3) as (cluster, here):
        for _ in range(300):
            number = draw.choice((0, 1, draw.randrange(9)))
            blocks = here.load(number)
            loaded += blocks
            if blocks < BLOCKS:
                here.store(number)
            seen |= tiers_of(cluster)
    assert loaded > 100 * BLOCKS and sum(read) > BLOCKS and Tier.GPU in seen


def test_a_page_that_is_rotten_in_the_pool_does_not_come(read: list[int]) -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        (host,) = cluster.shards.values()
        page = next(page for page in host.core.pool.ready() if page.tier is Tier.GPU)
        with host.fill(page.slot()) as room:
            room[:] = bytes(page.nbytes)
        read.clear()
        came = [here.load(1) for _ in range(40)]
        assert sum(read) >= BLOCKS
        assert came[-1] == BLOCKS, "the shard has found it, and serves it from memory or has it promoted again"


def test_a_device_that_does_not_open_it_is_not_asked_again(
    read: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refused(twin: Twin, descriptor: int, nbytes: int) -> Any:
        asked.append(nbytes)
        raise NoMemory("it maps nothing")

    monkeypatch.setattr(Twin, "open_shared", refused)
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        assert here.load(1) == BLOCKS and asked == [3 * EACH] and not read
    assert "is not read there: it maps nothing" in caplog.text


def pool_of_another_shard(read: list[int]) -> int:
    """Returns how many blocks came from the pool of a second shard, after a first one has ended."""
    for number in (1, 2):
        with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
            promoted(cluster, here, number)
            read.clear()
            came = here.load(number)
    return came if sum(read) else 0


def test_a_pool_is_that_of_its_shard_and_one_that_is_kept_is_noticed(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool_of_another_shard(read) == BLOCKS
    kept: list[int] = []
    opened = Twin.open_shared

    def first_of_all(twin: Twin, descriptor: int, nbytes: int) -> Any:
        """As if a pool that was opened once were that of every later shard."""
        kept.extend([] if kept else [os.dup(descriptor)])
        return opened(twin, kept[0], nbytes)

    monkeypatch.setattr(Twin, "open_shared", first_of_all)
    assert pool_of_another_shard(read) < BLOCKS, "nothing of it matches, and no block has other bytes"
    os.close(kept[0])


def test_a_pool_that_has_failed_is_given_to_nobody() -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        (host,) = cluster.shards.values()
        store = host._stores._by_tier[Tier.GPU]
        store._device.fail()  # type: ignore[attr-defined]
        page = next(page for page in host.core.pool.ready() if page.tier is Tier.GPU)
        with pytest.raises(OSError, match="the GPU has failed"):
            host.read(page.slot())
        assert host.pool is None
        served = shm_served.Served(host)
        with shm_served.Raw(SimpleNamespace(served=served)) as peer:  # type: ignore[arg-type]
            peer.send(FrameKind.POOL)
            assert peer.frame()[0] is FrameKind.FAILED
        served.close()


def test_a_device_that_fails_while_nobody_uses_it_is_noticed() -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        (host,) = cluster.shards.values()
        host._stores._by_tier[Tier.GPU]._device.fail()  # type: ignore[attr-defined]
        assert eventually(lambda: "goes on without its GPU tier" in here.client.status()["shards"][0]["trouble"])
        assert eventually(lambda: Tier.GPU not in tiers_of(cluster))
        assert here.load(1) == BLOCKS, "from RAM"


def test_a_device_that_has_failed_is_the_engines_loss_alone() -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        here.twin.fail()
        assert here.client.load(prompt(1), Dense(here.tensor)) == 0
        out = torch.zeros_like(kv(0))
        assert here.client.load(prompt(1), out) == BLOCKS * SPEC.block_tokens and torch.equal(out, kv(1))


# ------------------------------------------------------------------------------------------- hostile workers


@pytest.mark.parametrize(
    ("gpu", "frame", "says"),
    [
        (False, socket_frames.encode_header(FrameKind.POOL, 0), "POOL"),
        (True, socket_frames.encode_header(FrameKind.POOL, 8) + bytes(8), "a worker's POOL has no body"),
        (True, 2 * socket_frames.encode_header(FrameKind.POOL, 0), "asks for the pool once"),
        (True, None, "asked for pages of a pool that it has not opened"),
    ],
)
def test_a_worker_that_asks_for_what_it_has_not_is_refused_in_words(gpu: bool, frame: bytes | None, says: str) -> None:
    sizes = {"gpu_bytes": 3} if gpu else {}
    with world(**sizes, ram_bytes=3, host_bytes=3) as (cluster, _):
        (host,) = cluster.shards.values()
        served = shm_served.Served(host)
        wish = ReadRequest(NamespaceId(bytes(32)), Attempt(Holder(bytes(16)), 1), host.core.epoch, (), on_device=True)
        with shm_served.Raw(SimpleNamespace(served=served)) as peer:  # type: ignore[arg-type]
            if frame is not None:
                peer.send_bytes(frame)
            else:
                peer.send(FrameKind.READ, socket_frames.encode_read(wish, 10**10))
            if says == "asks for the pool once":
                assert peer.frame()[0] is FrameKind.POOL
            refusal = peer.refusal()
            assert isinstance(refusal, ProtocolError) and says in str(refusal)
            assert peer.is_closed()
        served.close()


def test_over_another_path_the_wish_is_not_followed() -> None:
    with world(gpu_bytes=3, ram_bytes=3, host_bytes=3) as (cluster, here):
        promoted(cluster, here, 1)
        (host,) = cluster.shards.values()
        key = next(page.key for page in host.core.pool.ready() if page.tier is Tier.GPU)
        space = next(page.space for page in host.core.pool.ready())
        want = PageWant(key, 0, key.part.layers)
        wish = ReadRequest(space, Attempt(Holder(bytes(range(16))), 1), host.core.epoch, (want,), on_device=True)
        for opens, tier in ((False, Tier.RAM), (True, Tier.GPU)):
            with ReadSession(host, Caller(ONE), wish, path="tcp", opens_pools=opens) as session:
                assert [slot.tier for slot in session.granted.values()] == [tier]
