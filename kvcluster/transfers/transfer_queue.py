"""Begins the loads and stores of one client: one load after the other, and one store after the other.

Loads never wait behind stores. Two pools of threads move bytes, one for loads and one for stores; a thread that waits
for one shard's bytes delays only its own exchange, and ends by the deadline of the call that it works for.

Beginning a transfer does not wait. Queued stores are bounded in number and bytes: one more ends at once with a miss,
since an engine must get its memory back and gains nothing from waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash
from kvcluster.core.messages import TicketBody
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.errors import KVClusterError
from kvcluster.runtime.threads import be_nice
from kvcluster.runtime.uninterrupted import without_interrupt
from kvcluster.transfers.bandwidth import BandwidthEstimator
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.deadlines import Timer
from kvcluster.transfers.layouts import check_open
from kvcluster.transfers.load_executor import LoadExecutor
from kvcluster.transfers.load_plan import READERS, LoadPlan
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import plan_pieces
from kvcluster.transfers.plan_messages import LoadEffect, LoadEvent, StoreEffect, StoreEvent
from kvcluster.transfers.plan_runner import PlanRunner
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transfers.store_executor import StoreCallbacks, StoreExecutor, StoreProgress, StoreTerms
from kvcluster.transfers.store_plan import WRITERS, StorePlan
from kvcluster.transfers.transfer import Loaded, Stored, Transfer
from kvcluster.transfers.worker_pool import WorkerPool
from kvcluster.transport.base import Deadline
from kvcluster.transport.process_location import locate

_SPARE_THREADS = 2
"""Threads in addition to the exchanges of a pool, for questions that cannot wait until one of them has ended."""


class _Line:
    """Plans of one kind, which begin one after the other. Used under the client's lock."""

    def __init__(self) -> None:
        self._waiting: deque[PlanRunner[Any, Any]] = deque()
        self._under_way: PlanRunner[Any, Any] | None = None
        self._beginning = False

    def add(self, runner: PlanRunner[Any, Any]) -> None:
        self._waiting.append(runner)
        self._begin_next()

    def over(self, runner: PlanRunner[Any, Any]) -> None:
        """Removes a plan that is over, or was cancelled before it began."""
        if runner is self._under_way:
            self._under_way = None
            self._begin_next()
        else:
            self._waiting.remove(runner)

    def _begin_next(self) -> None:
        """Begins the next plan. A plan that is over as soon as it begins calls this again; the loop then begins the
        next one, without recursion."""
        if self._beginning:
            return
        self._beginning = True
        try:
            while self._waiting and self._under_way is None:
                self._under_way = self._waiting.popleft()
                self._under_way.begin()
        finally:
            self._beginning = False


class TransferQueue:
    """Begins loads and stores of one client. Raises CallerError once it is closed."""

    def __init__(
        self,
        control: CoordinatorClient,
        shards: ShardConnections,
        health: ShardHealth,
        lock: threading.RLock,
        parts: tuple[Part | None, ...],
        *,
        next_attempt: Callable[[], Attempt],
        config: ClientConfig,
    ) -> None:
        self.loaded_bytes = 0
        """KV that all loads have brought."""
        self._bandwidth = BandwidthEstimator()  # updated when a load ends, one at a time
        self._control = control
        self._shards = shards
        self._health = health
        self._lock = lock
        self._parts = parts
        self._next_attempt = next_attempt
        self._store_wait_ns = config.store_wait_ms * 1_000_000
        self._host = locate(config.socket_dir).host
        self._timer = Timer()
        self._readers = WorkerPool(READERS + _SPARE_THREADS, "kvcluster-load")
        self._writers = WorkerPool(WRITERS + _SPARE_THREADS, "kvcluster-store", partial(be_nice, config.store_niceness))
        self._load_line = _Line()
        self._store_line = _Line()
        self._loads: dict[Transfer[Loaded], None] = {}
        self._stores: dict[Transfer[Stored], int] = {}  # those that are not over, and the bytes of each
        self._missed = self._closed = False

    @without_interrupt(Transfer.cancel, brief=True)
    def load(
        self,
        body: TicketBody,
        first: int,
        bound: BoundMemory,
        spec: KVSpec,
        deadline: Deadline,
        *,
        parts: tuple[Part | None, ...] | None = None,
    ) -> Transfer[Loaded]:
        """As Client.begin_load, into checked memory. `parts`: what of each group to load, by default all that the
        client holds."""
        parts = self._parts if parts is None else parts
        pieces = plan_pieces(body, spec, parts, first)
        progress = LoadProgress(body, spec, pieces, first)
        plan = LoadPlan(
            *(progress, pieces, parts, self._health),
            streams=self._shards.streams,
            next_attempt=self._next_attempt,
            deadline_ns=deadline.at_ns,
            on_device=isinstance(bound.endpoint, DeviceMemory),
        )

        def executor_of(runner: PlanRunner[LoadEvent, LoadEffect]) -> LoadExecutor:
            return LoadExecutor(
                self._control,
                self._shards,
                bound,
                progress,
                deadline,
                layer_completed=transfer.layer_completed,
                finish=lambda loaded, error: self._load_ended(transfer, runner, loaded, error),
            )

        def cancel(why: Miss) -> None:
            runner.cancel(why)

        transfer: Transfer[Loaded] = Transfer(deadline, cancel, progress.layer_left, self._layers(spec))
        runner = PlanRunner(plan, self._readers, self._lock, self._timer, executor_of)
        with self._lock:
            check_open(self._closed)
            unable = self._why_no_thread(self._readers)
            if unable is not None:
                transfer.finish(progress.loaded(unable))
            else:
                self._loads[transfer] = None
                self._load_line.add(runner)
        return transfer

    @without_interrupt(Transfer.cancel, brief=True)
    def store(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        loss: Loss,
        bound: BoundMemory,
        tokens: Sequence[int],
        spec: KVSpec,
        deadline: Deadline,
        *,
        start: int = 0,
        parts: tuple[Part | None, ...] | None = None,
    ) -> Transfer[Stored]:
        """As Client.begin_store, from checked memory of `parts`, by default this client's; `start` as in StoreTerms."""
        self._control.check_may_store()
        held = tuple((group, part) for group, part in enumerate(parts or self._parts) if part is not None)
        attempt, progress = self._next_attempt(), StoreProgress()
        terms = StoreTerms(spec, hashes, first, held, loss, tokens, attempt, self._store_wait_ns, start, self._host)
        plan = self._store_plan(terms, progress, deadline)

        def executor_of(runner: PlanRunner[StoreEvent, StoreEffect]) -> StoreExecutor:
            callbacks = StoreCallbacks(
                deliver=runner.deliver,
                drained=transfer.drained,
                finish=lambda stored, error: self._store_ended(transfer, stored, error),
                over=lambda: self._store_over(transfer, runner),
            )
            return StoreExecutor(
                self._control, self._shards, terms, bound, deadline, callbacks, next_attempt=self._next_attempt
            )

        def cancel(why: Miss) -> None:
            runner.cancel(why)

        transfer: Transfer[Stored] = Transfer(deadline, cancel)
        runner = PlanRunner(plan, self._writers, self._lock, self._timer, executor_of)
        nbytes = self.nbytes(len(terms.new), spec)
        with self._lock:
            check_open(self._closed)
            full = self._why_no_thread(self._writers) or self._why_full(nbytes)
            if full is None:
                self._stores[transfer] = nbytes
                self._store_line.add(runner)
            else:
                self._store_ended(transfer, progress.stored(full), None)
        return transfer

    def _store_plan(self, terms: StoreTerms, progress: StoreProgress, deadline: Deadline) -> StorePlan:
        return StorePlan(
            *(terms, progress, self._health),
            streams=self._shards.streams,
            next_attempt=self._next_attempt,
            deadline_ns=deadline.at_ns,
        )

    def load_seconds(self, blocks: int, spec: KVSpec) -> float | None:
        """Returns how long a load of this many blocks would take by the loads so far; None before the first."""
        link = self._bandwidth.last_estimate()
        if link is None:
            return None
        return link.load_ns(self.nbytes(blocks, spec)) / 1e9 if blocks else 0.0

    def nbytes(self, blocks: int, spec: KVSpec) -> int:
        """Returns the bytes of this client's part of so many blocks."""
        return blocks * sum(spec.page_bytes(group, part) for group, part in enumerate(self._parts) if part is not None)

    def wait_stored(self, deadline: Deadline) -> bool:
        """Waits for the stores that were begun so far; False if the deadline passes first, or if one that has ended
        since the last call has missed."""
        with self._lock:
            stores = list(self._stores)
        ended = all(transfer.wait_ended(deadline) for transfer in stores)
        with self._lock:
            missed, self._missed = self._missed, False
        return ended and not missed

    def close(self, break_off: Callable[[], object]) -> None:
        """Cancels transfers that are under way, and ends the threads. `break_off` ends exchanges that hang."""
        with self._lock:
            self._closed = True
            running: list[Transfer[Any]] = [*self._loads, *self._stores]
        for transfer in reversed(running):  # so that ending one does not begin the next
            transfer.cancel()
        break_off()
        for threads in (self._readers, self._writers):
            threads.close()
        self._timer.close()

    def _layers(self, spec: KVSpec) -> frozenset[int]:
        """Returns the model's layers of which this client moves some heads."""
        return frozenset(
            layer
            for group, part in zip(spec.groups, self._parts, strict=True)
            if part is not None
            for layer in group.layers[part.layer_start : part.layer_stop]
        )

    def _load_ended(
        self,
        transfer: Transfer[Loaded],
        runner: PlanRunner[LoadEvent, LoadEffect],
        loaded: Loaded | None,
        error: BaseException | None,
    ) -> None:
        if loaded is not None:
            self._bandwidth.record(loaded.nbytes, loaded.took_ns, time.monotonic_ns())
            self.loaded_bytes += loaded.nbytes
        del self._loads[transfer]
        transfer.finish(loaded, error)
        self._load_line.over(runner)

    def _store_ended(self, transfer: Transfer[Stored], stored: Stored | None, error: BaseException | None) -> None:
        self._missed = self._missed or stored is None or stored.miss is not None
        transfer.finish(stored, error)

    def _store_over(self, transfer: Transfer[Stored], runner: PlanRunner[StoreEvent, StoreEffect]) -> None:
        del self._stores[transfer]
        self._store_line.over(runner)

    def _why_no_thread(self, pool: WorkerPool) -> Miss | None:
        """Returns why no transfer may begin if there is no room for the threads that it needs, and starts these if
        there is. Called under the lock."""
        try:
            self._timer.start()
            pool.start()
        except KVClusterError as error:
            return Miss(MissReason.FULL, str(error))
        return None

    def _why_full(self, nbytes: int) -> Miss | None:
        """Returns why a store of that size may not be queued now; None if it may. Called under the lock."""
        waiting = list(self._stores.values())
        if not waiting:
            return None
        if len(waiting) >= limits.STORES_QUEUED:
            return Miss(MissReason.FULL, f"{len(waiting)} stores of this client wait already; store less often")
        if sum(waiting) + nbytes > limits.STORES_QUEUED_BYTES:
            detail = f"stores of {sum(waiting) >> 20} MiB of this client wait already; store less, or less often"
            return Miss(MissReason.FULL, detail)
        return None
