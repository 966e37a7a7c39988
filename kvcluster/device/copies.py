"""The executor of copy batches between pages in memory that the CPU addresses and blocks in a device's memory.

    load    pages --the CPU verifies and decodes--> pinned --copy--> staging --Scatter--> blocks
    store   blocks --Gather--> staging --copy--> pinned --the CPU copies and sums--> pages

A slot has the table of the moves first (moves.py), and the records behind it.

What the CPU reads or writes of a page is what it has verified or summed; a block is touched by kernels alone, behind
the event at which the caller made the call. A chunk of records has one slot of staging, and two chunks are under way at
once, so that the CPU works at one while the device has the other. `run` returns when the device has done everything: a
record is DONE only then, and a slot is given back only then. After a cancel no chunk is begun.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.device.capture import GATE
from kvcluster.device.device import Device, Event, Range
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import ALIGNED, RECORD_BYTES, StagedRecord, columns_bytes, moves
from kvcluster.device.staging import DeviceStaging, Slot
from kvcluster.pages import checksum, codec
from kvcluster.pages.copy_batch import CopyBatch, CopyDirection, CopyStatus, encoded_layer_bytes
from kvcluster.pages.copy_endpoints import CpuMemory, ForeignMemory, cpu_addresses
from kvcluster.pages.copy_executor import RunRecords
from kvcluster.pages.staging import Staging

_UNDER_WAY = 2
_PAUSE_S = 50e-6
"""Between two questions whether an event is done."""

_WAIT_S = 0.1
"""Between two looks whether a batch that waits for a slot has been cancelled."""


@dataclass(frozen=True, slots=True)
class DeviceMemory(ForeignMemory):
    """A device's memory, by address. What a batch does with it comes after the event `after`: all that the caller had
    enqueued, of which its blocks are made. None if the device could not say so any more, since it has failed."""

    device: Device
    after: Event | None


@dataclass(slots=True, eq=False)
class _Chunk:
    """Records that pass through one slot, and where in it each lies: from `first` to `stop`, behind room for their
    table. `event`: behind all work of the device."""

    slot: Slot
    records: Sequence[int]
    starts: Sequence[int]
    first: int
    stop: int
    event: Event | None = None


class DeviceCopies:
    """A CopyExecutor for one device. It opens a batch if one end is memory of that device and the CPU addresses the
    other, no record is larger than a slot, and a store has all of its pages."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        pages, blocks = batch.pages, batch.blocks
        if not isinstance(blocks, DeviceMemory) or blocks.device is not self._staging.device:
            return None
        if not cpu_addresses(pages):
            return None
        sizes = [_aligned(_raw_bytes(batch, at)) for at in range(len(batch.records))]
        tables = [_aligned(columns_bytes(geometry)) if geometry else 0 for geometry in batch.items.geometries]
        if max(sizes, default=0) + max(tables, default=0) + RECORD_BYTES > self._staging.slot_bytes:
            return None
        if batch.direction is CopyDirection.STORE and not _has_whole_pages(batch):
            return None
        return partial(_BatchRun(batch, pages, blocks, self._staging, sizes, tables).run)


class _BatchRun:
    """The records of one batch."""

    def __init__(
        self,
        batch: CopyBatch,
        pages: CpuMemory,
        blocks: DeviceMemory,
        staging: DeviceStaging,
        sizes: Sequence[int],
        tables: Sequence[int],
    ) -> None:
        self._batch = batch
        self._pages = pages
        self._blocks = blocks
        self._device = staging.device
        self._staging = staging
        self._sizes = sizes  # of records in a slot
        self._tables = tables  # of geometries
        self._room = Staging()
        self._loads = batch.direction is CopyDirection.LOAD
        self._stream = staging.loads if self._loads else staging.stores

    def run(self, start: int, stop: int) -> None:
        """As RunRecords."""
        under_way: deque[_Chunk] = deque()
        try:
            if self._blocks.after is not None and self._is_open():
                self._device.wait(self._stream, self._blocks.after)
            for records in self._chunks(start, stop):
                slot = self._slot(under_way)
                if slot is None:
                    break
                under_way.append(self._begun(slot, records))
                if len(under_way) == _UNDER_WAY:
                    self._end(under_way.popleft())
            while under_way:
                self._end(under_way.popleft())
        finally:
            for chunk in under_way:  # after an error
                self._wait(chunk)
                self._staging.give_back(chunk.slot)
        self._stop(range(start, stop))

    def _chunks(self, start: int, stop: int) -> Iterator[list[int]]:
        """Yields the pending records, as many at a time as a slot has room for."""
        chunk: list[int] = []
        groups: set[int] = set()
        room = self._staging.slot_bytes
        for at in range(start, stop):
            if self._batch.status[at] != CopyStatus.PENDING:
                continue
            group = self._group(at)
            own = self._sizes[at] + RECORD_BYTES
            if chunk and own + (group not in groups) * self._tables[group] > room:
                yield chunk
                chunk, groups, room = [], set(), self._staging.slot_bytes
            room -= own + (group not in groups) * self._tables[group]
            chunk.append(at)
            groups.add(group)
        if chunk:
            yield chunk

    def _slot(self, under_way: deque[_Chunk]) -> Slot | None:
        """Returns a slot, for which this run waits holding none itself; None if the batch is stopped meanwhile."""
        while self._is_open():
            slot = self._staging.take(wait_s=0 if under_way else _WAIT_S)
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

    def _begun(self, slot: Slot, records: Sequence[int]) -> _Chunk:
        """Has the device begin with these records: for a load, with those that the CPU finds sound."""
        groups = {self._group(number) for number in records}
        starts, first = [], len(records) * RECORD_BYTES + sum(self._tables[group] for group in groups)
        at = first
        for number in records:
            starts.append(at)
            at += self._sizes[number]
        chunk = _Chunk(slot, records, starts, first, at)
        try:
            if self._loads:
                chunk = self._verified(chunk)
            chunk = self._kept(chunk, [not self._stopped(number) for number in chunk.records])  # meanwhile, maybe
            kernel = self._kernel(chunk)
        except BaseException:
            self._staging.give_back(slot)
            raise
        if kernel.launches:  # some block has something of them
            self._enqueue(chunk, kernel)
        return chunk

    def _kernel(self, chunk: _Chunk) -> Scatter | Gather:
        """Returns what moves these records, and writes its table into the slot."""
        memory = chunk.slot.memory.range
        pairs = zip(chunk.records, chunk.starts, strict=True)
        records = [self._staged(memory.address + start, number) for number, start in pairs]
        table, launches = moves(records)
        with chunk.slot.pinned.opened(0, len(table), writes=True) as room:
            room[:] = table
        return (Scatter if self._loads else Gather)(Range(memory.address, len(table)), launches, records)

    def _enqueue(self, chunk: _Chunk, kernel: Scatter | Gather) -> None:
        device, stream = self._device, self._stream
        pinned, memory = chunk.slot.pinned.range, chunk.slot.memory.range
        brought = chunk.stop if self._loads else kernel.table.nbytes
        device.copy(_piece(memory, 0, brought), _piece(pinned, 0, brought), stream)
        device.launch(kernel, stream)
        if not self._loads:
            begins, nbytes = chunk.first, chunk.stop - chunk.first
            device.copy(_piece(pinned, begins, nbytes), _piece(memory, begins, nbytes), stream)
        chunk.event = device.record(stream)

    def _end(self, chunk: _Chunk) -> None:
        """Waits until the device is done with a chunk, and does the rest."""
        self._wait(chunk)
        try:
            if not self._loads and chunk.records:
                self._take_over(chunk)
        finally:
            self._staging.give_back(chunk.slot)
        for number in chunk.records:
            self._batch.status[number] = CopyStatus.DONE

    def _wait(self, chunk: _Chunk) -> None:
        """Waits until no work with this chunk is under way. Raises DeviceFailed."""
        while chunk.event is not None and not self._device.done(chunk.event):
            time.sleep(_PAUSE_S)

    # ------------------------------------------------------------------------------------------ by the CPU

    def _verified(self, chunk: _Chunk) -> _Chunk:
        """Brings records into the slot, raw. Returns the chunk with those that are sound; sets the status of others."""
        sound = []
        with chunk.slot.pinned.opened(0, chunk.stop, writes=True) as room:
            for number, start in zip(chunk.records, chunk.starts, strict=True):
                stopped = self._stopped(number)
                place = room[start : start + _raw_bytes(self._batch, number)]
                sound.append(not stopped and self._bring(number, place))
                if not stopped and not sound[-1]:
                    self._batch.status[number] = CopyStatus.MISMATCH
        return self._kept(chunk, sound)

    def _bring(self, number: int, room: memoryview) -> bool:
        """Copies or decodes a record. Returns whether it matches its sums."""
        batch, records = self._batch, self._batch.records
        layer, count, codec_id = records.layers[number], records.counts[number], records.codecs[number]
        data = self._pages.view(records.offsets[number], records.nbytes[number])
        into = room if codec_id == codec.RAW else self._room.room(data.nbytes)
        came = checksum.copy_sums(batch.identities[number], layer, count, into, data)
        if came != records.sums_of(number):
            return False
        if codec_id != codec.RAW:
            item = records.items[number]
            geometry, heads = batch.items.geometry(item), batch.items.head_stops[item] - batch.items.head_starts[item]
            coder = codec.coder(Codec(codec_id), geometry.group, block_tokens=geometry.block_tokens, heads=heads)
            coder.decode(into, room, count)
        return True

    def _take_over(self, chunk: _Chunk) -> None:
        """Copies what has arrived in the slot into the pages, and sums what it has written."""
        records, identities = self._batch.records, self._batch.identities
        with chunk.slot.pinned.opened(chunk.first, chunk.stop, writes=False) as room:
            for number, start in zip(chunk.records, chunk.starts, strict=True):
                into = self._pages.view(records.offsets[number], records.nbytes[number])
                data, layer = room[start - chunk.first :][: into.nbytes], records.layers[number]
                records.set_sums(
                    number, checksum.copy_sums(identities[number], layer, records.counts[number], into, data)
                )

    # ----------------------------------------------------------------------------------------------- records

    def _group(self, number: int) -> int:
        return self._batch.items.groups[self._batch.records.items[number]]

    def _staged(self, address: int, number: int) -> StagedRecord:
        records, items = self._batch.records, self._batch.items
        item = records.items[number]
        first = items.layer_starts[item] + records.layers[number]
        part = Part(first, first + records.counts[number], items.head_starts[item], items.head_stops[item])
        fills = part._replace(head_start=items.fill_starts[item], head_stop=items.fill_stops[item])
        return StagedRecord(address, part, fills, items.geometry(item), items.blocks[item])

    def _stopped(self, number: int) -> bool:
        return self._batch.is_stopped(number, time.monotonic_ns())

    def _all_stopped(self) -> bool:
        return bool(self._batch.cancel[0]) or time.monotonic_ns() >= self._batch.deadline_ns

    def _stop(self, records: range) -> None:
        """What is still pending was stopped."""
        for number in records:
            if self._batch.status[number] == CopyStatus.PENDING:
                self._batch.status[number] = CopyStatus.STOPPED

    @staticmethod
    def _kept(chunk: _Chunk, wanted: Sequence[bool]) -> _Chunk:
        """Returns the chunk with these of its records."""
        pairs = [pair for pair, keep in zip(zip(chunk.records, chunk.starts, strict=True), wanted, strict=True) if keep]
        return replace(chunk, records=[number for number, _ in pairs], starts=[start for _, start in pairs])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _piece(memory: Range, start: int, nbytes: int) -> Range:
    return Range(memory.address + start, nbytes)


def _raw_bytes(batch: CopyBatch, number: int) -> int:
    """Returns the bytes of a record, decoded."""
    records, items = batch.records, batch.items
    item = records.items[number]
    heads = items.head_stops[item] - items.head_starts[item]
    return records.counts[number] * encoded_layer_bytes(items.geometry(item), codec.RAW, heads)


def _has_whole_pages(batch: CopyBatch) -> bool:
    """Whether the memory has every layer and head of every page."""
    items = batch.items
    return all(
        items.geometry(item).part.intersect(part) == part
        for item, part in enumerate(
            map(Part, items.layer_starts, items.layer_stops, items.head_starts, items.head_stops)
        )
    )
