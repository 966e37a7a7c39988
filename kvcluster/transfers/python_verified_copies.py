"""The copy executor in Python: loads from memory of this host into the memory of a BoundMemory, and stores from it.

If the destination page is one run of bytes, layers are copied straight from the source, and summed while they are
written. For a strided destination, layers are copied to a buffer, verified there, and then written. Encoded layers are
verified in a buffer as they arrived, and decoded from there. A buffer holds one chunk, so that verifying, decoding and
writing it hit the CPU cache. A store copies each record from one run of bytes, or gathers its layers, and sums what it
has written. It needs no addresses: it is the reference for other executors, which compute addresses from the batch's
geometry.

`BatchCopies` are the copies of one exchange of a client: a batch, and the executor that carries it out in slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvcluster.copies.batch import (
    BadBatch,
    CopyBatch,
    CopyDirection,
    CopyExecutor,
    CopyItems,
    CopyStatus,
    CpuMemory,
    RunRecords,
    cpu_addresses,
    first_opened,
)
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.miss import Miss, MissReason
from kvcluster.device.device import DeviceFailed
from kvcluster.device.devices import DEVICES
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.memory.arena import Staging
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transport.base import Cancelled


@dataclass(eq=False, slots=True)
class PagePlace:
    """The destination of one page's layers. `run`: the bytes of those of its layers that the memory has, None if they
    are not one run."""

    block: int
    group: int
    part: Part
    fills: Part
    layer_bytes: int
    run: memoryview | None
    run_start: int  # the first layer of `run`, counted in the page

    def of(self, layer: int, stop: int) -> memoryview | None:
        """Returns the bytes of these layers, counted in the page; None if they are not one run."""
        if self.run is None:
            return None
        first = self.run_start
        return self.run[(layer - first) * self.layer_bytes : (stop - first) * self.layer_bytes]


class PythonCopies:
    """A CopyExecutor for loads into `memory` and stores from it; the geometries of its batches describe that memory.
    Used by one thread."""

    def __init__(self, memory: BoundMemory) -> None:
        self._memory = memory
        self._staging = Staging()
        self._decoded = Staging()
        self._items: CopyItems | None = None
        self._places: dict[int, PagePlace] = {}
        self._rows: list[tuple[int, ...]] = []
        self._shapes: dict[tuple[int, ...], tuple[Part, Part, Part, int]] = {}  # what pages of equal columns share

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor: opens every batch whose two endpoints the CPU addresses. It uses bounded views, so that
        wrong numbers in a batch do no harm."""
        pages = batch.pages
        return partial(self.run, batch, pages) if cpu_addresses(pages) and cpu_addresses(batch.blocks) else None

    def run(self, batch: CopyBatch, pages: CpuMemory, start: int, stop: int) -> None:
        """As RunRecords. `pages`: the endpoint of the batch that has pages."""
        status, records = batch.status, batch.records
        copy = self._load if batch.direction is CopyDirection.LOAD else self._store
        for at in range(start, stop):
            if status[at] == CopyStatus.PENDING:
                if batch.is_stopped(at, time.monotonic_ns()):
                    status[at] = CopyStatus.STOPPED
                else:
                    status[at] = copy(batch, at, pages.view(records.offsets[at], records.nbytes[at]))

    def place(self, items: CopyItems, item: int) -> PagePlace:
        """Returns where the layers of that page are written."""
        if self._items is not items:
            self._items, self._places, self._rows = items, {}, list(zip(*items.columns(), strict=True))
        place = self._places.get(item)
        if place is None:
            place = self._places[item] = self._find(items, item)
        return place

    def put(self, place: PagePlace, layer: int, stop: int, view: memoryview, coder: codec.Coder | None) -> None:
        """Writes verified layers from `view` to their place: decodes them with `coder`, if any. Does nothing for layers
        that lie there already."""
        into = place.of(layer, stop)
        if coder is not None:
            encoded, view = view, self._decoded.room((stop - layer) * place.layer_bytes) if into is None else into
            coder.decode(encoded, view, stop - layer)
        if into is None:
            part, first = place.part, place.part.layer_start
            rect = Part(first + layer, first + stop, part.head_start, part.head_stop)
            self._memory.put(place.block, place.group, rect, view, place.fills)

    def _store(self, batch: CopyBatch, at: int, into: memoryview) -> CopyStatus:
        records, items = batch.records, batch.items
        item, layer, count = records.items[at], records.layers[at], records.counts[at]
        block, first = items.blocks[item] + self._memory.first, items.layer_starts[item] + layer
        data = self._memory.get(block, items.groups[item], first, first + count, self._staging)
        records.set_sums(at, checksum.copy_sums(batch.identities[at], layer, count, into, data))
        return CopyStatus.DONE

    def _load(self, batch: CopyBatch, at: int, data: memoryview) -> CopyStatus:
        records = batch.records
        item, layer, count, codec_id = records.items[at], records.layers[at], records.counts[at], records.codecs[at]
        place, expected = self.place(batch.items, item), records.sums_of(at)
        coder = coder_of(batch.items, item, codec_id)
        run = place.of(layer, layer + count) if coder is None else None
        if run is not None:
            sums = checksum.copy_sums(batch.identities[at], layer, count, run, data)
            return CopyStatus.DONE if sums == expected else CopyStatus.MISMATCH
        layer_bytes = data.nbytes // count
        step = max(1, limits.CHUNK_BYTES // layer_bytes)
        for first in range(0, count, step):
            last = min(first + step, count)
            chunk = self._staging.room((last - first) * layer_bytes)
            piece = data[first * layer_bytes : last * layer_bytes]
            sums = checksum.copy_sums(batch.identities[at], layer + first, last - first, chunk, piece)
            if sums != expected[first:last]:
                return CopyStatus.MISMATCH
            self.put(place, layer + first, layer + last, chunk, coder)
        return CopyStatus.DONE

    def _find(self, items: CopyItems, item: int) -> PagePlace:
        group, row, *shape = self._rows[item]
        block, key = row + self._memory.first, (group, *shape)
        known = self._shapes.get(key)
        if known is None:
            part, fills = Part(*shape[:4]), Part(*shape[:2], *shape[4:])
            both = part.intersect(items.geometry(item).part)
            assert both is not None
            rect = both._replace(head_start=part.head_start, head_stop=part.head_stop)
            known = self._shapes[key] = part, fills, rect, part.heads * items.geometry(item).head_bytes
        part, fills, rect, layer_bytes = known
        run = self._memory.place(block, group, rect) if fills == part else None
        return PagePlace(block, group, part, fills, layer_bytes, run, rect.layer_start - part.layer_start)


def coder_of(items: CopyItems, item: int, codec_id: int) -> codec.Coder | None:
    """Returns the coder that decodes the item's page; None if it arrives raw."""
    if codec_id == codec.RAW:
        return None
    geometry, heads = items.geometry(item), items.head_stops[item] - items.head_starts[item]
    return codec.coder(Codec(codec_id), geometry.group, block_tokens=geometry.block_tokens, heads=heads)


EXECUTORS: tuple[CopyExecutor, ...] = (NativeCopies(), DEVICES)
"""The executors of all loads and stores, the fastest first. The one in Python follows them and opens any batch between
memory that the CPU addresses."""


class BatchCopies:
    """An ExchangeCopies. `carry_out(batch, run, start, stop)` calls `run` for some records and counts them.

    Raises ProtocolError if the batch contradicts itself, and CallerError if no executor of this process reaches the
    memory of both its ends; nothing has been copied then.
    """

    def __init__(
        self, batch: CopyBatch, python: PythonCopies, carry_out: Callable[[CopyBatch, RunRecords, int, int], None]
    ) -> None:
        self._batch = batch
        self._carry_out = carry_out
        self._run_records = _opened(batch, python)

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies. If the device has failed, the exchange ends as if it had been cancelled for that reason:
        no shard is to blame."""
        try:
            self._carry_out(self._batch, self._run_records, start, stop)
        except DeviceFailed as failed:
            raise Cancelled(Miss(MissReason.DEVICE_LOST, str(failed))) from None


def _opened(batch: CopyBatch, python: PythonCopies) -> RunRecords:
    try:
        run = first_opened((*EXECUTORS, python), batch)
    except BadBatch as bad:
        raise ProtocolError(f"the grant does not match the request: {bad}") from None
    if run is not None:
        return run
    source, target = type(batch.source).__name__, type(batch.target).__name__
    raise CallerError(f"nothing in this process copies from {source} to {target}: give memory that the CPU addresses")
