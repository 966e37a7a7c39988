"""A collective link: the bytes of a PAGES frame travel beside it, as messages of a pair (collective_pair.py).

A message is one record, sent from where it lies, or several small ones that are gathered first. They are received into
memory of the link's own, never into pages or blocks, and copied from there once they are complete. Two frames are under
way at a time. Memory of a message that did not end is not used again: it is released with the pair.
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from kvcluster.core import limits
from kvcluster.errors import ProtocolError
from kvcluster.pages.region import address_of
from kvcluster.transport.base import BytesPayload, Deadline, Payload, Unavailable
from kvcluster.transport.collective_pair import Pair, Transfer
from kvcluster.transport.exchange_copies import arrived_records
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.page_link import Arrival, PageLink, stage_bytes
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.socket_frames import FrameKind

FRAME_BYTES = 2 * limits.FRAME_BYTES
"""The most bytes of a frame of several records."""

_MESSAGE_BYTES = limits.RECORD_BYTES
"""The most bytes of a message of several records. A message costs some tens of microseconds on each side."""

_IDLE = 8


class Stages:
    """Memory that messages travel from and to; thread-safe. What is given back is used again, without being touched for
    the first time once more."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Returns memory for at least so many bytes, which nothing else uses, with any content."""
        if nbytes <= FRAME_BYTES:
            with self._lock:
                if self._idle:
                    return self._idle.pop()
        return memoryview(mmap.mmap(-1, max(nbytes, FRAME_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def give_back(self, stage: memoryview) -> None:
        """Nothing reads or writes this memory any more."""
        with self._lock:
            if stage.nbytes == FRAME_BYTES and len(self._idle) < _IDLE:
                self._idle.append(stage)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The messages of a frame that have begun, and the memory of this link that they travel from or to: `charged` bytes
    of `stage`, none if they are sent from where they lie."""

    stage: memoryview | None
    charged: int
    messages: deque[Transfer]


class CollectiveLink(PageLink):
    """A page link with a pair beside its socket."""

    batches = 2

    def __init__(self, frames: FramedSocket, pair: Pair, stages: Stages) -> None:
        super().__init__(frames)
        self._pair = pair
        self._stages = stages
        self._sent: deque[_Frame] = deque()
        self._arriving: deque[_Frame] = deque()
        frames.ends_with(pair.end)

    def abandon(self) -> None:
        self._pair.end()

    def close(self) -> None:
        self._pair.end()  # after which no memory of a message is used
        self._sent.clear()
        self._arriving.clear()
        self.frames.stages.release()
        super().close()

    # ----------------------------------------------------------------------------------------------- sending

    def send_pages(self, batch: Sequence[Record], deadline: Deadline) -> None:
        parts = list(_messages([record.data.nbytes for record in batch]))
        small = sum(record.data.nbytes for start, stop in parts if stop - start > 1 for record in batch[start:stop])
        stage = self._stage(self._sent, small, deadline) if small else None
        self.frames.send(FrameKind.PAGES, socket_frames.encode_pages(batch), deadline)
        frame = _Frame(stage, small, deque())
        self._sent.append(frame)
        at = 0
        for start, stop in parts:
            data = batch[start].data
            if stop - start > 1:
                assert stage is not None
                begin = at
                for record in batch[start:stop]:
                    stage[at : at + record.data.nbytes] = record.data
                    at += record.data.nbytes
                data = stage[begin:at]
            frame.messages.append(self._pair.send(data))
        while len(self._sent) > 1:
            self._end_first(self._sent, deadline)

    def drain(self, deadline: Deadline) -> None:
        while self._sent:
            self._end_first(self._sent, deadline)

    # --------------------------------------------------------------------------------------------- receiving

    def arrivals(self, check: Callable[[list[RecordHead]], None], deadline: Deadline) -> Iterator[Arrival]:
        following = self._next(check, deadline)
        while following is not None:
            records, room = arrived_records(following[0]), following[1]
            following = self._next(check, deadline)  # whose bytes arrive while these are copied
            records.offsets = array("Q", accumulate(records.nbytes[:-1], initial=address_of(room)))
            yield Arrival(records, list(_messages(records.nbytes)), room, partial(self._wait_for_message, deadline))
            self._end_first(self._arriving, deadline)

    def payloads(self, heads: Sequence[RecordHead], deadline: Deadline) -> Iterator[Payload]:
        room, at = self._receive(heads, deadline), 0
        for start, stop in _messages([head.nbytes for head in heads]):
            self._wait_for_message(deadline)
            for head in heads[start:stop]:
                yield BytesPayload(room[at : at + head.nbytes])
                at += head.nbytes
        self._end_first(self._arriving, deadline)

    def _next(
        self, check: Callable[[list[RecordHead]], None], deadline: Deadline
    ) -> tuple[list[RecordHead], memoryview] | None:
        """Returns the headers of the next frame, and the memory into which it begins to receive its bytes; None at the
        end of the load."""
        kind, body = self.frames.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
        if kind is FrameKind.DONE:
            return None
        heads = socket_frames.decode_pages(body)
        check(heads)
        return heads, self._receive(heads, deadline)

    def _receive(self, heads: Sequence[RecordHead], deadline: Deadline) -> memoryview:
        stage_bytes(heads)
        nbytes = sum(head.nbytes for head in heads)
        if nbytes > FRAME_BYTES and len(heads) > 1:
            raise ProtocolError(f"a frame of {len(heads)} records has {nbytes} bytes, more than {FRAME_BYTES}")
        stage = self._stage(self._arriving, nbytes, deadline)
        frame, at = _Frame(stage, nbytes, deque()), 0
        self._arriving.append(frame)
        for start, stop in _messages([head.nbytes for head in heads]):
            end = at + sum(head.nbytes for head in heads[start:stop])
            frame.messages.append(self._pair.receive(stage[at:end]))
            at = end
        return stage[:nbytes]

    # ----------------------------------------------------------------------------------------------- messages

    def _stage(self, frames: deque[_Frame], nbytes: int, deadline: Deadline) -> memoryview:
        """Returns memory for one more of these frames, charged to the tenant of the connection. What waits for its
        share of memory holds none."""
        if not self.frames.stages.try_take(nbytes):
            while frames:
                self._end_first(frames, deadline)
            self.frames.stages.take(nbytes, deadline)
        return self._stages.take(nbytes)

    def _end_first(self, frames: deque[_Frame], deadline: Deadline) -> None:
        """Ends the first of these frames, whose memory is not used any more."""
        frame = frames[0]
        while frame.messages:
            self._wait(frame.messages, deadline)
        frames.popleft()
        if frame.stage is not None:
            self._stages.give_back(frame.stage)
            self.frames.stages.give_back(frame.charged)

    def _wait_for_message(self, deadline: Deadline, _nbytes: int = 0) -> None:
        """Returns once the next message of the first frame has arrived."""
        self._wait(self._arriving[0].messages, deadline)

    def _wait(self, messages: deque[Transfer], deadline: Deadline) -> None:
        """Returns once the first of these has travelled, which is removed. Raises the other side's error if it has sent
        one."""
        try:
            messages[0].wait(deadline)
        except Unavailable as lost:
            raise self.frames.reason(lost, deadline) from None
        messages.popleft()


def _messages(nbytes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first record of each message, and the one behind its last, of a frame whose records have so many
    bytes: as many as have _MESSAGE_BYTES together, or one."""
    start = total = 0
    for at, own in enumerate(nbytes):
        if at > start and total + own > _MESSAGE_BYTES:
            yield start, at
            start, total = at, 0
        total += own
    if nbytes:
        yield start, len(nbytes)
