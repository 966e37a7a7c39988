"""Stores of one rank whose KV lies in the memory of a GPU: they read snapshots, and never the engine's blocks.

`begun`, on the model's thread, enqueues a snapshot of each block behind the work that fills it (device/snapshots.py);
then the engine may do with the block what it likes. A thread of ours waits until the pages have arrived in pinned
memory, and stores them. Blocks that find no slot free wait, in the order of their chains, while their request owns them
or the engine keeps them for it: as slots become free, our thread takes snapshots of them beside the engine's work.
Before a step writes one of them, that block and those behind it in its order are dropped; if a step writes a block
whose snapshot is being taken beside it, the step's stream waits for the snapshot. The model's thread never waits for
the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import MissReason
from kvcluster.device.device import DeviceFailed, Event, NoMemory
from kvcluster.device.snapshots import Snapshot, Snapshots
from kvcluster.engines.texts import error_text
from kvcluster.engines.vllm.step_metadata import StepReport, StoreOrder
from kvcluster.engines.vllm.stores import begin_store, count_store
from kvcluster.errors import KVClusterError
from kvcluster.transfers.layouts import Buffers
from kvcluster.transfers.transfer import Stored, Transfer
from kvcluster.transport.base import Deadline
from kvcluster.transport.thread_start import start_thread

_LOG = logging.getLogger(__name__)

_PAUSE_S = 0.0005
"""Between two looks at snapshots and stores under way."""

_AT_ONCE = 1
"""Stores under way: blocks of one chain that arrive meanwhile are stored together. A client carries out one store after
another, and the fixed work for a store takes as long as copying some 10 MiB."""

_AGAIN_S = 10.0
"""From a refusal of memory to the next try."""

_CLOSE_S = 5.0
"""The longest that `close` waits for a device that no longer answers."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """An order, of which blocks `next` to `stop` are still to be taken, counted in the order. They are filled behind
    the event `filled`; None if only the model's thread can determine that yet."""

    order: StoreOrder
    hashes: Sequence[BlockHash]
    client: Client
    stop: int
    next: int = 0
    filled: Event | None = None

    @property
    def left(self) -> bool:
        return self.next < self.stop

    @property
    def groups(self) -> list[bool]:
        """Of which groups it stores blocks."""
        return [bool(of_group) for of_group in self.order.source]


class _Piece(NamedTuple):
    """Blocks `first` to `stop` of an order, from block `at` of a snapshot on."""

    of: _Waiting
    first: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """Behind its last block in the snapshot."""
        return self.at + self.stop - self.first

    @property
    def block(self) -> int:
        """Its first block, counted in the chain."""
        return self.of.order.first + self.first

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of these blocks, if the cluster wants them."""
        order = self.of.order
        step = len(order.tokens) // order.blocks
        return order.tokens[self.first * step : self.stop * step]

    def continues(self, before: _Piece) -> bool:
        """Whether one store can take both: these are the next blocks of the same chain."""
        mine, other, at = self.of, before.of, self.block
        return (
            at == before.block + before.stop - before.first
            and mine.hashes[at - 1] == other.hashes[at - 1]
            and (mine.order.adapter, mine.order.loss) == (other.order.adapter, other.order.loss)
            and mine.client is other.client
            and mine.groups == other.groups
        )


class _UnderWay:
    """A snapshot of these pieces. `left`: how many of them are still to be stored."""

    def __init__(self, snapshot: Snapshot, pieces: Sequence[_Piece]) -> None:
        self.snapshot = snapshot
        self.pieces = pieces
        self.left = len(pieces)


class _PagesStore(NamedTuple):
    """A store under way, and the snapshots that it reads."""

    transfer: Transfer[Stored]
    reads: Sequence[_UnderWay]


class SnapshotStores:
    """Stores by snapshots. The first one starts the thread, which allocates the staging: before that nothing is asked
    of the device. `groups` are those that the snapshots are of: a pipeline rank may have no layer of the others.
    `beside`: the engine writes no block before a call of `before` that names it, so that snapshots may be taken beside
    its work."""

    def __init__(self, snapshots: Snapshots, store_ms: int, *, groups: Sequence[int], beside: bool) -> None:
        self._may_beside = beside
        self._snapshots = snapshots
        self._groups = tuple(groups)
        self._store_ms = store_ms
        self._lock = threading.Lock()
        """Guards the fields down to `_taken`, which both threads change. The thread that takes snapshots holds it: ours
        for one snapshot at a time, so that the model's thread waits no longer than that."""
        self._waiting: list[_Waiting] = []
        self._beside: list[tuple[set[int], Event]] = []  # blocks that are read beside the engine's work, until when
        self._went_on: set[str] = set()
        self._report = StepReport()
        self._taken = 0
        self._given_back = 0
        self._new: SimpleQueue[_UnderWay | None] = SimpleQueue()
        # Of our thread. `_ending`: it has taken over all that was enqueued before `close`.
        self._ending = False
        self._under_way: list[_UnderWay] = []
        self._arrived: list[tuple[_UnderWay, _Piece]] = []
        self._stores: list[_PagesStore] = []
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._refused = ""
        self.failed = ""
        self._refused_at = 0.0

    # ------------------------------------------------------------------------------------- the model's thread

    def before(self, written: Collection[int]) -> None:
        """As Stores."""
        if not self._waiting and not self._beside:
            return
        blocks = set(written)
        with self._lock:
            for one in self._waiting:
                rest = range(one.next, one.stop)
                lost = next((at for at in rest if any(of[at] in blocks for of in one.order.source if of)), None)
                if lost is not None:
                    self._drop(one, lost)
            # Where nothing may be taken beside: a step that computes nothing does not come to `begun`.
            self._try(partial(self._keep_behind, blocks) if self._may_beside else self._take)

    def _keep_behind(self, blocks: set[int]) -> None:
        """Makes the engine's work from now on wait for snapshots of these blocks that are being taken beside it."""
        read = [event for of_one, event in self._beside if not blocks.isdisjoint(of_one)]
        if read:  # all are taken on one stream: the last is behind the others
            device = self._snapshots.device
            device.wait(device.current(), read[-1])

    def begin(self, order: StoreOrder, hashes: Sequence[BlockHash], client: Client) -> None:
        """As Stores."""
        with self._lock:
            if self.failed:
                self._report.refused(order, self.failed)
            elif self._thread is None and not self._start():
                self._report.refused(order, self._refused)
            else:
                self._waiting.append(_Waiting(order, hashes, client, order.blocks))

    def begun(self) -> None:
        """As Stores: enqueues what there is room for, and sets from when on the rest may be taken beside the engine's
        work."""
        if self._waiting:
            with self._lock:
                self._try(self._take)

    def _take(self) -> None:
        """Enqueues snapshots of what waits. If our thread has not caught up, leaves all to it, so that the order is
        kept."""
        behind = any(one.filled is not None for one in self._waiting)
        while not behind and self._ready.is_set() and self._take_one(self._waiting, self._snapshots.take):
            """There may be room for another."""
        new = [one for one in self._waiting if one.left and one.filled is None]
        if new and self._may_beside:
            device = self._snapshots.device
            filled = device.record(device.current())
            for one in new:
                one.filled = filled

    def wait_ended(self, requests: Collection[str], deadline: Deadline) -> None:
        """As Stores. The engine that continues waits for the blocks itself."""

    def wait_idle(self, deadline: Deadline) -> bool:
        """As Stores. Blocks that wait for a slot are under way if our thread may take them."""
        while self._is_under_way() and deadline.remaining_s():
            time.sleep(_PAUSE_S)
        return not self._is_under_way()

    def _is_under_way(self) -> bool:
        waits = self._may_beside and bool(self._waiting) and self._thread is not None
        return not self.failed and (self._taken > self._given_back or waits)

    def settle(self, held: Mapping[str, int], report: StepReport) -> None:
        """As Stores."""
        now = time.monotonic_ns()
        with self._lock:
            for one in self._waiting:
                if held.get(one.order.request, now) < now:
                    self._drop(one, one.next)
            self._forget_ended()
            report.add_stores(self._report)
            self._report = StepReport()

    def reads(self, request: str) -> bool:
        """As Stores."""
        with self._lock:
            return any(one.order.request == request and one.left for one in self._waiting)

    def progressed(self) -> Collection[str]:
        """As Stores."""
        with self._lock:
            progressed, self._went_on = self._went_on, set()
        return progressed

    def close(self) -> None:
        """As Stores. Waits for what was enqueued, which reads the engine's blocks."""
        with self._lock:
            for one in self._waiting:
                self._drop(one, one.next)
            self._forget_ended()
        self._new.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    # ------------------------------------------------------------------------------ either thread, under the lock

    def _try(self, take: Callable[[], bool | None]) -> bool:
        """Returns whether `take` has returned True; drops all that waits if the device has failed or there is no
        staging."""
        taken = False
        try:
            taken = not self.failed and bool(take())
        except DeviceFailed as error:
            self.failed = f"{MissReason.DEVICE_LOST.value}: {error}"
        if self.failed or (self._refused and not self._ready.is_set()):
            for one in self._waiting:
                one.stop = one.next
                self._report.store_misses[self.failed or self._refused] += 1
        self._forget_ended()
        return taken

    def _take_one(self, waiting: Sequence[_Waiting], take: Callable[[list[list[int]]], Snapshot | None]) -> bool:
        """Enqueues one snapshot of these. Returns False if nothing of them waits or no slot is free."""
        pieces: list[_Piece] = []
        blocks: list[list[int]] = [[] for _ in self._snapshots.starts]
        room = self._snapshots.most
        for one in waiting:
            if not room or (pieces and one.groups != pieces[0].of.groups):
                break
            first, stop = one.next, min(one.stop, one.next + room)
            if first < stop:
                pieces.append(_Piece(one, first, stop, self._snapshots.most - room))
                room -= stop - first
                for mine, group in zip(blocks, self._groups, strict=True):
                    mine += one.order.source[group][first:stop]
        snapshot = take(blocks) if pieces else None
        if snapshot is None:
            return False
        for one, _, stop, _ in pieces:
            one.next = stop
            self._went_on.add(one.order.request)
        self._taken += 1
        self._new.put(_UnderWay(snapshot, pieces))
        return True

    def _forget_ended(self) -> None:
        """Removes the orders of which no block waits, and reports that they no longer read blocks."""
        self._report.drained.update(one.order.number for one in self._waiting if not one.left)
        self._waiting = [one for one in self._waiting if one.left]

    def _drop(self, one: _Waiting, stop: int) -> None:
        """Drops the blocks of an order from `stop` on."""
        self._report.dropped += one.left
        one.stop = stop

    def _start(self) -> bool:
        """Starts the thread. Returns False if it was refused memory a short while ago, or cannot be started."""
        if self._refused and time.monotonic() < self._refused_at + _AGAIN_S:
            return False
        self._refused = ""
        thread = threading.Thread(target=self._run, name="kvcluster-snapshots", daemon=True)
        try:
            start_thread(thread)
        except KVClusterError as error:
            self._refused, self._refused_at = str(error), time.monotonic()
            return False
        self._thread = thread
        return True

    # ---------------------------------------------------------------------------------------------- our thread

    def _run(self) -> None:
        try:
            self._snapshots.open()
        except (NoMemory, DeviceFailed) as error:
            self._refused_at = time.monotonic()
            self._refused = f"no room for staging: {error}"
            _LOG.warning("KV on %s is not stored: %s", self._snapshots.device.name, self._refused)
            self._thread = None
            return
        self._ready.set()
        try:
            while not self._ending or self._under_way:
                self._collect()
                self._settle()
                self._advance()
                self._take_beside()
            self._snapshots.close()
        except DeviceFailed as error:  # its slots may be in use for ever
            self._fail(f"{MissReason.DEVICE_LOST.value}: {error}")
        except Exception as error:  # a thread must not die silently
            self._fail(error_text(error))
            _LOG.exception("KV on %s is stored no more", self._snapshots.device.name)

    def _collect(self) -> None:
        """Takes over new snapshots, up to the end that `close` marks; waits for one, or for a while."""
        try:
            new = self._new.get(timeout=_PAUSE_S if self._under_way or self._waiting else None)
            while new is not None:
                self._under_way.append(new)
                new = self._new.get_nowait()
            self._ending = True
        except Empty:
            return

    def _take_beside(self) -> None:
        """Takes snapshots of what still waits, one at a time, so that the model's thread gets the lock between two."""
        while self._waiting:
            with self._lock:
                if not self._try(self._take_one_beside):
                    return

    def _take_one_beside(self) -> bool:
        """Takes one snapshot of blocks whose step has ended by now."""
        filled = next((one.filled for one in self._waiting), None)
        if filled is None or not self._snapshots.device.done(filled):
            return False
        return self._take_one([one for one in self._waiting if one.filled is filled], self._snapshot_beside)

    def _snapshot_beside(self, blocks: list[list[int]]) -> Snapshot | None:
        snapshot = self._snapshots.take_beside(blocks)
        if snapshot is not None:
            self._beside.append((set(chain.from_iterable(blocks)), snapshot.gathered))
        return snapshot

    def _settle(self) -> None:
        """Counts the stores that have ended, and frees the slots of which nothing is left to store."""
        if self._ending:
            for store in self._stores:
                store.transfer.cancel()
        for store in [one for one in self._stores if one.transfer.done()]:
            self._stores.remove(store)
            with self._lock:
                count_store(store.transfer, self._report, dropped=False)
            self._read(store.reads)

    def _read(self, snapshots: Sequence[_UnderWay]) -> None:
        """Records that one piece of each of these is no longer read."""
        for one in snapshots:
            one.left -= 1
            if not one.left:
                one.snapshot.release()
                self._under_way.remove(one)
                self._given_back += 1

    def _advance(self) -> None:
        """Begins stores of what has arrived, in the order in which it was taken."""
        for one in self._under_way:
            if one.snapshot.opened or not one.snapshot.done():
                continue
            one.snapshot.open()
            with self._lock:
                self._beside = [each for each in self._beside if each[1] is not one.snapshot.gathered]
            self._arrived += [(one, piece) for piece in one.pieces]
        if self._ending:
            arrived, self._arrived = self._arrived, []
            self._read([one for one, _ in arrived])
        while self._arrived and len(self._stores) < _AT_ONCE:
            self._begin(self._next())

    def _next(self) -> list[tuple[_UnderWay, _Piece]]:
        """Returns the first piece that has arrived, and those that continue it."""
        taken, rest = self._arrived[:1], list[tuple[_UnderWay, _Piece]]()
        for one in self._arrived[1:]:
            (taken if one[1].continues(taken[-1][1]) else rest).append(one)
        self._arrived = rest
        return taken

    def _begin(self, pieces: Sequence[tuple[_UnderWay, _Piece]]) -> None:
        """Begins one store of these pieces."""
        snapshots, first, last = [one for one, _ in pieces], pieces[0][1], pieces[-1][1]
        source: list[Buffers | None] = [None] * len(first.of.order.source)
        for at, group in enumerate(self._groups):
            if first.of.groups[group]:
                pages = [page for one, piece in pieces for page in one.snapshot.pages(at, piece.at, piece.end)]
                source[group] = Buffers(pages)
        tokens = tuple(chain.from_iterable(piece.tokens for _, piece in pieces))
        order = replace(first.of.order, first=first.block, tokens=tokens)
        hashes = last.of.hashes[: last.block + last.stop - last.first]
        try:
            transfer = begin_store(first.of.client, order, hashes, source, self._store_ms)
        except KVClusterError as error:
            with self._lock:
                self._report.store_misses[str(error)] += 1
            self._read(snapshots)
        else:
            self._stores.append(_PagesStore(transfer, snapshots))

    def _fail(self, why: str) -> None:
        self.failed = why
        for store in self._stores:
            store.transfer.cancel()
        with self._lock:
            self._report.store_misses[why] += sum(one.left for one in self._under_way)
