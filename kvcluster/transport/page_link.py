"""A page link: a framed socket, and how the bytes of its PAGES frames travel. Here they follow their frame on the same
socket, as over TCP; a NIXL link (nixl_link.py) sends them beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.errors import ProtocolError
from kvcluster.pages.copy_batch import CopyRecords
from kvcluster.pages.region import address_of
from kvcluster.pages.staging import Staging
from kvcluster.transport.base import Deadline, Payload
from kvcluster.transport.exchange_copies import arrived_records, lay_out
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.socket_frames import FrameKind


class Arrival(NamedTuple):
    """A frame of a load. `records` have their places in `room`, which those of one slice may share with those of
    another; a slice is the first record, and the one behind its last. `fill(nbytes)` returns once the `nbytes` of the
    next slice lie there; it raises Unavailable, or the other side's error."""

    records: CopyRecords
    slices: list[tuple[int, int]]
    room: memoryview
    fill: Callable[[int], None]


class PageLink:
    """Carries one exchange at a time. `shutdown` may be called from any thread; all else belongs to one thread."""

    def __init__(self, frames: FramedSocket) -> None:
        self.frames = frames
        self._stage = Staging()

    def is_quiet(self) -> bool:
        return self.frames.is_quiet()

    def shutdown(self) -> None:
        """Ends the exchange under way, and all later ones."""
        self.frames.shutdown()

    def close(self) -> None:
        """Nothing moves any more when this returns. May be called again."""
        self.frames.close()

    # ----------------------------------------------------------------------------------------------- sending

    def send_pages(self, batch: Sequence[Record], deadline: Deadline) -> None:
        """Sends a PAGES frame and the bytes of its records, which are not read any more when this returns. Raises
        Unavailable, or the other side's error."""
        data = [record.data for record in batch]
        self.frames.send(FrameKind.PAGES, socket_frames.encode_pages(batch), deadline, data)

    def drain(self, deadline: Deadline) -> None:
        """Returns once all that was sent has left this process, before the last frame of the exchange."""

    # --------------------------------------------------------------------------------------------- receiving

    def next_pages(self, deadline: Deadline) -> bytes | None:
        """Returns the body of the next PAGES frame, None for DONE. After it follows one of `arrival` and `payloads`, to
        its end, and then `taken`."""
        kind, body = self.frames.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
        return body if kind is FrameKind.PAGES else None

    def arrival(self, heads: Sequence[RecordHead], deadline: Deadline) -> Arrival:
        """Returns the frame of a load with these headers, which were asked for."""
        room, records = self._stage.room(stage_bytes(heads)), arrived_records(heads)
        slices = lay_out(records, address_of(room), room.nbytes)

        def fill(nbytes: int) -> None:
            self.frames.fill(room[:nbytes], deadline)

        return Arrival(records, slices, room, fill)

    def payloads(self, heads: Sequence[RecordHead], deadline: Deadline) -> Iterator[Payload]:
        """Yields the bytes of each record of a frame of a store, which is read before the next is asked for."""
        for head in heads:
            yield self.frames.incoming(head.nbytes, deadline)

    def taken(self, heads: Sequence[RecordHead], deadline: Deadline) -> None:
        """The bytes of that frame were read, and may be overwritten."""


def stage_bytes(heads: Sequence[RecordHead]) -> int:
    """Returns the bytes of the memory that these records pass through. Raises ProtocolError for a record that should
    have been several."""
    most = max([limits.RECORD_BYTES, *(head.nbytes for head in heads if len(head.sums) == 1)])
    for head in heads:
        if head.nbytes > most:
            raise ProtocolError(f"a record of {len(head.sums)} layers has {head.nbytes} bytes, more than {most}")
    return most
