"""Engines that have a shard's pool open, on a twin, in processes of their own: one of both is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

import kvcluster
from kvcluster import Dense
from kvcluster.actors.local import LocalCluster
from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import TABLE_BYTES, DeviceStaging
from tests.device.tensors import Engine
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, prompt
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shared_ray")]

EACH = BLOCKS * SPEC.block_bytes
POOL_BYTES = 4 * EACH
WHOLE = BLOCKS * SPEC.block_tokens


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    config = {
        "shard": {"gpu_bytes": POOL_BYTES, "gpu_device": "twin", "report_interval_ms": 50},
        "coordinator": {"promote_loads": 1, "host_codec": "raw", "hold_ms": 0},
        "client": {"deadline_ms": 10_000},
    }
    with kvcluster.local(ram_bytes=4 * EACH, host_bytes=4 * EACH, config=config) as running:
        yield running


@contextmanager
def engine() -> Iterator[Engine]:
    """An engine whose blocks lie on the twin of this process."""
    twin = Twin(Machine(Random(7)), nbytes=1 << 24, pinnable=1 << 28)
    DEVICES.add(DeviceStaging(twin, slot_bytes=limits.RECORD_BYTES + TABLE_BYTES, slots=2))
    try:
        yield Engine(twin)
    finally:
        DEVICES.remove(twin)


def load_for_ever(address: str) -> None:
    """What a process does that is killed: it loads into its blocks, and says when the first has come from the pool."""
    with engine() as own, kvcluster.connect(address, SPEC) as client:
        tensor, said = own.tensor(*kv(0).shape), False
        while True:
            assert client.load(prompt(1), Dense(tensor)) == WHOLE
            if pools() and not said:
                said = True
                print("open", flush=True)


def pools() -> int:
    """How many of this process's mappings are of a pool of that size."""
    return sum(
        int(stop, 16) - int(start, 16) == POOL_BYTES and "memfd:twin-0" in name
        for line in Path("/proc/self/maps").read_text().splitlines()
        for (start, stop), name in [(line.split()[0].split("-"), line)]
    )


def stored(client: Client) -> None:
    client.store(prompt(1), kv(1))
    assert client.flush()


def test_a_killed_engine_leaves_no_lease_and_no_page_behind(cluster: LocalCluster) -> None:
    with cluster.client(SPEC) as client:
        stored(client)
        script = f"from {__name__} import load_for_ever; load_for_ever({cluster.address!r})"
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "open\n"
            finally:
                process.kill()
        eventually(lambda: not client.status()["shards"][0]["leases"])
        with engine() as own:
            tensor = own.tensor(*kv(0).shape)
            assert client.load(prompt(1), Dense(tensor)) == WHOLE
            assert torch.equal(own.read(tensor), kv(1))


def test_an_engine_whose_shard_was_killed_keeps_nothing_of_its_pool(cluster: LocalCluster) -> None:
    with engine() as own, cluster.client(SPEC) as client:
        tensor = own.tensor(*kv(0).shape)
        stored(client)

        def from_the_pool() -> bool:
            assert client.load(prompt(1), Dense(tensor)) in (0, WHOLE)
            return pools() > 0

        eventually(from_the_pool)
        epoch = client.status()["shards"][0]["epoch"]
        os.kill(cluster.pids()[1], signal.SIGKILL)
        own.write(tensor, kv(2))
        assert client.load(prompt(1), Dense(tensor)) == 0
        assert torch.equal(own.read(tensor), kv(2)), "nothing of it came"
        eventually(
            lambda: client.status()["shards"][0]["epoch"] > epoch and client.status()["shards"][0]["state"] == "up"
        )
        client.load(prompt(1), Dense(tensor))
        eventually(lambda: pools() == 0)
        stored(client)
        eventually(from_the_pool)
        assert torch.equal(own.read(tensor), kv(1))
