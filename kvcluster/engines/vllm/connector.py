"""`KVClusterConnector`: vLLM's interface for connectors (KVConnectorBase_V1, with its hybrid memory allocator).

vLLM makes one for its scheduler and one for each worker. This module only adapts vLLM's interface: scheduler.py makes
the decisions, worker.py moves the bytes, and compat.py reads vLLM's objects.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.settings as settings
import kvcluster.engines.vllm.weight_versions as weight_versions
from kvcluster.engines.vllm.idle import IdleScheduler, IdleWorker
from kvcluster.engines.vllm.observer import observer
from kvcluster.engines.vllm.registration import Adapters, Registration
from kvcluster.engines.vllm.scheduler import EngineShape, SchedulerSide
from kvcluster.engines.vllm.stats import PromMetrics, TransferStats
from kvcluster.engines.vllm.step_metadata import Step, StepReport
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_logger = init_logger("vllm.kvcluster")  # beneath vllm's own, whose handler prints it


class KVClusterMetadata(KVConnectorMetadata):
    """Carries a step's orders to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class Reported(KVConnectorWorkerMetadata):
    """Carries the workers' report back to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Reported)
        self.report.merge(other.report)
        return self


class KVClusterConnector(KVConnectorBase_V1, SupportsHMA):
    """See docs/vllm.md. Raises ConfigError for wrong settings, CallerError for an engine that is not supported."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        chosen = settings.parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | IdleScheduler | None = None
        self._worker: WorkerSide | IdleWorker | None = None
        if chosen.mode == "on":
            self._serve(chosen, vllm_config, kv_cache_config, on_scheduler=role == KVConnectorRole.SCHEDULER)
        elif role == KVConnectorRole.WORKER:
            self._worker = IdleWorker()
        elif chosen.mode == "observe":
            self._scheduler = observer(chosen, vllm_config, kv_cache_config, _logger.info)
        else:
            self._scheduler = IdleScheduler()

    def _serve(
        self,
        chosen: settings.ConnectorSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        on_scheduler: bool,
    ) -> None:
        """Makes the side of this process, and begins to connect."""
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                'kvcluster needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: with "fail" a request '
                "fails whenever a shard is lost"
            )
        if not compat.loads_within(vllm_config):
            chosen = replace(chosen, layerwise_ms=0)
        layout = compat.layout(vllm_config, kv_cache_config)
        registration = Registration(vllm_config, layout, chosen, whole=on_scheduler, log=_logger.info)
        if on_scheduler:
            stores, loads = compat.roles(vllm_config)
            self._scheduler = SchedulerSide(
                chosen,
                layout,
                registration,
                Adapters(_logger.info),
                EngineShape(kv_cache_config.num_blocks, compat.ranks(vllm_config), stores, loads),
                forget=self._forget,
                empty_own_cache=self._empty_own_cache,
            )
            weight_versions.watch(self, self._scheduler)
        else:
            self._worker = WorkerSide(chosen, layout, registration)
        registration.start()

    # ---------------------------------------------------------------------------------------------- scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a failed store is only a later miss, and no reason to compute a request again."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        table = tuple(tuple(of_group) for of_group in blocks.get_block_ids())
        self._of_scheduler.allocated(request, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step, manager = self._of_scheduler.step(scheduler_output), self._kv_cache_manager
        few_blocks = manager is not None and compat.has_few_blocks(manager)
        return KVClusterMetadata(replace(step, few_blocks=few_blocks))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._of_scheduler.blocks_released(connector_output.finished_sending or ())
        reported = connector_output.kv_connector_worker_meta
        if isinstance(reported, Reported):
            self._of_scheduler.reported(reported.report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request)

    def has_pending_block_frees(self) -> bool:
        return self._of_scheduler.keeps_blocks

    def reset_cache(self) -> bool | None:
        """Stops sharing with other engines: vLLM calls this because the weights in memory may have changed."""
        manager = self._kv_cache_manager
        self._of_scheduler.reset(ready=manager is not None and compat.prefix_cache_is_unused(manager))
        return True

    def _empty_own_cache(self, ended: Collection[str]) -> bool:
        manager = self._kv_cache_manager
        return manager is not None and compat.empty_prefix_cache(manager, ended)

    def _forget(self, blocks: set[int]) -> None:
        if self._kv_cache_manager is not None:  # the scheduler binds it as soon as it has one
            compat.forget(self._kv_cache_manager, blocks)

    @property
    def _of_scheduler(self) -> SchedulerSide | IdleScheduler:
        assert self._scheduler is not None, "this connector is a worker's"
        return self._scheduler

    # ------------------------------------------------------------------------------------------------ workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._of_worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 calls this before the memory of its KV goes away, as it does while an engine sleeps."""
        self._of_worker.unregister()

    def restore_kv_caches(self) -> None:
        self._of_worker.restore()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this in every step before the forward pass. Its second model runner has by then enqueued what the
        step copies into blocks, or zeroes: on a GPU nothing of ours may be enqueued between that and this call."""
        assert isinstance(kv_connector_metadata, KVClusterMetadata)
        self._of_worker.before(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._of_worker.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._of_worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: a block is stored after all its layers are computed, since a page is stored as a whole."""

    def wait_for_save(self) -> None:
        self._of_worker.after(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._of_worker.settle()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker.invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return Reported(self._of_worker.take_report())

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def _of_worker(self) -> WorkerSide | IdleWorker:
        assert self._worker is not None, "this connector is the scheduler's"
        return self._worker

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVClusterMetadata)
        return metadata.step

    # ------------------------------------------------------------------------------------------------- counts

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None:
            return None
        taken = self._scheduler.stats.take()
        return TransferStats(taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TransferStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
