"""A client's loads and stores with an engine's tensors in the memory of a device: over every path, in every layout,
while the engine's own work is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
import torch

from kvcluster import Dense, Paged
from kvcluster.client.client import Client
from kvcluster.core.miss import MissReason
from kvcluster.device.devices import DEVICES
from kvcluster.device.ordering import Unordered
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import DeviceStaging
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ONE
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, spec_of
from tests.device.tensors import Engine
from tests.transport import shm_served, test_grpc, test_tcp
from tests.transport.peers import InProcess

TOKENS, BLOCKS = BLOCK, 6
SPEC = spec_of(dtype="bfloat16")
PROMPT = list(range(BLOCKS * TOKENS))


def values(seed: int) -> torch.Tensor:
    """`[blocks, layers, planes, tokens, heads, dim]`"""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM, generator=draw).bfloat16()


SERVED: dict[str, Callable[[Any], Any]] = {
    "memory": InProcess,
    "shm": shm_served.Served,
    "tcp": test_tcp.Served,
    "grpc": test_grpc.Served,
}


@contextmanager
def client_over(path: str, cluster: MemoryCluster) -> Iterator[Client]:
    """A client that reaches all shards of a cluster over that path alone."""
    with ExitStack() as stack:
        served = {shard: SERVED[path](host) for shard, host in cluster.shards.items()}
        for each in served.values():
            stack.callback(each.close)
        client = Client(cluster.port(ONE), lambda shard: served[shard.shard].open(ONE), SPEC)
        stack.callback(client.close)
        yield client


@pytest.fixture
def engine() -> Iterator[Engine]:
    twin = Twin(Machine(Random(7)), nbytes=1 << 22, pinnable=1 << 22)
    DEVICES.add(DeviceStaging(twin, slot_bytes=4_096, slots=2))
    yield Engine(twin)
    DEVICES.remove(twin)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(shards=2, ram_bytes="4MiB") as cluster:
        yield cluster


class Caches:
    """An engine's caches in one layout: memory for a call, and its tensors with the axes of `values`."""

    def __init__(self, engine: Engine, layout: str) -> None:
        self.engine, self.layout = engine, layout
        if layout == "dense":
            self.tensors = [engine.tensor(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM)]
            self.memory: Any = Dense(self.tensors[0])
            return
        ids = list(reversed(range(BLOCKS)))
        if layout == "nhd":
            self.tensors = [engine.tensor(2, BLOCKS, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
            layers: list[Any] = [each.transpose(0, 1) for each in self.tensors]
        elif layout == "hnd":
            self.tensors = [engine.tensor(BLOCKS, 2, HEADS, TOKENS, DIM) for _ in range(LAYERS)]
            layers = [each.transpose(2, 3) for each in self.tensors]
        else:  # planes apart, K transposed
            self.tensors = [
                engine.tensor(BLOCKS, *shape)
                for _ in range(LAYERS)
                for shape in ((HEADS, DIM, TOKENS), (TOKENS, HEADS, DIM))
            ]
            pairs = zip(self.tensors[::2], self.tensors[1::2], strict=True)
            layers = [(k.permute(0, 3, 1, 2), v) for k, v in pairs]
        self.memory = Paged(layers, ids)

    def each(self, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each tensor with what it has to hold of `content`."""
        if self.layout == "dense":
            yield self.tensors[0], content
            return
        paged = content.flip(0)
        for layer in range(LAYERS):
            both = paged[:, layer]  # blocks, planes, tokens, heads, dim
            if self.layout == "nhd":
                yield self.tensors[layer], both.transpose(0, 1)
            elif self.layout == "hnd":
                yield self.tensors[layer], both.transpose(2, 3)
            else:
                yield self.tensors[2 * layer], both[:, 0].permute(0, 2, 3, 1)
                yield self.tensors[2 * layer + 1], both[:, 1]

    def write(self, content: torch.Tensor) -> None:
        for tensor, part in self.each(content):
            self.engine.write(tensor, part)

    def hold(self, content: torch.Tensor) -> bool:
        return all(torch.equal(self.engine.read(tensor), part) for tensor, part in self.each(content))


@pytest.mark.parametrize("path", SERVED)
@pytest.mark.parametrize("layout", ["dense", "nhd", "hnd", "apart"])
def test_what_an_engine_has_computed_is_stored_and_loaded_to_the_last_bit(
    engine: Engine, cluster: MemoryCluster, path: str, layout: str
) -> None:
    """Its forward pass is still under way when it calls; and when the call is over, it may use its blocks again."""
    caches, others = Caches(engine, layout), Caches(engine, "nhd" if layout == "dense" else "dense")
    right, wrong = values(1), values(2)
    with client_over(path, cluster) as client:
        caches.write(right)
        assert client.store(PROMPT, caches.memory).blocks == BLOCKS
        caches.write(wrong)
        others.write(wrong)
        assert client.flush()
        assert client.load(PROMPT, others.memory) == len(PROMPT)
        assert others.hold(right) and caches.hold(wrong)
        assert client.load(PROMPT, caches.memory) == len(PROMPT)
        assert caches.hold(right)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_encoded_pages_come_as_the_cpu_decodes_them(engine: Engine, codec: str) -> None:
    config = {"shard": {"host_bytes": "4MiB"}, "coordinator": {"host_codec": codec, "host_raw_blocks": 0}}
    with MemoryCluster(shards=1, ram_bytes=2 * BLOCKS * SPEC.block_bytes, config=config) as cluster:
        client = cluster.client(SPEC)
        client.store(PROMPT, values(1))
        assert client.flush()
        for number in range(1, 6):  # which push the first down
            client.store([number * 1_000 + token for token in PROMPT], values(number))
            assert client.flush()
        plain, caches = torch.empty_like(values(1)), Caches(engine, "hnd")
        assert client.load(PROMPT, plain) == client.load(PROMPT, caches.memory) == len(PROMPT)
        assert not torch.equal(plain, values(1)), "it was encoded"
        assert caches.hold(plain)


@pytest.mark.parametrize("path", SERVED)
def test_the_thread_that_calls_neither_waits_for_the_device_nor_enqueues_but_one_event(
    engine: Engine, cluster: MemoryCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine's thread must not: it goes on to compute."""
    called: list[tuple[str, int]] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append((name, threading.get_ident()))
            return method(*arguments)

        return call

    caches = Caches(engine, "nhd")
    caches.write(values(1))
    for name in ("copy", "launch", "wait", "record", "done", "stream"):
        monkeypatch.setattr(Twin, name, noted(name, getattr(Twin, name)))
    with client_over(path, cluster) as client:
        stored = client.begin_store(client.hashes(PROMPT), caches.memory, token_ids=PROMPT)
        assert stored.result().blocks == BLOCKS and client.flush()
        with client.prepare_load(client.hashes(PROMPT)) as ticket:
            assert client.begin_load(ticket, caches.memory).result().blocks == BLOCKS
    assert [name for name, thread in called if thread == threading.get_ident()] == ["record", "record"]
    assert {"copy", "launch", "wait", "done"} <= {name for name, _ in called}


def test_memory_of_a_device_and_of_this_process_are_not_mixed(engine: Engine, cluster: MemoryCluster) -> None:
    caches = Caches(engine, "nhd")
    layers = [*caches.memory.layers[:-1], torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)]
    with pytest.raises(CallerError, match="twin-0 and memory of this process"):
        cluster.client(SPEC).load(PROMPT, Paged(layers, range(BLOCKS)))


def test_a_layer_that_is_too_large_for_the_staging_is_refused_with_what_it_takes(cluster: MemoryCluster) -> None:
    twin = Twin(Machine(Random(7)), nbytes=1 << 22, pinnable=1 << 22)
    layer = SPEC.layer_bytes(0, SPEC.whole(0))
    DEVICES.add(DeviceStaging(twin, slot_bytes=layer, slots=2))
    try:
        with pytest.raises(CallerError, match=r"device_staging_bytes=16777216\), or give memory of the CPU"):
            cluster.client(SPEC).load(PROMPT, Caches(Engine(twin), "dense").memory)
    finally:
        DEVICES.remove(twin)


def test_a_call_that_does_not_come_after_the_engines_work_is_noticed(
    engine: Engine, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the event were that of another stream."""
    elsewhere = engine.twin.stream()
    monkeypatch.setattr(Twin, "current", lambda twin: elsewhere)
    caches = Caches(engine, "nhd")
    monkeypatch.undo()
    caches.write(values(1))
    monkeypatch.setattr(Twin, "current", lambda twin: elsewhere)
    with pytest.raises(Unordered):
        cluster.client(SPEC).store(PROMPT, caches.memory)


@pytest.mark.parametrize("path", SERVED)
def test_a_device_that_fails_is_a_miss_of_its_own_and_no_fault_of_a_shard(
    engine: Engine, cluster: MemoryCluster, path: str
) -> None:
    caches, plain = Caches(engine, "nhd"), torch.empty_like(values(1))
    with client_over(path, cluster) as client:
        assert client.store(PROMPT, values(1)).blocks == BLOCKS
        assert client.flush()
        engine.twin.fail()
        with client.prepare_load(client.hashes(PROMPT)) as ticket:
            loaded = client.begin_load(ticket, caches.memory).result()
        assert loaded.blocks == 0 and loaded.miss is not None and loaded.miss.reason is MissReason.DEVICE_LOST
        stored = client.store([7, *PROMPT[1:]], caches.memory)
        assert stored.blocks == 0 and stored.miss is not None and stored.miss.reason is MissReason.DEVICE_LOST
        assert client.load(PROMPT, plain) == len(PROMPT), "the CPU's memory is served as before"
        assert torch.equal(plain, values(1))


def test_without_a_device_nothing_is_asked_of_addresses(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(address: int) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(DEVICES, "holders", asked)
    assert cluster.client(SPEC).store(PROMPT, values(1)).blocks == BLOCKS
