"""Runs a copy batch on a device, in chunks of records; each chunk has one slot of staging.

A slot begins with the table of the moves (moves.py); the records follow it as they arrive. In the device's memory a
slot has as much room again, for decoded records and, behind them, scratch memory.

Only kernels touch a block, and only after the event at which the caller made the call. Two chunks are under way at
once, so that the CPU works on one while the device works on the other. `run` returns when the device has finished
everything; a record becomes DONE, and a slot is given back, only when the device has finished it. After a cancel no
further chunk begins.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from kvcluster.copies.batch import BadBatch, CopyBatch, CopyStatus, encoded_layer_bytes
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.device.capture import GATE
from kvcluster.device.device import DeviceFailed, Event, Stream
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.kernels import Decode
from kvcluster.device.moves import Known, Moves, StagedRecord, aligned, columns_bytes, moves, record_bytes
from kvcluster.device.staging import DeviceStaging, Slot, wait_done
from kvcluster.device.verification import constant_bytes, row_bytes, scratch_bytes
from kvcluster.memory import codec

_UNDER_WAY = 2
_WAIT_S = 0.1
"""How often a batch that waits for a slot checks whether it has been cancelled."""


class Place(NamedTuple):
    """Where a record lies in a slot: `arrived_at`, as it arrives, and `raw`, decoded in the device's memory; both are
    the same if it arrives raw."""

    record: int
    arrived_at: int
    raw: int


@dataclass(slots=True, eq=False)
class Chunk:
    """Records that pass through one slot, from `first` to `stop`, behind room for the table of their moves. `scratch`:
    where scratch memory begins in the device's memory. `event`: recorded after all work of the device on the chunk.
    `verdicts`: where in the slot a load that the device verifies has its verdicts."""

    slot: Slot
    places: list[Place]
    first: int
    stop: int
    scratch: int
    event: Event | None = None
    verdicts: int = 0


class Sizes:
    """How many bytes of a slot the records of a batch take. Raises BadBatch if a record does not have the length that
    its codec implies: a kernel would read beyond it."""

    def __init__(self, batch: CopyBatch, *, summed: bool = False) -> None:
        """`summed`: the device verifies them, which takes more of the table."""
        records, items = batch.records, batch.items
        self.arrived_bytes: list[int] = []
        self.decoded: list[int] = []
        self.scratch: list[int] = []
        of_layer: dict[tuple[int, int, int], tuple[int, int]] = {}
        for item, count, nbytes, which in zip(
            records.items, records.counts, records.nbytes, records.codecs, strict=True
        ):
            heads = items.head_stops[item] - items.head_starts[item]
            kind = items.groups[item], heads, which
            if kind not in of_layer:
                geometry = items.geometry(item)
                raw, coded = (encoded_layer_bytes(geometry, each, heads) for each in (codec.RAW, which))
                of_layer[kind] = raw, coded
            raw, coded = of_layer[kind]
            if nbytes != count * coded:
                raise BadBatch(f"a record of {count} layers has {nbytes} bytes; expected {count * coded}")
            self.arrived_bytes.append(aligned(nbytes))
            self.decoded.append(0 if which == codec.RAW else aligned(count * raw))
            self.scratch.append(scratch_bytes(count, coded) if summed else 0)
        geometries = batch.items.geometries
        self.columns = [aligned(columns_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Bytes of the table for each geometry."""
        self.entry = [aligned(record_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Bytes of the table for one record of each geometry."""
        self.fixed = aligned(constant_bytes()) if summed else 0
        """Bytes of the table for each chunk."""
        self.rows = [aligned(row_bytes(count)) if summed else 0 for count in records.counts]
        """Bytes of the table for each record, in addition to `entry`."""
        tables = self.fixed + max(self.columns, default=0) + max(self.entry, default=0) + max(self.rows, default=0)
        self.most = max(map(max, self.arrived_bytes, map(add, self.decoded, self.scratch)), default=0) + tables
        """Bytes of a slot that the largest record takes in a chunk of its own."""


class BatchRun(ABC):
    """The run of one batch. A subclass defines the work on a chunk, which it enqueues on `stream`, or on another stream
    for which `stream` then waits."""

    def __init__(
        self,
        batch: CopyBatch,
        blocks: DeviceMemory,
        staging: DeviceStaging,
        sizes: Sizes,
        stream: Stream,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        """`chunk_bytes`: the most of a slot that a chunk uses, unless one record needs more; None for all of it."""
        self.batch = batch
        self.device = staging.device
        self.staging = staging
        self.stream = stream
        self._blocks = blocks
        self._sizes = sizes
        self._known: Known = {}
        self._room = min(staging.slot_bytes, max(sizes.most, chunk_bytes or staging.slot_bytes))

    @abstractmethod
    def fill(self, chunk: Chunk) -> Callable[[], None] | None:
        """Writes what the device needs into the slot. Removes records from the chunk that are stopped or in error, and
        sets their status. Returns a function that enqueues the device's work; None if there is none."""

    @abstractmethod
    def take_over(self, chunk: Chunk) -> None:
        """Called when the device has finished its work: does the rest on the CPU. Removes records from the chunk that
        are not DONE, and sets their status."""

    def run(self, start: int, stop: int) -> None:
        """As RunRecords."""
        under_way: deque[Chunk] = deque()
        try:
            if self._blocks.after is not None and self._is_open():
                self.device.wait(self.stream, self._blocks.after)
            for records, table in self._chunks(start, stop):
                slot = self._slot(under_way)
                if slot is None:
                    break
                self._begin(slot, records, table, under_way)
                if len(under_way) == _UNDER_WAY:
                    self._end(under_way.popleft())
            while under_way:
                self._end(under_way.popleft())
        finally:
            for chunk in under_way:  # after an error
                self._wait(chunk)
                self.staging.give_back(chunk.slot)
        self._stop(range(start, stop))

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[list[int], int]]:
        """Yields the pending records, as many at a time as a slot has room for, and the bytes to leave for their
        table."""
        sizes, room = self._sizes, self._room
        chunk: list[int] = []
        groups: set[int] = set()
        table, arrived, behind = sizes.fixed, 0, 0
        for at in range(start, stop):
            if self.batch.status[at] != CopyStatus.PENDING:
                continue
            group = self.batch.items.groups[self.batch.records.items[at]]
            own = sizes.entry[group] + sizes.rows[at]
            entry = own + (0 if group in groups else sizes.columns[group])
            needs = sizes.decoded[at] + sizes.scratch[at]
            if chunk and (table + entry + arrived + sizes.arrived_bytes[at] > room or behind + needs > room):
                yield chunk, table
                chunk, groups, table, arrived, behind = [], set(), sizes.fixed, 0, 0
                entry = own + sizes.columns[group]
            chunk.append(at)
            groups.add(group)
            table, arrived, behind = table + entry, arrived + sizes.arrived_bytes[at], behind + needs
        if chunk:
            yield chunk, table

    def _slot(self, under_way: deque[Chunk]) -> Slot | None:
        """Returns a slot; None if the batch is stopped meanwhile. While this run waits for one, it holds none
        itself."""
        while self._is_open():
            slot = self.staging.take(wait_s=0 if under_way else _WAIT_S)
            if slot is not None:
                return slot
            if under_way:
                self._end(under_way.popleft())
        return None

    def _is_open(self) -> bool:
        """Waits while a graph is captured. Returns False if the batch is stopped."""
        while not self._all_stopped():
            if GATE.wait(_WAIT_S):
                return True
        return False

    def _begin(self, slot: Slot, records: Sequence[int], table: int, under_way: deque[Chunk]) -> None:
        """Begins a chunk of these records, behind `table` bytes for their table, and adds it to `under_way`."""
        places, arrived, raw = [], table, self.staging.slot_bytes
        for number in records:
            is_raw = self.batch.records.codecs[number] == codec.RAW
            places.append(Place(number, arrived, arrived if is_raw else raw))
            arrived, raw = arrived + self._sizes.arrived_bytes[number], raw + self._sizes.decoded[number]
        chunk = Chunk(slot, places, table, arrived, raw)
        try:
            enqueue = self.fill(chunk)
        except BaseException:
            self.staging.give_back(slot)
            raise
        under_way.append(chunk)
        if enqueue is not None:
            try:
                self._enqueued(chunk, enqueue)
            except DeviceFailed:
                under_way.pop()  # the slot is the failed device's
                raise

    def _enqueued(self, chunk: Chunk, enqueue: Callable[[], None]) -> None:
        """Enqueues the work with a chunk. Raises DeviceFailed."""
        with self.device.together():
            try:
                enqueue()
            finally:  # after what has been enqueued, even if the rest could not be
                chunk.event = self.device.record(self.stream)

    def _end(self, chunk: Chunk) -> None:
        """Waits until the device has finished a chunk, and completes it on the CPU."""
        self._wait(chunk)
        try:
            self.take_over(chunk)
        finally:
            self.staging.give_back(chunk.slot)
        for place in chunk.places:
            self.batch.status[place.record] = CopyStatus.DONE

    def _wait(self, chunk: Chunk) -> None:
        """Waits until no work with this chunk is under way. Raises DeviceFailed."""
        if chunk.event is not None:
            wait_done(self.device, chunk.event)

    # ----------------------------------------------------------------------------------------- for subclasses

    def moves(self, chunk: Chunk) -> tuple[Moves, list[StagedRecord]]:
        """Returns the moves of a chunk's records, and how they lie in staging."""
        memory = chunk.slot.memory.range
        records = [self._staged(memory.address + place.raw, place.record) for place in chunk.places]
        return moves(records, self._known), records

    def decodes(self, chunk: Chunk) -> Iterator[Decode]:
        """Yields the kernels that decode records which arrived encoded: one for adjacent records of the same kind."""
        records, items, memory = self.batch.records, self.batch.items, chunk.slot.memory.range
        last: Decode | None = None
        for number, arrived, raw in chunk.places:
            if arrived == raw:
                continue
            item, count = records.items[number], records.counts[number]
            geometry, heads = items.geometry(item), items.head_stops[item] - items.head_starts[item]
            raw_bytes = count * heads * geometry.head_bytes
            one = Decode(
                Codec(records.codecs[number]),
                geometry.group,
                geometry.block_tokens,
                heads,
                count,
                memory.piece(arrived, records.nbytes[number]),
                memory.piece(raw, raw_bytes),
            )
            together = None if last is None else last.followed_by(one)
            if last is not None and together is None:
                yield last
            last = together or one
        if last is not None:
            yield last

    def stopped(self, number: int) -> bool:
        """Whether a record must not be begun any more."""
        return self.batch.is_stopped(number, time.monotonic_ns())

    def _staged(self, address: int, number: int) -> StagedRecord:
        records, items = self.batch.records, self.batch.items
        item = records.items[number]
        first = items.layer_starts[item] + records.layers[number]
        part = Part(first, first + records.counts[number], items.head_starts[item], items.head_stops[item])
        fills = part._replace(head_start=items.fill_starts[item], head_stop=items.fill_stops[item])
        return StagedRecord(address, part, fills, items.geometry(item), items.blocks[item])

    def _all_stopped(self) -> bool:
        return bool(self.batch.cancel[0]) or time.monotonic_ns() >= self.batch.deadline_ns

    def _stop(self, records: range) -> None:
        """Sets the status of the records that are still pending to STOPPED."""
        for number in records:
            if self.batch.status[number] == CopyStatus.PENDING:
                self.batch.status[number] = CopyStatus.STOPPED
