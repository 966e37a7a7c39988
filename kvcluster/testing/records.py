"""Single records in place of batches of copies: for sources and sinks of tests, and for those that stand before others
and change what passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcluster.pages.codec import RAW
from kvcluster.pages.copy_batch import CopyRecords
from kvcluster.pages.copy_endpoints import CopyEndpoint, HostMemory
from kvcluster.pages.region import address_of
from kvcluster.transport.base import ExchangeCopies, PageSink, PageSource, Payload, read_whole
from kvcluster.transport.exchange_copies import SingleCopies


class RecordSource(ABC):
    """A PageSource that fills one record at a time."""

    @abstractmethod
    def layer_bytes(self, item: int) -> int:
        """As PageSource."""

    @abstractmethod
    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        """Copies `layers` layers of page `item`, from its layer `layer` on, into `into`. Returns their checksums."""

    @abstractmethod
    def drained(self) -> None:
        """As PageSource."""

    def copies(self, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSource."""

        def store(at: int) -> None:
            into = target.view(records.offsets[at], records.nbytes[at])
            records.set_sums(at, self.copy(records.items[at], records.layers[at], records.counts[at], into))

        return SingleCopies(store)


def pass_on(sink: PageSink, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
    """Has `sink` take one record, whose bytes are read first."""
    staged = memoryview(bytearray(max(1, data.nbytes)))
    read_whole(data, staged[: data.nbytes])
    records = CopyRecords()
    records.add(item, layer, address_of(staged), data.nbytes, codec, sums)
    sink.copies(records, HostMemory(), staged).run(0, 1)


def copied(source: PageSource, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
    """Has `source` fill one record, and returns its sums."""
    records = CopyRecords()
    records.add(item, layer, address_of(into), into.nbytes, RAW, [0] * layers)
    source.copies(records, HostMemory(), into).run(0, 1)
    return records.sums_of(0)
