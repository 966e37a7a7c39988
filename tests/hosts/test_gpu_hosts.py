"""A group of shards with a pool on a GPU on one node, and a group without one on another: what either node stores the
other loads; shards are killed, a node is lost, and drained. The GPU is a twin, and Ray's in name; host `one` has it.

The tests of one cluster run in order, each on what the one before has left. What was not lost must come as a whole.
Whatever comes is compared, by the worker that loads it, with what is made anew from its number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster import Dense
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import TABLE_BYTES, DeviceStaging
from tests.actors.processes import title
from tests.device.tensors import Engine
from tests.hosts.hosts import ROOT, Cluster
from tests.hosts.netns import missing
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, prompt
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() else ["network namespaces"]
"""None where the machine gives us none: then nothing here runs."""

EACH = BLOCKS * SPEC.block_bytes
RAM_PROMPTS, HOST_PROMPTS, POOL_PROMPTS = 4, 16, 8
CHANGES = {
    "[groups.shard": "[groups.cpu",
    "per_node = true ": "shards = 1\nresources = {cpu_shard = 1} ",
    "20GiB": str(24 * EACH),
}
"""The group that the document prints becomes the one without a GPU."""

TIERS = f"""
host_bytes = {HOST_PROMPTS * EACH}
report_interval_ms = 100

[coordinator]
host_codec = "raw"
hold_ms = 0
promote_loads = 1
hot_window_ms = 1_000
hot_replicas = 1

"""
GPU_GROUP = f"""
[groups.gpu.shard]
ram_bytes = {RAM_PROMPTS * EACH}
host_bytes = {HOST_PROMPTS * EACH}
report_interval_ms = 100
gpu_bytes = {POOL_PROMPTS * EACH}
gpu_device = "twin"
num_gpus = 1
"""
PLACES = {"gpu-0": "one", "cpu-0": "two"}
PATIENT = ClientConfig(deadline_ms=10_000, connect_ms=30_000, store_wait_ms=10_000)


# ------------------------------------------------------------------------------------------------- workers


class Jobs:
    """What a worker does, in its own process; each job is a public method."""

    def __init__(self, client: Client, engine: Engine) -> None:
        self._client, self._engine = client, engine
        self._on_gpu = engine.tensor(*kv(0).shape)

    def store(self, first: int, last: int) -> int:
        """Stores these prompts; says how many of their blocks, once all are there."""
        stored = sum(self._client.store(prompt(number), kv(number)).blocks for number in range(first, last))
        return stored if self._client.flush() else 0

    def load(self, first: int, last: int) -> list[int]:
        """Loads these prompts; says how many blocks came, and in how many prompts a byte was another."""
        loaded = wrong = 0
        for number in range(first, last):
            out = torch.zeros_like(kv(number))
            blocks = self._client.load(prompt(number), out) // SPEC.block_tokens
            loaded, wrong = loaded + blocks, wrong + (not torch.equal(out[:blocks], kv(number)[:blocks]))
        return [loaded, wrong]

    def load_on_gpu(self, first: int, last: int) -> list[int]:
        """As `load`, into blocks on a twin."""
        loaded = wrong = 0
        for number in range(first, last):
            blocks = self._client.load(prompt(number), Dense(self._on_gpu)) // SPEC.block_tokens
            came = self._engine.read(self._on_gpu)
            loaded, wrong = loaded + blocks, wrong + (not torch.equal(came[:blocks], kv(number)[:blocks]))
        return [loaded, wrong]

    def status(self) -> dict[str, Any]:
        return dict(self._client.status())


def serve(address: str) -> None:
    """Does the jobs that standard input names, a JSON array of a name and arguments a line, until it ends."""
    twin = Twin(Machine(Random(7)), nbytes=1 << 24, pinnable=1 << 28)
    DEVICES.add(DeviceStaging(twin, slot_bytes=limits.RECORD_BYTES + TABLE_BYTES, slots=2))
    with kvcluster.connect(address, SPEC, token=os.environ["KVCLUSTER_TOKEN"], config=PATIENT) as client:
        jobs = Jobs(client, Engine(twin))
        for line in sys.stdin:
            job, *arguments = json.loads(line)
            print(json.dumps(getattr(jobs, job)(*arguments)), flush=True)
    DEVICES.remove(twin)


class Worker:
    """A worker on a host, one job at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def store(self, first: int, last: int) -> int:
        return int(self._ask("store", first, last))

    def load(self, first: int, last: int, *, on_gpu: bool = False) -> int:
        """How many blocks of these prompts came; no byte of them was another than was stored."""
        loaded, wrong = self._ask("load_on_gpu" if on_gpu else "load", first, last)
        assert not wrong
        return int(loaded)

    def shard(self, name: str) -> dict[str, Any]:
        """What the status says of a shard that is up; {} if it says nothing."""
        shards = {shard["shard"]: shard for shard in self._ask("status")["shards"] if shard["state"] == "up"}
        return dict(shards.get(name, {}))

    def _ask(self, *job: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the worker has ended"
        return json.loads(line)


@contextmanager
def worker(cluster: Cluster, host: str) -> Iterator[Worker]:
    """A worker there, within the block."""
    script = f"from {__name__} import serve; serve({cluster.address + ':7070'!r})"
    with subprocess.Popen(
        cluster.network.command(host, [sys.executable, "-c", script]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=cluster.environment,
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


# ------------------------------------------------------------------------------------------------- cluster


def join_with_gpu(cluster: Cluster) -> None:
    cluster.join("one")


def join_without_gpu(cluster: Cluster) -> None:
    """Its settings know no group with a GPU, so that it has none in name, nor is it shown one that this machine has."""
    settings = (cluster.folder / "cluster.toml").read_text(encoding="utf-8").removesuffix(GPU_GROUP)
    path = cluster.folder / "without-gpu.toml"
    path.write_text(settings, encoding="utf-8")
    offers = ("--offer", "kvcluster_shard=1", "--offer", "cpu_shard=1")
    cluster.join("two", "--config", str(path), *offers, wrapper=("env", "CUDA_VISIBLE_DEVICES="))


def pids_of_shards(cluster: Cluster, host: str) -> list[int]:
    return [pid for pid in cluster.network.pids(host) if "ShardActor" in title(pid)]


def has_pool(pid: int) -> bool:
    return "memfd:twin-0" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def pages(shard: dict[str, Any], tier: str) -> int:
    """How many lie in that tier, which is not RAM, of a shard as `Worker.shard` returns it."""
    uses = (*shard.get("above", ()), *shard.get("below", ()))
    return sum(int(use["pages"]) for use in uses if use["tier"] == tier)


def kill_shard(cluster: Cluster, name: str) -> None:
    (pid,) = pids_of_shards(cluster, PLACES[name])
    os.kill(pid, signal.SIGKILL)


def is_back(shard: dict[str, Any], epoch: int) -> bool:
    """Whether it is up, after the incarnation of that epoch, with all of its tiers."""
    return bool(shard) and shard["epoch"] > epoch and not shard["trouble"]


def serves_from_a_pool(one: Worker, two: Worker) -> bool:
    """Whether two prompts that are stored on the node with the GPU come to both, and into the pool."""
    one.store(0, 2)
    loads = [each.load(0, 2, on_gpu=on_gpu) for each in (one, two) for on_gpu in (False, True)]
    return set(loads) == {2 * BLOCKS} and pages(one.shard("gpu-0"), "gpu") > 0


def waits_for_a_gpu(cluster: Cluster) -> bool:
    """Whether the reconciler says that a shard waits for a node with a GPU."""
    return any(" waits for a node with kvcluster_shard 1, GPU 1, " in each for each in cluster.status()["waiting"])


@pytest.fixture(scope="module", params=NETWORKS)
def cluster() -> Iterator[Cluster]:
    """The head, and two nodes that both offer a place for a shard with a GPU, of which the second has none."""
    with Cluster(TIERS + GPU_GROUP, CHANGES) as cluster:
        cluster.up()
        join_with_gpu(cluster)
        join_without_gpu(cluster)
        cluster.wait_shards(lambda shards: len(shards) == len(PLACES))
        yield cluster


@pytest.fixture(scope="module")
def one(cluster: Cluster) -> Iterator[Worker]:
    """A worker on the node with the GPU."""
    with worker(cluster, "one") as found:
        yield found


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[Worker]:
    """A worker on the node without."""
    with worker(cluster, "two") as found:
        yield found


# --------------------------------------------------------------------------------------------------- tests


def test_each_group_runs_where_ray_has_what_it_claims(cluster: Cluster) -> None:
    assert cluster.shards() == PLACES
    assert [has_pool(pid) for host in ("one", "two") for pid in pids_of_shards(cluster, host)] == [True, False]


def test_what_either_node_stores_the_other_loads(one: Worker, two: Worker) -> None:
    assert [one.store(0, 2), two.store(2, 4)] == [2 * BLOCKS] * 2
    for each in (one, two):
        assert each.load(0, 4) == each.load(0, 4, on_gpu=True) == 4 * BLOCKS


def test_in_too_little_memory_pages_go_down_and_come_up_into_the_pool(one: Worker, two: Worker) -> None:
    before = pages(one.shard("gpu-0"), "gpu")
    assert [one.store(4, 12), two.store(12, 20)] == [8 * BLOCKS] * 2
    eventually(lambda: pages(one.shard("gpu-0"), "host"))

    def came_up() -> bool:
        assert one.load(0, 20, on_gpu=True) == two.load(0, 20) == 20 * BLOCKS
        return pages(one.shard("gpu-0"), "gpu") > before

    eventually(came_up)
    in_place = one.shard("gpu-0")["counters"]["read_on_device"]
    for each in (one, two):
        assert each.load(0, 20, on_gpu=True) == 20 * BLOCKS
    eventually(lambda: one.shard("gpu-0")["counters"]["read_on_device"] > in_place)


def test_what_the_pool_alone_still_has_is_right_on_both_nodes(one: Worker, two: Worker) -> None:
    """More is stored than RAM and the host tier hold: some of what they had before is left in the pool alone. Who does
    not read that in place gets copies in the host tier, which are counted."""
    copies = one.shard("gpu-0")["counters"]["staged"]

    def came() -> bool:
        one.store(40, 64)
        for each in (one, two):
            each.load(0, 12)
            each.load(0, 12, on_gpu=True)
        return bool(one.shard("gpu-0")["counters"]["staged"] > copies)

    eventually(came)


def test_a_killed_shard_with_a_pool_costs_its_own_blocks_and_comes_back_with_one(
    cluster: Cluster, one: Worker, two: Worker
) -> None:
    epoch = one.shard("gpu-0")["epoch"]
    kill_shard(cluster, "gpu-0")

    def back() -> bool:
        for each in (one, two):
            assert each.load(2, 4) == 2 * BLOCKS and each.load(12, 20) == 8 * BLOCKS, "these lie on the other shard"
            each.load(0, 20)
        return is_back(one.shard("gpu-0"), epoch)

    eventually(back)
    assert cluster.shards() == PLACES
    assert one.load(0, 2) == two.load(0, 2) == 0
    eventually(lambda: serves_from_a_pool(one, two))
    (pid,) = pids_of_shards(cluster, "one")
    assert has_pool(pid)


def test_a_killed_shard_without_a_gpu_costs_its_own_blocks_and_none_of_the_pool(
    cluster: Cluster, one: Worker, two: Worker
) -> None:
    epoch = two.shard("cpu-0")["epoch"]
    kill_shard(cluster, "cpu-0")

    def back() -> bool:
        for each in (one, two):
            assert each.load(0, 2) == each.load(0, 2, on_gpu=True) == 2 * BLOCKS, "these lie on the other shard"
            each.load(2, 20)
        return is_back(two.shard("cpu-0"), epoch)

    eventually(back)
    assert cluster.shards() == PLACES
    assert one.load(2, 4) == two.load(12, 20) == 0

    def serves() -> bool:
        two.store(2, 4)
        return one.load(0, 4) == two.load(0, 4) == 4 * BLOCKS

    eventually(serves)


def test_a_lost_node_with_a_gpu_costs_its_own_blocks_and_its_group_waits_for_one(cluster: Cluster, two: Worker) -> None:
    cluster.kill("one")  # the worker there, too

    def lost() -> bool:
        assert two.load(2, 4) == 2 * BLOCKS, "these lie on the other shard"
        two.load(0, 2)
        return not two.shard("gpu-0")

    eventually(lost)
    assert two.load(0, 2) == 0
    eventually(lambda: waits_for_a_gpu(cluster))
    assert cluster.shards() == {"cpu-0": "two"}
    join_with_gpu(cluster)
    assert cluster.wait_shards(lambda shards: len(shards) == len(PLACES)) == PLACES


def test_a_node_with_a_gpu_that_drains_leaves_every_page_elsewhere(cluster: Cluster, two: Worker) -> None:
    with worker(cluster, "one") as one:
        eventually(lambda: serves_from_a_pool(one, two))
        assert one.store(20, 30) == 10 * BLOCKS
        address = f"{cluster.address}:7070"
        said = cluster.kvcluster("one", "drain", "--local", "--yes", "--deadline", "60", "--address", address)
        assert "left here: gpu-0 with" in said and said.rstrip().endswith("drained: gpu-0"), said
        for each in (one, two):
            assert each.load(0, 4) == 4 * BLOCKS
            assert each.load(20, 30) == each.load(20, 30, on_gpu=True) == 10 * BLOCKS
    eventually(lambda: waits_for_a_gpu(cluster))
    assert cluster.shards() == {"cpu-0": "two"}


def test_the_end_of_the_cluster_leaves_nothing_behind(cluster: Cluster) -> None:
    assert [cluster.end(host) for host in ("one", "two", "head")] == [0, 0, 0]
    assert "left: every shard of this node has drained" in cluster.said("one")
    assert [pids_of_shards(cluster, host) for host in ("head", "one", "two")] == [[], [], []]
