"""The workers' side of the connector: carries out the scheduler's orders for one rank's part of the KV.

A load writes into blocks that the engine has allocated for it. Within a forward pass each layer waits for its own KV,
and blocks that have not arrived by the end of the pass are reported as invalid; a load beside the passes is reported
when it ends. A store reads blocks after the pass that filled them: in place from CPU memory (stores.py), by snapshots
from a GPU (snapshot_stores.py). On a GPU every load runs beside the passes, and this thread never waits. `DeviceKV`
holds which GPU that is, and where each block is in its memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvcluster.engines.vllm.compat as compat
from kvcluster.client.client import Client
from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec
from kvcluster.device.device import Device
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.snapshots import Snapshots
from kvcluster.engines.texts import miss_of
from kvcluster.engines.vllm.registration import Registration
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.snapshot_stores import SnapshotStores
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, LoadReport, Step, StepReport, StoreOrder
from kvcluster.engines.vllm.stores import InPlaceStores, Stores
from kvcluster.errors import CallerError, KVClusterError
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Layers, Paged
from kvcluster.transfers.transfer import Loaded, Transfer
from kvcluster.transport.base import Deadline


@dataclass(frozen=True, slots=True)
class DeviceKV:
    """The device, and the geometry of all blocks of each group of which this rank holds a part."""

    device: Device
    geometries: tuple[BlockGeometry, ...]
    staging_bytes: int

    def snapshots(self) -> Snapshots:
        """Returns new snapshots of these blocks. Allocates nothing."""
        return Snapshots(self.device, self.geometries, nbytes=self.staging_bytes // 2)


def device_kv(layout: compat.Layout, views: Sequence[list[Any]], staging_bytes: int) -> DeviceKV | str | None:
    """Returns the engine's KV if it lies on a device, None if it lies in CPU memory, and why it cannot be moved if its
    device cannot be used. Loads the kernels, which takes seconds where they have to be compiled."""
    tensors = [tensor for group in views for tensor in _tensors(group)]
    if not DEVICES and all(tensor.device.type == "cpu" for tensor in tensors):
        return None
    DEVICES.expect(staging_bytes // 2)
    blocks = min(tensor.shape[0] for tensor in tensors)
    spec = KVSpec(model="layout", weights=f"{PRIVATE_WEIGHTS}0", block_tokens=layout.block_tokens, groups=layout.groups)
    try:
        memory = [Paged(of_group, range(blocks)) if of_group else None for of_group in views]
        bound = bind(memory, spec, layout.parts, blocks, writable=False)
    except CallerError as error:
        return str(error)
    if not isinstance(bound.endpoint, DeviceMemory):
        return None
    geometries = tuple(geometry for geometry in bound.geometries() if geometry is not None)
    return DeviceKV(bound.endpoint.device, geometries, staging_bytes)


def _tensors(group: list[Any]) -> list[torch.Tensor]:
    return [tensor for layer in group for tensor in (layer if isinstance(layer, tuple) else (layer,))]


class _Load:
    """One load order, in progress or failed to start."""

    def __init__(self, order: LoadOrder, transfer: Transfer[Loaded] | None, miss: Miss | None) -> None:
        self.order = order
        self.transfer = transfer
        self.miss = miss
        self.began_ns = time.monotonic_ns()

    def over(self) -> bool:
        return self.transfer is None or self.transfer.done()

    def report(self) -> LoadReport:
        """Ends the load if it has not ended, and returns its report."""
        took_ns = time.monotonic_ns() - self.began_ns
        if self.transfer is None:
            return LoadReport(self.order.first, 0, took_ns, Loss.EXACT, self.miss)
        try:
            loaded = self.transfer.result(None if self.transfer.done() else 0)
        except KVClusterError as error:
            return LoadReport(self.order.first, 0, took_ns, Loss.EXACT, miss_of(error))
        # `took_ns` ends at the last byte, not now, when the model's thread happens to look.
        return LoadReport(loaded.blocks, loaded.nbytes, loaded.took_ns or took_ns, loaded.loss, loaded.miss)


class WorkerSide:
    """The workers' side of one rank. Every method is called on the thread that runs the model."""

    def __init__(self, settings: ConnectorSettings, layout: compat.Layout, registration: Registration) -> None:
        self._settings = settings
        self._layout = layout
        self._registration = registration
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._layers: list[Layers | None] = []
        self._layer_numbers: dict[str, int] = {
            name: number
            for group, part, names in zip(layout.groups, layout.parts, layout.layers, strict=True)
            if part is not None
            for name, number in zip(names, group.layers[part.layer_start : part.layer_stop], strict=True)
        }
        self._chains: dict[str, list[BlockHash]] = {}
        self._loads: list[_Load] = []
        self._stores: Stores = InPlaceStores(self._memory, settings.store_ms)
        self._off = ""  # why nothing is loaded or stored
        self._held: dict[str, int] = {}  # by ended request: until when its blocks are kept for its stores
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._received: set[str] = set()
        self._openings: tuple[Client | None, int] = (None, 0)  # reported so far, of the client of the last report
        self._report = StepReport()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Registers the engine's KV, one tensor per layer. Raises CallerError for an unknown layout."""
        self._kv_caches = kv_caches
        views = [compat.views(kv_caches, self._layout, number) for number in range(len(self._layout.groups))]
        self._layers = [Layers(of_group) if of_group else None for of_group in views]
        kv = device_kv(self._layout, views, self._settings.staging_bytes)
        if isinstance(kv, str):
            self._off = kv
            self._registration.log(f"neither loads nor stores: {kv}")
        elif kv is not None:
            self._registration.log(
                f"KV lies in the memory of {kv.device.name}: no release of kvcluster has run so on a card. If answers "
                'differ from those with "mode": "off", tell us'
            )
            beside = not self._layout.zeroes_blocks
            groups = [number for number, of_group in enumerate(views) if of_group]
            self._stores = SnapshotStores(kv.snapshots(), self._settings.store_ms, groups=groups, beside=beside)

    def unregister(self) -> None:
        """The memory of the engine's KV goes away, until `restore`: ends all that reads or writes it. May be called
        again."""
        self._cancel()
        self._stores.settle({}, self._report)
        self._stores = InPlaceStores(self._memory, self._settings.store_ms)
        self._layers = []

    def restore(self) -> None:
        """The memory is there again, at the same addresses. May be called again."""
        if not self._layers:
            self.register(self._kv_caches)

    # ------------------------------------------------------------------------------------------ one step, in order

    def before(self, step: Step) -> None:
        """Called before the step writes anything: ends stores that read blocks which the step overwrites, and loads of
        ended requests."""
        self._stores.before(step.written)
        if step.weights and step.weights != self._registration.wanted:
            self._registration.use(step.weights)
        for name, first, hashes in step.chains:
            self._chains.setdefault(name, [])[first:] = hashes
        for name in step.gone:
            self._chains.pop(name, None)
            for load in self._loads:
                if load.order.request == name and load.transfer is not None:
                    load.transfer.cancel()
        until, progressed = time.monotonic_ns() + self._settings.hold_ms * 1_000_000, self._stores.progressed()
        if not step.few_blocks:
            self._held.update(dict.fromkeys(self._held.keys() & progressed, until))
        self._held.update(dict.fromkeys(step.held, until))

    def load(self, step: Step) -> None:
        """Starts the step's loads."""
        for order in step.loads:
            transfer, miss = self._begin_load(order)
            self._loads.append(_Load(order, transfer, miss))

    def wait_layer(self, name: str) -> None:
        """Returns once that layer's KV of the loads within this pass has arrived, or will not arrive."""
        for load in self._loads:
            if load.order.layerwise and load.transfer is not None:
                load.transfer.wait_layer(self._layer_numbers[name])

    def after(self, step: Step) -> None:
        """Called after the pass: ends the loads within it, and starts the step's stores."""
        for load in [one for one in self._loads if one.order.layerwise]:
            self._end_load(load)
        for order in step.stores:
            self._begin_store(order)
        self._stores.begun()
        if step.handed_over:
            self._stores.wait_ended(step.handed_over, Deadline.after_ms(self._settings.handover_ms))
        self._report.step = step.number

    def settle(self) -> tuple[set[str], set[str], set[str]]:
        """Returns the held requests whose blocks are no longer read, the requests whose loads have ended, and those of
        them whose loads failed."""
        for load in [one for one in self._loads if not one.order.layerwise and one.over()]:
            self._end_load(load)
        self._stores.settle(self._held, self._report)
        sent = {name for name in self._held if not self._stores.reads(name)}
        for name in sent:
            del self._held[name]
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return sent, received, failed

    def invalid_blocks(self) -> set[int]:
        """Returns the engine's blocks that should have been loaded and were not, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport:
        """Returns the report since the last call."""
        report, self._report = self._report, StepReport(step=self._report.step)
        self._off = report.off = self._off or self._stores.failed
        report.opened_breakers = self._new_openings()
        return report

    def _new_openings(self) -> int:
        """Returns how often a breaker of the present client has opened since the last report."""
        client, (counted, before) = self._registration.client, self._openings
        now = 0 if client is None else client.shard_connections.openings()
        self._openings = client, now
        return now - (before if client is counted else 0)

    def wait_idle(self, deadline: Deadline) -> bool:
        """Waits until no transfer is under way. Returns whether none is."""
        loads = all(load.transfer is None or load.transfer.wait_ended(deadline) for load in self._loads)
        return loads and self._stores.wait_idle(deadline)

    def close(self) -> None:
        """Cancels all transfers in progress."""
        self._cancel()
        self._registration.close()

    def _cancel(self) -> None:
        for load in self._loads:
            if load.transfer is not None:
                load.transfer.cancel()
        self._stores.close()

    # --------------------------------------------------------------------------------------------------- loads

    def _begin_load(self, order: LoadOrder) -> tuple[Transfer[Loaded] | None, Miss | None]:
        registration = self._registration
        client = registration.reader if order.of_another else registration.client
        if self._off or not self._layers:
            return None, Miss(MissReason.DEVICE_LOST, self._off or "the engine's KV is not in memory")
        if client is None:
            return None, Miss(MissReason.COORDINATOR_LOST, f"a worker has no cluster: {registration.why}")
        try:
            ticket = client.redeem(order.ticket)
            into = self._memory(order.into)
            return client.begin_load(
                ticket, into, first=order.first, adapter=order.adapter, deadline_ms=order.deadline_ms
            ), None
        except KVClusterError as error:
            return None, miss_of(error)

    def _end_load(self, load: _Load) -> None:
        self._loads.remove(load)
        order, report = load.order, load.report()
        if report.miss is not None and report.miss.reason is MissReason.DEVICE_LOST:
            self._off = self._off or str(report.miss)
        self._report.loads[order.request] = report
        if not order.layerwise:
            self._received.add(order.request)
        arrived = report.blocks - order.first
        if arrived == len(order.into[0]):
            return
        if self._layout.may_fail_in_part:
            self._invalid.update(order.into[0][arrived:])
        else:
            self._failed.add(order.request)

    # -------------------------------------------------------------------------------------------------- stores

    def _begin_store(self, order: StoreOrder) -> None:
        client = self._registration.client
        if self._off or not self._layers:
            self._report.refused(order, self._off or "the engine's KV is not in memory")
        elif client is None:
            self._report.refused(order, "a worker has no cluster")
        else:
            hashes = self._chains[order.request][: order.first + order.blocks]
            self._stores.begin(order, hashes, client)

    def _memory(self, blocks: BlockIds) -> list[Paged | None]:
        each = zip(self._layers, blocks, strict=True)
        return [Paged(layers, of_group) if layers is not None and of_group else None for layers, of_group in each]
