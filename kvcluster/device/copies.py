"""The executor of copy batches between pages in memory that the CPU addresses and blocks in a device's memory.

    load    pages --the CPU copies and verifies--> pinned --copy--> staging (--Decode--> staging) --Scatter--> blocks
    store   blocks --Gather--> staging --copy--> pinned --the CPU copies and sums--> pages

A slot has the table of the moves first (moves.py), the records as they come behind it, and in the device's memory as
much room again for what is decoded.

What the CPU reads or writes of a page is what it has verified or summed; a block is touched by kernels alone, behind
the event at which the caller made the call. A chunk of records has one slot of staging, and two chunks are under way at
once, so that the CPU works at one while the device has the other. `run` returns when the device has done everything: a
record is DONE only then, and a slot is given back only then. After a cancel no chunk is begun.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.device.capture import GATE
from kvcluster.device.device import Device, Event, Range
from kvcluster.device.kernels import Decode, Gather, Scatter
from kvcluster.device.moves import StagedRecord, aligned, columns_bytes, moves, record_bytes
from kvcluster.device.staging import DeviceStaging, Slot, wait_done
from kvcluster.pages import checksum, codec
from kvcluster.pages.copy_batch import BadBatch, CopyBatch, CopyDirection, CopyStatus, encoded_layer_bytes
from kvcluster.pages.copy_endpoints import CpuMemory, ForeignMemory, cpu_addresses
from kvcluster.pages.copy_executor import RunRecords

_UNDER_WAY = 2
_WAIT_S = 0.1
"""Between two looks whether a batch that waits for a slot has been cancelled."""


@dataclass(frozen=True, slots=True)
class DeviceMemory(ForeignMemory):
    """A device's memory, by address. What a batch does with it comes after the event `after`: all that the caller had
    enqueued, of which its blocks are made. None if the device could not say so any more, since it has failed."""

    device: Device
    after: Event | None


class _Place(NamedTuple):
    """Where a record lies in a slot: as it comes, and raw in the device's memory; the same if it comes raw."""

    record: int
    came: int
    raw: int


@dataclass(slots=True, eq=False)
class _Chunk:
    """Records that pass through one slot, from `first` to `stop`, behind room for the table of their moves. `event`:
    behind all work of the device."""

    slot: Slot
    places: list[_Place]
    first: int
    stop: int
    event: Event | None = None


class DeviceCopies:
    """A CopyExecutor for one device. It opens a batch if one end is memory of that device and the CPU addresses the
    other, no record is larger than a slot, and a store has all of its pages and leaves them raw."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        pages, blocks = batch.pages, batch.blocks
        if not isinstance(blocks, DeviceMemory) or blocks.device is not self._staging.device:
            return None
        if not cpu_addresses(pages):
            return None
        if batch.direction is CopyDirection.STORE and not (_has_whole_pages(batch) and _is_raw(batch)):
            return None
        sizes = _Sizes(batch)
        if sizes.most > self._staging.slot_bytes:
            return None
        return partial(_BatchRun(batch, pages, blocks, self._staging, sizes).run)


class _Sizes:
    """What the records of a batch take of a slot. Raises BadBatch if a record has another length than its codec says:
    a kernel would read beyond it."""

    def __init__(self, batch: CopyBatch) -> None:
        records, items = batch.records, batch.items
        self.came: list[int] = []
        self.raw: list[int] = []
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
            self.raw.append(aligned(count * raw))
        geometries = batch.items.geometries
        self.columns = [aligned(columns_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Of the table, for each geometry."""
        self.entry = [aligned(record_bytes(geometry)) if geometry else 0 for geometry in geometries]
        """Of the table, for each record of each geometry."""
        tables = max(self.columns, default=0) + max(self.entry, default=0)
        self.most = max(map(max, self.came, self.raw), default=0) + tables
        """What the largest record takes alone."""


class _BatchRun:
    """The records of one batch."""

    def __init__(
        self, batch: CopyBatch, pages: CpuMemory, blocks: DeviceMemory, staging: DeviceStaging, sizes: _Sizes
    ) -> None:
        self._batch = batch
        self._pages = pages
        self._blocks = blocks
        self._device = staging.device
        self._staging = staging
        self._sizes = sizes
        self._loads = batch.direction is CopyDirection.LOAD
        self._stream = staging.loads if self._loads else staging.stores

    def run(self, start: int, stop: int) -> None:
        """As RunRecords."""
        under_way: deque[_Chunk] = deque()
        try:
            if self._blocks.after is not None and self._is_open():
                self._device.wait(self._stream, self._blocks.after)
            for records, table in self._chunks(start, stop):
                slot = self._slot(under_way)
                if slot is None:
                    break
                under_way.append(self._begun(slot, records, table))
                if len(under_way) == _UNDER_WAY:
                    self._end(under_way.popleft())
            while under_way:
                self._end(under_way.popleft())
        finally:
            for chunk in under_way:  # after an error
                self._wait(chunk)
                self._staging.give_back(chunk.slot)
        self._stop(range(start, stop))

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[list[int], int]]:
        """Yields the pending records, as many at a time as a slot has room for, and the bytes to leave for their
        table."""
        sizes, room = self._sizes, self._staging.slot_bytes
        chunk: list[int] = []
        groups: set[int] = set()
        table = came = raw = 0
        for at in range(start, stop):
            if self._batch.status[at] != CopyStatus.PENDING:
                continue
            group = self._batch.items.groups[self._batch.records.items[at]]
            entry = sizes.entry[group] + (0 if group in groups else sizes.columns[group])
            if chunk and (table + entry + came + sizes.came[at] > room or raw + sizes.raw[at] > room):
                yield chunk, table
                chunk, groups, table, came, raw = [], set(), 0, 0, 0
                entry = sizes.entry[group] + sizes.columns[group]
            chunk.append(at)
            groups.add(group)
            table, came, raw = table + entry, came + sizes.came[at], raw + sizes.raw[at]
        if chunk:
            yield chunk, table

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

    def _begun(self, slot: Slot, records: Sequence[int], table: int) -> _Chunk:
        """Has the device begin with these records, behind `table` bytes: for a load, with those that the CPU finds
        sound."""
        places, came, raw = [], table, self._staging.slot_bytes
        for number in records:
            is_raw = self._batch.records.codecs[number] == codec.RAW
            places.append(_Place(number, came, came if is_raw else raw))
            came, raw = came + self._sizes.came[number], raw + (0 if is_raw else self._sizes.raw[number])
        chunk = _Chunk(slot, places, table, came)
        try:
            if self._loads:
                self._verify(chunk)
            chunk.places = [place for place in chunk.places if not self._stopped(place.record)]  # meanwhile, maybe
            move = self._move(chunk)
        except BaseException:
            self._staging.give_back(slot)
            raise
        if move.launches:  # some block has something of them
            self._enqueue(chunk, move)
        return chunk

    def _move(self, chunk: _Chunk) -> Scatter | Gather:
        """Returns what moves these records, and writes its table into the slot."""
        memory = chunk.slot.memory.range
        records = [self._staged(memory.address + place.raw, place.record) for place in chunk.places]
        table, launches = moves(records)
        with chunk.slot.pinned.opened(0, len(table), writes=True) as room:
            room[:] = table
        return (Scatter if self._loads else Gather)(Range(memory.address, len(table)), launches, records)

    def _enqueue(self, chunk: _Chunk, move: Scatter | Gather) -> None:
        device, stream = self._device, self._stream
        pinned, memory = chunk.slot.pinned.range, chunk.slot.memory.range
        brought = chunk.stop if self._loads else move.table.nbytes
        device.copy(memory.piece(0, brought), pinned.piece(0, brought), stream)
        for decode in self._decodes(chunk):
            device.launch(decode, stream)
        device.launch(move, stream)
        if not self._loads:
            begins, nbytes = chunk.first, chunk.stop - chunk.first
            device.copy(pinned.piece(begins, nbytes), memory.piece(begins, nbytes), stream)
        chunk.event = device.record(stream)

    def _decodes(self, chunk: _Chunk) -> Iterator[Decode]:
        """Yields what decodes the records that came encoded: one kernel for records of a kind that lie together."""
        records, items, memory = self._batch.records, self._batch.items, chunk.slot.memory.range
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

    def _end(self, chunk: _Chunk) -> None:
        """Waits until the device is done with a chunk, and does the rest."""
        self._wait(chunk)
        try:
            if not self._loads and chunk.places:
                self._take_over(chunk)
        finally:
            self._staging.give_back(chunk.slot)
        for place in chunk.places:
            self._batch.status[place.record] = CopyStatus.DONE

    def _wait(self, chunk: _Chunk) -> None:
        """Waits until no work with this chunk is under way. Raises DeviceFailed."""
        if chunk.event is not None:
            wait_done(self._device, chunk.event)

    # ------------------------------------------------------------------------------------------ by the CPU

    def _verify(self, chunk: _Chunk) -> None:
        """Brings records into the slot as they are. Leaves those in the chunk that are sound; sets the status of
        others."""
        sound = []
        with chunk.slot.pinned.opened(0, chunk.stop, writes=True) as room:
            for place in chunk.places:
                number, nbytes = place.record, self._batch.records.nbytes[place.record]
                if self._stopped(number):
                    continue
                if self._bring(number, room[place.came : place.came + nbytes]):
                    sound.append(place)
                else:
                    self._batch.status[number] = CopyStatus.MISMATCH
        chunk.places = sound

    def _bring(self, number: int, room: memoryview) -> bool:
        """Copies a record. Returns whether it matches its sums."""
        records, identity = self._batch.records, self._batch.identities[number]
        data = self._pages.view(records.offsets[number], records.nbytes[number])
        came = checksum.copy_sums(identity, records.layers[number], records.counts[number], room, data)
        return came == records.sums_of(number)

    def _take_over(self, chunk: _Chunk) -> None:
        """Copies what has arrived in the slot into the pages, and sums what it has written."""
        records, identities = self._batch.records, self._batch.identities
        with chunk.slot.pinned.opened(chunk.first, chunk.stop, writes=False) as room:
            for number, came, _ in chunk.places:
                into = self._pages.view(records.offsets[number], records.nbytes[number])
                data, layer = room[came - chunk.first :][: into.nbytes], records.layers[number]
                records.set_sums(
                    number, checksum.copy_sums(identities[number], layer, records.counts[number], into, data)
                )

    # ----------------------------------------------------------------------------------------------- records

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


def _is_raw(batch: CopyBatch) -> bool:
    return all(which == codec.RAW for which in batch.records.codecs)


def _has_whole_pages(batch: CopyBatch) -> bool:
    """Whether the memory has every layer and head of every page."""
    items = batch.items
    return all(
        items.geometry(item).part.intersect(part) == part
        for item, part in enumerate(
            map(Part, items.layer_starts, items.layer_stops, items.head_starts, items.head_stops)
        )
    )
