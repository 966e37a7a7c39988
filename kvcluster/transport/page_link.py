"""A page link: a framed socket, and how the bytes of its PAGES frames travel. Here they follow their frame on the same
socket, as over TCP; a collective link (collective_link.py) sends them beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

    batches = 1
    """How many batches of a store it reads at a time."""

    def __init__(self, frames: FramedSocket) -> None:
        self.frames = frames

    def is_quiet(self) -> bool:
        return self.frames.is_quiet()

    def shutdown(self) -> None:
        """Ends the exchange under way, and all later ones."""
        self.frames.shutdown()

    def close(self) -> None:
        self.frames.close()

    # ----------------------------------------------------------------------------------------------- sending

    def send_pages(self, batch: Sequence[Record], deadline: Deadline) -> None:
        """Sends a PAGES frame and the bytes of its records. The memory of all frames before it is not read any more when
        this returns; its own is, until the next call, `drain`, or `abandon`."""
        data = [record.data for record in batch]
        self.frames.send(FrameKind.PAGES, socket_frames.encode_pages(batch), deadline, data)

    def drain(self, deadline: Deadline) -> None:
        """Returns once the memory of no frame is read any more."""

    def abandon(self) -> None:
        """As `drain`, but at once: what has not been sent is not. No exchange follows."""

    # --------------------------------------------------------------------------------------------- receiving

    def arrivals(self, check: Callable[[list[RecordHead]], None], deadline: Deadline) -> Iterator[Arrival]:
        """Yields the frames of a load until DONE. `check` raises for headers that were not asked for, before there is
        memory for what they announce. The memory of an arrival may be used until the next one is asked for."""
        stage = Staging()
        while True:
            kind, body = self.frames.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
            if kind is FrameKind.DONE:
                return
            heads = socket_frames.decode_pages(body)
            check(heads)
            room, records = stage.room(stage_bytes(heads)), arrived_records(heads)
            slices = lay_out(records, address_of(room), room.nbytes)
            yield Arrival(records, slices, room, partial(self._fill, room, deadline))

    def payloads(self, heads: Sequence[RecordHead], deadline: Deadline) -> Iterator[Payload]:
        """Yields the bytes of each record of a PAGES frame of a store, which is read before the next is asked for."""
        for head in heads:
            yield self.frames.incoming(head.nbytes, deadline)

    def _fill(self, room: memoryview, deadline: Deadline, nbytes: int) -> None:
        self.frames.fill(room[:nbytes], deadline)


def stage_bytes(heads: Sequence[RecordHead]) -> int:
    """Returns the bytes of the memory that these records pass through. Raises ProtocolError for a record that should
    have been several."""
    most = max([limits.RECORD_BYTES, *(head.nbytes for head in heads if len(head.sums) == 1)])
    for head in heads:
        if head.nbytes > most:
            raise ProtocolError(f"a record of {len(head.sums)} layers has {head.nbytes} bytes, more than {most}")
    return most
