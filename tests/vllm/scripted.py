"""Workers that move nothing and report what a test says, to test the decisions of the scheduler's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvcluster.client.client import Client
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.connector import KVClusterMetadata, Reported
from kvcluster.engines.vllm.step_metadata import LoadOrder, LoadReport, StepReport, StoreOrder
from kvcluster.transfers.layouts import Dense
from kvcluster.transfers.long_chains import Prompt
from tests.client.build import BOUND_S
from tests.vllm.toy import Engine, Text, spans_of

if TYPE_CHECKING:
    from tests.vllm.conftest import Bench

LOST = Miss(MissReason.SHARD_LOST, "gone")
BLOCK_BYTES = 1_000
"""What a block is said to have brought."""

PATIENT = {"lookup_ms": 30_000, "store_ms": 30_000, "hold_ms": 30_000}
"""So that no claim depends on how busy the machine is."""

ALWAYS = {"prefill_tokens_per_s": 1, "layerwise_ms": 10_000} | PATIENT
"""A load pays, and goes on within the forward pass where it may."""

BESIDE = {"prefill_tokens_per_s": 1, "layerwise_ms": 0} | PATIENT
"""A load pays, and goes on beside the passes."""

_MS = 1_000_000


class ScriptedRank:
    """Answers each step at once. Loads come whole and stores are read before their step ends, unless told otherwise.

    `come` says how many blocks of its ticket a load brings; `loss` what they have lost; `took_ms` how long it took.
    Loads beside the passes end with the step after their own, or when `finish` is called where `patient`. While `reads`
    stores go on reading until `drain`, or their blocks are named in a step.
    """

    member = None

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, number: int) -> None:
        self.layout = compat.layout(config, kv)
        self.come: Callable[[LoadOrder], int] = lambda order: order.first + len(order.into[0])
        self.loss = Loss.EXACT
        self.took_ms = 1
        self.patient = False
        self.reads = False
        self.loads: list[LoadOrder] = []
        """All that were ordered."""
        self.stores: list[StoreOrder] = []
        self._beside: list[LoadOrder] = []
        self._ending: set[str] = set()
        self._reading: dict[int, StoreOrder] = {}
        self._ended: list[int] = []
        self._held: list[str] = []

    def finish(self, name: str) -> None:
        """The load of that request ends with the next step."""
        self._ending.add(name)

    def drain(self, *numbers: int) -> None:
        """These stores, or all, have read their sources."""
        self._end_stores(numbers or tuple(self._reading))

    def _end_stores(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._reading[number]
            self._ended.append(number)

    @property
    def reading(self) -> list[int]:
        return list(self._reading)

    def execute(self, output: SchedulerOutput, texts: dict[str, Text]) -> tuple[KVConnectorOutput, dict[str, int]]:
        orders = output.kv_connector_metadata
        assert isinstance(orders, KVClusterMetadata)
        step, report, told = orders.step, StepReport(orders.step.number), KVConnectorOutput()
        told.finished_recving = set()
        written = set(step.written)
        broken_off = [number for number, store in self._reading.items() if not written.isdisjoint(blocks_of(store))]
        self._end_stores(broken_off)
        for load in [one for one in self._beside if not self.patient or one.request in self._ending | set(step.gone)]:
            self._beside.remove(load)
            self._end(load, report, told, gone=load.request in step.gone)
            told.finished_recving.add(load.request)
        for load in step.loads:
            self.loads.append(load)
            if load.layerwise:
                self._end(load, report, told)
            else:
                self._beside.append(load)
        for store in step.stores:
            self.stores.append(store)
            self._reading[store.number] = store
        if not self.reads:
            self.drain()
        report.drained.update(self._ended)
        self._ended.clear()
        self._held += step.held
        told.finished_sending = {
            name for name in self._held if all(store.request != name for store in self._reading.values())
        }
        self._held = [name for name in self._held if name not in told.finished_sending]
        told.kv_connector_worker_meta = Reported(report)
        said = {
            name: texts[name].token(stop) for name, (_, stop, known) in spans_of(output, texts).items() if stop >= known
        }
        return told, said

    def _end(self, load: LoadOrder, report: StepReport, told: KVConnectorOutput, gone: bool = False) -> None:
        wanted = load.first + len(load.into[0])
        came = load.first if gone else self.come(load)
        nbytes = BLOCK_BYTES * max(0, came - load.first)
        miss = None if came == wanted else LOST
        report.loads[load.request] = LoadReport(came, nbytes, self.took_ms * _MS, self.loss, miss)
        if came == wanted:
            return
        if self.layout.may_fail_in_part:
            told.invalid_block_ids |= set(load.into[0][came - load.first :])
        else:
            told.failed_recving.add(load.request)

    def wait_idle(self) -> None:
        """It never moves anything."""

    def await_step(self) -> None:
        """It computes at once."""

    def close(self) -> None:
        """It has nothing."""


def blocks_of(store: StoreOrder) -> set[int]:
    """The engine's blocks that a store reads."""
    return {block for source in store.source for block in source}


def fill(client: Client, tokens: Sequence[int], *, loss: Loss = Loss.EXACT, salt: bytes = b"") -> None:
    """Has the cluster hold the full blocks of a prompt, whatever is in them."""
    blocks = len(tokens) // client.spec.block_tokens
    stored = client.store(Prompt(tokens, salt), memory_of(client.spec, blocks), loss=loss)
    assert stored.miss is None
    assert client.flush(deadline_ms=BOUND_S * 1e3)


def memory_of(spec: KVSpec, blocks: int) -> Any:
    made = []
    for group in spec.groups:
        plane = group.planes[0]
        shape = (blocks, len(group.layers), len(group.planes), spec.block_tokens, plane.heads, plane.dim)
        made.append(Dense(torch.zeros(shape, dtype=getattr(torch, plane.dtype))))
    return made if len(made) > 1 else made[0]


def engine_of(bench: Bench, model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
    """An engine whose workers are scripted, and whose lookups are answered at once."""
    return bench.engine(model, {"report": True, **(extra or {})}, rank=ScriptedRank, at_once=True, **options)


def knows_link(engine: Engine, bytes_per_s: int = 2**30) -> None:
    """As if a load had shown how fast they come."""
    engine.side._matcher.bandwidth.record(bytes_per_s, 10**9, engine.side._clock())
