"""Kills a shard and measures what it serves from its disk tier after its restart.

Files that were just written are in the system's page cache, which outlives the shard. So loads are measured twice: with
that cache as it is, and with the files dropped from it before each load.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rounds import interleaved
from benchmarks.tiers.fixtures import (
    PAGE_BYTES,
    load,
    one_shard,
    prompt,
    random_kv,
    rates,
    store,
    wait_for_tier,
)
from kvcluster.cli.figures import progress
from kvcluster.cli.waiting import wait_until
from kvcluster.client import Client

_COLD, _RAW = "from the drive", "RAM, raw"


def restart(rounds: int, blocks: int, folder: Path | None) -> dict[str, Any]:
    """Returns the seconds from the kill to the first whole load, and rates of loads from disk and, for comparison, of
    raw loads from the RAM tier."""
    source, into = random_kv(blocks), random_kv(blocks)
    tokens, raw = prompt(0, blocks), prompt(1, blocks)
    tiers = {
        "ram_bytes": 2 * blocks * PAGE_BYTES,
        "host_bytes": blocks * PAGE_BYTES,  # three prompts in q4
        "disk_bytes": 4 * blocks * PAGE_BYTES,
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvcluster-bench-", dir=folder) as disk,
        one_shard({"host_codec": "q4"}, disk_dir=disk, **tiers) as (cluster, client),
    ):
        progress("filling the disk tier")
        for number in (0, 10, 20, 30, 40, 50):
            store(client, number, source)
        wait_for_tier(client, tokens, "disk")
        progress("killing the shard")
        before = _epoch(client)
        killed = time.perf_counter()
        os.kill(cluster.pids()[1], signal.SIGKILL)
        wait_until(lambda: _epoch(client) > before and client.lookup(tokens).tokens == len(tokens), "it is back")
        found = time.perf_counter()
        load(client, tokens, into)
        loaded = time.perf_counter()
        store(client, 1, source)
        progress("loads from disk")
        seconds = interleaved(
            {
                _RAW: partial(load, client, raw, into),
                "disk, cached by the system": partial(load, client, tokens, into),
                _COLD: partial(load, client, tokens, into),
            },
            rounds,
            before=lambda name: _empty_cache(Path(disk)) if name == _COLD else None,
        )
    rows = [{"from": name, **of} for name, of in rates(seconds, _RAW, blocks).items()]
    return {"back_s": loaded - killed, "first_load_s": loaded - found, "loads": rows}


def _epoch(client: Client) -> int:
    """Returns the epoch of the one shard; 0 while there is none."""
    return max((int(shard["epoch"]) for shard in client.status()["shards"]), default=0)


def _empty_cache(disk: Path) -> None:
    """Writes these files to the drive and drops them from the system's page cache."""
    for path in disk.rglob("*.pages"):
        with path.open("rb+") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
