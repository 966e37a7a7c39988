"""The worker's side of an exchange, for all transports; sessions.py is the shard's side.

Bytes move in records. `in_order_of_use` and `runs_of` define how layers of pages are cut into records, and the order in
which they travel.

A data path that knows where all its bytes lie builds the records of a load or store from its grant (`granted_records`,
`reserved_records`) and passes them on as one batch: the sink or source copies them in slices, between the renewals of
its lease. `RecordSink` and `outgoing_records` take one record at a time instead.

`RequestedLayers` and `check_answer_length` check that a shard's answer matches the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter

from kvcluster.copies.batch import HOST, CopyEndpoint, CopyRecords, cpu_addresses
from kvcluster.core import limits
from kvcluster.core.ids import SUM_BYTES
from kvcluster.core.messages import NewPage, NewPages, PageWant, PageWants, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss
from kvcluster.errors import ProtocolError
from kvcluster.memory.arena import Staging
from kvcluster.memory.codec import RAW
from kvcluster.memory.region import address_of
from kvcluster.transport.base import BytesPayload, ExchangeCopies, PageSource, Payload
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.shm_frames import Places


def in_order_of_use(
    wants: Sequence[PageWant], layer_bytes: Sequence[int], record_bytes: int | None = None
) -> Iterator[tuple[int, int, list[int]]]:
    """Yields runs of records, a record being the unit in which a load moves bytes: the first layer within its page, the
    number of layers, and the pages of which these are used next, as places in `wants`.

    The first layers of every page come before the second of any. A record has at most `record_bytes` (by default
    limits.RECORD_BYTES), or one layer.
    """
    columns = PageWants.of(wants)
    alike: dict[tuple[int, int], list[int]] = {}
    for at, kind in enumerate(zip(columns.kind_of, layer_bytes, strict=True)):
        alike.setdefault(kind, []).append(at)
    runs = []
    for (number, nbytes), pages in alike.items():
        _, part, start, stop = columns.kinds[number]
        runs += [
            (part.layer_start + layer, layer, count, pages)
            for layer, count in runs_of(start, stop, nbytes, record_bytes)
        ]
    for _, layer, count, pages in sorted(runs, key=itemgetter(0)):
        yield layer, count, pages


def runs_of(start: int, stop: int, layer_bytes: int, record_bytes: int | None = None) -> list[tuple[int, int]]:
    """Divides layers of one page into records. Returns the first layer and the number of layers of each."""
    step = max(1, (record_bytes or limits.RECORD_BYTES) // layer_bytes)
    return [(layer, min(step, stop - layer)) for layer in range(start, stop, step)]


def granted_records(wants: Sequence[PageWant], places: Places, record_bytes: int | None = None) -> CopyRecords:
    """Returns the records granted to a load, in the order of their use, each of at most `record_bytes` or one layer.
    Offsets are relative to the same base as those of `places`."""
    asked = PageWants.of(wants).select(places.items)
    runs = list(in_order_of_use(asked, places.layer_bytes, record_bytes))
    items: list[int] = []
    layers: list[int] = []
    counts: list[int] = []
    offsets: list[int] = []
    nbytes: list[int] = []
    for layer, count, pages in runs:
        items += [places.items[at] for at in pages]
        layers += [layer] * len(pages)
        counts += [count] * len(pages)
        offsets += [places.offsets[at] + layer * places.layer_bytes[at] for at in pages]
        nbytes += [count * places.layer_bytes[at] for at in pages]
    codecs, sums = places.codecs, places.sums
    if len(runs) > 1:  # else each page is one record
        lengths = [stop - start for _, _, start, stop in asked.kinds]
        starts = [0, *accumulate([lengths[number] for number in asked.kind_of])]  # of each page's sums
        codecs = [places.codecs[at] for _, _, pages in runs for at in pages]
        sums = []
        for layer, count, pages in runs:
            for at in pages:
                first = starts[at] + layer - asked.kinds[asked.kind_of[at]].layer_start
                sums += places.sums[first : first + count]
    return CopyRecords(
        array("I", items),
        array("I", layers),
        array("I", counts),
        array("Q", offsets),
        array("Q", nbytes),
        array("Q", codecs),
        _sum_starts(counts),
        array("Q", sums),
    )


def split_places(wants: Sequence[PageWant], places: Places, end: int) -> tuple[Places, Places]:
    """Returns the granted pages of a load that lie before the offset `end`, and the others, whose offsets count from
    there."""
    kinds = PageWants.of(wants).select(places.items)
    lengths = [kinds.kinds[number].layer_stop - kinds.kinds[number].layer_start for number in kinds.kind_of]
    starts = list(accumulate(lengths, initial=0))

    def chosen(ats: Sequence[int], base: int) -> Places:
        return Places(
            [places.items[at] for at in ats],
            [places.offsets[at] - base for at in ats],
            [places.layer_bytes[at] for at in ats],
            [places.codecs[at] for at in ats],
            [layer_sum for at in ats for layer_sum in places.sums[starts[at] : starts[at + 1]]],
        )

    near = [at for at, offset in enumerate(places.offsets) if offset < end]
    far = [at for at, offset in enumerate(places.offsets) if offset >= end]
    return chosen(near, 0), chosen(far, end)


def arrived_records(heads: Sequence[RecordHead]) -> CopyRecords:
    """Returns the records that these headers announce, without offsets (`lay_out`)."""
    counts = [len(head.sums) for head in heads]
    return CopyRecords(
        array("I", [head.item for head in heads]),
        array("I", [head.layer for head in heads]),
        array("I", counts),
        array("Q", bytes(8 * len(heads))),
        array("Q", [head.nbytes for head in heads]),
        array("Q", [head.codec for head in heads]),
        _sum_starts(counts),
        array("Q", [layer_sum for head in heads for layer_sum in head.sums]),
    )


def lay_out(records: CopyRecords, address: int, room: int) -> list[tuple[int, int]]:
    """Places these records one after the other at `address`, those of each slice of at most `room` bytes from there
    again. Returns the slices: the first record of each, and the one behind its last."""
    slices = list(records.slices(room))
    for start, stop in slices:
        records.offsets[start:stop] = array("Q", accumulate(records.nbytes[start : stop - 1], initial=address))
    return slices


def reserved_records(pages: Sequence[NewPage], places: Places) -> CopyRecords:
    """Returns the records reserved for a store, page after page so that each is complete early, with room for the
    sums."""
    items, offsets, layer_bytes, _, _ = places
    reserved = NewPages.of(pages).select(items)
    kinds = list(zip(layer_bytes, reserved.place_of, strict=True))
    runs_of_kind = {  # of which thousands of pages share few
        (nbytes, number): runs_of(0, reserved.places[number][1].layers, nbytes)
        for nbytes, number in dict.fromkeys(kinds)
    }
    runs = [runs_of_kind[kind] for kind in kinds]
    rows = [at for at, of_page in enumerate(runs) for _ in of_page]
    layers = [layer for of_page in runs for layer, _ in of_page]
    counts = [count for of_page in runs for _, count in of_page]
    return CopyRecords(
        array("I", [items[at] for at in rows]),
        array("I", layers),
        array("I", counts),
        array("Q", [offsets[at] + layer * layer_bytes[at] for at, layer in zip(rows, layers, strict=True)]),
        array("Q", [count * layer_bytes[at] for at, count in zip(rows, counts, strict=True)]),
        array("Q", [RAW]) * len(rows),
        _sum_starts(counts),
        array("Q", bytes(SUM_BYTES * sum(counts))),
    )


def _sum_starts(counts: Sequence[int]) -> array[int]:
    """Returns where the sums of each record begin, from the numbers of their layers."""
    starts = array("I", accumulate(counts, initial=0))
    starts.pop()
    return starts


def open_store(source: PageSource, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
    """Returns the copies of these records from `source`. Raises ProtocolError if its pages have other lengths than the
    records."""
    own = {item: source.layer_bytes(item) for item in dict.fromkeys(records.items)}
    for item, count, nbytes in zip(records.items, records.counts, records.nbytes, strict=True):
        if nbytes != count * own[item]:
            raise ProtocolError(f"page {item} has layers of {own[item]} bytes, not {nbytes // count}")
    return source.copies(records, target, keeps)


class RecordSink(ABC):
    """A PageSink that takes one record at a time, as bytes of memory that the CPU addresses."""

    device = None

    @abstractmethod
    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        """Takes `len(sums)` layers of `wants[item]`, from its page's layer `layer` on. They are at most
        limits.RECORD_BYTES, or one layer, and may be left unread."""

    def copies(self, records: CopyRecords, source: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSink."""
        assert cpu_addresses(source), "pages of a device come through memory of this process"

        def load(at: int) -> None:
            data = BytesPayload(source.view(records.offsets[at], records.nbytes[at]))
            self.receive(records.items[at], records.layers[at], records.codecs[at], records.sums_of(at), data)

        return SingleCopies(load)


class SingleCopies:
    """Copies that are carried out one record at a time, by `copy`."""

    def __init__(self, copy: Callable[[int], object]) -> None:
        self._copy = copy

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies."""
        for at in range(start, stop):
            self._copy(at)


def outgoing_records(
    request: WriteRequest, outcome: Sequence[Written | None], source: PageSource
) -> Iterator[list[Record]]:
    """Yields the layers of every page of a store that the shard takes, in batches of about FRAME_BYTES. The records are
    views of one stage, and are valid until the next batch."""
    items = [item for item, refused in enumerate(outcome) if refused is None]
    if not items:
        return
    layer_bytes = [source.layer_bytes(item) for item in items]
    records = reserved_records(request.pages, Places(items, [0] * len(items), layer_bytes))
    room = max(limits.FRAME_BYTES, *layer_bytes)
    stage = Staging().room(min(room, sum(records.nbytes)))
    slices = lay_out(records, address_of(stage), room)
    copies = open_store(source, records, HOST, stage)
    for start, stop in slices:
        copies.run(start, stop)
        batch, end = [], 0
        for at in range(start, stop):
            begin, end = end, end + records.nbytes[at]
            batch.append(Record(records.items[at], records.layers[at], RAW, records.sums_of(at), stage[begin:end]))
        yield batch


class RequestedLayers:
    """The layers that a load requested from a shard. Checks that only these arrive, in order, each once.

    Otherwise a layer that arrived twice would hide a missing one.
    """

    def __init__(self, request: ReadRequest, outcome: Sequence[Miss | None], address: str) -> None:
        self._wants = request.wants
        self._outcome = outcome
        self._address = address
        self._next = [want.layer_start for want in request.wants]

    def check(self, heads: Sequence[RecordHead]) -> None:
        """Raises ProtocolError unless the layers of each record are the next ones of its item."""
        for item, layer, _, sums, _ in heads:
            stop = layer + len(sums)
            if (
                item >= len(self._next)
                or self._outcome[item] is not None
                or layer != self._next[item]
                or stop > self._wants[item].layer_stop
            ):
                raise ProtocolError(f"{self._address} sent layers that were not asked for, or not in order")
            self._next[item] = stop


def check_answer_length(outcome: Sequence[object], asked: Sequence[object], address: str) -> None:
    """Raises ProtocolError if a shard has not answered for exactly the requested pages."""
    if len(outcome) != len(asked):
        raise ProtocolError(f"{address} answered for {len(outcome)} of the {len(asked)} pages of the request")
