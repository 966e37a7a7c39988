"""Stores of one rank: what reads the engine's blocks for them, and until when.

In CPU memory a store reads the engine's blocks in place, on threads of the client, while the engine continues. The
engine may give a block to a new owner meanwhile: each step lists the blocks that it reassigns, and before the step
runs, stores that read them get a short grace time and are then cancelled. Once `Transfer.cancel` returns nothing is
read any more, and a cancelled store is not committed, so a block that was copied too late never becomes visible.

On a GPU they are snapshots (snapshot_stores.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.engines.vllm.step_metadata import BlockIds, StepReport, StoreOrder
from kvcluster.errors import KVClusterError
from kvcluster.transfers.transfer import Stored, Transfer
from kvcluster.transport.base import Deadline

_GRACE_NS = 5_000_000
"""The total time that one step waits for stores that read blocks it will overwrite: enough to copy a few blocks."""


class Stores(Protocol):
    """The stores of one rank. Every method is called on the thread that runs the model. `failed` is the reason why
    nothing can be stored any more; "" while it can."""

    @property
    def failed(self) -> str: ...

    def before(self, written: Collection[int]) -> None:
        """Called before a step writes these blocks: ends the stores that still read them."""

    def begin(self, order: StoreOrder, hashes: Sequence[BlockHash], client: Client) -> None:
        """Begins a store of blocks that the work enqueued so far fills; `hashes` is the chain up to its last block."""

    def begun(self) -> None:
        """All stores of this step have been begun."""

    def wait_ended(self, requests: Collection[str], deadline: Deadline) -> None:
        """Another engine continues these requests: waits for their stores, if this thread may wait."""

    def wait_idle(self, deadline: Deadline) -> bool:
        """Waits until all that is under way has ended. Returns whether it has."""
        ...

    def settle(self, held: Mapping[str, int], report: StepReport) -> None:
        """Adds to the report what has ended. Blocks of a request in `held` are kept until a time of the monotonic
        clock, in nanoseconds."""

    def reads(self, request: str) -> bool:
        """Whether blocks of that request are still read."""
        ...

    def progressed(self) -> Collection[str]:
        """Returns the requests that had blocks read since the last call, and have more blocks still to be read."""
        ...

    def close(self) -> None:
        """Cancels everything. No block is read any more; `settle` may be called once more."""


class _Store:
    """One store order whose transfer has started."""

    def __init__(self, order: StoreOrder, transfer: Transfer[Stored]) -> None:
        self.order = order
        self.transfer = transfer
        self.told_drained = False
        self.dropped = False


class InPlaceStores:
    """Stores that read the engine's blocks where they lie. `memory` names blocks as the source of a call."""

    def __init__(self, memory: Callable[[BlockIds], Any], store_ms: int) -> None:
        self.failed = ""
        self._memory = memory
        self._store_ms = store_ms
        self._stores: list[_Store] = []
        self._refused: list[tuple[StoreOrder, str]] = []

    def before(self, written: Collection[int]) -> None:
        """As Stores. Waits for the grace time at most."""
        blocks = set(written)
        until = time.monotonic_ns() + _GRACE_NS
        for store in self._stores:
            mine = (block for of_group in store.order.source for block in of_group)
            if store.transfer.source_free() or blocks.isdisjoint(mine):
                continue
            while not store.transfer.source_free() and time.monotonic_ns() < until:
                time.sleep(0.0002)
            if not store.transfer.source_free():
                store.transfer.cancel()
                store.dropped = True

    def begin(self, order: StoreOrder, hashes: Sequence[BlockHash], client: Client) -> None:
        """As Stores."""
        try:
            transfer = begin_store(client, order, hashes, self._memory(order.source), self._store_ms)
        except KVClusterError as error:
            self._refused.append((order, str(error)))
            return
        self._stores.append(_Store(order, transfer))

    def begun(self) -> None:
        """As Stores: they read as soon as they have begun."""

    def wait_ended(self, requests: Collection[str], deadline: Deadline) -> None:
        """As Stores."""
        for store in self._stores:
            if store.order.request in requests:
                store.transfer.wait_ended(deadline)

    def wait_idle(self, deadline: Deadline) -> bool:
        """As Stores."""
        return all(store.transfer.wait_ended(deadline) for store in self._stores)

    def settle(self, held: Mapping[str, int], report: StepReport) -> None:
        """As Stores."""
        for order, why in self._refused:
            report.refused(order, why)
        self._refused.clear()
        now = time.monotonic_ns()
        running: list[_Store] = []
        for store in self._stores:
            if store.transfer.source_free():
                self._tell_drained(store, report)
            elif held.get(store.order.request, now) < now:
                store.transfer.cancel()
                store.dropped = True
            if store.transfer.done():
                self._tell_drained(store, report)
                count_store(store.transfer, report, dropped=store.dropped)
            else:
                running.append(store)
        self._stores = running

    def reads(self, request: str) -> bool:
        """As Stores."""
        return any(s.order.request == request and not s.transfer.source_free() and not s.dropped for s in self._stores)

    def progressed(self) -> Collection[str]:
        """As Stores. Always empty: a store reads all its blocks as soon as it can."""
        return ()

    def close(self) -> None:
        """As Stores."""
        for store in self._stores:
            store.transfer.cancel()

    def _tell_drained(self, store: _Store, report: StepReport) -> None:
        if not store.told_drained:
            store.told_drained = True
            report.drained[store.order.number] += 1


def begin_store(
    client: Client, order: StoreOrder, hashes: Sequence[BlockHash], source: Any, store_ms: int
) -> Transfer[Stored]:
    """Begins to store the blocks of an order, of which the last is the last of `hashes`. Raises KVClusterError."""
    return client.begin_store(
        hashes,
        source,
        first=order.first,
        loss=order.loss,
        token_ids=order.tokens,
        adapter=order.adapter,
        deadline_ms=store_ms,
    )


def count_store(transfer: Transfer[Stored], report: StepReport, *, dropped: bool) -> None:
    """Adds a store that has ended to a report. `dropped`: it was cancelled for the sake of its blocks' new owner."""
    try:
        stored = transfer.result(0)
    except KVClusterError as error:
        report.store_misses[str(error)] += 1
        return
    report.stored += stored.blocks
    report.store_bytes += stored.nbytes
    if dropped:
        report.dropped += 1
    elif stored.miss is not None:
        report.store_misses[stored.miss.reason.value] += 1
