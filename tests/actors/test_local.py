"""An embedded cluster of real processes: what is shared, and what is left of a killed process."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
import torch

import kvcluster
from kvcluster.actors import embedded
from kvcluster.actors.local import LocalCluster
from kvcluster.actors.own_ray import asks_for_a_token
from kvcluster.client import Client
from kvcluster.core.groups import Part
from kvcluster.core.miss import MissReason
from kvcluster.errors import CallerError, ConfigError
from kvcluster.runtime.malloc_env import ENVIRONMENT
from tests.actors.conftest import QUICK
from tests.actors.processes import descendants, listening, outcome, ports, start_worker, title, unused_of_ray
from tests.actors.worker import PATIENT, SPEC, digest, kv, tokens
from tests.ports import free_port
from tests.scraping import scraped
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(shared_cluster: LocalCluster) -> Iterator[Client]:
    with kvcluster.connect(shared_cluster.address, SPEC, config=PATIENT) as client:
        yield client


@pytest.fixture
def own_client(own_cluster: LocalCluster) -> Iterator[Client]:
    """A client of the cluster whose processes these tests kill."""
    with kvcluster.connect(own_cluster.address, SPEC, config=PATIENT) as client:
        yield client


def store(client: Client, seed: int) -> None:
    stored = client.store(tokens(seed), kv(seed))
    assert (stored.blocks, stored.miss) == (8, None)
    assert client.flush()


def shards(client: Client) -> dict[str, Any]:
    return {shard["shard"]: shard for shard in client.status()["shards"]}


def total(client: Client, what: str) -> int:
    return sum(shard[what] for shard in shards(client).values())


def counted(client: Client, what: str) -> int:
    return sum(shard["counters"][what] for shard in shards(client).values())


def test_a_process_that_starts_later_loads_the_same_bytes(shared_cluster: LocalCluster, client: Client) -> None:
    store(client, 1)
    assert outcome(start_worker("load", shared_cluster.address, 1)) == {"tokens": 128, "digest": digest(kv(1))}


def test_two_processes_redeem_one_ticket_each_for_its_own_layers_and_heads(
    shared_cluster: LocalCluster, client: Client
) -> None:
    store(client, 2)
    parts = [Part(0, 1, 0, 4), Part(1, 4, 1, 3)]
    with client.prepare_load(client.hashes(tokens(2)), whole=True) as ticket:
        workers = [
            start_worker(
                "redeem",
                shared_cluster.address,
                bytes(ticket).hex(),
                *(p.layer_start, p.layer_stop, p.head_start, p.head_stop),
            )
            for p in parts
        ]
        for part, worker in zip(parts, workers, strict=True):
            mine = kv(2)[:, part.layer_start : part.layer_stop, :, :, part.head_start : part.head_stop]
            assert outcome(worker) == {"blocks": 8, "digest": digest(mine)}


METHODS = (
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.ActorInfoGcsService/GetAllActorInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
"""One of each of Ray's services that an actor's code or state can be reached by."""


def answered(port: int, method: str) -> bool:
    """Whether a call without a token is served at this port."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=5)
        except grpc.RpcError:
            return False
    return True


def test_no_port_of_ray_serves_a_stranger(shared_cluster: LocalCluster) -> None:
    heard = ports(descendants(os.getpid()))
    raylet = ports([pid for pid in descendants(os.getpid()) if "raylet/raylet" in title(pid)])
    assert raylet and set(raylet) <= set(heard)
    assert [(port, method) for port in heard for method in METHODS if answered(port, method)] == []
    head = ports([pid for pid in descendants(os.getpid()) if "gcs_server" in title(pid)])
    assert any(asks_for_a_token(f"127.0.0.1:{port}") for port in head)


def test_nothing_listens_beyond_loopback(shared_cluster: LocalCluster) -> None:
    heard = listening([os.getpid(), *descendants(os.getpid())])
    assert set(shared_cluster.pids()) <= set(heard)
    assert set().union(*heard.values()) <= {"127.0.0.1", "::1"}


def test_ray_has_no_process_that_nothing_uses(shared_cluster: LocalCluster) -> None:
    started = descendants(os.getpid())
    assert any("raylet" in title(pid) for pid in started)
    assert unused_of_ray(started) == []


def test_each_process_serves_its_metrics_at_a_port_of_its_own(shared_ray: None) -> None:
    port = free_port()
    config = {"metrics": {"port": port}, **QUICK}
    with kvcluster.local(shards=1, ram_bytes="16MiB", config=config) as cluster:
        store(cluster.client(SPEC), 7)
        found = {at: scraped(at) for at in (port, port + 1)}
    assert float(found[port]['kvcluster_store_blocks_total{decision="write"}']) == 8
    assert float(found[port]['kvcluster_call_seconds_count{method="PrepareStore"}']) == 1
    assert float(found[port + 1]['kvcluster_shard_pages_total{event="commits"}']) == 8
    assert float(found[port + 1]["kvcluster_memory_bytes"]) < float(found[port + 1]["kvcluster_memory_limit_bytes"])


def test_rays_sockets_lie_where_no_other_user_comes(shared_cluster: LocalCluster) -> None:
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    assert (session / "sockets" / "raylet").is_socket()
    closed = [folder for folder in session.parents if stat.S_IMODE(folder.stat().st_mode) == 0o700]
    assert any(folder.name.startswith("kvcluster-") for folder in closed), "Ray opens the session itself to all users"


def test_the_coordinator_does_without_torch(shared_cluster: LocalCluster) -> None:
    def has_torch(pid: int) -> bool:
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
            return "libtorch" in maps.read()

    coordinator, *_ = shared_cluster.pids()
    assert has_torch(os.getpid())
    assert not has_torch(coordinator)


def test_actors_have_the_priority_of_the_processes_that_wait_for_them(shared_cluster: LocalCluster) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in shared_cluster.pids()] == [mine] * 3


def test_its_processes_began_with_the_allocators_settings(shared_cluster: LocalCluster) -> None:
    for pid in shared_cluster.pids():
        told = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
        assert {f"{name}={value}" for name, value in ENVIRONMENT.items()} <= set(told)


def test_a_port_in_use_is_refused_before_anything_starts(shared_cluster: LocalCluster) -> None:
    port = int(shared_cluster.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"), kvcluster.local(port=port):
        raise AssertionError("it started")


def test_a_port_of_metrics_in_use_is_refused_before_anything_starts(shared_cluster: LocalCluster) -> None:
    port = int(shared_cluster.address.rpartition(":")[2])
    metrics = {"metrics": {"port": port}}
    with pytest.raises(ConfigError, match=rf"{port}: .*metrics\.port"), kvcluster.local(shards=1, config=metrics):
        raise AssertionError("it started")


def test_a_second_cluster_on_the_same_ray_is_another_cluster(client: Client) -> None:
    store(client, 3)
    with kvcluster.local(ram_bytes="16MiB") as second:
        assert second.client(SPEC).lookup(tokens(3)).blocks == 0
    assert client.lookup(tokens(3)).blocks == 8


def test_a_cluster_is_an_object_with_and_without_a_block(shared_ray: None) -> None:
    cluster = kvcluster.local(ram_bytes="16MiB", config=QUICK)
    client = cluster.client(SPEC)
    assert repr(cluster) == f"<LocalCluster at {cluster.address}>"
    assert client.store(tokens(4), kv(4)).blocks == 8
    client.flush()
    with cluster as same:
        assert same is cluster and client.lookup(tokens(4)).blocks == 8
    cluster.close()
    assert (
        repr(cluster) == f"<LocalCluster at {cluster.address}, closed>"
        and repr(client) == f"<Client of tiny at {cluster.address}, closed>"
    )
    with pytest.raises(CallerError, match="this cluster is closed; start another one"):
        cluster.client(SPEC)


def test_a_cluster_that_does_not_fit_beside_another_says_so_before_anything_starts(
    shared_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = embedded._RAY._users
    monkeypatch.setattr(embedded._RAY, "_room", embedded._RAY._taken + 2**20)
    with pytest.raises(
        ConfigError, match=r"do not fit beside the clusters that this process runs already.*: close one"
    ):
        kvcluster.local(ram_bytes="16MiB")
    assert embedded._RAY._users == users


def test_a_worker_killed_mid_store_leaves_neither_lease_nor_page(shared_cluster: LocalCluster, client: Client) -> None:
    pages, aborted = total(client, "pages"), counted(client, "aborted")
    with start_worker("store", shared_cluster.address, 5, 64, "SIGKILL", 40) as worker:
        assert worker.wait() == -signal.SIGKILL
    eventually(lambda: counted(client, "aborted") > aborted)
    assert total(client, "leases") == 0
    assert total(client, "pages") == pages
    assert client.lookup(tokens(5, 64)).blocks == 0


def test_a_worker_that_freezes_mid_store_loses_its_lease_and_is_told(
    shared_cluster: LocalCluster, client: Client
) -> None:
    pages, revoked = total(client, "pages"), counted(client, "revoked")
    with start_worker("store", shared_cluster.address, 6, 64, "SIGSTOP", 40, "tcp") as worker:
        try:
            eventually(lambda: counted(client, "revoked") > revoked)
            eventually(lambda: total(client, "leases") == 0)
        finally:
            worker.send_signal(signal.SIGCONT)
        frozen = outcome(worker)
    assert frozen["blocks"] == 0
    assert frozen["miss"] != "None"
    assert total(client, "pages") == pages
    assert client.lookup(tokens(6, 64)).blocks == 0


def test_a_killed_shard_comes_back_empty_under_a_new_epoch(own_cluster: LocalCluster, own_client: Client) -> None:
    store(own_client, 7)
    holder = own_client.explain(tokens(7))[0].shard
    before = shards(own_client)[holder]
    os.kill(own_cluster.pids()[1 + sorted(shards(own_client)).index(holder)], signal.SIGKILL)

    def is_back() -> bool:
        now = shards(own_client)[holder]
        return bool(now["epoch"] > before["epoch"] and now["state"] == "up")

    eventually(is_back)
    assert shards(own_client)[holder]["pages"] == 0
    assert {block.reason for block in own_client.explain(tokens(7))} == {MissReason.SHARD_LOST}
    store(own_client, 7)
    out = torch.zeros_like(kv(7))
    assert own_client.load(tokens(7), out) == 128
    assert torch.equal(out, kv(7))


def test_a_killed_coordinator_comes_back_at_its_address_and_relearns_every_block(
    own_cluster: LocalCluster, own_client: Client
) -> None:
    store(own_client, 8)
    before, (coordinator, *_) = own_client.status()["epoch"], own_cluster.pids()
    os.kill(coordinator, signal.SIGKILL)
    # In between there are misses, and no errors.
    eventually(
        lambda: (
            own_client.lookup(tokens(8), deadline_ms=1_000).blocks == 8 and coordinator not in descendants(os.getpid())
        )
    )
    assert own_client.status()["epoch"] > before
    out = torch.zeros_like(kv(8))
    assert own_client.load(tokens(8), out) == 128
    assert torch.equal(out, kv(8))
    eventually(lambda: own_client.store(tokens(9), kv(9)).blocks == 8)  # when it has heard of every shard
