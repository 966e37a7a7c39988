"""The executor of loads from memory that a device reads itself: a shard's pool in its own memory, or an arena that is
registered with it.

    pool     --CopySums--> staging
    arena    --copy--> staging, CopySums there
                       staging (--Decode--> staging) --Scatter--> blocks

No byte of a page passes through the CPU. The shard may write either at any time, as when a lease has ended, so a record
is verified in staging, and nothing of one that does not match reaches a block (verification.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from operator import add

from kvcluster.copies.batch import BadBatch, CopyBatch, CopyDirection, CopyStatus, RunRecords
from kvcluster.device.batch_run import BatchRun, Chunk, Place, Sizes
from kvcluster.device.device import Range, Stream
from kvcluster.device.endpoints import DeviceMemory, DevicePoolMemory, RegisteredMemory
from kvcluster.device.kernels import Decode, Scatter
from kvcluster.device.staging import DeviceStaging
from kvcluster.device.verification import UNIT, CopySums, SummedRecord, can_verify, verification
from kvcluster.memory import checksum


class PoolCopies:
    """A CopyExecutor for one device. It opens a load from memory that the device reads into blocks there, if its
    records are no larger than a slot, and of a length that a device can verify; those of a pool must have such a
    length."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        pages, blocks, device = batch.pages, batch.blocks, self._staging.device
        if not isinstance(blocks, DeviceMemory) or blocks.device is not device:
            return None
        if not isinstance(pages, (DevicePoolMemory, RegisteredMemory)) or pages.device is not device:
            return None
        if batch.direction is CopyDirection.STORE:
            return None
        records, within = batch.records, isinstance(pages, DevicePoolMemory)
        aligned = not within or not any((pages.memory.address + offset) % UNIT for offset in set(records.offsets))
        kinds = set(zip(records.nbytes, records.counts, strict=True))
        if not aligned or not all(can_verify(nbytes // layers) for nbytes, layers in kinds):
            if within:  # no other executor reads a pool, and requests for pools can be verified
                raise BadBatch("records of a pool lie, or have lengths, where a device cannot verify them")
            return None
        if max(map(add, records.offsets, records.nbytes), default=0) > pages.memory.nbytes:
            raise BadBatch(f"a record lies beyond a pool of {pages.memory.nbytes} bytes")
        sizes = Sizes(batch, summed=True)
        if sizes.most > self._staging.slot_bytes:
            return None
        return _PoolRun(batch, pages, blocks, self._staging, sizes).run


class _PoolRun(BatchRun):
    """The records of one load."""

    def __init__(
        self,
        batch: CopyBatch,
        pages: DevicePoolMemory | RegisteredMemory,
        blocks: DeviceMemory,
        staging: DeviceStaging,
        sizes: Sizes,
    ) -> None:
        super().__init__(batch, blocks, staging, sizes, staging.loads)
        self._pages = pages
        self._brings = cycle(staging.brings)

    def fill(self, chunk: Chunk) -> Callable[[], None] | None:
        """As BatchRun."""
        chunk.places = [place for place in chunk.places if not self.stopped(place.record)]
        if not chunk.places:
            return None
        (table, launches, layers_at), records = self.moves(chunk)
        memory = chunk.slot.memory.range
        summed = [self._summed(place, memory, at) for place, at in zip(chunk.places, layers_at, strict=True)]
        first = len(table) // 8
        sums = verification(summed, first, memory.address + chunk.scratch)
        table += sums.words
        with chunk.slot.pinned.opened(0, len(table), writes=True) as room:
            room[:] = table
        chunk.verdicts = 8 * sums.verdicts
        whole = Range(memory.address, len(table))
        copy_sums = CopySums(whole, first, sums.launches, sums.scratch, summed)
        scatter = Scatter(whole, launches, records)
        return partial(self._enqueue, chunk, copy_sums, list(self.decodes(chunk)), scatter)

    def _enqueue(self, chunk: Chunk, sums: CopySums, decodes: list[Decode], move: Scatter) -> None:
        stream = next(self._brings)
        try:
            self._bring(chunk, sums, decodes, stream)
        finally:  # also after an error: the slot is free once what has been enqueued is done
            self.device.wait(self.stream, self.device.record(stream))
        if move.launches:
            self.device.launch(move, self.stream)

    def _bring(self, chunk: Chunk, sums: CopySums, decodes: list[Decode], stream: Stream) -> None:
        """Enqueues all that loads the records into the slot, verifies and decodes them, and copies their verdicts to
        the CPU."""
        device, pinned, memory = self.device, chunk.slot.pinned.range, chunk.slot.memory.range
        device.copy(memory.piece(0, sums.table.nbytes), pinned.piece(0, sums.table.nbytes), stream)
        if isinstance(self._pages, RegisteredMemory):
            for into, data in self._arena_ranges(chunk, self._pages):
                device.copy(memory.piece(into, data.nbytes), data, stream)
        device.launch(sums, stream)
        nbytes = 8 * len(chunk.places)
        device.copy(pinned.piece(chunk.verdicts, nbytes), memory.piece(chunk.verdicts, nbytes), stream)
        for decode in decodes:
            device.launch(decode, stream)

    def take_over(self, chunk: Chunk) -> None:
        """As BatchRun: reads the verdicts."""
        if not chunk.places:
            return
        stop = chunk.verdicts + 8 * len(chunk.places)
        with chunk.slot.pinned.opened(chunk.verdicts, stop, writes=False) as words:
            verdicts = words.cast("Q").tolist()
        for place, wrong in zip(chunk.places, verdicts, strict=True):
            if wrong:
                self.batch.status[place.record] = CopyStatus.MISMATCH
        chunk.places = [place for place, wrong in zip(chunk.places, verdicts, strict=True) if not wrong]

    def _summed(self, place: Place, memory: Range, layers_at: int | None) -> SummedRecord:
        records, number = self.batch.records, place.record
        nbytes, layers = records.nbytes[number], records.counts[number]
        seed = checksum.first_seed(self.batch.identities[number], records.layers[number], nbytes // layers)
        into = data = memory.piece(place.arrived_at, nbytes)
        if isinstance(self._pages, DevicePoolMemory):
            data = self._pages.memory.piece(records.offsets[number], nbytes)
        return SummedRecord(data, into.address, seed, records.sums_of(number), layers_at)

    def _arena_ranges(self, chunk: Chunk, arena: RegisteredMemory) -> Iterator[tuple[int, Range]]:
        """Yields each range of the arena to copy, and the offset in the slot to copy it to; adjacent records are one
        copy."""
        offsets, sizes = self.batch.records.offsets, self.batch.records.nbytes
        runs: list[list[int]] = []  # offset in the slot, offset in the arena, bytes
        for number, into, _ in chunk.places:
            last = runs[-1] if runs else None
            if last and (into, offsets[number]) == (last[0] + last[2], last[1] + last[2]):
                last[2] += sizes[number]
            else:
                runs.append([into, offsets[number], sizes[number]])
        for into, offset, nbytes in runs:
            for data in arena.pieces(offset, nbytes):
                yield into, data
                into += data.nbytes
