"""What is measured on: one shard of `kvcluster.local()`, and prompts that lie where they are wanted.

Pages are those of a Llama-3-8B (32 layers, 8 heads of 128 channels, bfloat16, 16 tokens: 2 MiB).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.bench.specs import llama_8b
from kvcluster.cli.bench.transfer.party import warm_memory
from kvcluster.client import Client
from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.core.messages import Done, SetPolicy
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection

BLOCK_TOKENS = 16
SPEC = llama_8b("sha256:bench", BLOCK_TOKENS)
SHAPE = (32, 2, BLOCK_TOKENS, 8, 128)
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))
CALL_MS = 60_000
LOOK_S = 0.02
_SETTLE_S = 30.0


@contextmanager
def one_shard(*, coordinator: Mapping[str, Any] | None = None, **tiers: Any) -> Iterator[LocalCluster]:
    """One shard whose tiers, sized as `kvcluster.local` has them, change only by the watermarks that are given; nothing
    is promoted."""
    quiet = {"hold_ms": 0, "host_raw_blocks": 0, "promote_loads": 1_000_000, **(coordinator or {})}
    config = {"coordinator": quiet, "shard": {"scrub_bytes": 0}, "client": {"deadline_ms": CALL_MS}}
    with kvcluster.local(shards=1, config=config, **tiers) as cluster:
        yield cluster


def set_policy(address: str, setting: tuple[str, str]) -> None:
    """As `kvcluster policy set`."""
    connection = Connection(address, None)
    try:
        expect(Done, GrpcPort(connection).ask(SetPolicy((setting,)), Deadline.after_ms(CALL_MS)))
    finally:
        connection.close()


def prompt(number: int, blocks: int) -> list[int]:
    """One that no other number has."""
    return [number, *range(1, blocks * BLOCK_TOKENS)]


def tensors(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers to store, and where they are to be loaded, in memory that has been touched."""
    source, into = (
        torch.frombuffer(warm_memory(blocks * PAGE_BYTES), dtype=torch.bfloat16).view(blocks, *SHAPE) for _ in range(2)
    )
    return source.normal_(), into


def store(client: Client, tokens: list[int], kv: torch.Tensor) -> None:
    """Stores all of it."""
    stored = client.store(tokens, kv)
    if stored.blocks != len(kv):
        raise KVClusterError(f"{len(kv)} blocks were to be stored: {stored}")


def load(client: Client, tokens: list[int], into: torch.Tensor) -> float:
    """Seconds that it took to load all of it."""
    began = time.perf_counter()
    loaded = client.load(tokens, into)
    took = time.perf_counter() - began
    if loaded != len(tokens):
        raise KVClusterError(f"{loaded} of {len(tokens)} tokens were loaded")
    return took


def rates(turns: Sequence[float], raw: Sequence[float], blocks: int) -> dict[str, float]:
    """Tokens a second in the median of these turns, and how many times that of the raw ones."""
    took = statistics.median(turns)
    return {"tokens_per_s": blocks * BLOCK_TOKENS / took, "of_raw": statistics.median(raw) / took}


def tier_of(client: Client, tokens: list[int]) -> str:
    """Where all of it lies, or "" where that is not one tier."""
    tiers = {block.tier if block.hit else "" for block in client.explain(tokens)}
    return tiers.pop() if len(tiers) == 1 else ""


def lies_in(tier: str, client: Client, tokens: list[int]) -> bool:
    """Is all of it in that tier?"""
    return tier_of(client, tokens) == tier


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits until it holds, `what` says what."""
    give_up = time.monotonic() + _SETTLE_S
    while not holds():
        if time.monotonic() > give_up:
            raise KVClusterError(f"not within {_SETTLE_S:.0f} s: {what}")
        time.sleep(LOOK_S)
