"""The demo's fifth act: a shard with a pool in the memory of a GPU, and an engine whose KV lies on the same GPU.

What the engine loads is promoted to the pool, and the engine then reads it there: the GPU copies and verifies, and no
byte passes through memory of the CPU. Without a GPU both sides have a twin of one, and the act reports that.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import kvcluster
from kvcluster.cli.child_process import ChildProcess
from kvcluster.cli.demo.screen import Screen
from kvcluster.cli.demo.signals import Signals
from kvcluster.config import TWIN

BLOCKS = 32
SHAPE = BLOCKS, 8, 2, 16, 4, 64
SPEC = kvcluster.KVSpec.uniform(
    model="demo", weights="sha256:5", num_layers=8, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=16
)
_POOL_BYTES = 2 * BLOCKS * SPEC.block_bytes
ARENA_BYTES = 2 * _POOL_BYTES
"""The shard's memory in RAM: of `ram` and of `host`."""
PROMPT = list(range(BLOCKS * SPEC.block_tokens))

Figures = dict[str, Any]


def conduct(replica: ChildProcess, screen: Screen, signals: Signals) -> Figures:
    """Runs the act with a replica, on a separate cluster of one shard."""
    has_gpu = replica.ask("has_gpu")["has_gpu"]
    shard = {"gpu_bytes": _POOL_BYTES, "gpu_device": "cuda" if has_gpu else TWIN, "report_interval_ms": 50}
    config = {"shard": shard, "coordinator": {"hold_ms": 0}}
    with ExitStack() as house:
        with screen.step("a shard with a pool on a GPU"), signals.put_off():
            cluster = house.enter_context(kvcluster.local(ram_bytes=_POOL_BYTES, host_bytes=_POOL_BYTES, config=config))
        with screen.step("an engine reads it in place"):
            read: Figures = replica.ask("read_on_gpu", address=cluster.address, has_gpu=has_gpu)
    return assess(read)


def assess(read: Figures) -> Figures:
    """`ok`: all pages of a load were read from the pool, with the bytes that were stored, and no copy was made."""
    return read | {"ok": read["pages"] == BLOCKS and read["identical"] and not read["copies"]}
