"""What the benchmark runs on: one shard of `kvcluster.local()`, and prompts that are moved into the wanted tier.

Pages are those of a Llama-3-8B (32 layers, 8 heads of 128 channels, bfloat16, 16 tokens: 2 MiB).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch

import kvcluster
from benchmarks.rounds import medians
from benchmarks.specs import CALL_MS, llama_8b, page_shape
from benchmarks.transfer.worker import warm_memory
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.waiting import wait_until
from kvcluster.client import Client
from kvcluster.core.messages import Done, SetPolicy
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection

SPEC = llama_8b()
SHAPE = page_shape(SPEC)
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))

Name = TypeVar("Name")


@contextmanager
def one_shard(coordinator: Mapping[str, Any], **tiers: Any) -> Iterator[tuple[LocalCluster, Client]]:
    """Starts one shard with these tiers (arguments of `kvcluster.local`), and a client. Pages move only by the given
    watermarks, and none are promoted."""
    quiet = {"hold_ms": 0, "host_raw_blocks": 0, "promote_loads": 1_000_000, **coordinator}
    config = {"coordinator": quiet, "shard": {"scrub_bytes": 0}, "client": {"deadline_ms": CALL_MS}}
    with kvcluster.local(shards=1, config=config, **tiers) as cluster:
        yield cluster, cluster.client(SPEC)


def set_policy(address: str, setting: tuple[str, str]) -> None:
    """Does the same as `kvcluster policy set`."""
    with closing(Connection(address)) as connection:
        expect(Done, GrpcPort(connection).ask(SetPolicy((setting,)), Deadline.after_ms(CALL_MS)))


def prompt(number: int, blocks: int) -> list[int]:
    """Returns a prompt that differs from that of any other number."""
    return [number, *range(1, blocks * SPEC.block_tokens)]


def random_kv(blocks: int) -> torch.Tensor:
    """Returns random KV for so many blocks, in memory that has been touched."""
    memory = warm_memory(blocks * PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(blocks, *SHAPE).normal_()


def store(client: Client, number: int, kv: torch.Tensor) -> float:
    """Stores the prompt of that number; returns the seconds. Raises KVClusterError if not all blocks are stored."""
    tokens = prompt(number, len(kv))
    began = time.perf_counter()
    stored = client.store(tokens, kv)
    took = time.perf_counter() - began
    if stored.blocks != len(kv):
        raise KVClusterError(f"not all of {len(kv)} blocks were stored: {stored}")
    return took


def load(client: Client, tokens: list[int], into: torch.Tensor) -> None:
    """Loads all tokens. Raises KVClusterError if some are not loaded."""
    loaded = client.load(tokens, into)
    if loaded != len(tokens):
        raise KVClusterError(f"{loaded} of {len(tokens)} tokens were loaded")


def rates(seconds: Mapping[Name, Sequence[float]], raw: Name, blocks: int) -> dict[Name, dict[str, float]]:
    """Returns the tokens per second of the median load of each, and its ratio to that of the raw loads."""
    took = medians(seconds)
    tokens = blocks * SPEC.block_tokens
    return {name: {"tokens_per_s": tokens / of, "of_raw": took[raw] / of} for name, of in took.items()}


def tier_of(client: Client, tokens: list[int]) -> str:
    """Returns the tier that holds the whole prompt, or "" if that is not one tier."""
    tiers = {block.tier if block.hit else "" for block in client.explain(tokens)}
    return tiers.pop() if len(tiers) == 1 else ""


def wait_for_tier(client: Client, tokens: list[int], tier: str) -> None:
    """Waits until the whole prompt is in that tier. Raises KVClusterError if that takes too long."""
    wait_until(lambda: tier_of(client, tokens) == tier, f"a prompt is in the {tier} tier")
