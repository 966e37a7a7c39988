"""Metrics of a worker: the state of shards as its clients see it. A worker is an engine's process, which may have a
metrics server of its own: the series are added to those that it serves. The engine integrations call `watch`; any other
worker does it like this:

    from kvcluster.client.metrics import watch
    watch(client)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

from kvcluster.client.client import Client
from kvcluster.runtime.metric_samples import Sample, labelled
from kvcluster.runtime.metrics_server import metric_families
from kvcluster.sequences.attend_planner import SpanChoice
from kvcluster.sequences.statistics import ShippedCounter
from kvcluster.transfers.breaker import BreakerState
from kvcluster.transports import NAMES


class WorkerCollector:
    """A collector for a registry of prometheus-client, over one client or the sum of several. Asks no shard and no
    coordinator, and keeps no client alive."""

    def __init__(self, *clients: Client) -> None:
        self._clients: WeakSet[Client] = WeakSet()
        self._shipped: dict[ShippedCounter, None] = {}
        """Also those of clients that were collected: what they have counted stays."""
        self._lock = threading.Lock()
        for client in clients:
            self.add(client)

    def add(self, client: Client) -> None:
        """Also counts this client, until it is collected. May be called again with the same one."""
        with self._lock:
            self._clients.add(client)
            self._shipped[client.shipped_counter] = None

    def samples(self) -> list[Sample]:
        """Returns the series of WORKER_METRICS."""
        with self._lock:
            shards = [client.shard_connections for client in self._clients]
            shipped = [counter.counts() for counter in self._shipped]
        breakers = Counter(_state(breaker) for one in shards for breaker in one.breakers().values())
        paths = Counter(path["name"] for one in shards for path in one.names().values())
        chosen = {choice.value: sum(each.chosen.get(choice.value, 0) for each in shipped) for choice in SpanChoice}
        moved = {
            "query": sum(each.query_bytes for each in shipped),
            "result": sum(each.result_bytes for each in shipped),
        }
        return [
            *labelled("kvcluster_worker_breakers", {state.value: breakers[state.value] for state in BreakerState}),
            *labelled("kvcluster_worker_paths", {path: paths[path] for path in (*NAMES, *paths)}),
            *labelled("kvcluster_worker_attended_spans_total", chosen),
            *labelled("kvcluster_worker_shipped_bytes_total", moved),
            Sample("kvcluster_worker_failed_attends_total", (), sum(each.failed for each in shipped)),
        ]

    def describe(self) -> Iterable[Any]:
        """Claims no names, so that prometheus-client accepts another collector of the same series."""
        return ()

    def collect(self) -> Iterator[Any]:
        """As prometheus-client asks for it. Raises ConfigError without prometheus-client."""
        return metric_families(self.samples())


_of_this_process = WorkerCollector()
_registered = threading.Lock()
"""Held for ever once the collector is in the default registry."""


def watch(client: Client) -> bool:
    """Adds a client to the series that this process shows in prometheus-client's default registry. Returns False where
    prometheus-client is not installed."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    _of_this_process.add(client)
    if _registered.acquire(blocking=False):
        REGISTRY.register(_of_this_process)
    return True


def _state(breaker: Mapping[str, Any]) -> str:
    """Returns the state as which a breaker is counted. One whose time is up waits for the next call, which is a probe.
    If the shard is removed for good no such call follows, and its breaker must not count as open for ever."""
    due = breaker["state"] == BreakerState.OPEN.value and not breaker["open_ms"]
    return BreakerState.PROBING.value if due else str(breaker["state"])
