"""Metrics: the table of all of them. metric_samples.py makes their values, metrics_server.py serves them.

A name is `kvcluster_<noun>_<unit>`, with `_total` if it only grows (from 0, since its process started). Every series of
a bounded label exists from the start, so that a rate over it is 0 and not absent. The values of a label are known
beforehand: none names a namespace or a block, and none a tenant unless `metrics.tenants` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from kvcluster.core.coordinator.eviction_history import AGE_BOUNDS_S


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
    "kvcluster_lost_shards_total": Metric(
        _COUNTER, "Shards that stopped reporting, without those that were told to stop."
    ),
    "kvcluster_restarted_shards_total": Metric(
        _COUNTER, "Shards that started again without having been drained, since the coordinator started."
    ),
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
    "kvcluster_tenant_bytes": Metric(
        _GAUGE,
        "Bytes that a tenant has in a tier of all shards, without replicas, and the floor and limit of its quota; only "
        "with metrics.tenants.",
        ("tenant", "tier", "kind"),
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
    "kvcluster_file_stale": Metric(
        _GAUGE,
        "1 while a file that was changed is not in use, because it cannot be used: what it said before holds, if it "
        "was read before. By file: tokens, quotas, certificates.",
        ("file",),
    ),
    "kvcluster_start_retries_total": Metric(
        _COUNTER, "Attempts of this process to start again that failed, until it could serve."
    ),
    "kvcluster_memory_bytes": Metric(_GAUGE, "Resident memory of this process, shared memory of its tiers included."),
    "kvcluster_memory_limit_bytes": Metric(_GAUGE, "Memory of the machine, or the limit of the container."),
    "kvcluster_certificate_expires_seconds": Metric(
        _GAUGE, "When the certificate of this process ends, in seconds since 1970; without TLS there is none."
    ),
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
    "kvcluster_worker_attended_spans_total": Metric(
        _COUNTER, "Spans of steps of attention, by where they were attended to.", ("choice",)
    ),
    "kvcluster_worker_shipped_bytes_total": Metric(
        _COUNTER, "Bytes of queries that were sent to shards, and of the results that came back.", ("what",)
    ),
    "kvcluster_worker_failed_attends_total": Metric(
        _COUNTER, "Shards that were asked to attend and brought no results, so that their spans were loaded."
    ),
}

METRICS: Mapping[str, Metric] = {**COORDINATOR_METRICS, **SHARD_METRICS, **PROCESS_METRICS, **WORKER_METRICS}
