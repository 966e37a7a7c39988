"""Kills a shard and measures what it serves from its disk tier after its restart.

Files that were just written are in the system's page cache, which outlives the shard. So loads are measured twice: with
that cache as it is, and with the files dropped from it before each load.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcluster.cli.bench.tiers.fixtures import (
    PAGE_BYTES,
    SPEC,
    lies_in,
    load,
    one_shard,
    prompt,
    rates,
    store,
    tensors,
    until,
)
from kvcluster.client import Client

_COLD, _RAW, _FIRST = "from the drive", "device, raw", 0


def restart(rounds: int, blocks: int, folder: Path | None, say: Callable[[str], object]) -> dict[str, Any]:
    """Returns the seconds from the kill to the first whole load, and rates of loads from disk and, for comparison, of
    raw loads from the device tier."""
    source, into = tensors(blocks)
    tokens, raw = prompt(_FIRST, blocks), prompt(_FIRST + 1, blocks)
    with (
        tempfile.TemporaryDirectory(prefix="kvcluster-bench-", dir=folder) as disk,
        one_shard(
            coordinator={"host_codec": "q4"},
            device_bytes=2 * blocks * PAGE_BYTES,
            host_bytes=blocks * PAGE_BYTES,  # three prompts in q4
            disk_bytes=4 * blocks * PAGE_BYTES,
            disk_dir=disk,
        ) as cluster,
    ):
        client = cluster.client(SPEC)
        say("filling the disk tier")
        for pushing in range(6):
            store(client, prompt(_FIRST + 10 * pushing, blocks), source)
        until(lambda: lies_in("disk", client, tokens), "a prompt lies on disk")
        say("killing the shard")
        before = _epoch(client)
        began = time.perf_counter()
        os.kill(cluster.pids()[1], signal.SIGKILL)
        until(lambda: _epoch(client) > before and client.lookup(tokens).tokens == len(tokens), "it is back")
        first = load(client, tokens, into)
        back = time.perf_counter() - began
        store(client, raw, source)
        say("loads from disk")
        times: dict[str, list[float]] = {_RAW: [], "disk, cached by the system": [], _COLD: []}
        for _ in range(rounds):
            for name, turns in times.items():
                if name == _COLD:
                    _empty_cache(Path(disk))
                turns.append(load(client, raw if name == _RAW else tokens, into))
    rows = [{"from": name, **rates(turns, times[_RAW], blocks)} for name, turns in times.items()]
    return {"back_s": back, "first_load_s": first, "loads": rows}


def _epoch(client: Client) -> int:
    """Returns the epoch of the one shard; 0 while there is none."""
    return max((int(shard["epoch"]) for shard in client.status()["shards"]), default=0)


def _empty_cache(disk: Path) -> None:
    """Writes these files to the drive and drops them from the system's page cache."""
    for path in disk.rglob("*.pages"):
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
