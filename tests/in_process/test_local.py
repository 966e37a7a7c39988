"""`kvcluster.local(ray=False)`: a whole cluster in this process, with the same calls, tiers and figures as one of
processes, and no other process at its address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.client.in_process import served_here
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Leave
from kvcluster.errors import CallerError, ConfigError, CredentialError
from kvcluster.in_process.cluster import InProcessCluster
from kvcluster.runtime.auth import token_line
from tests.client.build import SPEC, kv, prompt, room, same
from tests.ports import free_port
from tests.scraping import scraped
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PATIENT = {"client": {"deadline_ms": 10_000}}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with kvcluster.local(ray=False, ram_bytes="4MiB", config=PATIENT) as running:
        yield running


def hosts(cluster: LocalCluster) -> InProcessCluster:
    assert isinstance(cluster._embedded, InProcessCluster)
    return cluster._embedded


def stored(client: kvcluster.Client, seed: int = 1) -> None:
    assert client.store(prompt(8, seed), kv(8, seed)).blocks == 8 and client.flush()


def loaded(client: kvcluster.Client, seed: int = 1) -> int:
    out = room(8)
    blocks = client.load(prompt(8, seed), out) // SPEC.block_tokens
    assert same(out[:blocks], kv(8, seed)[:blocks]), "a wrong byte"
    return blocks


def test_it_has_the_calls_of_a_cluster_of_processes(cluster: LocalCluster) -> None:
    client = cluster.client(SPEC)
    stored(client)
    assert loaded(client) == 8
    assert [block.shard for block in client.explain(prompt(8, 1))] == ["shard-0"] * 8
    assert client.pin(prompt(8, 1), 60).blocks == 8 and client.unpin(prompt(8, 1)).blocks == 8
    (shard,) = client.status()["shards"]
    assert (shard["state"], shard["pages"], shard["release"]) == ("up", 8, kvcluster.__version__)
    assert client.clear() == 8 and client.lookup(prompt(8, 1)).blocks == 0
    assert cluster.pids() == [os.getpid()]


WITHOUT = """
import sys
missing = ("ray", "torch", "numpy", "zmq", "msgspec", "rich", "transformers", "matplotlib", "prometheus_client")
missing += ("cryptography",)
sys.modules.update(dict.fromkeys(missing))
import kvcluster
spec = kvcluster.KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4
)
with kvcluster.local(ray=False, ram_bytes="1MiB", host_bytes="1MiB") as cluster:
    client = cluster.client(spec)
    kv, out = bytes(range(256)) * 4, bytearray(4 * spec.block_bytes)
    client.store(range(16), kv)
    client.flush()
    print(client.load(range(16), out), out == kv)
"""


def test_it_needs_no_extra() -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("16 True\n", "")


def test_sequences_leave_their_memory_for_it_and_come_back() -> None:
    spec = kvcluster.KVSpec.uniform(
        model="m", weights="sha256:1", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4
    )
    few = {"client": {"resident_bytes": 384 * spec.block_bytes, "deadline_ms": 10_000}}
    with kvcluster.local(ray=False, ram_bytes="4MiB", config=few) as cluster:
        policy = kvcluster.WindowPolicy(tail_tokens=0, migration_tokens=4)
        with cluster.client(spec).sequence(policy=policy) as sequence:
            k, v = torch.randn(4096, 1, 8), torch.randn(4096, 1, 8)
            for start in range(0, 4096, 64):
                sequence.append(0, k[start : start + 64], v[start : start + 64])
                sequence.advance(64)
            for start in range(0, 4096, 64):
                read = torch.stack(sequence.read(0, start, 64))
                assert torch.equal(read, torch.stack((k, v))[:, start : start + 64])
            out = sequence.attend(0, k[-1:], planner=kvcluster.ShipAbsent())
            exact = torch.softmax(k[-1:, 0] @ k[:, 0].T / 8**0.5, dim=1) @ v[:, 0]
            assert torch.allclose(out[:, 0], exact, atol=1e-5)


# -------------------------------------------------------------------------------------------- its address


def test_this_process_connects_by_its_address(cluster: LocalCluster) -> None:
    stored(cluster.client(SPEC))
    with kvcluster.connect(cluster.address, SPEC) as client:
        assert loaded(client) == 8
    assert repr(cluster) == f"<LocalCluster at {cluster.address}>"


def test_another_process_learns_what_to_do(cluster: LocalCluster) -> None:
    code = f"""
import kvcluster
spec = kvcluster.KVSpec.uniform(model="m", weights="w", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
try: kvcluster.connect({cluster.address!r}, spec)
except kvcluster.errors.ConfigError as error: print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert said.startswith(f"{cluster.address} is a cluster within the process that started it")
    assert "kvcluster.local(ray=True) or `kvcluster up`" in said


def test_a_command_at_its_address_learns_what_to_do(cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "kvcluster", "status", "--address", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode != 0 and "kvcluster.local(ray=True) or `kvcluster up`" in done.stderr


def test_a_forked_child_and_what_outlives_it_learn_what_to_do(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served_here(cluster.address) is not None
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ConfigError, match="no other process can connect to it"):
        kvcluster.connect(cluster.address, SPEC)
    monkeypatch.undo()
    cluster.close()
    with pytest.raises(ConfigError, match="or one that has ended"):
        kvcluster.connect(cluster.address, SPEC)
    with pytest.raises(CallerError, match="this cluster is closed; start another one"):
        cluster.client(SPEC)


def test_a_port_is_refused_since_none_is_listened_on() -> None:
    with pytest.raises(ConfigError, match="listens on no port, and port 7070 was given"):
        kvcluster.local(ray=False, ram_bytes="1MiB", port=7070)


def test_pools_that_leave_the_process_no_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.actors.node_memory.memory_limit_bytes", lambda: 2**30)
    with pytest.raises(ConfigError, match="do not fit into this process"):
        kvcluster.local(ray=False, ram_bytes="512MiB", host_bytes="256MiB")


def test_a_token_stands_for_a_tenant_as_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(token_line("one", "a") + "\n" + token_line("two", "b") + "\n", encoding="utf-8")
    server = {"token_file": str(tmp_path / "tokens"), "transports": ["tcp", "grpc"]}
    with kvcluster.local(ray=False, ram_bytes="4MiB", config={"server": server, **PATIENT}) as cluster:
        with pytest.raises(CredentialError, match="requires a token"):
            cluster.client(SPEC)
        with pytest.raises(CredentialError, match="does not know this token"):
            cluster.client(SPEC, token="three")
        stored(cluster.client(SPEC, token="one"))
        assert loaded(cluster.client(SPEC, token="one")) == 8
        assert loaded(cluster.client(SPEC, token="two")) == 0
        revoked = cluster.client(SPEC, token="one")
        (tmp_path / "tokens").write_text(token_line("two", "b") + "\n", encoding="utf-8")

        def refused() -> bool:
            with suppress(CredentialError):
                revoked.lookup(prompt(8, 1))
                return False
            return True

        eventually(refused)


# ------------------------------------------------------------------------------------------ tiers, figures


def test_a_disk_tier_outlives_the_cluster(tmp_path: Path) -> None:
    config = {"coordinator": {"host_codec": "raw"}, **PATIENT}
    sizes: dict[str, Any] = {"ram_bytes": "4MiB", "host_bytes": "4MiB", "disk_bytes": "16MiB", "disk_dir": tmp_path}
    with kvcluster.local(ray=False, config=config, **sizes) as cluster:
        stored(cluster.client(SPEC))
    with kvcluster.local(ray=False, config=config, **sizes) as cluster:
        assert loaded(cluster.client(SPEC)) == 8


def test_each_host_serves_its_metrics() -> None:
    port = free_port()
    config = {"metrics": {"port": port}, **PATIENT}
    with kvcluster.local(ray=False, ram_bytes="4MiB", config=config) as cluster:
        stored(cluster.client(SPEC))
        found = {at: scraped(at) for at in (port, port + 1)}
    assert float(found[port]['kvcluster_store_blocks_total{decision="write"}']) == 8
    assert float(found[port]['kvcluster_call_seconds_count{method="PrepareStore"}']) == 1
    assert float(found[port + 1]['kvcluster_shard_pages_total{event="commits"}']) == 8


# ------------------------------------------------------------------------------- hosts that end by themselves


def test_a_shard_that_ends_by_itself_is_replaced(cluster: LocalCluster) -> None:
    client = cluster.client(SPEC)
    stored(client)
    before = hosts(cluster).shards[ShardId("shard-0")]
    hosts(cluster).shard_left(ShardId("shard-0"), Leave("the coordinator has given it up"))
    eventually(lambda: hosts(cluster).shards.get(ShardId("shard-0")) not in (None, before))
    eventually(lambda: client.store(prompt(8, 2), kv(8, 2)).blocks == 8)
    assert client.flush() and loaded(client, 2) == 8


def test_a_coordinator_that_ends_by_itself_is_replaced_and_forgets_no_purge(cluster: LocalCluster) -> None:
    client = cluster.client(SPEC)
    stored(client)
    assert client.clear() == 8
    before = hosts(cluster).running_coordinator()
    hosts(cluster).coordinator_left(Leave("the coordinator failed"))
    eventually(lambda: hosts(cluster)._coordinator not in (None, before))
    hosts(cluster).wait_until_up()
    assert client.lookup(prompt(8, 1)).blocks == 0
    stored(client, 2)
    assert loaded(client, 2) == 8


def test_a_cluster_that_cannot_start_leaves_nothing_running() -> None:
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ConfigError, match="Choose another"):
        metrics = {"port": listening.getsockname()[1]}
        kvcluster.local(ray=False, ram_bytes="1MiB", config={"metrics": metrics})
    assert set(threading.enumerate()) <= threads
