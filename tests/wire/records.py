"""What a frame of pages holds."""

from __future__ import annotations

from kvcluster.wire import frames
from kvcluster.wire.frames import Record


def records_of(message: bytes) -> list[Record]:
    """The records of a whole frame, with their bytes."""
    heads, at = frames.parse_heads(message)
    records = []
    for item, layer, codec, sums, nbytes in heads:
        records.append(Record(item, layer, codec, sums, memoryview(message)[at : at + nbytes]))
        at += nbytes
    return records
