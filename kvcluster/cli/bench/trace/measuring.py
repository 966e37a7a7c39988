"""The replay: each request loads the cached prefix of its prompt and stores the rest, once for each row.

A row is a setting of the tiers. The host tier has the same size in all rows that have one; they differ in the number of
blocks that its codec fits into it. Every figure is a count, so results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvcluster import config
from kvcluster.cli.bench.specs import llama_8b
from kvcluster.cli.bench.trace.cluster import TENANT, TraceCluster
from kvcluster.cli.bench.trace.reading import Trace
from kvcluster.core.block_facts import recompute_cost
from kvcluster.core.hashing import foreign
from kvcluster.core.ids import BlockHash
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import LoadGrant, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import FASTEST
from kvcluster.errors import ConfigError
from kvcluster.testing.kernel import MS


@dataclass(frozen=True, slots=True)
class Row:
    """A setting: the codec of the host tier ("" for none), and the number of first blocks that stay raw in it."""

    codec: str = ""
    raw_blocks: int = 0

    @property
    def name(self) -> str:
        if not self.codec:
            return "device alone"
        return f"+ host {self.codec}" + (", first block raw" if self.raw_blocks else "")


TRACE_TOKENS = 512
"""Tokens of a block in the published traces. If a block counts as fewer tokens here, runs hold fewer blocks in
proportion."""

ROWS = (Row(), Row("raw"), Row("q8", 1), Row("q8"), Row("q4", 1), Row("q4"))


def measure(
    trace: Trace,
    *,
    capacity: float,
    host: float,
    shards: int,
    block_tokens: int,
    say: Callable[[str], None],
    eviction_policy: str = "lru",
) -> dict[str, Any]:
    """Returns the figures of all rows. `capacity` and `host` are the total bytes of the tiers of all shards, as shares
    of the raw size of all distinct blocks of the trace; every block of the trace counts as `block_tokens` tokens.

    Raises ConfigError if a tier is too small for a page, or the eviction policy does not exist.
    """
    spec = llama_8b("sha256:trace", block_tokens)
    page_bytes = spec.page_bytes(0, spec.whole(0))
    tiers = {"--capacity": capacity, "--host": host}
    device_bytes, host_bytes = (int(share * trace.distinct * page_bytes) // shards for share in tiers.values())
    for option, nbytes in (("--capacity", device_bytes), ("--host", host_bytes)):
        if nbytes < page_bytes:
            raise ConfigError(f"{option} {tiers[option]} is less than one block per shard; give more, or fewer shards")
    rows = []
    for row in ROWS:
        say(f"{row.name} ...")
        coordinator = {
            "eviction_policy": eviction_policy,
            "run_blocks": max(1, config.CoordinatorConfig().run_blocks * block_tokens // TRACE_TOKENS),
        }
        settings = _settings(row, coordinator, shards=shards, device_bytes=device_bytes, host_bytes=host_bytes)
        figures = replay(trace, spec, settings)
        rows.append({"name": row.name, "codec": row.codec, "raw_blocks": row.raw_blocks, **figures})
    raw_blocks = next(figures["host_blocks"] for figures in rows if figures["codec"] == "raw")
    for figures in rows:
        figures["host_ratio"] = figures["host_blocks"] / raw_blocks if raw_blocks else None
    return {
        "requests": len(trace.requests),
        "distinct_blocks": trace.distinct,
        "asked_blocks": trace.asked,
        "reused_share": 1 - trace.distinct / trace.asked,
        "capacity": capacity,
        "host": host,
        "shards": shards,
        "block_tokens": block_tokens,
        "eviction_policy": eviction_policy,
        "page_bytes": page_bytes,
        "device_bytes": device_bytes * shards,
        "host_bytes": host_bytes * shards,
        "rows": rows,
    }


def _settings(
    row: Row, coordinator: dict[str, Any], *, shards: int, device_bytes: int, host_bytes: int
) -> config.Config:
    """Returns the configuration of one row. The bytes are per shard."""
    overrides = {
        "shards": shards,
        "coordinator": {"host_codec": row.codec or "raw", "host_raw_blocks": row.raw_blocks, **coordinator},
        # There are no bytes to corrupt, so scrubbing is off.
        "shard": {"device_bytes": device_bytes, "host_bytes": host_bytes if row.codec else 0, "scrub_bytes": 0},
    }
    return config.load(None, overrides)


def replay(trace: Trace, spec: KVSpec, settings: config.Config) -> dict[str, Any]:
    """Returns the figures of one row. Cached blocks are averaged over the requests of the second half; names with
    `_end` are their numbers after the last request."""
    cluster = TraceCluster(settings, spec)
    names = sorted({block for request in trace.requests for block in request.ids})
    made = foreign(spec.namespace(TENANT), (name.to_bytes(16, "little") for name in names))
    hash_of: dict[int, BlockHash] = dict(zip(names, made, strict=True))
    hits = below = lossy = 0
    asked_cost = saved_cost = 0  # of computing all requested blocks, and those found
    counted: list[dict[str, float]] = []
    for number, request in enumerate(trace.requests):
        cluster.advance(request.at_ms * MS)
        hashes = [hash_of[block] for block in request.ids]
        grant = cluster.load(hashes)
        hits += grant.blocks
        costs = [recompute_cost(spec, depth) for depth in range(len(hashes))]
        asked_cost += sum(costs)
        saved_cost += sum(costs[: grant.blocks])
        below += _blocks(grant, lambda tier, _: tier > FASTEST)
        lossy += _blocks(grant, lambda _, loss: loss > Loss.EXACT)
        if grant.blocks < len(hashes):
            cluster.store(hashes, grant.blocks, _worst(grant))
        if number >= len(trace.requests) // 2:
            counted.append(_held(cluster))
    check_coordinator(cluster.coordinator)
    for shard in cluster.shards:
        check_shard(shard)
    end = counted[-1]
    counters: dict[str, int] = {}
    for member in cluster.coordinator.members.all():
        for name, value in member.info.counters:
            counters[name] = counters.get(name, 0) + value
    return {
        "hit_blocks": hits,
        "hit_rate": hits / trace.asked,
        "saved_share": saved_cost / asked_cost,
        "hits_from_host": below,
        "hits_lossy": lossy,
        **{name: fmean(held[name] for held in counted) for name in end},
        **{f"{name}_end": value for name, value in end.items()},
        "counters": counters,
    }


def _blocks(grant: LoadGrant, which: Callable[[Tier, Loss], bool]) -> int:
    """Returns the number of granted blocks that have a source for which `which` is True."""
    return sum(run.count for run in grant.runs if any(which(source.tier, source.loss) for source in run.plan[0] or ()))


def _worst(grant: LoadGrant) -> Loss:
    """Returns the worst loss of these blocks, which KV computed over them has as well."""
    return max((source.loss for run in grant.runs for source in run.plan[0] or ()), default=Loss.EXACT)


def _held(cluster: TraceCluster) -> dict[str, float]:
    """Returns the current blocks and use of the tiers. A block in both tiers counts in each, and once in
    `cached_blocks`."""
    pools = [shard.pool for shard in cluster.shards]
    held: dict[str, float] = {"cached_blocks": cluster.coordinator.directory.blocks}
    for tier in Tier:
        allocators = [pool.allocators[tier] for pool in pools if tier in pool.allocators]
        capacity_bytes = sum(allocator.capacity_bytes for allocator in allocators)
        used_bytes = sum(allocator.used_bytes for allocator in allocators)
        blocks = sum(pool.count(tier) for pool in pools if tier in pool.allocators)
        held[f"{tier.name.lower()}_blocks"] = blocks
        held[f"{tier.name.lower()}_used"] = used_bytes / capacity_bytes if capacity_bytes else 0.0
    return held
