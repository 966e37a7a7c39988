"""A cluster of one shard without Ray: a coordinator and a shard, each a process (tests/compat/peer.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PEER = Path(__file__).resolve().parents[2] / "tests" / "compat" / "peer.py"


@dataclass(frozen=True)
class Cluster:
    """The coordinator's address, and the process ids of both."""

    address: str
    coordinator: int
    shard: int


@contextmanager
def cluster(pool: str, gpu: str = "", codec: str = "") -> Iterator[Cluster]:
    """Serves pages from a pool of that size, and with `gpu` from another one on a device of that kind; with `codec`,
    pages that go down are encoded so, and stay there. Both processes end with the block."""
    root = str(PEER.parents[2])
    env = {"KVCLUSTER_PEER_POOL": pool, "KVCLUSTER_PEER_GPU": gpu, "KVCLUSTER_PEER_CODEC": codec}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with ExitStack() as stack:
        coordinator = stack.enter_context(_process(env, "coordinator", "1"))
        address: str = _told(coordinator)["address"]
        shard = stack.enter_context(_process(env, "shard", "shard-0", address))
        _told(shard)
        _wait_until_up(coordinator)
        yield Cluster(address, coordinator.pid, shard.pid)


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _process(env: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PEER), *arguments],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _told(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with status {process.wait()}")
    found: dict[str, str] = json.loads(line)
    return found


def _wait_until_up(coordinator: subprocess.Popen[str]) -> None:
    """Returns when the shard has reported to the coordinator. A line on its stdin is answered with what it knows."""
    assert coordinator.stdin is not None
    until = time.monotonic() + 30
    while time.monotonic() < until:
        coordinator.stdin.write("\n")
        coordinator.stdin.flush()
        shards = _told(coordinator)["shards"]
        if any(shard["state"] == "up" for shard in shards.values()):  # type: ignore[attr-defined]
            return
        time.sleep(0.05)
    raise RuntimeError(f"the shard has not reported for 30 s: {shards}")
