"""The series of workers in prometheus-client's default registry: of all clients of the process, and of those alone that
are there."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from prometheus_client import REGISTRY, CollectorRegistry

from kvcluster.client.metrics import WorkerCollector, watch
from kvcluster.sequences.statistics import ShippedCounter
from kvcluster.testing import MemoryCluster
from tests.client.build import SPEC

MULTIPROCESS = """
from prometheus_client import CollectorRegistry, Counter, REGISTRY, generate_latest, multiprocess
from kvcluster.client.metrics import watch
from kvcluster.testing import MemoryCluster
from tests.client.build import SPEC
Counter("of_the_engine", "A counter of another's.").inc()
with MemoryCluster(ram_bytes="4MiB") as cluster:
    assert watch(cluster.client(SPEC))
    assert b"kvcluster_worker_breakers" in generate_latest(REGISTRY)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


class SeenClient:
    """As much of a client as the collector reads: connected to one shard, to which it has sent 3 bytes."""

    def __init__(self) -> None:
        self.shipped_counter = ShippedCounter()
        self.shipped_counter.sent(1, query_bytes=3)

    @property
    def shard_connections(self) -> SeenClient:
        return self

    def breakers(self) -> dict[str, dict[str, str]]:
        return {"shard-0": {"state": "open", "open_ms": 500}}

    def names(self) -> dict[str, dict[str, str]]:
        return {"shard-0": {"name": "tcp"}}


def test_clients_are_summed_and_of_those_that_are_gone_only_what_they_have_counted_stays() -> None:
    first, second = SeenClient(), SeenClient()
    collector, registry = WorkerCollector(first), CollectorRegistry()  # type: ignore[arg-type]
    registry.register(collector)

    def shown() -> tuple[float | None, ...]:
        by_path = registry.get_sample_value("kvcluster_worker_paths", {"path": "tcp"})
        sent = registry.get_sample_value("kvcluster_worker_shipped_bytes_total", {"what": "query"})
        return by_path, registry.get_sample_value("kvcluster_worker_breakers", {"state": "open"}), sent

    assert shown() == (1, 1, 3)
    collector.add(second)  # type: ignore[arg-type]
    collector.add(second)  # type: ignore[arg-type]
    assert shown() == (2, 2, 6)
    del second
    gc.collect()
    assert shown() == (1, 1, 6)
    assert first.names()


def test_what_is_watched_is_in_the_default_registry_once_and_may_be_registered_again() -> None:
    with MemoryCluster(shards=1, ram_bytes="4MiB") as cluster:
        first, second = cluster.client(SPEC), cluster.client(SPEC)
        assert watch(first)
        assert watch(first)
        assert watch(second)
        shown = [family for family in REGISTRY.collect() if family.name == "kvcluster_worker_paths"]
        assert len(shown) == 1
        own = WorkerCollector(first)
        REGISTRY.register(own)  # as an engine did before there was `watch`
        REGISTRY.unregister(own)


def test_without_prometheus_client_nothing_is_watched() -> None:
    with MemoryCluster(ram_bytes="4MiB") as cluster, patch.dict(sys.modules, {"prometheus_client": None}):
        assert not watch(cluster.client(SPEC))


def test_the_multiprocess_mode_of_an_engine_is_not_disturbed(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", MULTIPROCESS], check=True, capture_output=True, text=True, env=environment, timeout=120
    )
    assert "of_the_engine_total 1.0" in done.stdout
    assert "kvcluster" not in done.stdout
