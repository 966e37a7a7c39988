"""The executor of copy batches between pages in memory that the CPU addresses and blocks in a device's memory.

    load    pages --the CPU copies and verifies--> pinned --copy--> staging (--Decode--> staging) --Scatter--> blocks
    store   blocks --Gather--> staging --copy--> pinned --the CPU copies and sums--> pages

The bytes of a page that the CPU copies are the bytes that it verifies or sums. Decoded records lie behind the encoded
ones in the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcluster.copies.batch import CopyBatch, CopyDirection, CopyStatus, CpuMemory, RunRecords, cpu_addresses
from kvcluster.core.groups import Part
from kvcluster.device.batch_run import BatchRun, Chunk, Sizes
from kvcluster.device.device import Range
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.staging import DeviceStaging
from kvcluster.memory import checksum, codec

_CHUNK_BYTES = 8 << 20
"""The CPU copies so many bytes, which takes some ms, while the device works on those before."""


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
        if batch.direction is CopyDirection.STORE and not (_has_whole_pages(batch) and is_raw(batch)):
            return None
        sizes = Sizes(batch)
        if sizes.most > self._staging.slot_bytes:
            return None
        return _HostRun(batch, pages, blocks, self._staging, sizes).run


class _HostRun(BatchRun):
    """The records of one batch."""

    def __init__(
        self, batch: CopyBatch, pages: CpuMemory, blocks: DeviceMemory, staging: DeviceStaging, sizes: Sizes
    ) -> None:
        self._loads = batch.direction is CopyDirection.LOAD
        stream = staging.loads if self._loads else staging.stores
        super().__init__(batch, blocks, staging, sizes, stream, chunk_bytes=_CHUNK_BYTES)
        self._pages = pages

    def fill(self, chunk: Chunk) -> Callable[[], None] | None:
        """As BatchRun. Of a load, only records that match their sums stay in the chunk."""
        if self._loads:
            self._verify(chunk)
        chunk.places = [place for place in chunk.places if not self.stopped(place.record)]  # stopped since
        (table, launches, _), records = self.moves(chunk)
        with chunk.slot.pinned.opened(0, len(table), writes=True) as room:
            room[:] = table
        if not launches:  # no block has any part of them
            return None
        move = (Scatter if self._loads else Gather)(
            Range(chunk.slot.memory.range.address, len(table)), launches, records
        )
        return partial(self._enqueue, chunk, move)

    def _enqueue(self, chunk: Chunk, move: Scatter | Gather) -> None:
        device, stream = self.device, self.stream
        pinned, memory = chunk.slot.pinned.range, chunk.slot.memory.range
        brought = chunk.stop if self._loads else move.table.nbytes
        device.copy(memory.piece(0, brought), pinned.piece(0, brought), stream)
        for decode in self.decodes(chunk):
            device.launch(decode, stream)
        device.launch(move, stream)
        if not self._loads:
            begins, nbytes = chunk.first, chunk.stop - chunk.first
            device.copy(pinned.piece(begins, nbytes), memory.piece(begins, nbytes), stream)

    # ------------------------------------------------------------------------------------------ by the CPU

    def _verify(self, chunk: Chunk) -> None:
        """Copies records into the slot without decoding them. Keeps those in the chunk that match their sums; sets the
        status of those that do not."""
        sound = []
        with chunk.slot.pinned.opened(0, chunk.stop, writes=True) as room:
            for place in chunk.places:
                number, nbytes = place.record, self.batch.records.nbytes[place.record]
                if self.stopped(number):
                    continue
                if self._bring(number, room[place.arrived_at : place.arrived_at + nbytes]):
                    sound.append(place)
                else:
                    self.batch.status[number] = CopyStatus.MISMATCH
        chunk.places = sound

    def _bring(self, number: int, room: memoryview) -> bool:
        """Copies a record. Returns whether it matches its sums."""
        records, identity = self.batch.records, self.batch.identities[number]
        data = self._pages.view(records.offsets[number], records.nbytes[number])
        sums = checksum.copy_sums(identity, records.layers[number], records.counts[number], room, data)
        return sums == records.sums_of(number)

    def take_over(self, chunk: Chunk) -> None:
        """As BatchRun: for a store, copies what has arrived into the pages, and sums what it has written."""
        if self._loads or not chunk.places:
            return
        records, identities = self.batch.records, self.batch.identities
        with chunk.slot.pinned.opened(chunk.first, chunk.stop, writes=False) as room:
            for number, arrived, _ in chunk.places:
                into = self._pages.view(records.offsets[number], records.nbytes[number])
                data, layer = room[arrived - chunk.first :][: into.nbytes], records.layers[number]
                records.set_sums(
                    number, checksum.copy_sums(identities[number], layer, records.counts[number], into, data)
                )


def is_raw(batch: CopyBatch) -> bool:
    """Whether all records of a load arrive raw, or all of a store are to be left raw."""
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
