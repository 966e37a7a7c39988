"""One record handed to a sink or a source, for those that stand before another and change what passes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.copies.batch import CopyRecords, HostMemory
from kvcluster.memory.codec import RAW
from kvcluster.memory.region import address_of
from kvcluster.transport.base import PageSink, PageSource, Payload, read_whole


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
