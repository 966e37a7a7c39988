"""The sink of one exchange of a load: it takes layers into the caller's memory, verifies them there, and counts them.

It writes what its exchange owns and no more (read_ranges.py), under the gate of its ranges. What lies in memory comes
as a batch of copies, which the first executor that takes it carries out in slices; the executor in Python
(python_copies.py) takes any. What comes over a stream is received a record at a time, by chunks, and is placed by that
same executor.

What does not verify may lie in the caller's memory, but is never told to have come: its block has failed, unless
another shard's bytes take the place of these. A bulk load is made of many thousand records, so what holds for all
records of a page is worked out once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from kvcluster.pages import checksum, codec
from kvcluster.pages.copy_batch import (
    BadBatch,
    CopyBatch,
    CopyDirection,
    CopyItems,
    CopyRecords,
    CopyStatus,
    encoded_layer_bytes,
)
from kvcluster.pages.copy_endpoints import HostMemory
from kvcluster.pages.copy_executor import EXECUTORS, CopyExecutor, choose
from kvcluster.transport.base import Payload
from kvcluster.transport.exchange_copies import ExchangeCopies, PageMemory

_TARGET = HostMemory()


@dataclass(eq=False, slots=True)
class _Form:
    """In which codec a page comes."""

    codec_id: int
    layer_bytes: int
    identity: int
    coder: codec.Coder | None  # None where it comes raw


class LoadSink:
    """Of one exchange with one shard: a CopySink. `layer_came` is called when some layer is there of every block."""

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
        self._forms: list[_Form | None] = [None] * len(ranges.pieces)  # that came last of each
        self._model_layers: list[tuple[int, ...] | None] = [None] * len(ranges.pieces)
        self._sizes: dict[tuple[int, int, int], int] = {}  # group, codec, heads -> bytes of a layer
        self._staging = Staging()

    # ------------------------------------------------------------------------------------ batches of copies

    def copies(self, records: CopyRecords, source: PageMemory, keeps: object) -> ExchangeCopies:
        """As CopySink. What cannot be decoded here, or has another length than its codec says, is not copied: it
        counts as what did not match."""
        identities, status = array("Q"), bytearray(len(records))
        rows = zip(records.items, records.layers, records.counts, records.codecs, strict=True)
        for at, (item, layer, layers, codec_id) in enumerate(rows):
            want = self._ranges.pieces[item].want
            if not want.layer_start <= layer < layer + layers <= want.layer_stop:
                raise ProtocolError(
                    f"what was granted is not what was asked for: record {at} has layers {layer} to {layer + layers}, "
                    f"not some of those from {want.layer_start} to {want.layer_stop}"
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
        executor = choose([*EXECUTORS, self._python], batch.direction, source, _TARGET)
        assert executor is not None
        if executor is not self._python:  # which reaches memory through views, and no number of a batch leads it astray
            try:
                batch.check()
            except BadBatch as bad:
                raise ProtocolError(f"what was granted is not what was asked for: {bad}") from None
        return _LoadCopies(self, batch, executor)

    def run(self, batch: CopyBatch, executor: CopyExecutor, start: int, stop: int) -> None:
        """Carries out some records of a batch, and counts them. Raises Cancelled where they were stopped."""
        whole = False
        with self._ranges.gate:
            now = time.monotonic_ns()
            self._ranges.check(now)
            self._ranges.heard_ns = now
            try:
                executor.run(batch, start, stop)
            finally:
                for at in range(start, stop):
                    whole = self._count_record(batch, at) or whole
        if whole:
            self._layer_came()
        if CopyStatus.STOPPED in batch.status[start:stop]:
            self._ranges.check(time.monotonic_ns())  # dropped items stop nothing else

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

    # --------------------------------------------------------------------------------------- what comes

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        stop, asked = layer + len(sums), self._ranges.pieces[item].want
        if stop > asked.layer_stop:
            raise ProtocolError(f"layers to {stop} of a page came of which those to {asked.layer_stop} were asked for")
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
        """Some layers into the caller's memory, and verified. False where others bring them."""
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
                    came = checksum.copy_sums(form.identity, layer, len(sums), view, here)
                    whole = self._count(item, place, form, layer, stop, came == tuple(sums), view)
                    break
                got += data.read_into(view[got:] if got else view)
                if got == nbytes:
                    right = checksum.first_mismatch(form.identity, layer, sums, view) is None
                    whole = self._count(item, place, form, layer, stop, right, view)
                    break
            data.wait()
        if whole:
            self._layer_came()
        return True

    def _count(
        self, item: int, place: PagePlace, form: _Form, layer: int, stop: int, verified: bool, view: memoryview
    ) -> bool:
        """Those layers have come. True where some layer is there of every block by that."""
        if not verified:
            self._ranges.did_not_match(item, layer, stop)
            return False
        self._ranges.came(item, stop)
        self._python.put(place, layer, stop, view, form.coder)
        return self._came(item, layer, stop)

    def _came(self, item: int, layer: int, stop: int) -> bool:
        """Counts layers that are in place. True as in `_count`."""
        piece = self._ranges.pieces[item]
        layers = self._model_layers[item]
        if layers is None:
            layers = self._model_layers[item] = piece.model_layers(self._spec)
        first, nbytes = piece.want.layer_start, (stop - layer) * self._layer_bytes(item, codec.RAW)
        return self._progress.came(piece.block, layers[layer - first : stop - first], nbytes)

    def _take_none(self, item: int, layer: int, stop: int) -> None:
        """What came cannot be what was asked for."""
        with self._ranges.gate:
            if self._ranges.may_write(item, layer, time.monotonic_ns()):
                self._ranges.did_not_match(item, layer, stop)

    def _form(self, item: int, codec_id: int) -> _Form | None:
        """How this page comes. None where this process cannot decode it."""
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
        """Of a page in that codec, which is known."""
        items = self._items
        shape = items.groups[item], codec_id, items.head_stops[item] - items.head_starts[item]
        size = self._sizes.get(shape)
        if size is None:
            size = self._sizes[shape] = encoded_layer_bytes(items.geometry(item), codec_id, shape[2])
        return size


class _LoadCopies:
    """A batch of one exchange and what carries it out."""

    def __init__(self, sink: LoadSink, batch: CopyBatch, executor: CopyExecutor) -> None:
        self._sink = sink
        self._batch = batch
        self._executor = executor

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies."""
        self._sink.run(self._batch, self._executor, start, stop)


def _items(ranges: ReadRanges, into: BoundMemory) -> CopyItems:
    """A row for each piece of an exchange."""
    items = CopyItems(into.geometries())
    for piece in ranges.pieces:
        items.add(piece.group, piece.block - into.first, piece.want.key.part, (piece.head_start, piece.head_stop))
    return items
