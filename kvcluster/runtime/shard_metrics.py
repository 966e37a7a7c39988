"""What a shard counts outside its core: exchanges by path, bytes by tier, refused connections, moves between tiers.

Each is counted once an exchange or batch, never page by page. Every series of the paths, operations and tiers that are
known exists from the start; the in-process path of tests gets its series when it is first used.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from kvcluster.core.messages import DeclineReason, Moved, MovePages, SpanMiss, Stage, Staged, Written
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import ADDRESSABLE, INGEST, STAGING, Takes, Tier
from kvcluster.errors import KVClusterError
from kvcluster.runtime.metric_samples import Histogram, HistogramSet, Refusal, Sample
from kvcluster.transport.exchange_summary import ExchangeResult, ExchangeSummary, Operation
from kvcluster.transports import NAMES

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
