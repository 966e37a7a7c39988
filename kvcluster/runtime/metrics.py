"""Metrics: the table of all of them, and what their values are made of. Pure; metrics_server.py serves them.

A name is `kvcluster_<noun>_<unit>`, with `_total` if it only grows (from 0, since its process started). Every series of
a bounded label exists from the start, so that a rate over it is 0 and not absent. What a label may say is known
beforehand: none names a namespace or a block, and none a tenant unless `metrics.tenants` is set.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from kvcluster.core.age_histogram import AGE_BOUNDS_S, AgeHistogram
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import EvictOrder, MoveOrder, Order, PullOrder, ShardInfo, Status
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import Tier
from kvcluster.errors import CredentialError, KVClusterError, VersionError
from kvcluster.transport.base import Unavailable


class MetricKind(Enum):
    """The values are Prometheus' names of the types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds of the buckets of a histogram of times."""


class Metric(NamedTuple):
    """One row of the table. `about` is the help text that a scrape shows; `labels` are the names of its labels;
    `buckets` are the upper bounds of a histogram's."""

    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

COORDINATOR_METRICS: Mapping[str, Metric] = {
    "kvcluster_lookups_total": Metric(_COUNTER, "Lookups of prompts, each for a load or to route a request."),
    "kvcluster_lookup_tokens_total": Metric(_COUNTER, "Tokens that lookups asked for, in full blocks.", ("result",)),
    "kvcluster_missed_tokens_total": Metric(
        _COUNTER, "Tokens that lookups did not find, by the reason why the first of them was missing.", ("reason",)
    ),
    "kvcluster_reused_tokens_total": Metric(
        _COUNTER, "Tokens that lookups found for a load, which its worker need not compute."
    ),
    "kvcluster_stores_total": Metric(_COUNTER, "Stores of prompts that were prepared."),
    "kvcluster_store_blocks_total": Metric(_COUNTER, "Blocks of stores, by what was decided.", ("decision",)),
    "kvcluster_reported_pages_total": Metric(
        _COUNTER, "Pages that shards reported, by what became of them.", ("event",)
    ),
    "kvcluster_purged_blocks_total": Metric(_COUNTER, "Blocks that a purge or clear has removed."),
    "kvcluster_lost_shards_total": Metric(_COUNTER, "Shards that stopped reporting."),
    "kvcluster_ordered_pulls_total": Metric(_COUNTER, "Orders to copy pages from one shard to another."),
    "kvcluster_drains_total": Metric(
        _COUNTER, "Drains that have ended, by whether all was moved or the time was up first.", ("result",)
    ),
    "kvcluster_eviction_age_seconds": Metric(
        _HISTOGRAM,
        "Time since the last use of blocks, when their last copy was evicted from that tier.",
        ("tier",),
        AGE_BOUNDS_S,
    ),
    "kvcluster_tenant_lookup_tokens_total": Metric(
        _COUNTER, "As kvcluster_lookup_tokens_total, of each tenant; only with metrics.tenants.", ("tenant", "result")
    ),
    "kvcluster_tenant_written_blocks_total": Metric(
        _COUNTER, "Blocks that a tenant was granted to write; only with metrics.tenants.", ("tenant",)
    ),
    "kvcluster_blocks": Metric(_GAUGE, "Blocks that can be found, without the private ones of sequences."),
    "kvcluster_private_blocks": Metric(_GAUGE, "Private blocks of open sequences."),
    "kvcluster_claimed_blocks": Metric(_GAUGE, "Blocks that the tables of open sequences name."),
    "kvcluster_sequences": Metric(_GAUGE, "Open sequences."),
    "kvcluster_namespaces": Metric(_GAUGE, "Namespaces with blocks, or attached to."),
    "kvcluster_pinned_blocks": Metric(_GAUGE, "Blocks that users have pinned, which are not evicted."),
    "kvcluster_orders": Metric(_GAUGE, "Orders that shards have not ended, by kind.", ("kind",)),
    "kvcluster_replica_requests": Metric(_GAUGE, "Blocks that wait to be copied to another shard."),
    "kvcluster_tickets": Metric(_GAUGE, "Tickets of loads and stores that are under way."),
    "kvcluster_shards": Metric(_GAUGE, "Shards, by state.", ("state",)),
    "kvcluster_rebuilding": Metric(_GAUGE, "1 while the coordinator learns from shards what they hold."),
    "kvcluster_cache_enabled": Metric(_GAUGE, "0 after `kvcluster off`."),
    "kvcluster_coordinator_epoch_seconds": Metric(_GAUGE, "The coordinator's incarnation: its epoch, in seconds."),
}

SHARD_METRICS: Mapping[str, Metric] = {
    "kvcluster_shard_pages_total": Metric(_COUNTER, "Pages of this shard, by what became of them.", ("event",)),
    "kvcluster_exchanges_total": Metric(
        _COUNTER,
        "Loads, stores and computes of workers and copies between shards that have ended, by how.",
        ("operation", "path", "result"),
    ),
    "kvcluster_exchange_seconds": Metric(
        _HISTOGRAM, "Time of an exchange at this shard, from its request to its end.", ("operation", "path")
    ),
    "kvcluster_moved_bytes_total": Metric(
        _COUNTER,
        "Bytes of pages that whole exchanges moved, by the tier that they lie in.",
        ("operation", "path", "tier"),
    ),
    "kvcluster_unmoved_pages_total": Metric(
        _COUNTER,
        "Pages that whole exchanges asked for and did not move, and spans that were not attended to, by reason.",
        ("operation", "reason"),
    ),
    "kvcluster_refused_connections_total": Metric(
        _COUNTER,
        "Connections of data paths that were ended for a fault of the other side, by reason.",
        ("path", "reason"),
    ),
    "kvcluster_tier_move_seconds": Metric(
        _HISTOGRAM, "Time to move a batch of pages between the tiers of this shard.", ("operation",)
    ),
    "kvcluster_tier_moved_bytes_total": Metric(
        _COUNTER, "Bytes of pages that were moved between tiers, as they lie in the first.", ("source", "target")
    ),
    "kvcluster_tier_bytes": Metric(_GAUGE, "Bytes of a tier of this shard, by use.", ("tier", "use")),
    "kvcluster_tier_pages": Metric(_GAUGE, "Readable pages of a tier of this shard.", ("tier",)),
    "kvcluster_condemned_pages": Metric(_GAUGE, "Pages without new readers that are freed when the last one ends."),
    "kvcluster_leases": Metric(_GAUGE, "Leases of workers that read or write pages."),
    "kvcluster_waiting": Metric(_GAUGE, "Length of a queue of this shard, by what waits.", ("queue",)),
    "kvcluster_draining": Metric(_GAUGE, "1 while the shard is drained."),
    "kvcluster_degraded": Metric(
        _GAUGE, "1 if the shard runs without a tier that it should have, or with a smaller one; `status` says why."
    ),
    "kvcluster_shard_epoch_seconds": Metric(_GAUGE, "The shard's incarnation: its epoch, in seconds."),
}

PROCESS_METRICS: Mapping[str, Metric] = {
    "kvcluster_call_seconds": Metric(_HISTOGRAM, "Time to answer a gRPC call, without the network.", ("method",)),
    "kvcluster_refused_calls_total": Metric(_COUNTER, "gRPC calls that were not let through, by reason.", ("reason",)),
    "kvcluster_calls_under_way": Metric(_GAUGE, "gRPC calls that are served or wait for a thread."),
    "kvcluster_start_retries_total": Metric(
        _COUNTER, "Attempts of this process to start again that failed, until it could serve."
    ),
    "kvcluster_memory_bytes": Metric(_GAUGE, "Resident memory of this process, shared memory of its tiers included."),
    "kvcluster_memory_limit_bytes": Metric(_GAUGE, "Memory of the machine, or the limit of the container."),
    "kvcluster_uptime_seconds": Metric(_GAUGE, "Time since this process began to serve."),
}

WORKER_METRICS: Mapping[str, Metric] = {
    "kvcluster_worker_breakers": Metric(
        _GAUGE,
        "Shards that this worker has asked, by the state of its circuit breaker for them: open while it asks them "
        "nothing, probing when the next call is to show whether they answer.",
        ("state",),
    ),
    "kvcluster_worker_paths": Metric(_GAUGE, "Shards that this worker is connected to, by path.", ("path",)),
}

METRICS: Mapping[str, Metric] = {**COORDINATOR_METRICS, **SHARD_METRICS, **PROCESS_METRICS, **WORKER_METRICS}

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
