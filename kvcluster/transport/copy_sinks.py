"""Copy sinks: how a data path that knows where all its bytes lie hands them over at once.

Such a path builds the records of a load from what it was granted, and runs them through a CopySink in slices between
the renewals of its lease. A sink that takes one record at a time gets them so.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Protocol, runtime_checkable

from kvcluster.core.messages import ReadRequest
from kvcluster.pages.copy_batch import CopyRecords
from kvcluster.pages.copy_endpoints import HostMemory, MappedMemory
from kvcluster.transport.seam import PageSink, Present
from kvcluster.transport.sessions import in_order_of_use
from kvcluster.wire.shm_frames import Place

ReadableMemory = MappedMemory | HostMemory


class LoadCopies(Protocol):
    """The copies of one exchange under way."""

    def run(self, start: int, stop: int) -> None:
        """Carries out the records from `start` to `stop`, each once and in order. What it raises ends the exchange."""


@runtime_checkable
class CopySink(PageSink, Protocol):
    """A sink that takes batches too. What it gets so it verifies where it was written."""

    def copies(self, records: CopyRecords, source: ReadableMemory, keeps: object) -> LoadCopies:
        """Prepares to take these records out of `source`, which lives as long as `keeps`. Raises ProtocolError, and
        has written nothing, where they are not what was asked for."""
        ...


def granted_records(request: ReadRequest, places: Mapping[int, Place]) -> CopyRecords:
    """What was granted, in the order of its use. Offsets count as those of `places` do."""
    order = in_order_of_use(request.wants, {item: place.layer_bytes for item, place in places.items()})
    counts = [count for _, _, count in order]
    of_order = [places[item] for item, _, _ in order]  # thousands: a column at a time is half the time of a row
    sums = array("Q")
    for (item, layer, count), place in zip(order, of_order, strict=True):
        first = layer - request.wants[item].layer_start
        sums.extend(place.sums[first : first + count])
    return CopyRecords(
        array("I", [item for item, _, _ in order]),
        array("I", [layer for _, layer, _ in order]),
        array("I", counts),
        array(
            "Q",
            [place.offset + layer * place.layer_bytes for (_, layer, _), place in zip(order, of_order, strict=True)],
        ),
        array("Q", [count * place.layer_bytes for count, place in zip(counts, of_order, strict=True)]),
        array("Q", [place.codec for place in of_order]),
        array("I", [0, *accumulate(counts)][:-1]),
        sums,
    )


def open_copies(
    sink: PageSink,
    records: CopyRecords,
    source: ReadableMemory,
    keeps: object,
    between: Callable[[], object] = lambda: None,
) -> LoadCopies:
    """The copies of these records into `sink`, whatever it is. `between` is called between two records that are
    handed over one at a time: a slow sink may take its time with each."""
    if isinstance(sink, CopySink):
        return sink.copies(records, source, keeps)
    return _SingleCopies(sink, records, source, between)


class _SingleCopies:
    """Into a sink that takes one record at a time."""

    def __init__(
        self, sink: PageSink, records: CopyRecords, source: ReadableMemory, between: Callable[[], object]
    ) -> None:
        self._sink = sink
        self._records = records
        self._source = source
        self._between = between

    def run(self, start: int, stop: int) -> None:
        records = self._records
        for at in range(start, stop):
            if at > start:
                self._between()
            data = Present(self._source.view(records.offsets[at], records.nbytes[at]))
            self._sink.receive(records.items[at], records.layers[at], records.codecs[at], records.sums_of(at), data)
