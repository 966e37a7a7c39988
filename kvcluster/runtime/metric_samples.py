"""Samples: the values of the metrics of metrics.py, and the counters of them in a process. Pure.

`ShardMetrics` counts what happens in a shard outside its core: exchanges by path, bytes by tier, refused connections,
moves between tiers. Each is counted once an exchange or batch, never page by page. Every series of the paths,
operations and tiers that are known exists from the start; the in-process path of tests gets its series when it is first
used.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from kvcluster.core.coordinator.eviction_history import AgeHistogram
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import (
    DeclineReason,
    EvictOrder,
    Moved,
    MoveOrder,
    MovePages,
    Order,
    PullOrder,
    ShardInfo,
    SpanMiss,
    Stage,
    Staged,
    Status,
    TenantStatus,
    Written,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import ADDRESSABLE, INGEST, STAGING, Takes, Tier
from kvcluster.errors import CredentialError, KVClusterError, VersionError
from kvcluster.runtime.metrics import METRICS
from kvcluster.transport.base import Unavailable
from kvcluster.transport.exchange_summary import ExchangeResult, ExchangeSummary, Operation
from kvcluster.transports import NAMES

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
    RATE = "rate"  # beyond the rate of its tenant's quota
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


class OperatorFile(Enum):
    """A file of the operator, or several that belong together, that a process reads again when it changes."""

    TOKENS = "tokens"
    QUOTAS = "quotas"
    CERTIFICATES = "certificates"


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
    """How long the gRPC calls of a process took, by method, how many were refused, how often it tried to start, and
    whether its files are the newest. Thread-safe."""

    def __init__(self, methods: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._seconds = HistogramSet("kvcluster_call_seconds", [(method,) for method in methods])
        self._refused = dict.fromkeys(Refusal, 0)
        self._start_retries = 0
        self._under_way: list[Callable[[], int]] = []
        self._troubles: dict[OperatorFile, Callable[[], str]] = dict.fromkeys(OperatorFile, str)

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

    def watch_file(self, file: OperatorFile, trouble: Callable[[], str]) -> None:
        """Has `trouble` asked why the newest version of the file is not in use, "" if it is (WatchedFiles.trouble)."""
        self._troubles[file] = trouble

    def samples(self) -> list[Sample | Histogram]:
        under_way = sum(count() for count in self._under_way)
        with self._lock:
            refused = {why.value: count for why, count in self._refused.items()}
            retries = self._start_retries
        return [
            *labelled("kvcluster_refused_calls_total", refused),
            *self._seconds.samples(),
            Sample("kvcluster_calls_under_way", (), float(under_way)),
            *labelled("kvcluster_file_stale", {file.value: bool(why()) for file, why in self._troubles.items()}),
            Sample("kvcluster_start_retries_total", (), float(retries)),
        ]


class CoordinatorFigures(NamedTuple):
    """The figures of a coordinator for a scrape: the status of the whole cluster, and others beside it."""

    status: Status
    missed_tokens: Mapping[MissReason, int]
    eviction_ages: Mapping[Tier, AgeHistogram]
    open_orders: Mapping[type[Order], int]
    pinned_blocks: int
    replica_requests: int
    by_tenant: Mapping[Tenant, Mapping[str, int]]
    tenants: Iterable[TenantStatus] = ()


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
    return [*samples, *_of_tenants(figures)]


def _of_tenants(figures: CoordinatorFigures) -> Iterator[Sample]:
    """Yields the series of each tenant."""
    for tenant, own in figures.by_tenant.items():
        hit, asked = own["hit_tokens"], own["asked_tokens"]
        yield Sample("kvcluster_tenant_lookup_tokens_total", (tenant, "hit"), float(hit))
        yield Sample("kvcluster_tenant_lookup_tokens_total", (tenant, "miss"), float(asked - hit))
        yield Sample("kvcluster_tenant_written_blocks_total", (tenant,), float(own["write_blocks"]))
    for one in figures.tenants:
        for use in one.tiers:
            labels = one.tenant, use.tier.name.lower()
            kinds = (("used", use.used_bytes), ("floor", use.floor_bytes), ("limit", use.limit_bytes))
            for kind, nbytes in kinds:
                if nbytes is not None:
                    yield Sample("kvcluster_tenant_bytes", (*labels, kind), float(nbytes))


def shard_samples(info: ShardInfo, waiting: Mapping[str, int], condemned: int) -> list[Sample]:
    """Returns the series of SHARD_METRICS that the core reports. `waiting`: the length of each queue."""
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


_READ_TIERS = tuple(tier.name.lower() for tier in ADDRESSABLE)
_TIERS_OF = dict.fromkeys(Operation, _READ_TIERS) | {Operation.STORE: (INGEST.name.lower(),), Operation.ATTEND: ()}
_READ_REASONS = tuple(
    reason.value
    for reason in (
        *(MissReason.EVICTED, MissReason.PENDING, MissReason.LOSSY, MissReason.CORRUPT, MissReason.FULL),
        *(MissReason.DEADLINE, MissReason.SHARD_LOST),
    )
)
"""Why a shard lends no page to a reader."""

_REASONS_OF = {
    Operation.LOAD: _READ_REASONS,
    Operation.STORE: tuple(written.value for written in Written if written is not Written.COMMITTED),
    Operation.ATTEND: tuple(why.value for why in (*SpanMiss, *DeclineReason)),
    Operation.REPLICATE_OUT: _READ_REASONS,
    Operation.REPLICATE_IN: (Written.LOST.value,),
}
_MOVES = ("demote", "promote", "stage")
_REFUSALS = tuple(refusal for refusal in Refusal if refusal is not Refusal.METHOD)
_Labels = tuple[str, ...]


class ShardMetrics:
    """The counters and histograms of one shard. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        known = [(operation.value, path) for operation in Operation for path in NAMES]
        self._exchange_seconds = HistogramSet("kvcluster_exchange_seconds", known)
        self._move_seconds = HistogramSet("kvcluster_tier_move_seconds", [(move,) for move in _MOVES])
        self._exchanges = _zeros((*labels, result.value) for labels in known for result in ExchangeResult)
        self._bytes = _zeros((o.value, path, tier) for o in Operation for path in NAMES for tier in _TIERS_OF[o])
        self._unmoved = _zeros((o.value, reason) for o in Operation for reason in _REASONS_OF[o])
        self._refused = _zeros((path, refusal.value) for path in NAMES for refusal in _REFUSALS)
        self._moved = _zeros(_moves())

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        operation, path = summary.operation.value, summary.path
        self._exchange_seconds.add((operation, path), summary.seconds)
        with self._lock:
            self._exchanges[operation, path, summary.result.value] += 1
            for tier, nbytes in summary.nbytes.items():
                self._bytes[operation, path, tier.name.lower()] += nbytes
            for reason, pages in summary.missed.items():
                self._unmoved[operation, reason] += pages

    def connection_refused(self, path: str, error: KVClusterError) -> None:
        with self._lock:
            self._refused[path, Refusal.of(error).value] += 1

    def moved(self, order: MovePages | Stage, result: Moved | Staged, seconds: float) -> None:
        """Counts a batch of moves between tiers, all in one direction. Pages that could not be moved count as no
        bytes."""
        first = order.pages[0]
        down = first.target.tier > first.source.tier
        self._move_seconds.add(("stage" if isinstance(order, Stage) else "demote" if down else "promote",), seconds)
        kept = [sums is not None for sums in result.sums] if isinstance(result, Moved) else [True] * len(order.pages)
        for index in result.corrupt:
            kept[index] = False
        with self._lock:
            for page, moved in zip(order.pages, kept, strict=True):
                if moved:
                    self._moved[page.source.tier.name.lower(), page.target.tier.name.lower()] += page.source.nbytes

    def samples(self) -> list[Sample | Histogram]:
        with self._lock:
            counted = {
                "kvcluster_exchanges_total": dict(self._exchanges),
                "kvcluster_moved_bytes_total": dict(self._bytes),
                "kvcluster_unmoved_pages_total": dict(self._unmoved),
                "kvcluster_refused_connections_total": dict(self._refused),
                "kvcluster_tier_moved_bytes_total": dict(self._moved),
            }
        return [
            *self._exchange_seconds.samples(),
            *self._move_seconds.samples(),
            *(Sample(name, labels, float(n)) for name, series in counted.items() for labels, n in series.items()),
        ]


def _zeros(series: Iterator[_Labels]) -> Counter[_Labels]:
    return Counter(dict.fromkeys(series, 0))


def _moves() -> Iterator[_Labels]:
    """Yields the pairs of tiers between which pages can move."""
    for source in Tier:
        for target in Tier:
            down, up = target > source, target < source and target.spec.takes is Takes.RAW
            staged = target is STAGING and not source.spec.addressable
            if down or up or staged:
                yield source.name.lower(), target.name.lower()
