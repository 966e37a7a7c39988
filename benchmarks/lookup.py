"""Measures lookups: the index alone against a bare dict, and a whole lookup over gRPC against an empty call.

In the core, a lookup finds a 512-block chain in an index of N blocks and writes its recency and hold; chains are drawn
at random. The baseline is the least that any Python index must do: get and stamp each record in a dict of slotted
records. Memory is the growth of the process for each N, eviction queue included.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import Any

import torch

import kvcluster
from benchmarks.rounds import interleaved, latency_ms, medians
from benchmarks.specs import llama_8b, page_shape
from kvcluster.child_python import spawn_context, spawning
from kvcluster.cli.figures import table
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.coordinator.index import BlockRecord, PrefixIndex
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.groups import PREFIX, Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId, ShardId
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
from kvcluster.core.tiers import INGEST
from kvcluster.eviction.lru import LRU
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

CHAIN = 512
_ROUNDS, _DRAWN = 5, 200
_PART = Part(0, 32, 0, 8)
_SPACE = NamespaceId(bytes(32))


class _Bare:
    """The smallest record that holds its place and recency."""

    __slots__ = ("place", "stamp")

    def __init__(self, place: object) -> None:
        self.place = place
        self.stamp = 0


def measure(sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the figures of both parts."""
    # Each size runs in its own process: memory that one run freed must not hide what the next allocates.
    return {"core": [_in_own_process(size) for size in sizes], "grpc": _measure_grpc()}


def _in_own_process(size: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, spawn_context()) as pool:
        with spawning():
            measured = pool.submit(_measure_core, size)
        return measured.result()


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the figures as a table."""
    yield f"\n{CHAIN}-block lookups in the core, recency and hold written"
    yield from table(
        [
            {**row, **{name: row[name] / 1e6 for name in ("blocks_per_s", "bare_blocks_per_s")}}
            for row in figures["core"]
        ],
        {
            "blocks": "{blocks:,}",
            "M blocks/s": "{blocks_per_s:.2f}",
            "bare dict": "{bare_blocks_per_s:.2f}",
            "ratio": "{ratio:.2f}",
            "bytes/block": "{bytes_per_block:.0f}",
            "bytes/block, bare dict": "{bare_bytes_per_block:.0f}",
        },
    )
    yield (
        f"\n{CHAIN}-block lookup over gRPC, coordinator in a process of its own "
        "({calls} calls each)\nmedian {lookup_ms:.2f} ms, empty call {empty_ms:.2f} ms: ratio {ratio:.2f}; "
        "p99 {lookup_p99_ms:.2f} and {empty_p99_ms:.2f} ms"
    ).format(**figures["grpc"])


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

    def many(look: Callable[[Sequence[BlockHash]], None]) -> None:
        for chain in rng.choices(chains, k=_DRAWN):
            look(chain)

    seconds = medians(interleaved({"bare": lambda: many(bare_lookup), "index": lambda: many(lookup)}, _ROUNDS))
    held = len(chains) * CHAIN
    return {
        "blocks": blocks,
        "blocks_per_s": _DRAWN * CHAIN / seconds["index"],
        "bare_blocks_per_s": _DRAWN * CHAIN / seconds["bare"],
        "ratio": seconds["bare"] / seconds["index"],
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
            event = PageEvent(_SPACE, PageKey(fresh, 0, _PART), parent, depth, INGEST, Loss.EXACT)
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
    spec = llama_8b(layers=1, heads=1)
    tokens = list(range(CHAIN * spec.block_tokens))
    with kvcluster.local(shards=1, ram_bytes="64MiB") as cluster:
        client = cluster.client(spec)
        client.store(tokens, torch.zeros(CHAIN, *page_shape(spec), dtype=torch.bfloat16))
        client.flush()
        hashes = tuple(client.hashes(tokens))
        need = Need((spec.whole(0),))
        next_attempt = own_attempts()
        open_tickets: list[Attempt] = []
        deadline = Deadline.after_ms(60_000)
        with closing(Connection(cluster.address)) as connection:
            attached = connection.ask(COORDINATOR["Attach"], Attach(spec), deadline)
            assert isinstance(attached, Attached)

            def empty() -> None:
                connection.ask(COORDINATOR["Ping"], None, deadline)

            def lookup() -> None:
                open_tickets.append(next_attempt())
                prepare = PrepareLoad(open_tickets[-1], hashes, need)
                grant = connection.ask(COORDINATOR["PrepareLoad"], prepare, deadline, attached.namespace)
                assert getattr(grant, "blocks", 0) == CHAIN, "the chain was stored, so all of it is found"

            def end_tickets(_: object) -> None:
                while open_tickets:
                    connection.ask(COORDINATOR["EndTicket"], EndTicket(open_tickets.pop()), deadline)

            times = interleaved({"empty": empty, "lookup": lookup}, calls, before=end_tickets)
    of_lookup, of_empty = latency_ms(times["lookup"]), latency_ms(times["empty"])
    return {
        "calls": calls,
        "lookup_ms": of_lookup["p50_ms"],
        "empty_ms": of_empty["p50_ms"],
        "ratio": of_lookup["p50_ms"] / of_empty["p50_ms"],
        "lookup_p99_ms": of_lookup["p99_ms"],
        "empty_p99_ms": of_empty["p99_ms"],
    }
