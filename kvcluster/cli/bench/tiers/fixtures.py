"""What the benchmark runs on: one shard of `kvcluster.local()`, and prompts that are moved into the wanted tier.

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
    """Starts one shard with these tiers (arguments of `kvcluster.local`). Pages move only by the given watermarks, and
    none are promoted."""
    quiet = {"hold_ms": 0, "host_raw_blocks": 0, "promote_loads": 1_000_000, **(coordinator or {})}
    config = {"coordinator": quiet, "shard": {"scrub_bytes": 0}, "client": {"deadline_ms": CALL_MS}}
    with kvcluster.local(shards=1, config=config, **tiers) as cluster:
        yield cluster


def set_policy(address: str, setting: tuple[str, str]) -> None:
    """Does the same as `kvcluster policy set`."""
    connection = Connection(address, None)
    try:
        expect(Done, GrpcPort(connection).ask(SetPolicy((setting,)), Deadline.after_ms(CALL_MS)))
    finally:
        connection.close()


def prompt(number: int, blocks: int) -> list[int]:
    """Returns a prompt that differs from that of any other number."""
    return [number, *range(1, blocks * BLOCK_TOKENS)]


def tensors(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random numbers to store, and memory to load them into; all pages of both have been touched."""
    source, into = (
        torch.frombuffer(warm_memory(blocks * PAGE_BYTES), dtype=torch.bfloat16).view(blocks, *SHAPE) for _ in range(2)
    )
    return source.normal_(), into


def store(client: Client, tokens: list[int], kv: torch.Tensor) -> None:
    """Stores all blocks. Raises KVClusterError if some are not stored."""
    stored = client.store(tokens, kv)
    if stored.blocks != len(kv):
        raise KVClusterError(f"not all of {len(kv)} blocks were stored: {stored}")


def load(client: Client, tokens: list[int], into: torch.Tensor) -> float:
    """Loads all tokens and returns the seconds it took. Raises KVClusterError if some are not loaded."""
    began = time.perf_counter()
    loaded = client.load(tokens, into)
    took = time.perf_counter() - began
    if loaded != len(tokens):
        raise KVClusterError(f"{loaded} of {len(tokens)} tokens were loaded")
    return took


def rates(turns: Sequence[float], raw: Sequence[float], blocks: int) -> dict[str, float]:
    """Returns the tokens per second of the median turn, and its ratio to that of the raw turns."""
    took = statistics.median(turns)
    return {"tokens_per_s": blocks * BLOCK_TOKENS / took, "of_raw": statistics.median(raw) / took}


def tier_of(client: Client, tokens: list[int]) -> str:
    """Returns the tier that holds the whole prompt, or "" if that is not one tier."""
    tiers = {block.tier if block.hit else "" for block in client.explain(tokens)}
    return tiers.pop() if len(tiers) == 1 else ""


def lies_in(tier: str, client: Client, tokens: list[int]) -> bool:
    """Returns whether the whole prompt is in that tier."""
    return tier_of(client, tokens) == tier


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()` is True. Raises KVClusterError, naming the condition as `what`, if that takes too long."""
    give_up = time.monotonic() + _SETTLE_S
    while not holds():
        if time.monotonic() > give_up:
            raise KVClusterError(f"not within {_SETTLE_S:.0f} s: {what}")
        time.sleep(LOOK_S)
