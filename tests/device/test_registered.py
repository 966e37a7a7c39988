"""Engines whose device reads a shard's arena itself, over shm."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
import torch

from kvcluster import Dense, KVSpec
from kvcluster.client.client import Client
from kvcluster.config.rules import LEAST_STAGING_BYTES
from kvcluster.device import endpoints
from kvcluster.device.device import NoMemory, Range
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import RegisteredMemory
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import DeviceStaging
from kvcluster.memory.region import Mapping
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ONE
from kvcluster.transport import shm_control
from kvcluster.transport.shm_pages import ShmPages
from tests.device.tensors import Engine
from tests.device.test_shared_pool import batches_from, world
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, prompt
from tests.transport import shm_served
from tests.waiting import eventually


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages of each batch that a device reads in an arena."""
    return batches_from(RegisteredMemory, monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that was to be registered."""
    pieces: list[int] = []
    register = Twin.register

    def counted(twin: Twin, memory: Range) -> Any:
        pieces.append(memory.nbytes)
        return register(twin, memory)

    monkeypatch.setattr(Twin, "register", counted)
    return pieces


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> set[Range]:
    """What is registered."""
    now = set[Range]()
    register, unregister = Machine.register, Machine.unregister

    def registers(machine: Machine, memory: Range) -> None:
        register(machine, memory)
        now.add(memory)

    def unregisters(machine: Machine, memory: Range) -> None:
        unregister(machine, memory)
        now.remove(memory)

    monkeypatch.setattr(Machine, "register", registers)
    monkeypatch.setattr(Machine, "unregister", unregisters)
    return now


def test_loads_come_by_the_device_and_all_is_given_back(read: list[int], held: set[Range]) -> None:
    with world(ram_bytes=5) as (_, here):
        for number in range(3):
            here.store(number)
        for number in range(3):
            assert here.load(number) == BLOCKS
        assert len(read) >= 3 and held
        here.client.close()
        assert eventually(lambda: not held)


def test_memory_of_the_cpu_is_filled_by_the_cpu(read: list[int]) -> None:
    with world(ram_bytes=3) as (_, here):
        here.store(1)
        out = torch.zeros_like(kv(0))
        assert here.client.load(prompt(1), out) == BLOCKS * SPEC.block_tokens
        assert torch.equal(out, kv(1)) and not read


def test_an_arena_of_several_pieces_is_read_across_their_borders(
    read: list[int], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 3 * SPEC.block_bytes // 2
    monkeypatch.setattr(endpoints, "REGISTERED_BYTES", piece)
    with world(ram_bytes=2) as (_, here):
        for number in range(6):
            here.store(number)
            assert here.load(number) == BLOCKS
    assert read and len(asked) > 2 and set(asked[:-1]) == {piece}


@pytest.mark.parametrize("refused", [1, 3])
def test_where_it_is_refused_the_cpu_brings_pages_and_it_is_not_tried_again(
    read: list[int],
    held: set[Range],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: int,
) -> None:
    """Also of a later piece: then those before are given back."""
    asked: list[int] = []
    register = Twin.register

    def refuses(twin: Twin, memory: Range) -> Any:
        asked.append(memory.nbytes)
        if len(asked) == refused:
            raise NoMemory("there is a limit")
        return register(twin, memory)

    monkeypatch.setattr(Twin, "register", refuses)
    monkeypatch.setattr(endpoints, "REGISTERED_BYTES", SPEC.block_bytes)
    with world(ram_bytes=3) as (_, here):
        here.store(1)
        assert [here.load(1) for _ in range(4)] == [BLOCKS] * 4
        assert eventually(lambda: "there is a limit" in caplog.text)
        assert [here.load(1) for _ in range(4)] == [BLOCKS] * 4
        assert not read and len(asked) == refused and caplog.text.count("there is a limit") == 1
        here.client.close()
        assert eventually(lambda: not held)


def test_while_it_takes_long_the_cpu_brings_pages(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, register = threading.Event(), Twin.register

    def slow(twin: Twin, memory: Range) -> Any:
        assert goes_on.wait(30)
        return register(twin, memory)

    monkeypatch.setattr(Twin, "register", slow)
    monkeypatch.setattr(shm_control, "_REGISTER_S", 0.001)
    with world(ram_bytes=3) as (_, here):
        here.store(1)
        assert [here.load(1) for _ in range(3)] == [BLOCKS] * 3 and not read
        goes_on.set()
        assert eventually(lambda: here.load(1) == BLOCKS and bool(read))


def test_a_connection_that_ends_meanwhile_leaves_nothing(held: set[Range], monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, began, done, register = threading.Event(), threading.Event(), threading.Event(), Twin.register

    def slow(twin: Twin, memory: Range) -> Any:
        began.set()
        assert goes_on.wait(30)
        taken = register(twin, memory)
        done.set()
        return taken

    monkeypatch.setattr(Twin, "register", slow)
    monkeypatch.setattr(shm_control, "_REGISTER_S", 0.001)
    with world(ram_bytes=3) as (_, here):
        here.store(1)
        assert here.load(1) == BLOCKS and began.wait(30)
        here.client.close()
        goes_on.set()
        assert done.wait(30) and eventually(lambda: not held)


def test_it_stays_registered_however_many_connections_come_and_go(
    read: list[int], held: set[Range], asked: list[int]
) -> None:
    """A deadline in the middle of an exchange ends its connection."""
    with world(ram_bytes=5) as (_, here):
        here.store(1)
        assert here.load(1) == BLOCKS
        paths = [path for path in gc.get_objects() if isinstance(path, ShmPages)]
        for _ in range(5):
            for path in paths:
                for one in list(path._connections._idle):
                    path._connections._idle.remove(one)
                    path._connections.discard(one)
            assert here.load(1) == BLOCKS
        assert len(asked) == 1 and held and len(read) >= 6
        for path in paths:
            path.close()
        del paths, path, one
        here.client.close()
        assert eventually(lambda: not held)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_encoded_pages_that_are_larger_than_a_slot_when_they_are_decoded(read: list[int], codec: str) -> None:
    spec = KVSpec.uniform(
        model="m", weights="sha256:1", num_layers=32, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=16
    )
    kv_of = [torch.randn(2, 32, 2, 16, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(8)]
    config = {"shard": {"host_bytes": "64MiB"}, "coordinator": {"host_codec": codec, "host_raw_blocks": 0}}
    with MemoryCluster(shards=1, ram_bytes=4 * spec.block_bytes, config=config) as cluster, ExitStack() as ends:
        served = {shard: shm_served.Served(host) for shard, host in cluster.shards.items()}
        for each in served.values():
            ends.callback(each.close)
        client = Client(cluster.port(ONE), lambda shard: served[shard.shard].open(ONE), spec)
        ends.callback(client.close)
        for number, content in enumerate(kv_of):
            client.store([number, *range(1, 32)], content)
            assert client.flush()
        slot_bytes = LEAST_STAGING_BYTES // 4
        twin = Twin(Machine(Random(7)), nbytes=1 << 26, pinnable=1 << 28)
        DEVICES.add(DeviceStaging(twin, slot_bytes=slot_bytes, slots=2))
        ends.callback(DEVICES.remove, twin)
        engine, plain = Engine(twin), torch.zeros_like(kv_of[0])
        there = engine.tensor(*plain.shape)
        assert client.load([0, *range(1, 32)], plain) == client.load([0, *range(1, 32)], Dense(there)) == 32
        assert torch.equal(engine.read(there), plain) and not torch.equal(plain, kv_of[0])
    assert read


def test_a_memory_file_without_its_memory_is_not_registered(held: set[Range]) -> None:
    """Locking its pages would take as much memory as somebody has claimed."""
    nbytes = 1 << 20
    for resident in (False, True):
        file = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, nbytes)
            if resident:
                os.posix_fallocate(file, 0, nbytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            arena = Mapping(file, nbytes, writable=False)
        finally:
            os.close(file)
        registering = shm_control.Registering(Twin(Machine(Random(1)), pinnable=nbytes), arena)
        registering.wait(30)
        if resident:
            assert registering.result() is not None and held
        else:
            with pytest.raises(NoMemory, match="less memory than its size"):
                registering.result()
            assert not held
