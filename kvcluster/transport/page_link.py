"""A page link: a framed socket, and how the bytes of its PAGES frames travel. Here they follow their frame on the same
socket, as over TCP; a collective link (collective_link.py) sends them beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvcluster.core import limits
from kvcluster.errors import ProtocolError
from kvcluster.pages.staging import Staging
from kvcluster.transport.base import Deadline, Payload
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.socket_frames import FrameKind

Arrival = tuple[list[RecordHead], memoryview, Callable[[int], None]]
"""(headers of a frame, memory, fill): `fill(nbytes)` returns once the next `nbytes` of the frame lie at the beginning
of that memory. It raises Unavailable, or the other side's error."""


class PageLink:
    """Carries one exchange at a time. `shutdown` may be called from any thread; all else belongs to one thread."""

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
        """Sends a PAGES frame and the bytes of its records, which are not read any more when this returns."""
        data = [record.data for record in batch]
        self.frames.send(FrameKind.PAGES, socket_frames.encode_pages(batch), deadline, data)

    def drain(self, deadline: Deadline) -> None:
        """Returns once all bytes have left this process."""

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
            room = stage.room(stage_bytes(heads))
            yield heads, room, partial(self._fill, room, deadline)

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
