"""Replays a trace of requests: each request loads the cached prefix of its prompt and stores the rest, once for each
row.

A trace has the form that Mooncake publishes: one JSON object a line, in order of time. `timestamp` is in milliseconds;
`hash_ids` names the blocks of the prompt, a chain from its first block on: an id always follows the same ids. Other
fields of a line are ignored.

A row is a setting of the tiers. The host tier has the same size in all rows that have one; they differ in the number of
blocks that its codec fits into it. Every figure is a count, so results are the same on every machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvcluster import config
from kvcluster.core.coordinator.block_facts import recompute_cost
from kvcluster.core.hashing import foreign
from kvcluster.core.ids import BlockHash
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import Tier
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST
from kvcluster.errors import ConfigError
from kvcluster.replay.kernel import MS
from kvcluster.replay.replayed_cluster import TENANT, TraceCluster


class TraceRequest(NamedTuple):
    """The arrival time of a prompt in milliseconds, and the ids of its blocks."""

    at_ms: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. They name `asked` blocks in total, of which `distinct` are different."""

    requests: tuple[TraceRequest, ...]
    distinct: int
    asked: int


def read(path: str | Path, *, most: int | None = None) -> Trace:
    """Reads the first `most` requests of a trace, or all. Raises ConfigError, naming the line, for an invalid one."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(islice(file, most), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no trace: it is not UTF-8 text") from None


def parse(lines: Iterable[str], name: str) -> Trace:
    """Parses the lines of a trace as `read` does; `name` is their name in error messages."""
    requests: list[TraceRequest] = []
    before: dict[int, int | None] = {}  # what each block follows
    for number, line in enumerate(lines, 1):
        try:
            request = _request(line)
            if requests and request.at_ms < requests[-1].at_ms:
                raise ValueError(f"timestamp {request.at_ms} is before {requests[-1].at_ms}, that of the line above")
            for last, block in zip((None, *request.ids), request.ids, strict=False):
                if (known := before.setdefault(block, last)) != last:
                    raise ValueError(f"block {block} follows {last}, and elsewhere {known}: not a chain")
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        requests.append(request)
    if not requests:
        raise ConfigError(f"{name} holds no requests")
    return Trace(tuple(requests), len(before), sum(len(request.ids) for request in requests))


def _request(line: str) -> TraceRequest:
    try:
        value = json.loads(line)
        at_ms, ids = value["timestamp"], tuple(value["hash_ids"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("not a JSON object with timestamp and hash_ids") from None
    if not ids or not all(type(number) is int and 0 <= number < 2**63 for number in (at_ms, *ids)):
        raise ValueError("timestamp is an integer of milliseconds, and hash_ids a list of integers, from 0 on")
    return TraceRequest(at_ms, ids)


class Row(NamedTuple):
    """A setting: the codec of the host tier ("" for none), and the number of first blocks that stay raw in it."""

    codec: str = ""
    raw_blocks: int = 0

    @property
    def name(self) -> str:
        if not self.codec:
            return "RAM alone"
        return f"+ host {self.codec}" + (", first block raw" if self.raw_blocks else "")

    def settings(self, shards: int, coordinator: Mapping[str, Any], ram_bytes: int, host_bytes: int) -> config.Config:
        """Returns the configuration. The bytes are per shard."""
        tier = {"host_codec": self.codec or "raw", "host_raw_blocks": self.raw_blocks}
        # There are no bytes to corrupt, so scrubbing is off.
        shard = {"ram_bytes": ram_bytes, "host_bytes": host_bytes if self.codec else 0, "scrub_bytes": 0}
        return config.load(None, {"shards": shards, "coordinator": {**coordinator, **tier}, "shard": shard})


TRACE_TOKENS = 512
"""Tokens of a block in the published traces. If a block counts as fewer tokens here, runs hold fewer blocks in
proportion."""

SPEC = KVSpec.uniform(
    model="llama-3-8b",
    weights="sha256:trace",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_tokens=16,
)
"""What a block of the trace counts as: 128 KiB of KV a token."""

ROWS = (Row(), Row("raw"), Row("q8", 1), Row("q8"), Row("q4", 1), Row("q4"))


def measure(
    trace: Trace,
    *,
    capacity: float,
    host: float,
    shards: int,
    block_tokens: int,
    eviction_policy: str = "lru",
    progress: Callable[[str], object] = lambda row: None,
) -> dict[str, Any]:
    """Returns the figures of all rows. `capacity` and `host` are the total bytes of the tiers of all shards, as shares
    of the raw size of all distinct blocks of the trace; every block of the trace counts as `block_tokens` tokens.
    `progress` is called with the name of each row as it begins.

    Raises ConfigError if a tier is too small for a page, or the eviction policy does not exist.
    """
    spec = replace(SPEC, block_tokens=block_tokens)
    page_bytes = spec.page_bytes(0, spec.whole(0))
    per_shard = {}
    for option, share in (("--capacity", capacity), ("--host", host)):
        per_shard[option] = int(share * trace.distinct * page_bytes) // shards
        if per_shard[option] < page_bytes:
            raise ConfigError(f"{option} {share} is less than one block per shard; give more, or fewer shards")
    coordinator = {
        "eviction_policy": eviction_policy,
        "run_blocks": max(1, config.CoordinatorConfig().run_blocks * block_tokens // TRACE_TOKENS),
    }
    rows = []
    for row in ROWS:
        progress(f"{row.name} ...")
        settings = row.settings(shards, coordinator, per_shard["--capacity"], per_shard["--host"])
        rows.append({"name": row.name, **row._asdict(), **replay(trace, spec, settings)})
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
        "ram_bytes": per_shard["--capacity"] * shards,
        "host_bytes": per_shard["--host"] * shards,
        "rows": rows,
    }


def block_hashes(trace: Trace, spec: KVSpec) -> dict[int, BlockHash]:
    """Returns the hash of each block of the trace, by its id."""
    names = sorted({block for request in trace.requests for block in request.ids})
    made = foreign(spec.namespace(TENANT), (name.to_bytes(16, "little") for name in names))
    return dict(zip(names, made, strict=True))


def replay(trace: Trace, spec: KVSpec, settings: config.Config) -> dict[str, Any]:
    """Returns the figures of one row. Cached blocks are averaged over the requests of the second half; names with
    `_end` are their numbers after the last request."""
    cluster = TraceCluster(settings, spec)
    hash_of = block_hashes(trace, spec)
    found: Counter[str] = Counter()
    asked_cost = saved_cost = 0  # of computing all requested blocks, and those found
    counted: list[dict[str, float]] = []
    for number, request in enumerate(trace.requests):
        cluster.advance(request.at_ms * MS)
        hashes = [hash_of[block] for block in request.ids]
        grant = cluster.load(hashes)
        costs = [recompute_cost(spec, depth) for depth in range(len(hashes))]
        asked_cost += sum(costs)
        saved_cost += sum(costs[: grant.blocks])
        loss = Loss.EXACT
        for run in grant.runs:
            sources = run.plan[0] or ()
            found["host"] += run.count * any(source.tier > INGEST for source in sources)
            found["lossy"] += run.count * any(source.loss > Loss.EXACT for source in sources)
            loss = max([loss, *(source.loss for source in sources)])
        found["hits"] += grant.blocks
        if grant.blocks < len(hashes):
            cluster.store(hashes, grant.blocks, loss)  # KV computed over lossy blocks has their loss as well
        if number >= len(trace.requests) // 2:
            counted.append(_held(cluster))
    check_coordinator(cluster.coordinator)
    for shard in cluster.shards:
        check_shard(shard)
    counters: Counter[str] = Counter()
    for member in cluster.coordinator.state.members.all():
        counters.update(dict(member.info.counters))
    return {
        "hit_blocks": found["hits"],
        "hit_rate": found["hits"] / trace.asked,
        "saved_share": saved_cost / asked_cost,
        "hits_from_host": found["host"],
        "hits_lossy": found["lossy"],
        **{name: fmean(held[name] for held in counted) for name in counted[-1]},
        **{f"{name}_end": value for name, value in counted[-1].items()},
        "counters": dict(counters),
    }


def _held(cluster: TraceCluster) -> dict[str, float]:
    """Returns the current blocks and use of the tiers. A block in both tiers counts in each, and once in
    `cached_blocks`."""
    pools = [shard.pool for shard in cluster.shards]
    held: dict[str, float] = {"cached_blocks": cluster.coordinator.state.namespaces.blocks}
    for tier in Tier:
        allocators = [pool.allocators[tier] for pool in pools if tier in pool.allocators]
        capacity_bytes = sum(allocator.capacity_bytes for allocator in allocators)
        used_bytes = sum(allocator.used_bytes for allocator in allocators)
        blocks = sum(pool.count(tier) for pool in pools if tier in pool.allocators)
        held[f"{tier.name.lower()}_blocks"] = blocks
        held[f"{tier.name.lower()}_used"] = used_bytes / capacity_bytes if capacity_bytes else 0.0
    return held
