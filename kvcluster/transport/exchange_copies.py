"""The copies of one exchange: how a data path that knows where all its bytes lie passes them on as one batch.

Such a path builds the records of a load or store from its grant, and has them copied in slices between the renewals of
its lease: by the sink or source itself if that takes batches of copies, otherwise one record at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

from kvcluster.core import limits
from kvcluster.core.messages import NewPage, ReadRequest
from kvcluster.errors import ProtocolError
from kvcluster.pages.codec import RAW
from kvcluster.pages.copy_batch import CopyRecords
from kvcluster.pages.copy_endpoints import HostMemory, MappedMemory
from kvcluster.transport.base import BytesPayload, PageSink, PageSource
from kvcluster.transport.sessions import in_order_of_use
from kvcluster.wire.shm_frames import Place

PageMemory = MappedMemory | HostMemory
"""Memory of pages that the CPU can read and write."""


class ExchangeCopies(Protocol):
    """The copies of one exchange under way."""

    def run(self, start: int, stop: int) -> None:
        """Carries out the records from `start` to `stop`, each once and in order. An error ends the exchange."""


@runtime_checkable
class CopySink(PageSink, Protocol):
    """A sink that takes batches too. It verifies their bytes at their destination."""

    def copies(self, records: CopyRecords, source: PageMemory, keeps: object) -> ExchangeCopies:
        """Prepares to copy these records from `source`, which lives as long as `keeps`. Raises ProtocolError, and
        has written nothing, if they do not match the request."""
        ...


@runtime_checkable
class CopySource(PageSource, Protocol):
    """A source that fills pages by batches too."""

    def copies(self, records: CopyRecords, target: PageMemory, keeps: object) -> ExchangeCopies:
        """Prepares to copy these records into `target`, which lives as long as `keeps`; `run` sets their sums. Their
        lengths were checked (`open_store`). Raises ProtocolError, and has written nothing, if they do not match the
        source otherwise."""
        ...


def granted_records(request: ReadRequest, places: Mapping[int, Place]) -> CopyRecords:
    """Returns the records granted to a load, in the order of their use. Offsets are relative to the same base as those
    of `places`."""
    order = in_order_of_use(request.wants, {item: place.layer_bytes for item, place in places.items()})
    sums = array("Q")
    for item, layer, count in order:
        first = layer - request.wants[item].layer_start
        sums.extend(places[item].sums[first : first + count])
    return _records(order, places, array("Q", [places[item].codec for item, _, _ in order]), sums)


def reserved_records(pages: Sequence[NewPage], places: Mapping[int, Place]) -> CopyRecords:
    """Returns the records reserved for a store, page after page so that each is complete early, with room for the
    sums."""
    order = []
    for item, place in places.items():
        layers, step = pages[item].key.part.layers, max(1, limits.RECORD_BYTES // place.layer_bytes)
        order += [(item, layer, min(step, layers - layer)) for layer in range(0, layers, step)]
    sums = array("Q", bytes(8 * sum(count for _, _, count in order)))
    return _records(order, places, array("Q", [RAW]) * len(order), sums)


def _records(
    order: Sequence[tuple[int, int, int]], places: Mapping[int, Place], codecs: array[int], sums: array[int]
) -> CopyRecords:
    """Returns one record for each (item, first layer, layers). There are thousands, and building them by columns takes
    half the time of building them by rows."""
    counts = [count for _, _, count in order]
    of_order = [places[item] for item, _, _ in order]
    return CopyRecords(
        array("I", [item for item, _, _ in order]),
        array("I", [layer for _, layer, _ in order]),
        array("I", counts),
        array(
            "Q",
            [place.offset + layer * place.layer_bytes for (_, layer, _), place in zip(order, of_order, strict=True)],
        ),
        array("Q", [count * place.layer_bytes for count, place in zip(counts, of_order, strict=True)]),
        codecs,
        array("I", [0, *accumulate(counts)][:-1]),
        sums,
    )


def open_load(
    sink: PageSink,
    records: CopyRecords,
    source: PageMemory,
    keeps: object,
    between: Callable[[], object] = lambda: None,
) -> ExchangeCopies:
    """Returns the copies of these records into any kind of `sink`. If the sink takes one record at a time, `between` is
    called between two records, because a slow sink may take long with each."""
    if isinstance(sink, CopySink):
        return sink.copies(records, source, keeps)

    def load(at: int) -> None:
        data = BytesPayload(source.view(records.offsets[at], records.nbytes[at]))
        sink.receive(records.items[at], records.layers[at], records.codecs[at], records.sums_of(at), data)

    return _SingleCopies(load, between)


def open_store(
    source: PageSource,
    records: CopyRecords,
    target: PageMemory,
    keeps: object,
    between: Callable[[], object] = lambda: None,
) -> ExchangeCopies:
    """As `open_load`, from `source`. Raises ProtocolError if its pages have other lengths than the records."""
    own = {item: source.layer_bytes(item) for item in dict.fromkeys(records.items)}
    for item, count, nbytes in zip(records.items, records.counts, records.nbytes, strict=True):
        if nbytes != count * own[item]:
            raise ProtocolError(f"page {item} has layers of {own[item]} bytes, not {nbytes // count}")
    if isinstance(source, CopySource):
        return source.copies(records, target, keeps)

    def store(at: int) -> None:
        into = target.view(records.offsets[at], records.nbytes[at])
        records.set_sums(at, source.copy(records.items[at], records.layers[at], records.counts[at], into))

    return _SingleCopies(store, between)


class _SingleCopies:
    """Copies that are handed over one record at a time."""

    def __init__(self, copy: Callable[[int], None], between: Callable[[], object]) -> None:
        self._copy = copy
        self._between = between

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies."""
        for at in range(start, stop):
            if at > start:
                self._between()
            self._copy(at)
