"""Runs of a copy batch over a device: in chunks of records, each with one slot of staging.

A slot has the table of the moves first (moves.py), and the records as they come behind it; in the device's memory it
has as much room again, for what is decoded and for scratch memory behind that.

A block is touched by kernels alone, behind the event at which the caller made the call. Two chunks are under way at
once, so that the CPU works at one while the device has the other. `run` returns when the device has done everything: a
record is DONE only then, and a slot is given back only then. After a cancel no chunk is begun.
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
"""Between two looks whether a batch that waits for a slot has been cancelled."""


class Place(NamedTuple):
    """Where a record lies in a slot: as it comes, and raw in the device's memory; the same if it comes raw."""

    record: int
    came: int
    raw: int


@dataclass(slots=True, eq=False)
class Chunk:
    """Records that pass through one slot, from `first` to `stop`, behind room for the table of their moves. `scratch`:
    where in the device's memory scratch memory begins. `event`: behind all work of the device. `verdicts`: where a load
    that the device verifies has them in the slot."""

    slot: Slot
    places: list[Place]
    first: int
    stop: int
    scratch: int
    event: Event | None = None
    verdicts: int = 0


class Sizes:
    """What the records of a batch take of a slot. Raises BadBatch if a record has another length than its codec says:
    a kernel would read beyond it."""

    def __init__(self, batch: CopyBatch, *, summed: bool = False) -> None:
        """`summed`: the device verifies them, for which the table has more."""
        records, items = batch.records, batch.items
        self.came: list[int] = []
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
            self.came.append(aligned(nbytes))
            self.decoded.append(0 if which == codec.RAW else aligned(count * raw))
            self.scratch.append(scratch_bytes(count, coded) if summed else 0)
        geometries = batch.items.geometries
        self.columns = [aligned(columns_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Of the table, for each geometry."""
        self.entry = [aligned(record_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Of the table, for each record of each geometry."""
        self.fixed = aligned(constant_bytes()) if summed else 0
        """Of the table, for each chunk."""
        self.rows = [aligned(row_bytes(count)) if summed else 0 for count in records.counts]
        """Of the table, for each record beside `entry`."""
        tables = self.fixed + max(self.columns, default=0) + max(self.entry, default=0) + max(self.rows, default=0)
        self.most = max(map(max, self.came, map(add, self.decoded, self.scratch)), default=0) + tables
        """What the largest record takes alone."""


class BatchRun(ABC):
    """The records of one batch. Who extends it says what is done with a chunk, on `stream`, or on another for which
    `stream` then waits."""

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
        """Writes what the device needs into the slot. Leaves in the chunk what is not stopped or in error, and sets the
        status of others. Returns what enqueues the device's work; None if it has none."""

    @abstractmethod
    def take_over(self, chunk: Chunk) -> None:
        """The device is done with its work: does the rest by the CPU. Leaves in the chunk what is DONE then, and sets
        the status of others."""

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
        table, came, behind = sizes.fixed, 0, 0
        for at in range(start, stop):
            if self.batch.status[at] != CopyStatus.PENDING:
                continue
            group = self.batch.items.groups[self.batch.records.items[at]]
            own = sizes.entry[group] + sizes.rows[at]
            entry = own + (0 if group in groups else sizes.columns[group])
            needs = sizes.decoded[at] + sizes.scratch[at]
            if chunk and (table + entry + came + sizes.came[at] > room or behind + needs > room):
                yield chunk, table
                chunk, groups, table, came, behind = [], set(), sizes.fixed, 0, 0
                entry = own + sizes.columns[group]
            chunk.append(at)
            groups.add(group)
            table, came, behind = table + entry, came + sizes.came[at], behind + needs
        if chunk:
            yield chunk, table

    def _slot(self, under_way: deque[Chunk]) -> Slot | None:
        """Returns a slot, for which this run waits holding none itself; None if the batch is stopped meanwhile."""
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
        """Has the device begin with these records, behind `table` bytes, as a chunk that is under way then."""
        places, came, raw = [], table, self.staging.slot_bytes
        for number in records:
            is_raw = self.batch.records.codecs[number] == codec.RAW
            places.append(Place(number, came, came if is_raw else raw))
            came, raw = came + self._sizes.came[number], raw + self._sizes.decoded[number]
        chunk = Chunk(slot, places, table, came, raw)
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
            finally:  # behind what has been enqueued, also if something could not be
                chunk.event = self.device.record(self.stream)

    def _end(self, chunk: Chunk) -> None:
        """Waits until the device is done with a chunk, and does the rest."""
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

    # ------------------------------------------------------------------------------------- for who extends it

    def moves(self, chunk: Chunk) -> tuple[Moves, list[StagedRecord]]:
        """Returns the moves of a chunk's records, and how they lie in staging."""
        memory = chunk.slot.memory.range
        records = [self._staged(memory.address + place.raw, place.record) for place in chunk.places]
        return moves(records, self._known), records

    def decodes(self, chunk: Chunk) -> Iterator[Decode]:
        """Yields what decodes the records that came encoded: one kernel for records of a kind that lie together."""
        records, items, memory = self.batch.records, self.batch.items, chunk.slot.memory.range
        last: Decode | None = None
        for number, came, raw in chunk.places:
            if came == raw:
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
                memory.piece(came, records.nbytes[number]),
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
        """What is still pending was stopped."""
        for number in records:
            if self.batch.status[number] == CopyStatus.PENDING:
                self.batch.status[number] = CopyStatus.STOPPED
