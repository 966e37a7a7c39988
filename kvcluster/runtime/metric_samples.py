"""Samples: the values of the metrics of metrics.py, and what counts them in a process. Pure."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from kvcluster.core.coordinator.age_histogram import AgeHistogram
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import EvictOrder, MoveOrder, Order, PullOrder, ShardInfo, Status
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import Tier
from kvcluster.errors import CredentialError, KVClusterError, VersionError
from kvcluster.runtime.metrics import METRICS
from kvcluster.transport.base import Unavailable

_DECISIONS = {"write": "write_blocks", "committed": "duplicate_blocks", "pending": "pending_blocks"}
_DECISIONS |= {"refused": "refused_blocks"}
_EVENTS = {"committed": "committed_pages", "gone": "gone_pages", "corrupt": "corrupt_pages"}
_STATES = ("up", "joining", "draining", "stopping", "lost")
_ORDERS: Mapping[type[Order], str] = {EvictOrder: "evict", MoveOrder: "move", PullOrder: "pull"}


class Sample(NamedTuple):
    """The value of one series: the labels' values are in the order of its row."""

    name: str
    labels: tuple[str, ...]
    value: float


class Histogram(NamedTuple):
    """A series of a histogram: how many values are at most each bound of its row's buckets, how many there are in all,
    and the sum of them in seconds."""

    name: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    seconds: float


class Refusal(Enum):
    """Why a gRPC call, or a connection of another path, was not let through."""

    CREDENTIAL = "credential"  # none, an unknown one, or one that may not make this call
    BUSY = "busy"  # its tenant has too many calls or connections
    PROTOCOL = "protocol"  # malformed
    VERSION = "version"  # no version of the protocol is spoken by both sides
    METHOD = "method"  # there is no such method here

    @classmethod
    def of(cls, error: KVClusterError) -> Refusal:
        """Returns why an error of the other side ends its call or connection."""
        if isinstance(error, CredentialError):
            return cls.CREDENTIAL
        if isinstance(error, Unavailable):
            return cls.BUSY
        return cls.VERSION if isinstance(error, VersionError) else cls.PROTOCOL


class HistogramSet:
    """The histograms of one metric, one for each of its `series` of label values. Thread-safe; a value is added in
    constant time."""

    def __init__(self, name: str, series: Iterable[tuple[str, ...]]) -> None:
        self._name = name
        self._bounds = METRICS[name].buckets
        self._lock = threading.Lock()
        self._counts = {labels: [0] * (len(self._bounds) + 1) for labels in series}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        """Adds a value. A series that was not named at first is added with its first value."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            counts[bisect_left(self._bounds, value)] += 1
            self._sums[labels] = self._sums.get(labels, 0.0) + value

    def samples(self) -> list[Histogram]:
        with self._lock:
            return [
                Histogram(self._name, labels, tuple(accumulate(counts)), self._sums[labels])
                for labels, counts in self._counts.items()
            ]


class CallMetrics:
    """How long the gRPC calls of a process took, by method, how many were refused, and how often it tried to start.
    Thread-safe."""

    def __init__(self, methods: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._seconds = HistogramSet("kvcluster_call_seconds", [(method,) for method in methods])
        self._refused = dict.fromkeys(Refusal, 0)
        self._start_retries = 0
        self._under_way: list[Callable[[], int]] = []

    def took(self, method: str, seconds: float) -> None:
        self._seconds.add((method,), seconds)

    def refused(self, why: Refusal) -> None:
        with self._lock:
            self._refused[why] += 1

    def start_failed(self) -> None:
        """Counts an attempt of a restarted process to start, which it repeats."""
        with self._lock:
            self._start_retries += 1

    def watch(self, under_way: Callable[[], int]) -> None:
        """Has `under_way` asked for the number of calls of a server, one of those of this process."""
        self._under_way.append(under_way)

    def samples(self) -> list[Sample | Histogram]:
        under_way = sum(count() for count in self._under_way)
        with self._lock:
            refused = {why.value: count for why, count in self._refused.items()}
            retries = self._start_retries
        return [
            *labelled("kvcluster_refused_calls_total", refused),
            *self._seconds.samples(),
            Sample("kvcluster_calls_under_way", (), float(under_way)),
            Sample("kvcluster_start_retries_total", (), float(retries)),
        ]


class CoordinatorFigures(NamedTuple):
    """What a coordinator tells of itself for a scrape: the status of the whole cluster, and figures beside it."""

    status: Status
    missed_tokens: Mapping[MissReason, int]
    eviction_ages: Mapping[Tier, AgeHistogram]
    open_orders: Mapping[type[Order], int]
    pinned_blocks: int
    replica_requests: int
    by_tenant: Mapping[Tenant, Mapping[str, int]]


def coordinator_samples(figures: CoordinatorFigures) -> list[Sample | Histogram]:
    """Returns the series of COORDINATOR_METRICS."""
    status = figures.status
    counted = dict(status.counters)
    states = [shard.state for shard in status.shards]
    hit = counted["hit_tokens"]
    single = {
        "kvcluster_lookups_total": counted["loads"],
        "kvcluster_reused_tokens_total": counted["reused_tokens"],
        "kvcluster_stores_total": counted["stores"],
        "kvcluster_purged_blocks_total": counted["purged_blocks"],
        "kvcluster_lost_shards_total": counted["lost_shards"],
        "kvcluster_restarted_shards_total": counted["restarted_shards"],
        "kvcluster_ordered_pulls_total": counted["pulls"],
        "kvcluster_blocks": status.blocks,
        "kvcluster_private_blocks": status.private_blocks,
        "kvcluster_claimed_blocks": status.claimed_blocks,
        "kvcluster_sequences": status.sequences,
        "kvcluster_namespaces": status.namespaces,
        "kvcluster_pinned_blocks": figures.pinned_blocks,
        "kvcluster_replica_requests": figures.replica_requests,
        "kvcluster_tickets": status.tickets,
        "kvcluster_rebuilding": status.state == "rebuilding",
        "kvcluster_cache_enabled": dict(status.policy).get("cache") != "off",
        "kvcluster_coordinator_epoch_seconds": status.epoch / 1e9,
    }
    samples: list[Sample | Histogram] = [Sample(name, (), float(value)) for name, value in single.items()]
    tokens = {"hit": hit, "miss": counted["asked_tokens"] - hit}
    samples += labelled("kvcluster_lookup_tokens_total", tokens)
    samples += labelled(
        "kvcluster_missed_tokens_total", {reason.value: tokens for reason, tokens in figures.missed_tokens.items()}
    )
    samples += labelled("kvcluster_store_blocks_total", {what: counted[of] for what, of in _DECISIONS.items()})
    samples += labelled("kvcluster_reported_pages_total", {what: counted[of] for what, of in _EVENTS.items()})
    samples += labelled("kvcluster_shards", {state: states.count(state) for state in (*_STATES, *states)})
    drains = {"moved": counted["drains"], "deadline": counted["late_drains"]}
    samples += labelled("kvcluster_drains_total", drains)
    samples += labelled("kvcluster_orders", {_ORDERS[kind]: count for kind, count in figures.open_orders.items()})
    samples += [
        Histogram("kvcluster_eviction_age_seconds", (tier.name.lower(),), ages.cumulative(), ages.total_ns / 1e9)
        for tier, ages in figures.eviction_ages.items()
    ]
    for tenant, own in figures.by_tenant.items():
        hit, asked = own["hit_tokens"], own["asked_tokens"]
        samples += [
            Sample("kvcluster_tenant_lookup_tokens_total", (tenant, "hit"), float(hit)),
            Sample("kvcluster_tenant_lookup_tokens_total", (tenant, "miss"), float(asked - hit)),
            Sample("kvcluster_tenant_written_blocks_total", (tenant,), float(own["write_blocks"])),
        ]
    return samples


def shard_samples(info: ShardInfo, waiting: Mapping[str, int], condemned: int) -> list[Sample]:
    """Returns those of SHARD_METRICS that its core tells. `waiting`: the length of each queue."""
    single = {
        "kvcluster_condemned_pages": condemned,
        "kvcluster_leases": info.leases,
        "kvcluster_draining": info.draining,
        "kvcluster_degraded": bool(info.trouble),
        "kvcluster_shard_epoch_seconds": info.epoch / 1e9,
    }
    samples = [Sample(name, (), float(value)) for name, value in single.items()]
    samples += labelled("kvcluster_shard_pages_total", dict(info.counters))
    samples += labelled("kvcluster_waiting", waiting)
    for tier in Tier:
        use, name = info.use(tier), tier.name.lower()
        sizes = {"capacity": use.capacity_bytes, "free": use.free_bytes, "writing": use.writing_bytes}
        samples += [Sample("kvcluster_tier_bytes", (name, what), float(nbytes)) for what, nbytes in sizes.items()]
        samples.append(Sample("kvcluster_tier_pages", (name,), float(use.pages)))
    return samples


def labelled(name: str, values: Mapping[str, float]) -> list[Sample]:
    """Returns the series of a metric with one label, by its values."""
    return [Sample(name, (label,), float(value)) for label, value in values.items()]
