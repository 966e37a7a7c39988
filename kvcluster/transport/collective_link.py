"""A collective link: the bytes of a PAGES frame travel beside it, as one message of a pair (collective_pair.py).

Both ends have memory of their own for what travels, never pages or blocks: a sender gathers a frame there, and a
receiver copies it from there once it is complete. Two frames are under way at a time. Memory of a transfer that did not
end is not used again: it is released with the pair.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.errors import ProtocolError
from kvcluster.pages.region import address_of
from kvcluster.transport.base import BytesPayload, Deadline, Payload, Unavailable
from kvcluster.transport.collective_pair import Pair, Transfer
from kvcluster.transport.exchange_copies import arrived_records, lay_out
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.page_link import Arrival, PageLink, stage_bytes
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.socket_frames import FrameKind

MESSAGE_BYTES = 2 * limits.FRAME_BYTES
"""The target size of a message; a larger one has one record."""

_UNDER_WAY = 2
"""Messages that a side has begun: one travels while the other is gathered, or copied and verified."""

_IDLE = 8

_WHOLE = sys.maxsize
"""Records are laid out in slices of so many bytes: a message is one."""


class Stages:
    """Memory that messages travel from and to; thread-safe. What is given back is used again, without being touched for
    the first time once more."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Returns memory for at least so many bytes, which nothing else uses, with any content."""
        if nbytes <= MESSAGE_BYTES:
            with self._lock:
                if self._idle:
                    return self._idle.pop()
        return memoryview(mmap.mmap(-1, max(nbytes, MESSAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def give_back(self, stage: memoryview) -> None:
        """Nothing reads or writes this memory any more."""
        with self._lock:
            if stage.nbytes == MESSAGE_BYTES and len(self._idle) < _IDLE:
                self._idle.append(stage)


class _Message(NamedTuple):
    """`memory` is that part of `stage` that travels."""

    stage: memoryview
    memory: memoryview
    transfer: Transfer


class CollectiveLink(PageLink):
    """A page link with a pair beside its socket."""

    def __init__(self, frames: FramedSocket, pair: Pair, stages: Stages) -> None:
        super().__init__(frames)
        self._pair = pair
        self._stages = stages
        self._sent: deque[_Message] = deque()
        self._coming: deque[_Message] = deque()
        frames.ends_with(pair.end)

    def close(self) -> None:
        self._pair.end()  # after which no memory of a message is used
        self._sent.clear()
        self._coming.clear()
        self.frames.stages.release()
        super().close()

    # ----------------------------------------------------------------------------------------------- sending

    def send_pages(self, batch: Sequence[Record], deadline: Deadline) -> None:
        nbytes = sum(record.data.nbytes for record in batch)
        if len(self._sent) >= _UNDER_WAY:
            self._end_first(self._sent, deadline)
        stage = self._stage(self._sent, nbytes, deadline)
        at = 0
        for record in batch:
            stage[at : at + record.data.nbytes] = record.data
            at += record.data.nbytes
        self.frames.send(FrameKind.PAGES, socket_frames.encode_pages(batch), deadline)
        self._begin(self._sent, stage, nbytes, self._pair.send)

    def drain(self, deadline: Deadline) -> None:
        while self._sent:
            self._end_first(self._sent, deadline)

    # --------------------------------------------------------------------------------------------- receiving

    def arrivals(self, check: Callable[[list[RecordHead]], None], deadline: Deadline) -> Iterator[Arrival]:
        following = self._next(check, deadline)
        while following is not None:
            records = arrived_records(following)
            following = self._next(check, deadline)  # whose bytes arrive while these are copied
            room = self._coming[0].memory
            yield Arrival(
                records, lay_out(records, address_of(room), _WHOLE), room, partial(self._wait_first, deadline)
            )
            self._end_first(self._coming, deadline)

    def payloads(self, heads: Sequence[RecordHead], deadline: Deadline) -> Iterator[Payload]:
        self._receive(heads, deadline)
        memory = self._coming[0].memory
        self._wait_first(deadline)
        at = 0
        for head in heads:
            yield BytesPayload(memory[at : at + head.nbytes])
            at += head.nbytes
        self._end_first(self._coming, deadline)

    def _next(self, check: Callable[[list[RecordHead]], None], deadline: Deadline) -> list[RecordHead] | None:
        """Returns the headers of the next frame, whose bytes it begins to receive; None at the end of the load."""
        kind, body = self.frames.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
        if kind is FrameKind.DONE:
            return None
        heads = socket_frames.decode_pages(body)
        check(heads)
        self._receive(heads, deadline)
        return heads

    def _receive(self, heads: Sequence[RecordHead], deadline: Deadline) -> None:
        stage_bytes(heads)
        nbytes = sum(head.nbytes for head in heads)
        if nbytes > MESSAGE_BYTES and len(heads) > 1:
            raise ProtocolError(f"a frame of {len(heads)} records has {nbytes} bytes, more than {MESSAGE_BYTES}")
        self._begin(self._coming, self._stage(self._coming, nbytes, deadline), nbytes, self._pair.receive)

    def _wait_first(self, deadline: Deadline, _nbytes: int = 0) -> None:
        self._wait(self._coming[0], deadline)

    # ----------------------------------------------------------------------------------------------- messages

    def _stage(self, messages: deque[_Message], nbytes: int, deadline: Deadline) -> memoryview:
        """Returns memory for one more of these messages, charged to the tenant of the connection. What waits for its
        share of memory holds none."""
        if not self.frames.stages.try_take(nbytes):
            while messages:
                self._end_first(messages, deadline)
            self.frames.stages.take(nbytes, deadline)
        return self._stages.take(nbytes)

    def _begin(
        self, messages: deque[_Message], stage: memoryview, nbytes: int, move: Callable[[memoryview], Transfer]
    ) -> None:
        messages.append(_Message(stage, stage[:nbytes], move(stage[:nbytes])))

    def _end_first(self, messages: deque[_Message], deadline: Deadline) -> None:
        """Ends the first of these messages, whose memory is not read any more."""
        self._wait(messages[0], deadline)
        message = messages.popleft()
        self._stages.give_back(message.stage)
        self.frames.stages.give_back(message.memory.nbytes)

    def _wait(self, message: _Message, deadline: Deadline) -> None:
        """Returns once the message has travelled. Raises the other side's error if it has sent one."""
        try:
            message.transfer.wait(deadline)
        except Unavailable as lost:
            raise self.frames.reason(lost, deadline) from None
