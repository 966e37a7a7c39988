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
from kvcluster.client.python_copies import PagePlace, PythonCopies, coder_of
from kvcluster.client.read_ranges import ReadRanges
from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import ProtocolError
from kvcluster.pages import checksum, codec, native, native_copies
from kvcluster.pages.codec import RAW
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
from kvcluster.pages.staging import Staging
from kvcluster.transport.base import Payload
from kvcluster.transport.exchange_copies import ExchangeCopies, PageMemory

if TYPE_CHECKING:
    from kvcluster.pages import _native

_TARGET = HostMemory()


@dataclass(frozen=True, slots=True)
class _Form:
    """How pages of one group and number of heads arrive in one codec."""

    codec_id: int
    layer_bytes: int
    coder: codec.Coder | None  # None if they arrive raw


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
        self._forms: dict[tuple[int, int, int], _Form | None] = {}  # by group, heads and codec
        self._identity = (-1, -1, 0)  # the last (item, codec), since its layers arrive one after the other, and its own
        self._layers: dict[tuple[int, Part, int, int], tuple[tuple[int, ...], int]] = {}  # see `_layers_of`
        self._staging = Staging()

    # ------------------------------------------------------------------------------------ batches of copies

    def copies(self, records: CopyRecords, source: PageMemory, keeps: object) -> ExchangeCopies:
        """As CopySink. Records that cannot be decoded here, or whose length does not fit their codec, are not copied
        and count as not matching. Raises ProtocolError for layers that were not requested."""
        pieces, status = self._ranges.pieces, bytearray(len(records))
        known: dict[tuple[object, ...], CopyStatus] = {}  # thousands of records differ only in their block
        rows = zip(records.items, records.layers, records.counts, records.codecs, records.nbytes, strict=True)
        for at, (item, layer, layers, codec_id, nbytes) in enumerate(rows):
            _, group, want, _, _ = pieces[item]
            kind = group, want[0].part, want[1:], layer, layers, codec_id, nbytes
            if kind not in known:
                known[kind] = self._status(at, records)
            if known[kind]:
                status[at] = self._status(at, records)
        codecs: Sequence[int] = records.codecs
        if CopyStatus.UNREADABLE in status:  # some of them no number of a codec
            codecs = [RAW if was == CopyStatus.UNREADABLE else own for was, own in zip(status, codecs, strict=True)]
        identities = checksum.identities(self._namespace, [pieces[item].want.key for item in records.items], codecs)
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

    def _status(self, at: int, records: CopyRecords) -> CopyStatus:
        """Returns the status of a record before it is run. Raises ProtocolError if its layers were not requested."""
        item, layer, layers = records.items[at], records.layers[at], records.counts[at]
        want = self._ranges.pieces[item].want
        if not want.layer_start <= layer < layer + layers <= want.layer_stop:
            raise ProtocolError(
                f"the grant does not match the request: record {at} has layers {layer} to {layer + layers}, "
                f"which are not within {want.layer_start} to {want.layer_stop}"
            )
        form = self._form(item, records.codecs[at])
        if form is None:
            return CopyStatus.UNREADABLE
        return CopyStatus.PENDING if records.nbytes[at] == layers * form.layer_bytes else CopyStatus.MISMATCH

    def run(self, batch: CopyBatch, run: RunRecords, start: int, stop: int) -> None:
        """Carries out some records of a batch, and counts them. Raises Cancelled if they were stopped."""
        with self._ranges.gate:
            now = time.monotonic_ns()
            self._ranges.check(now)
            self._ranges.heard_ns = now
            try:
                run(start, stop)
            finally:
                whole = self._count_records(batch, start, stop)
        if whole:
            self._layer_came()
        if CopyStatus.STOPPED in batch.status[start:stop]:
            self._ranges.check(time.monotonic_ns())  # raises unless only dropped items were stopped

    def _count_records(self, batch: CopyBatch, start: int, stop: int) -> bool:
        """Counts what has become of these records. True if that completes some layer in every block."""
        records, ranges = batch.records, self._ranges
        came: dict[tuple[int, ...], list[int]] = {}  # blocks, by the model layers that they got
        nbytes, rows = 0, slice(start, stop)
        columns = records.items[rows], records.layers[rows], records.counts[rows], batch.status[rows]
        for item, layer, layers, status in zip(*columns, strict=True):
            if not ranges.is_next(item, layer):
                continue
            if status == CopyStatus.DONE:
                ranges.came(item, layer + layers)
                of_model, raw_bytes = self._layers_of(item, layer, layer + layers)
                came.setdefault(of_model, []).append(ranges.pieces[item].block)
                nbytes += raw_bytes
            elif status in (CopyStatus.MISMATCH, CopyStatus.UNREADABLE) and not ranges.dropped[item]:
                ranges.did_not_match(item, layer, layer + layers)
        return self._progress.came(came, nbytes)

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
                    sums_here = checksum.copy_sums(self._identity_of(item, form.codec_id), layer, len(sums), view, here)
                    verified = sums_here == tuple(sums)
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
        stop, identity = layer + len(sums), self._identity_of(item, form.codec_id)
        in_place = form.coder is None and place.run is not None
        if not in_place and form.layer_bytes >= native.LEAST_LAYER_BYTES and self._blocks is not None:
            return self._blocks.load(item, layer, form.codec_id, identity, tuple(sums), view)
        if checksum.first_mismatch(identity, layer, sums, view) is not None:
            return False
        self._python.put(place, layer, stop, view, form.coder)
        return True

    def _count(self, item: int, layer: int, stop: int, verified: bool) -> bool:
        """Records that these layers have arrived. True if that completes some layer in every block."""
        if not verified:
            self._ranges.did_not_match(item, layer, stop)
            return False
        self._ranges.came(item, stop)
        of_model, raw_bytes = self._layers_of(item, layer, stop)
        return self._progress.came({of_model: [self._ranges.pieces[item].block]}, raw_bytes)

    @cached_property
    def _blocks(self) -> _native.BlockCopier | None:
        return native_copies.block_copier(CopyDirection.LOAD, self._items)

    def _layers_of(self, item: int, layer: int, stop: int) -> tuple[tuple[int, ...], int]:
        """Returns the model's numbers of these layers of a page, and their raw bytes."""
        _, group, (key, _, _), _, _ = self._ranges.pieces[item]
        kind = group, key.part, layer, stop
        if kind not in self._layers:
            first, layer_bytes = key.part.layer_start, self._spec.layer_bytes(group, key.part)
            self._layers[kind] = (
                self._spec.groups[group].layers[first + layer : first + stop],
                (stop - layer) * layer_bytes,
            )
        return self._layers[kind]

    def _take_none(self, item: int, layer: int, stop: int) -> None:
        """Records that these layers cannot be used: their codec or length is wrong."""
        with self._ranges.gate:
            if self._ranges.may_write(item, layer, time.monotonic_ns()):
                self._ranges.did_not_match(item, layer, stop)

    def _form(self, item: int, codec_id: int) -> _Form | None:
        """Returns the form of this page; None if this process cannot decode it."""
        items = self._items
        group, heads = items.groups[item], items.head_stops[item] - items.head_starts[item]
        try:
            form = self._forms[group, heads, codec_id]
        except KeyError:
            form = None
            if codec.check_codec(codec_id) is None:
                nbytes = encoded_layer_bytes(items.geometry(item), codec_id, heads)
                form = _Form(codec_id, nbytes, coder_of(items, item, codec_id))
            self._forms[group, heads, codec_id] = form
        if form is None:
            self._ranges.unreadable[item] = Miss(MissReason.LOSSY, codec.check_codec(codec_id) or "")
        return form

    def _identity_of(self, item: int, codec_id: int) -> int:
        known, in_codec, identity = self._identity
        if item != known or codec_id != in_codec:
            identity = checksum.identity(self._namespace, self._ranges.pieces[item].want.key, codec_id)
            self._identity = item, codec_id, identity
        return identity


def _items(ranges: ReadRanges, into: BoundMemory) -> CopyItems:
    """Returns one row for each piece of an exchange."""
    blocks, groups, wants, head_starts, head_stops = zip(*ranges.pieces, strict=True)
    parts = zip(*[want.key.part for want in wants], strict=True)
    rows = [block - into.first for block in blocks]
    columns = (array("I", column) for column in (groups, rows, *parts, head_starts, head_stops))
    return CopyItems(into.geometries(), *columns)
