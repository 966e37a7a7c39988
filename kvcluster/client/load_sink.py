"""The sink of one exchange of a load: it writes layers into the caller's memory, verifies them there, and counts them.

It writes only what its exchange owns (read_ranges.py), under the gate of its ranges. Bytes that lie in mapped memory
come as a batch of copies; the first executor that accepts the batch carries it out in slices, and the executor in
Python (python_copies.py) accepts any batch. Bytes from a stream are received one record at a time, by chunks, and the
Python executor places them.

Layers that do not verify may lie in the caller's memory, but are never counted as arrived: their block has failed,
unless another shard's bytes replace them. A bulk load has many thousands of records, so values that are the same for
all records of a page are computed once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvcluster.client.batch_copies import BatchCopies
from kvcluster.client.load_progress import LoadProgress
from kvcluster.client.memory import BoundMemory
from kvcluster.client.part_memory import Staging
from kvcluster.client.python_copies import PagePlace, PythonCopies, coder_of
from kvcluster.client.read_ranges import ReadRanges
from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.pages import checksum, codec, native, native_copies
from kvcluster.pages.copy_batch import (
    CopyBatch,
    CopyDirection,
    CopyItems,
    CopyRecords,
    CopyStatus,
    encoded_layer_bytes,
)
from kvcluster.pages.copy_endpoints import HostMemory
from kvcluster.pages.copy_executor import RunRecords
from kvcluster.transport.base import Payload
from kvcluster.transport.exchange_copies import ExchangeCopies, PageMemory

if TYPE_CHECKING:
    from kvcluster.pages._native import BlockCopier

_TARGET = HostMemory()


@dataclass(eq=False, slots=True)
class _Form:
    """The codec in which a page arrives."""

    codec_id: int
    layer_bytes: int
    identity: int
    coder: codec.Coder | None  # None if it arrives raw


class LoadSink:
    """The CopySink of one exchange with one shard. `layer_came` is called when a layer is complete in every block."""

    def __init__(
        self,
        namespace: NamespaceId,
        spec: KVSpec,
        into: BoundMemory,
        ranges: ReadRanges,
        progress: LoadProgress,
        layer_came: Callable[[], object],
    ) -> None:
        self._namespace = namespace
        self._spec = spec
        self._into = into
        self._ranges = ranges
        self._progress = progress
        self._layer_came = layer_came
        self._items = _items(ranges, into)
        self._python = PythonCopies(into)
        self._forms: list[_Form | None] = [None] * len(ranges.pieces)  # the last form of each piece
        self._model_layers: list[tuple[int, ...] | None] = [None] * len(ranges.pieces)
        self._sizes: dict[tuple[int, int, int], int] = {}  # group, codec, heads -> bytes of a layer
        self._staging = Staging()

    # ------------------------------------------------------------------------------------ batches of copies

    def copies(self, records: CopyRecords, source: PageMemory, keeps: object) -> ExchangeCopies:
        """As CopySink. Records that cannot be decoded here, or whose length does not fit their codec, are not copied
        and count as not matching. Raises ProtocolError for layers that were not requested."""
        identities, status = array("Q"), bytearray(len(records))
        rows = zip(records.items, records.layers, records.counts, records.codecs, strict=True)
        for at, (item, layer, layers, codec_id) in enumerate(rows):
            want = self._ranges.pieces[item].want
            if not want.layer_start <= layer < layer + layers <= want.layer_stop:
                raise ProtocolError(
                    f"the grant does not match the request: record {at} has layers {layer} to {layer + layers}, "
                    f"which are not within {want.layer_start} to {want.layer_stop}"
                )
            form = self._form(item, codec_id)
            identities.append(0 if form is None else form.identity)
            if form is None:
                status[at] = CopyStatus.UNREADABLE
            elif records.nbytes[at] != layers * form.layer_bytes:
                status[at] = CopyStatus.MISMATCH
        batch = CopyBatch(
            CopyDirection.LOAD,
            source,
            _TARGET,
            records,
            self._items,
            identities,
            status,
            self._ranges.cancel,
            self._ranges.dropped,
            self._ranges.deadline_ns,
            keeps=(keeps, self._into),
        )
        return BatchCopies(batch, self._python, self.run)

    def run(self, batch: CopyBatch, run: RunRecords, start: int, stop: int) -> None:
        """Carries out some records of a batch, and counts them. Raises Cancelled if they were stopped."""
        whole = False
        with self._ranges.gate:
            now = time.monotonic_ns()
            self._ranges.check(now)
            self._ranges.heard_ns = now
            try:
                run(start, stop)
            finally:
                for at in range(start, stop):
                    whole = self._count_record(batch, at) or whole
        if whole:
            self._layer_came()
        if CopyStatus.STOPPED in batch.status[start:stop]:
            self._ranges.check(time.monotonic_ns())  # raises unless only dropped items were stopped

    def _count_record(self, batch: CopyBatch, at: int) -> bool:
        item, layer, status = batch.records.items[at], batch.records.layers[at], batch.status[at]
        stop = layer + batch.records.counts[at]
        if not self._ranges.is_next(item, layer):
            return False
        if status == CopyStatus.DONE:
            self._ranges.came(item, stop)
            return self._came(item, layer, stop)
        if status in (CopyStatus.MISMATCH, CopyStatus.UNREADABLE) and not self._ranges.dropped[item]:
            self._ranges.did_not_match(item, layer, stop)
        return False

    # ------------------------------------------------------------------------------------------ streams

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        stop, asked = layer + len(sums), self._ranges.pieces[item].want
        if stop > asked.layer_stop:
            raise ProtocolError(f"layers up to {stop} of a page arrived, but only {asked.layer_stop} were requested")
        form = self._form(item, codec_id)
        if form is None or data.nbytes != len(sums) * form.layer_bytes:
            self._take_none(item, layer, stop)
            return
        place = self._python.place(self._items, item)
        step = max(1, limits.CHUNK_BYTES // form.layer_bytes)
        at_once = len(sums) if data.present is not None and place.run is not None else step
        for at in range(0, len(sums), at_once):
            if not self._take(item, place, form, layer + at, sums[at : at + at_once], data):
                return

    def _take(self, item: int, place: PagePlace, form: _Form, layer: int, sums: Sequence[int], data: Payload) -> bool:
        """Takes some layers into the caller's memory and verifies them. False if another exchange brings them."""
        stop = layer + len(sums)
        nbytes, run = len(sums) * form.layer_bytes, place.of(layer, stop)
        view = run if run is not None and form.coder is None else self._staging.room(nbytes)
        got, whole = 0, False
        while True:
            with self._ranges.gate:
                if not self._ranges.may_write(item, layer, time.monotonic_ns()):
                    return False
                here = None if run is None else data.present
                if here is not None and here.nbytes == nbytes:
                    verified = checksum.copy_sums(form.identity, layer, len(sums), view, here) == tuple(sums)
                    if verified:
                        self._python.put(place, layer, stop, view, form.coder)
                    whole = self._count(item, layer, stop, verified)
                    break
                got += data.read_into(view[got:] if got else view)
                if got == nbytes:
                    whole = self._count(item, layer, stop, self._put(item, place, form, layer, sums, view))
                    break
            data.wait()
        if whole:
            self._layer_came()
        return True

    def _put(self, item: int, place: PagePlace, form: _Form, layer: int, sums: Sequence[int], view: memoryview) -> bool:
        """Verifies layers that have arrived in `view`, and puts them where they belong. False if they do not match."""
        stop = layer + len(sums)
        in_place = form.coder is None and place.run is not None
        if not in_place and form.layer_bytes >= native.LEAST_LAYER_BYTES and self._blocks is not None:
            return self._blocks.load(item, layer, form.codec_id, form.identity, tuple(sums), view)
        if checksum.first_mismatch(form.identity, layer, sums, view) is not None:
            return False
        self._python.put(place, layer, stop, view, form.coder)
        return True

    def _count(self, item: int, layer: int, stop: int, verified: bool) -> bool:
        """Records that these layers have arrived. True if that completes some layer in every block."""
        if not verified:
            self._ranges.did_not_match(item, layer, stop)
            return False
        self._ranges.came(item, stop)
        return self._came(item, layer, stop)

    @cached_property
    def _blocks(self) -> BlockCopier | None:
        return native_copies.block_copier(CopyDirection.LOAD, self._items)

    def _came(self, item: int, layer: int, stop: int) -> bool:
        """Counts layers that are in place. Returns as `_count`."""
        piece = self._ranges.pieces[item]
        layers = self._model_layers[item]
        if layers is None:
            layers = self._model_layers[item] = piece.model_layers(self._spec)
        first, nbytes = piece.want.layer_start, (stop - layer) * self._layer_bytes(item, codec.RAW)
        return self._progress.came(piece.block, layers[layer - first : stop - first], nbytes)

    def _take_none(self, item: int, layer: int, stop: int) -> None:
        """Records that these layers cannot be used: their codec or length is wrong."""
        with self._ranges.gate:
            if self._ranges.may_write(item, layer, time.monotonic_ns()):
                self._ranges.did_not_match(item, layer, stop)

    def _form(self, item: int, codec_id: int) -> _Form | None:
        """Returns the form of this page; None if this process cannot decode it."""
        form = self._forms[item]
        if form is not None and form.codec_id == codec_id:
            return form
        why = codec.check_codec(codec_id)
        if why is not None:
            self._ranges.unreadable[item] = Miss(MissReason.LOSSY, why)
            return None
        key = self._ranges.pieces[item].want.key
        form = self._forms[item] = _Form(
            codec_id,
            self._layer_bytes(item, codec_id),
            checksum.identity(self._namespace, key, codec_id),
            coder_of(self._items, item, codec_id),
        )
        return form

    def _layer_bytes(self, item: int, codec_id: int) -> int:
        """Returns the bytes of one layer of the item's page in that codec, which must be known."""
        items = self._items
        shape = items.groups[item], codec_id, items.head_stops[item] - items.head_starts[item]
        size = self._sizes.get(shape)
        if size is None:
            size = self._sizes[shape] = encoded_layer_bytes(items.geometry(item), codec_id, shape[2])
        return size


def _items(ranges: ReadRanges, into: BoundMemory) -> CopyItems:
    """Returns one row for each piece of an exchange."""
    items = CopyItems(into.geometries())
    for piece in ranges.pieces:
        items.add(piece.group, piece.block - into.first, piece.want.key.part, (piece.head_start, piece.head_stop))
    return items
