"""What becomes of a cluster whose Ray has lost its raylet, or finds no room in /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvcluster
from tests.actors.conftest import QUICK
from tests.actors.processes import descendants, title
from tests.actors.worker import SPEC, digest, kv, tokens
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]


def without_a_raylet() -> None:
    """Stores and loads before and after the raylet of a local cluster is killed."""
    with kvcluster.local(shards=1, ram_bytes="32MiB", config=QUICK) as cluster, cluster.client(SPEC) as client:
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
    with kvcluster.local(shards=1, ram_bytes="32MiB", config=QUICK) as cluster, cluster.client(SPEC) as client:
        assert client.store(tokens(1), kv(1)).blocks == 8 and client.flush()
        out = kv(2)
        assert client.load(tokens(1), out) == 128 and digest(out) == digest(kv(1))
    print("served")


def _in_a_process_of_its_own(name: str, *before: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    python = f"from {__name__} import {name}; {name}()"
    return subprocess.check_output([*before, sys.executable, "-c", python], text=True, cwd=ROOT, env=env, timeout=150)


def test_a_cluster_whose_raylet_is_killed_serves_on_and_ends_whole() -> None:
    said = _in_a_process_of_its_own("without_a_raylet").splitlines()
    assert said[-1] == "served, and nothing is left"


def test_a_cluster_needs_no_room_in_dev_shm() -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    said = _in_a_process_of_its_own("without_dev_shm", "unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    assert said.splitlines()[-1] == "served"
