"""Measures lookups: the index alone against a bare dict, and a whole lookup over gRPC against an empty call.

In the core, a lookup finds a 512-block chain in an index of N blocks and writes its recency and hold; chains are drawn
at random. The baseline is the least that any Python index must do: get and stamp each record in a dict of slotted
records. Memory is the growth of the process for each N, eviction queue included.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import kvcluster
from kvcluster.core.eviction_queue import EvictionQueue
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.index import BlockRecord, PrefixIndex
from kvcluster.core.messages import (
    Attach,
    Attached,
    EndTicket,
    Need,
    PageEvent,
    PageKey,
    PrepareLoad,
    ShardAddress,
)
from kvcluster.core.miss import Loss
from kvcluster.core.replica_sets import ReplicaTable
from kvcluster.core.spec import PREFIX, KVSpec, Part
from kvcluster.core.tiers import FASTEST
from kvcluster.eviction.lru import LRU
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

CHAIN = 512
_PART = Part(0, 32, 0, 8)
_SPACE = NamespaceId(bytes(32))


class _Bare:
    """The smallest record that holds its place and recency."""

    __slots__ = ("place", "stamp")

    def __init__(self, place: object) -> None:
        self.place = place
        self.stamp = 0


def measure(sizes: Sequence[int]) -> dict[str, Any]:
    """Figures of both parts."""
    # Each size runs in its own process: memory that one run freed must not hide what the next allocates.
    context = multiprocessing.get_context("spawn")
    core = []
    for blocks in sizes:
        with context.Pool(1) as pool:
            core.append(pool.apply(_measure_core, (blocks,)))
    return {"core": core, "grpc": _measure_grpc()}


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures as a table."""
    out = [f"\n{CHAIN}-block lookups in the core, recency and hold written"]
    out.append("    blocks  M blocks/s  bare dict  ratio  bytes/block  bare dict")
    for row in figures["core"]:
        out.append(
            f"{row['blocks']:>10,} {row['blocks_per_s'] / 1e6:>11.2f} {row['bare_blocks_per_s'] / 1e6:>10.2f} "
            f"{row['ratio']:>6.2f} {row['bytes_per_block']:>12.0f} {row['bare_bytes_per_block']:>10.0f}"
        )
    grpc = figures["grpc"]
    out.append(f"\n{CHAIN}-block lookup over gRPC, coordinator in a process of its own ({grpc['calls']} calls each)")
    out.append(
        f"median {grpc['lookup_ms']:.2f} ms, empty call {grpc['empty_ms']:.2f} ms: ratio {grpc['ratio']:.2f}; "
        f"p99 {grpc['lookup_p99_ms']:.2f} and {grpc['empty_p99_ms']:.2f} ms"
    )
    return out


def _measure_core(blocks: int) -> dict[str, Any]:
    rng = random.Random(7)
    chains = [[BlockHash(rng.randbytes(32)) for _ in range(CHAIN)] for _ in range(-(-blocks // CHAIN))]
    need = Need((_PART,))
    gc.collect()
    gc.freeze()  # as the coordinator's process does: the collector need not scan objects that live forever
    bare, bare_bytes = _grown(lambda: _bare_dict(chains))
    index, index_bytes = _grown(lambda: _index(chains))
    got = bare.get
    stamps = itertools.count(1)

    def bare_lookup(chain: Sequence[BlockHash]) -> None:
        stamp = next(stamps)
        for block in chain:
            record = got(block)
            if record is None:
                break
            record.stamp = stamp

    def lookup(chain: Sequence[BlockHash]) -> None:
        stamp = next(stamps)
        found = index[0].find(chain, need)
        assert found.blocks == CHAIN
        index[0].touch(chain, stamp, stamp + 1)

    rates: dict[str, list[float]] = {"bare": [], "index": []}
    for _ in range(5):
        drawn = [rng.choice(chains) for _ in range(200)]
        for name, look in (("bare", bare_lookup), ("index", lookup)):
            began = time.perf_counter()
            for chain in drawn:
                look(chain)
            rates[name].append(len(drawn) * CHAIN / (time.perf_counter() - began))
    held = len(chains) * CHAIN
    medians = {name: statistics.median(of) for name, of in rates.items()}
    return {
        "blocks": blocks,
        "blocks_per_s": medians["index"],
        "bare_blocks_per_s": medians["bare"],
        "ratio": medians["index"] / medians["bare"],
        "bytes_per_block": index_bytes / held,
        "bare_bytes_per_block": bare_bytes / held,
    }


def _bare_dict(chains: Sequence[Sequence[BlockHash]]) -> dict[BlockHash, _Bare]:
    place = object()
    return {BlockHash(bytes(bytearray(block))): _Bare(place) for chain in chains for block in chain}


def _index(chains: Sequence[Sequence[BlockHash]]) -> tuple[PrefixIndex, EvictionQueue[BlockRecord]]:
    book = ReplicaTable()
    slot = book.open_slot(ShardAddress(ShardId("shard-0"), Epoch(1), "127.0.0.1:1"))
    index = PrefixIndex(_SPACE, [PREFIX], 16, book)
    cold: EvictionQueue[BlockRecord] = EvictionQueue(LRU(), lambda _, block: index.get(block))
    for number, chain in enumerate(chains):
        parent = BlockHash(bytes(32))
        for depth, block in enumerate(chain):
            # A hash of its own for each record, as it comes off the wire.
            fresh = BlockHash(bytes(bytearray(block)))
            event = PageEvent(_SPACE, PageKey(fresh, 0, _PART), parent, depth, FASTEST, Loss.EXACT)
            record = index.add(event, slot, 1_000_000_000 + number)
            assert record is not None
            cold.push(record)
            parent = block
    return index, cold


def _grown(build: Callable[[], Any]) -> tuple[Any, int]:
    before = _resident_bytes()
    built = build()
    return built, _resident_bytes() - before


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure_grpc(calls: int = 400) -> dict[str, Any]:
    spec = KVSpec.uniform(
        model="bench", weights="sha256:bench", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32"
    )
    tokens = list(range(CHAIN * 16))
    with kvcluster.local(shards=1, device_bytes="64MiB") as cluster:
        client = cluster.client(spec)
        client.store(tokens, torch.zeros(CHAIN, 1, 2, 16, 1, 8))
        client.flush()
        hashes = tuple(client.hashes(tokens))
        connection = Connection(cluster.address, None)
        deadline = Deadline.after_ms(60_000)
        attached = connection.ask(COORDINATOR["Attach"], Attach(spec), deadline)
        assert isinstance(attached, Attached)
        holder = Holder(os.urandom(16))
        times: dict[str, list[float]] = {"lookup": [], "empty": []}
        for number in range(calls):
            attempt = Attempt(holder, number + 1)
            need = Need((spec.whole(0),))
            began = time.perf_counter()
            connection.ask(COORDINATOR["Ping"], None, deadline)
            times["empty"].append(time.perf_counter() - began)
            began = time.perf_counter()
            prepare = PrepareLoad(attempt, hashes, need)
            grant = connection.ask(COORDINATOR["PrepareLoad"], prepare, deadline, attached.namespace)
            times["lookup"].append(time.perf_counter() - began)
            assert getattr(grant, "blocks", 0) == CHAIN, "the chain was stored, so all of it is found"
            connection.ask(COORDINATOR["EndTicket"], EndTicket(attempt), deadline)
        connection.close()
    median = {name: statistics.median(of) * 1e3 for name, of in times.items()}
    p99 = {name: statistics.quantiles(of, n=100)[98] * 1e3 for name, of in times.items()}
    return {
        "calls": calls,
        "lookup_ms": median["lookup"],
        "empty_ms": median["empty"],
        "ratio": median["lookup"] / median["empty"],
        "lookup_p99_ms": p99["lookup"],
        "empty_p99_ms": p99["empty"],
    }
