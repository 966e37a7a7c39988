"""What becomes of a cluster without the Ray around it: a stranger at Ray's ports, a raylet that is killed, a machine
without room in /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import kvcluster
from kvcluster.actors.gcs import asks_for_a_token
from kvcluster.actors.local import LocalCluster
from tests.actors.conftest import QUICK
from tests.actors.processes import descendants, ports, title
from tests.actors.worker import SPEC, digest, kv, tokens
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
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


# ----------------------------------------------------------------- with a Ray of their own: see _in_a_process_of_its_own


def without_a_raylet() -> None:
    """Stores and loads before and after the raylet of a local cluster is killed."""
    with kvcluster.local(shards=1, device_bytes="32MiB", config=QUICK) as cluster:
        with cluster.client(SPEC) as client:
            assert client.store(tokens(1), kv(1)).blocks == 8 and client.flush()
            for pid in descendants(os.getpid()):
                if "raylet/raylet" in title(pid):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not any("raylet/raylet" in title(pid) for pid in descendants(os.getpid())))
            out = kv(2)
            assert client.load(tokens(1), out) == 128 and digest(out) == digest(kv(1))
            assert client.store(tokens(2), kv(2)).blocks == 8
    eventually(lambda: not any("kvcluster" in title(pid) or "ray" in title(pid) for pid in descendants(os.getpid())))
    print("served, and nothing is left")


def without_dev_shm() -> None:
    """Stores and loads where Ray's own store finds no room in /dev/shm."""
    with pytest.raises(OSError, match="No space left"):
        Path("/dev/shm/full").write_bytes(bytes(2**20))
    with kvcluster.local(shards=1, device_bytes="32MiB", config=QUICK) as cluster:
        with cluster.client(SPEC) as client:
            assert client.store(tokens(1), kv(1)).blocks == 8 and client.flush()
            out = kv(2)
            assert client.load(tokens(1), out) == 128 and digest(out) == digest(kv(1))
    print("served")


def _in_a_process_of_its_own(name: str, *before: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    python = f"from {__name__} import {name}; {name}()"
    return subprocess.check_output([*before, sys.executable, "-c", python], text=True, cwd=ROOT, env=env, timeout=150)


@pytest.mark.nightly
def test_a_cluster_whose_raylet_is_killed_serves_on_and_ends_whole() -> None:
    said = _in_a_process_of_its_own("without_a_raylet").splitlines()
    assert said[-1] == "served, and nothing is left"


@pytest.mark.nightly
def test_a_cluster_needs_no_room_in_dev_shm() -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    said = _in_a_process_of_its_own("without_dev_shm", "unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    assert said.splitlines()[-1] == "served"
