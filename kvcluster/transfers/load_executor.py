"""Carries out a load's plan (load_plan.py): exchanges with shards, questions to the coordinator, and the outcome.

One thread drives each exchange from its pin to its last byte: a thread that waits for missing bytes cannot be woken,
and while one waits others verify and copy. The bytes of an exchange pass through its sink, which writes layers into the
caller's memory, verifies them there, and counts them.

A sink writes only what its exchange owns (read_ranges.py), under the gate of its ranges. Bytes that lie in memory, a
shard's arena or a stage that a stream fills, are passed as a batch of copies; the first executor that accepts the batch
carries it out in slices, and the executor in Python (python_verified_copies.py) accepts any batch. Layers that do not
verify may lie in the caller's memory, but are never counted as arrived: their block has failed, unless another shard's
bytes replace them. A bulk load has many thousands of records, so values that are the same for all records of a page are
computed once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from kvcluster.copies.batch import (
    CopyBatch,
    CopyDirection,
    CopyEndpoint,
    CopyItems,
    CopyRecords,
    CopyStatus,
    RunRecords,
    encoded_layer_bytes,
)
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Explain, Explained, ReadRequest
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.device.device import Device
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.memory.codec import RAW
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.plan_messages import (
    Answered,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transfers.plan_runner import Job
from kvcluster.transfers.python_verified_copies import BatchCopies, PythonCopies
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Deadline, ExchangeCopies, Unavailable, run_to_completion

_DONE = int(CopyStatus.DONE)


class LoadSink:
    """The PageSink of one exchange with one shard: it writes the bytes that arrive into the memory `into`, as far as
    `ranges` still want them, and counts them in `progress`. `layer_completed` is called each time a layer has arrived
    in every block."""

    def __init__(
        self,
        namespace: NamespaceId,
        spec: KVSpec,
        into: BoundMemory,
        ranges: ReadRanges,
        progress: LoadProgress,
        layer_completed: Callable[[], object],
    ) -> None:
        self._namespace = namespace
        self._spec = spec
        self._into = into
        self._ranges = ranges
        self._progress = progress
        self._layer_completed = layer_completed
        self._items = _items(ranges, into)
        self._kinds = ranges.pieces.wants.kind_of
        self._places = [(kind.group, kind.part) for kind in ranges.pieces.wants.kinds]
        self._python = PythonCopies(into)
        self._layer_bytes: dict[tuple[int, int, int], int] = {}  # by group, heads and codec
        self._layers: dict[tuple[int, int, int], tuple[tuple[int, ...], int]] = {}  # see `_layers_of`

    @property
    def device(self) -> Device | None:
        """As PageSink."""
        endpoint = self._into.endpoint
        if not isinstance(endpoint, DeviceMemory):
            return None
        sizes = {self._spec.layer_bytes(group, part) for group, part in self._places}
        return endpoint.device if DEVICES.reads_pools(endpoint.device, sizes) else None

    # ------------------------------------------------------------------------------------ batches of copies

    def copies(self, records: CopyRecords, source: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSink. Records that cannot be decoded here, or whose length does not fit their codec, are not copied
        and count as not matching. Raises ProtocolError for layers that were not requested."""
        wants, status = self._ranges.pieces.wants, bytearray(len(records))
        kinds = [self._kinds[item] for item in records.items]
        rows = list(zip(kinds, records.layers, records.counts, records.codecs, records.nbytes, strict=True))
        examples = dict(zip(rows, range(len(rows)), strict=True))  # thousands of records differ only in their block
        wrong = {row for row, at in examples.items() if self._status(at, records)}
        for at, row in enumerate(rows if wrong else ()):
            if row in wrong:
                status[at] = self._status(at, records)  # which notes why this item cannot be decoded
        codecs: Sequence[int] = records.codecs
        if CopyStatus.UNREADABLE in status:  # some of them no number of a codec
            codecs = [RAW if was == CopyStatus.UNREADABLE else own for was, own in zip(status, codecs, strict=True)]
        hashes = [wants.hashes[item] for item in records.items]
        identities = checksum.identities(self._namespace, hashes, [self._places[number] for number in kinds], codecs)
        batch = CopyBatch(
            CopyDirection.LOAD,
            source,
            self._into.endpoint,
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
        layer_bytes = self._layer_bytes_of(item, records.codecs[at])
        if layer_bytes is None:
            return CopyStatus.UNREADABLE
        return CopyStatus.PENDING if records.nbytes[at] == layers * layer_bytes else CopyStatus.MISMATCH

    def run(self, batch: CopyBatch, run: RunRecords, start: int, stop: int) -> None:
        """Carries out some records of a batch, and counts them. Raises Cancelled if they were stopped."""
        with self._ranges.gate:
            now = time.monotonic_ns()
            self._ranges.check(now)
            self._ranges.last_arrival_ns = now
            self._pass_over(batch, start, stop)
            try:
                run(start, stop)
            finally:
                whole = self._count_records(batch, start, stop)
        if whole:
            self._layer_completed()
        if CopyStatus.STOPPED in batch.status[start:stop]:
            self._ranges.check(time.monotonic_ns())  # raises unless only dropped items were stopped

    def _pass_over(self, batch: CopyBatch, start: int, stop: int) -> None:
        """Stops records whose layers are not the next of their page. A layer that has arrived before would overwrite
        bytes that count already, and one behind a gap would count as if nothing were missing."""
        records, rows = batch.records, slice(start, stop)
        for at in self._ranges.unexpected(records.items[rows], records.layers[rows], records.counts[rows]):
            batch.status[start + at] = CopyStatus.STOPPED

    def _count_records(self, batch: CopyBatch, start: int, stop: int) -> bool:
        """Counts these records by their status. True if that completes some layer in every block."""
        records, ranges = batch.records, self._ranges
        done: dict[tuple[int, int, int], list[int]] = {}  # items of one kind that got the same layers
        rows = slice(start, stop)
        columns = records.items[rows], records.layers[rows], records.counts[rows], batch.status[rows]
        for item, layer, layers, status in zip(*columns, strict=True):
            if not ranges.is_next(item, layer):
                continue
            if status == _DONE:
                ranges.arrived(item, layer + layers)
                done.setdefault((self._kinds[item], layer, layers), []).append(item)
            elif status in (CopyStatus.MISMATCH, CopyStatus.UNREADABLE) and not ranges.dropped[item]:
                ranges.did_not_match(item, layer, layer + layers)
        arrived: dict[tuple[int, ...], list[int]] = {}  # blocks, by the model layers that arrived
        nbytes, blocks = 0, ranges.pieces.blocks
        for (_, layer, layers), items in done.items():
            of_model, raw_bytes = self._layers_of(items[0], layer, layer + layers)
            arrived.setdefault(of_model, []).extend([blocks[item] for item in items])
            nbytes += raw_bytes * len(items)
        return self._progress.arrived(arrived, nbytes)

    # ------------------------------------------------------------------------------------- what is alike

    def _layers_of(self, item: int, layer: int, stop: int) -> tuple[tuple[int, ...], int]:
        """Returns the model's numbers of these layers of a page, and their raw bytes."""
        kind = self._kinds[item], layer, stop
        if kind not in self._layers:
            _, group, (key, _, _), _, _ = self._ranges.pieces[item]
            first, layer_bytes = key.part.layer_start, self._spec.layer_bytes(group, key.part)
            self._layers[kind] = (
                self._spec.groups[group].layers[first + layer : first + stop],
                (stop - layer) * layer_bytes,
            )
        return self._layers[kind]

    def _layer_bytes_of(self, item: int, codec_id: int) -> int | None:
        """Returns the bytes of a layer of this page in that codec; None if this process cannot decode it."""
        items = self._items
        kind = items.groups[item], items.head_stops[item] - items.head_starts[item], codec_id
        unknown = codec.check_codec(codec_id)
        if unknown is not None:
            self._ranges.unreadable[item] = Miss(MissReason.LOSSY, unknown)
            return None
        if kind not in self._layer_bytes:
            self._layer_bytes[kind] = encoded_layer_bytes(items.geometry(item), codec_id, kind[1])
        return self._layer_bytes[kind]


def _items(ranges: ReadRanges, into: BoundMemory) -> CopyItems:
    """Returns one row for each piece of an exchange."""
    pieces = ranges.pieces
    groups, parts, _, _ = zip(*pieces.wants.kinds, strict=True)
    columns = [pieces.column(of_kind) for of_kind in (*zip(*parts, strict=True), *zip(*pieces.heads, strict=True))]
    rows = [block - into.first for block in pieces.blocks]
    return CopyItems(into.geometries(), *(array("I", each) for each in (pieces.column(groups), rows, *columns)))


class LoadExecutor:
    """Executes one load. Calls `finish` with the outcome, and `layer_completed` whenever a layer is complete."""

    def __init__(
        self,
        control: CoordinatorClient,
        shards: ShardConnections,
        into: BoundMemory,
        progress: LoadProgress,
        deadline: Deadline,
        layer_completed: Callable[[], object],
        finish: Callable[[Loaded | None, BaseException | None], object],
    ) -> None:
        self._control = control
        self._shards = shards
        self._into = into
        self._progress = progress
        self._deadline = deadline
        self._layer_completed = layer_completed
        self._finish = finish
        self._ranges: dict[int, ReadRanges] = {}

    def perform(self, effect: LoadEffect, jobs: list[Job[LoadEvent]]) -> LoadEvent | None:
        """As PlanExecutor."""
        match effect:
            case StartRead():
                self._ranges[effect.exchange] = effect.ranges
                jobs.append(partial(self._read, effect))
            case StopRead(exchange, items):
                self._ranges[exchange].stop(items)
                return ReadStopped(exchange, items)
            case FindReplicas():
                jobs.append(partial(self._ask, effect))
            case ReportCorrupt():
                jobs.append(partial(self._report, effect))
            case FinishLoad(loaded, error):
                self._ranges.clear()
                self._finish(loaded, error)
        return None

    def _read(self, start: StartRead) -> LoadEvent:
        """Runs one exchange."""
        spec, namespace = self._progress.spec, self._progress.body.namespace
        wants = start.ranges.pieces.wants
        request = ReadRequest(namespace, start.attempt, start.shard.epoch, wants, start.accept)
        sink = LoadSink(namespace, spec, self._into, start.ranges, self._progress, self._layer_completed)
        start.ranges.last_arrival_ns = time.monotonic_ns()  # the exchange may have waited for a thread
        try:
            progress = self._shards.read(start.shard, spec, request, sink, self._deadline)
            return ReadEnded(start.exchange, run_to_completion(progress))
        except Unavailable as trouble:
            return ReadEnded(start.exchange, error=trouble.with_traceback(None))  # it would hold the caller's memory
        except BaseException as error:
            return ReadEnded(start.exchange, error=error)

    def _ask(self, ask: FindReplicas) -> LoadEvent:
        answers: list[Explained] = []
        for question in ask.questions:
            explain = Explain(question.hashes, question.need)
            try:
                answers.append(self._control.ask(Explained, self._progress.spec, explain, Deadline(ask.until_ns)))
            except KVClusterError:  # earlier answers are used; the plan knows why the other blocks failed
                break
        return Answered(ask.number, answers)

    def _report(self, report: ReportCorrupt) -> None:
        progress = self._progress
        self._shards.suspect(report.shard, progress.spec, progress.body.namespace, report.keys, self._deadline)
