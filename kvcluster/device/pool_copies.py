"""The executor of loads from a shard's pool in the memory of the same device.

    pages --CopySums--> staging --Scatter--> blocks

No byte of a page passes through the CPU. The shard may write the pool at any time, as when a lease has ended, so a
record is verified in staging, and nothing of one that does not match reaches a block (verification.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import add

from kvcluster.device.batch_run import BatchRun, Chunk, Place, Sizes
from kvcluster.device.copies import is_raw
from kvcluster.device.device import Range
from kvcluster.device.endpoints import DeviceMemory, DevicePoolMemory
from kvcluster.device.kernels import Scatter
from kvcluster.device.staging import DeviceStaging
from kvcluster.device.verification import UNIT, CopySums, SummedRecord, can_verify, verification
from kvcluster.pages import checksum
from kvcluster.pages.copy_batch import BadBatch, CopyBatch, CopyDirection, CopyStatus
from kvcluster.pages.copy_executor import RunRecords


class PoolCopies:
    """A CopyExecutor for one device. It opens a load from a pool there into blocks there, if its records are raw, no
    larger than a slot, and of a length that a device can verify."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        pages, blocks, device = batch.pages, batch.blocks, self._staging.device
        if not isinstance(blocks, DeviceMemory) or blocks.device is not device:
            return None
        if (
            not isinstance(pages, DevicePoolMemory)
            or pages.device is not device
            or batch.direction is CopyDirection.STORE
        ):
            return None
        records = batch.records
        if not is_raw(batch) or any((pages.memory.address + offset) % UNIT for offset in set(records.offsets)):
            return None
        kinds = set(zip(records.nbytes, records.counts, strict=True))
        if not all(can_verify(nbytes // layers) for nbytes, layers in kinds):
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
        self, batch: CopyBatch, pages: DevicePoolMemory, blocks: DeviceMemory, staging: DeviceStaging, sizes: Sizes
    ) -> None:
        super().__init__(batch, blocks, staging, sizes, staging.loads)
        self._pool = pages.memory

    def fill(self, chunk: Chunk) -> Callable[[], None] | None:
        """As BatchRun. The room for what is decoded is the kernel's scratch memory."""
        chunk.places = [place for place in chunk.places if not self.stopped(place.record)]
        if not chunk.places:
            return None
        (table, launches, layers_at), records = self.moves(chunk)
        memory = chunk.slot.memory.range
        summed = [self._summed(place, memory, at) for place, at in zip(chunk.places, layers_at, strict=True)]
        first = len(table) // 8
        sums = verification(summed, first, memory.address + self.staging.slot_bytes)
        assert sums.scratch.nbytes <= self.staging.slot_bytes, "a layer has more bytes than its blocks add"
        table += sums.words
        with chunk.slot.pinned.opened(0, len(table), writes=True) as room:
            room[:] = table
        chunk.verdicts = 8 * sums.verdicts
        whole = Range(memory.address, len(table))
        kernels = CopySums(whole, first, sums.launches, sums.scratch, summed), Scatter(whole, launches, records)
        return partial(self._enqueue, chunk, *kernels)

    def _enqueue(self, chunk: Chunk, sums: CopySums, move: Scatter) -> None:
        device, stream = self.device, self.stream
        pinned, memory = chunk.slot.pinned.range, chunk.slot.memory.range
        device.copy(memory.piece(0, sums.table.nbytes), pinned.piece(0, sums.table.nbytes), stream)
        device.launch(sums, stream)
        if move.launches:
            device.launch(move, stream)
        nbytes = 8 * len(chunk.places)
        device.copy(pinned.piece(chunk.verdicts, nbytes), memory.piece(chunk.verdicts, nbytes), stream)

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
        data = self._pool.piece(records.offsets[number], nbytes)
        return SummedRecord(data, memory.address + place.came, seed, records.sums_of(number), layers_at)
