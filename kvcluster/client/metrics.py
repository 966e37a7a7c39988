"""Metrics of a worker: how its client sees the shards. A worker is an engine's process, which has a metrics server of
its own: the series are added to what that server shows.

    import prometheus_client
    from kvcluster.client.metrics import WorkerCollector
    prometheus_client.REGISTRY.register(WorkerCollector(client))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvcluster.client.breaker import BreakerState
from kvcluster.client.client import Client
from kvcluster.runtime.metrics import Sample, labelled
from kvcluster.runtime.metrics_server import metric_families
from kvcluster.transports import NAMES


class WorkerCollector:
    """A collector for a registry of prometheus-client, over one client; register one in a process. Asks no shard and
    no coordinator."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def samples(self) -> list[Sample]:
        """Returns the series of WORKER_METRICS."""
        shards = self._client.shard_connections
        breakers = Counter(map(_state, shards.breakers().values()))
        paths = Counter(path["name"] for path in shards.names().values())
        return [
            *labelled("kvcluster_worker_breakers", {state.value: breakers[state.value] for state in BreakerState}),
            *labelled("kvcluster_worker_paths", {path: paths[path] for path in (*NAMES, *paths)}),
        ]

    def collect(self) -> Iterator[Any]:
        """As prometheus-client asks for it. Raises ConfigError without prometheus-client."""
        return metric_families(self.samples())


def _state(breaker: Mapping[str, Any]) -> str:
    """Returns the state as which a breaker is counted. One whose time is up waits for the next call, which is a probe.
    If the shard is gone for good none comes, and it must not count as open for ever."""
    due = breaker["state"] == BreakerState.OPEN.value and not breaker["open_ms"]
    return BreakerState.PROBING.value if due else str(breaker["state"])
