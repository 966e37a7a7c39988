"""A shard whose disk is full, read-only or forbidden from its start: it serves from memory, says so, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcluster.testing import MemoryCluster
from tests.client.build import SPEC, kv, prompt, room, same

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
FOLDER = Path("/dev/shm/disks")
MIB = 2**20


def full() -> None:
    FOLDER.mkdir()
    with FOLDER.joinpath("another's").open("wb") as other, pytest.raises(OSError, match="No space left"):
        while True:
            other.write(bytes(MIB))


def read_only() -> None:
    FOLDER.mkdir()
    subprocess.check_call(["mount", "-o", "remount,ro", "/dev/shm"])


def forbidden() -> None:
    FOLDER.mkdir()
    FOLDER.chmod(0)
    mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    if os.geteuid() == 0 and mapped[2] != "1":
        os.setresuid(65534, 65534, 65534)  # root may enter every folder


DISKS = {"full": full, "read_only": read_only, "forbidden": forbidden}


def serve(disk: str) -> None:
    """Stores and loads, in a mount namespace of its own whose /dev/shm is that disk, and prints what status says."""
    DISKS[disk]()
    sizes = {"host_bytes": 4 * MIB, "disk_bytes": 16 * MIB, "disk_dir": str(FOLDER)}
    with MemoryCluster(ram_bytes=4 * MIB, config={"shard": sizes}) as cluster:
        client = cluster.client(SPEC)
        assert client.store(prompt(8, 1), kv(8, 1)).blocks == 8 and client.flush()
        out = room(8)
        assert client.load(prompt(8, 1), out) == 8 * SPEC.block_tokens and same(out, kv(8, 1))
        (shard,) = client.status()["shards"]
        cluster.wait_until_idle()
        cluster.check()
    print(shard["trouble"])


@pytest.mark.parametrize(
    ("disk", "why"),
    [("full", "No space left on device"), ("read_only", "Read-only file system"), ("forbidden", "Permission denied")],
)
def test_a_shard_without_a_usable_disk_serves_from_memory_and_says_why(disk: str, why: str) -> None:
    mount = f'mount -t tmpfs -o size={2 * MIB} tmpfs /dev/shm && exec "$@"'
    python = [sys.executable, "-c", f"from {__name__} import serve; serve({disk!r})"]
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *python]
    if disk == "forbidden" and os.geteuid() == 0:
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", *python]
    said = subprocess.check_output(command, text=True, cwd=ROOT, timeout=120)
    assert "shard.disk_dir" in said and why in said
