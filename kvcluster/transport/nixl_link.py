"""A NIXL link: the bytes of a PAGES frame are written into a slot of the other end (nixl_end.py), and the frame follows
once they lie there. Frames larger than a slot, and small ones, carry their bytes on the socket, as over TCP.

    JOIN      ->  and  <- JOIN         once, after WELCOME: where each end's slots are
    PAGES     ->       <- TAKEN        the slot may be written again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcluster.core import limits
from kvcluster.errors import ProtocolError
from kvcluster.pages.region import address_of
from kvcluster.transport.base import BytesPayload, Deadline, Payload, Unavailable
from kvcluster.transport.exchange_copies import arrived_records, lay_out
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.nixl_end import SLOT_BYTES, SLOTS, NixlEnd
from kvcluster.transport.page_link import Arrival, PageLink, stage_bytes
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.socket_frames import FrameKind

_LEAST_BYTES = limits.SMALL_BODY_BYTES
"""A frame of less costs more by NIXL than on the socket."""


class NixlLink(PageLink):
    """A page link with an end of NIXL beside its socket."""

    def __init__(self, frames: FramedSocket, end: NixlEnd) -> None:
        super().__init__(frames)
        self._end = end
        self._slot_out = self._slot_in = 0
        self._to_take = 0
        """Slots of the other end that were written, and are not TAKEN yet."""
        self._following: bytes | None = None
        """The PAGES frame to send once the transfer under way has ended."""

    def close(self) -> None:
        self._end.close()
        super().close()

    # ----------------------------------------------------------------------------------------------- sending

    def send_pages(self, batch: Sequence[Record], deadline: Deadline) -> None:
        nbytes = sum(record.data.nbytes for record in batch)
        if not _by_nixl(nbytes):
            self._end_transfer(deadline)
            super().send_pages(batch, deadline)
            return
        slot, at = self._end.outgoing(self._slot_out), 0  # from which nothing is sent: its last transfer has ended
        for record in batch:
            slot[at : at + record.data.nbytes] = record.data
            at += record.data.nbytes
        self._end_transfer(deadline)
        while self._to_take >= SLOTS:
            self._await_taken(deadline)
        with self._reason(deadline):
            self._end.begin(self._slot_out, nbytes)
        self._following = socket_frames.encode_pages(batch)
        self._slot_out = (self._slot_out + 1) % SLOTS
        self._to_take += 1

    def drain(self, deadline: Deadline) -> None:
        self._end_transfer(deadline)
        while self._to_take:
            self._await_taken(deadline)

    def _end_transfer(self, deadline: Deadline) -> None:
        """Ends the transfer under way, if there is one, and sends its frame."""
        if self._following is not None:
            with self._reason(deadline):
                self._end.finish(deadline, lambda: self._look(deadline))
            self.frames.send(FrameKind.PAGES, self._following, deadline)
            self._following = None

    def _look(self, deadline: Deadline) -> None:
        """Raises the other side's error, if it has sent one, or Unavailable if it has ended."""
        if not self.frames.is_quiet():
            self._await_taken(deadline)

    def _await_taken(self, deadline: Deadline) -> None:
        self.frames.receive(FrameKind.TAKEN, deadline=deadline)
        written = self._to_take - (self._following is not None)
        if not written:
            raise ProtocolError(f"{self.frames.peer} has taken what was not sent")
        self._to_take -= 1

    @contextmanager
    def _reason(self, deadline: Deadline) -> Iterator[None]:
        """Raises what the other side has said of its end, where NIXL only knows that it has ended."""
        try:
            yield
        except Unavailable as lost:
            raise self.frames.reason(lost, deadline) from None

    # --------------------------------------------------------------------------------------------- receiving

    def next_pages(self, deadline: Deadline) -> bytes | None:
        with self._reason(deadline), self.frames.meanwhile(self._end.progress):
            return super().next_pages(deadline)

    def arrival(self, heads: Sequence[RecordHead], deadline: Deadline) -> Arrival:
        nbytes = sum(head.nbytes for head in heads)
        if not _by_nixl(nbytes):
            return super().arrival(heads, deadline)
        stage_bytes(heads)
        room, records = self._end.arrived(self._slot_in, nbytes), arrived_records(heads)
        return Arrival(records, lay_out(records, address_of(room), sys.maxsize), room, _lies_there)

    def payloads(self, heads: Sequence[RecordHead], deadline: Deadline) -> Iterator[Payload]:
        nbytes = sum(head.nbytes for head in heads)
        if not _by_nixl(nbytes):
            yield from super().payloads(heads, deadline)
            return
        room, at = self._end.arrived(self._slot_in, nbytes), 0
        for head in heads:
            yield BytesPayload(room[at : at + head.nbytes])
            at += head.nbytes

    def taken(self, heads: Sequence[RecordHead], deadline: Deadline) -> None:
        if _by_nixl(sum(head.nbytes for head in heads)):
            self._slot_in = (self._slot_in + 1) % SLOTS
            self.frames.send(FrameKind.TAKEN, b"", deadline)


def _by_nixl(nbytes: int) -> bool:
    """Whether a frame of so many bytes of pages travels by NIXL."""
    return _LEAST_BYTES <= nbytes <= SLOT_BYTES


def _lies_there(nbytes: int) -> None:
    """The bytes were complete before their frame was sent."""


def join(frames: FramedSocket, deadline: Deadline) -> NixlLink:
    """Joins the two sides of a connection; both call this. Raises Unavailable, ProtocolError or KVClusterError."""
    end = NixlEnd(frames.peer)
    try:
        frames.send(FrameKind.JOIN, socket_frames.encode_join(end.address, end.metadata), deadline)
        _, body = frames.receive(FrameKind.JOIN, deadline=deadline)
        end.join(*socket_frames.decode_join(body))
    except BaseException:
        end.close()
        raise
    return NixlLink(frames, end)
