"""The connector's counts in vLLM's log and at its Prometheus endpoint, as `kvcluster:<name>_total`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvcluster.engines.vllm.stats import DESCRIBED


class TransferStats(KVConnectorStats):
    """The counts of one interval, passed from the scheduler to vLLM's logger and metrics endpoint."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        told = {name: self.data[name] for name in DESCRIBED if name in self.data}
        return {name: round(count, 3) if isinstance(count, float) else count for name, count in told.items()}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """One counter for each count, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"kvcluster:{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in DESCRIBED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
