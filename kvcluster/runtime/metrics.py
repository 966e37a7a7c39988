"""Metrics: the table of all of them, and what their values are made of. Pure; metrics_server.py serves them.

A name is `kvcluster_<noun>_<unit>`, with `_total` if it only grows (from 0, since its process started). Every series of
a bounded label exists from the start, so that a rate over it is 0 and not absent. No label names a tenant, a namespace
or a block: what a label may say is known beforehand.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from kvcluster.core.messages import ShardInfo, Status
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import Tier


class MetricKind(Enum):
    """The values are Prometheus' names of the types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One row of the table. `about` is the help text that a scrape shows; `labels` are the names of its labels."""

    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

COORDINATOR_METRICS: Mapping[str, Metric] = {
    "kvcluster_lookups_total": Metric(_COUNTER, "Lookups of prompts, each for a load or to route a request."),
    "kvcluster_lookup_tokens_total": Metric(_COUNTER, "Tokens that lookups asked for, in full blocks.", ("result",)),
    "kvcluster_missed_tokens_total": Metric(
        _COUNTER, "Tokens that lookups did not find, by the reason why the first of them was missing.", ("reason",)
    ),
    "kvcluster_stores_total": Metric(_COUNTER, "Stores of prompts that were prepared."),
    "kvcluster_store_blocks_total": Metric(_COUNTER, "Blocks of stores, by what was decided.", ("decision",)),
    "kvcluster_reported_pages_total": Metric(
        _COUNTER, "Pages that shards reported, by what became of them.", ("event",)
    ),
    "kvcluster_purged_blocks_total": Metric(_COUNTER, "Blocks that a purge or clear has removed."),
    "kvcluster_lost_shards_total": Metric(_COUNTER, "Shards that stopped reporting."),
    "kvcluster_ordered_pulls_total": Metric(_COUNTER, "Pages that shards were told to copy from one another."),
    "kvcluster_blocks": Metric(_GAUGE, "Blocks that can be found, without the private ones of sequences."),
    "kvcluster_private_blocks": Metric(_GAUGE, "Private blocks of open sequences."),
    "kvcluster_claimed_blocks": Metric(_GAUGE, "Blocks that the tables of open sequences name."),
    "kvcluster_sequences": Metric(_GAUGE, "Open sequences."),
    "kvcluster_namespaces": Metric(_GAUGE, "Namespaces with blocks, or attached to."),
    "kvcluster_tickets": Metric(_GAUGE, "Tickets of loads and stores that are under way."),
    "kvcluster_shards": Metric(_GAUGE, "Shards, by state.", ("state",)),
    "kvcluster_rebuilding": Metric(_GAUGE, "1 while the coordinator learns from shards what they hold."),
    "kvcluster_cache_enabled": Metric(_GAUGE, "0 after `kvcluster off`."),
    "kvcluster_coordinator_epoch_seconds": Metric(_GAUGE, "The coordinator's incarnation: its epoch, in seconds."),
}

SHARD_METRICS: Mapping[str, Metric] = {
    "kvcluster_shard_pages_total": Metric(_COUNTER, "Pages of this shard, by what became of them.", ("event",)),
    "kvcluster_tier_bytes": Metric(_GAUGE, "Bytes of a tier of this shard, by use.", ("tier", "use")),
    "kvcluster_tier_pages": Metric(_GAUGE, "Readable pages of a tier of this shard.", ("tier",)),
    "kvcluster_leases": Metric(_GAUGE, "Leases of workers that read or write pages."),
    "kvcluster_draining": Metric(_GAUGE, "1 while the shard is drained."),
    "kvcluster_degraded": Metric(_GAUGE, "1 if the shard runs without a tier that it should have; `status` says why."),
    "kvcluster_shard_epoch_seconds": Metric(_GAUGE, "The shard's incarnation: its epoch, in seconds."),
}

PROCESS_METRICS: Mapping[str, Metric] = {
    "kvcluster_call_seconds": Metric(_HISTOGRAM, "Time to answer a gRPC call, without the network.", ("method",)),
    "kvcluster_refused_calls_total": Metric(_COUNTER, "gRPC calls that were not let through, by reason.", ("reason",)),
    "kvcluster_memory_bytes": Metric(_GAUGE, "Resident memory of this process, shared memory of its tiers included."),
    "kvcluster_memory_limit_bytes": Metric(_GAUGE, "Memory of the machine, or the limit of the container."),
    "kvcluster_uptime_seconds": Metric(_GAUGE, "Time since this process began to serve."),
}

METRICS: Mapping[str, Metric] = {**COORDINATOR_METRICS, **SHARD_METRICS, **PROCESS_METRICS}

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds of the buckets of a histogram of calls."""

_DECISIONS = {"write": "write_blocks", "committed": "duplicate_blocks", "pending": "pending_blocks"}
_DECISIONS |= {"refused": "refused_blocks"}
_EVENTS = {"committed": "committed_pages", "gone": "gone_pages", "corrupt": "corrupt_pages"}
_STATES = ("up", "joining", "draining", "lost")


class Sample(NamedTuple):
    """The value of one series: the labels' values are in the order of its row."""

    name: str
    labels: tuple[str, ...]
    value: float


class Histogram(NamedTuple):
    """A series of a histogram: `counts` of calls up to each of BUCKETS, and of all; and the sum of their seconds."""

    name: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    seconds: float


class Refusal(Enum):
    """Why a gRPC call was not let through."""

    CREDENTIAL = "credential"  # none, an unknown one, or one that may not make this call
    BUSY = "busy"  # too many calls of its tenant are under way
    PROTOCOL = "protocol"  # malformed
    VERSION = "version"  # no version of the protocol is spoken by both sides; connections of tcp and shm as well
    METHOD = "method"  # there is no such method here


class CallMetrics:
    """How long the gRPC calls of a process took, by method, and how many were refused. Thread-safe."""

    def __init__(self, methods: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = {method: [0] * (len(BUCKETS) + 1) for method in methods}
        self._seconds = dict.fromkeys(self._counts, 0.0)
        self._refused = dict.fromkeys(Refusal, 0)

    def took(self, method: str, seconds: float) -> None:
        with self._lock:
            self._counts[method][bisect_left(BUCKETS, seconds)] += 1
            self._seconds[method] += seconds

    def refused(self, why: Refusal) -> None:
        with self._lock:
            self._refused[why] += 1

    def samples(self) -> list[Sample | Histogram]:
        with self._lock:
            refused = {why.value: count for why, count in self._refused.items()}
            return [
                *_labelled("kvcluster_refused_calls_total", refused),
                *(
                    Histogram("kvcluster_call_seconds", (method,), tuple(accumulate(counts)), self._seconds[method])
                    for method, counts in self._counts.items()
                ),
            ]


def coordinator_samples(status: Status, missed_tokens: Mapping[MissReason, int]) -> list[Sample]:
    """Returns the series of COORDINATOR_METRICS, for a status of the whole cluster."""
    counted = dict(status.counters)
    states = [shard.state for shard in status.shards]
    hit = counted["hit_tokens"]
    single = {
        "kvcluster_lookups_total": counted["loads"],
        "kvcluster_stores_total": counted["stores"],
        "kvcluster_purged_blocks_total": counted["purged_blocks"],
        "kvcluster_lost_shards_total": counted["lost_shards"],
        "kvcluster_ordered_pulls_total": counted["pulls"],
        "kvcluster_blocks": status.blocks,
        "kvcluster_private_blocks": status.private_blocks,
        "kvcluster_claimed_blocks": status.claimed_blocks,
        "kvcluster_sequences": status.sequences,
        "kvcluster_namespaces": status.namespaces,
        "kvcluster_tickets": status.tickets,
        "kvcluster_rebuilding": status.state == "rebuilding",
        "kvcluster_cache_enabled": dict(status.policy).get("cache") != "off",
        "kvcluster_coordinator_epoch_seconds": status.epoch / 1e9,
    }
    samples = [Sample(name, (), float(value)) for name, value in single.items()]
    tokens = {"hit": hit, "miss": counted["asked_tokens"] - hit}
    samples += _labelled("kvcluster_lookup_tokens_total", tokens)
    samples += _labelled(
        "kvcluster_missed_tokens_total", {reason.value: tokens for reason, tokens in missed_tokens.items()}
    )
    samples += _labelled("kvcluster_store_blocks_total", {what: counted[of] for what, of in _DECISIONS.items()})
    samples += _labelled("kvcluster_reported_pages_total", {what: counted[of] for what, of in _EVENTS.items()})
    samples += _labelled("kvcluster_shards", {state: states.count(state) for state in (*_STATES, *states)})
    return samples


def shard_samples(info: ShardInfo) -> list[Sample]:
    """Returns the series of SHARD_METRICS."""
    single = {
        "kvcluster_leases": info.leases,
        "kvcluster_draining": info.draining,
        "kvcluster_degraded": bool(info.trouble),
        "kvcluster_shard_epoch_seconds": info.epoch / 1e9,
    }
    samples = [Sample(name, (), float(value)) for name, value in single.items()]
    samples += _labelled("kvcluster_shard_pages_total", dict(info.counters))
    for tier in Tier:
        use, name = info.use(tier), tier.name.lower()
        sizes = {"capacity": use.capacity_bytes, "free": use.free_bytes, "writing": use.writing_bytes}
        samples += [Sample("kvcluster_tier_bytes", (name, what), float(nbytes)) for what, nbytes in sizes.items()]
        samples.append(Sample("kvcluster_tier_pages", (name,), float(use.pages)))
    return samples


def _labelled(name: str, values: Mapping[str, float]) -> list[Sample]:
    return [Sample(name, (label,), float(value)) for label, value in values.items()]
