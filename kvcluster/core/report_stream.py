"""The report stream: what a shard tells the coordinator, numbered, acknowledged and bounded.

Numbers belong to one pair of (shard epoch, coordinator epoch) and begin at 1. The sender keeps what is not
yet acknowledged and sends it again; the receiver skips what it has and asks for an inventory where a number
is missing. Where the sender had to forget (too much unacknowledged, a new coordinator), it offers an
inventory by itself: everything it holds, in chunks, marked with the number up to which it is true. Events
that happen meanwhile have higher numbers and follow. One message is under way at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvcluster.core import limits
from kvcluster.core.messages import PageEvent, StreamEvent


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What goes into the next message: events from number `first`, or one chunk of an inventory."""

    first: int = 0
    events: tuple[StreamEvent, ...] = ()
    inventory: bool = False
    upto: int = 0
    chunk: int = 0
    last: bool = False
    pages: tuple[PageEvent, ...] = ()


class Everything(Protocol):
    """What an inventory has to tell, so many pages, of which a chunk at a time is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, chunk: slice, /) -> Iterable[PageEvent]: ...


class ReportStream:
    """The sending half. `everything` lists all READY pages at the moment of the call."""

    def __init__(self, everything: Callable[[], Everything]) -> None:
        self._everything = everything
        self._backlog: deque[StreamEvent] = deque()
        self._acked = 0
        self._inventory: Everything | None = None
        self._upto = 0
        self._chunk = 0
        self._owed = True  # a coordinator that knows nothing of us is owed an inventory

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._acked + len(self._backlog)

    @property
    def acked(self) -> int:
        """Everything up to this number is known to the coordinator; -1 while it is owed an inventory."""
        return -1 if self._owed else self._acked

    @property
    def has_news(self) -> bool:
        return self._owed or bool(self._backlog)

    def append(self, event: StreamEvent) -> None:
        if len(self._backlog) >= limits.STREAM_BACKLOG:
            self.owe_inventory()
        self._backlog.append(event)

    def reset(self) -> None:
        """Another coordinator listens: numbers begin again, with an inventory."""
        self._backlog.clear()
        self._acked = 0
        self._inventory = None
        self._owed = True

    def owe_inventory(self) -> None:
        """Events were lost on either side: all that we hold is to be told again."""
        self._acked += len(self._backlog)
        self._backlog.clear()
        self._inventory = None
        self._owed = True

    def next_piece(self) -> StreamPiece:
        """The next message's content; the same again until `answered`."""
        if not self._owed:
            events = tuple(islice(self._backlog, limits.REPORTS_PER_MESSAGE))
            return StreamPiece(first=self._acked + 1, events=events)
        if self._inventory is None:
            # What is in the backlog is in the snapshot too.
            self._acked += len(self._backlog)
            self._backlog.clear()
            self._inventory = self._everything()
            self._upto = self._acked
            self._chunk = 0
        start = self._chunk * limits.INVENTORY_CHUNK
        pages = tuple(self._inventory[start : start + limits.INVENTORY_CHUNK])
        last = start + limits.INVENTORY_CHUNK >= len(self._inventory)
        return StreamPiece(inventory=True, upto=self._upto, chunk=self._chunk, last=last, pages=pages)

    def answered(self, piece: StreamPiece, acked: int) -> None:
        """The coordinator has `piece`, and everything up to `acked`."""
        if piece.inventory:
            if self._inventory is None or piece.chunk != self._chunk:
                return  # an older inventory than the one we now owe
            self._chunk += 1
            if piece.last:
                self._owed = False
                self._inventory = None
            return
        while self._acked < acked and self._backlog:
            self._backlog.popleft()
            self._acked += 1


class ReportCursor:
    """The receiving half: what the coordinator has heard of one shard incarnation."""

    def __init__(self) -> None:
        self._next = 0  # 0: an inventory has to come first
        self._next_chunk = 0
        self._upto = 0  # of the inventory that came last: a chunk of another, overtaken on its way, is none of it

    @property
    def acked(self) -> int:
        return max(0, self._next - 1)

    @property
    def current(self) -> bool:
        """Is all known that was sent so far?"""
        return self._next > 0

    def news(self, first: int, events: Sequence[StreamEvent]) -> Sequence[StreamEvent] | None:
        """The events not heard before, or None where some are missing and an inventory is needed."""
        if self._next == 0:
            return None
        if first > self._next:
            self._next = self._next_chunk = 0
            return None
        fresh = events[self._next - first :]
        self._next += len(fresh)
        return fresh

    def chunk(self, chunk: int, *, upto: int, last: bool) -> bool:
        """Takes note of an inventory chunk; False where it is not the one that comes next.

        The one before it counts again, unless news came after it: its answer was lost, and to begin anew for
        that would never end where many chunks meet a network that loses a few answers.
        """
        if chunk == 0:
            self._next = self._next_chunk = 0
            self._upto = upto
        if upto == self._upto and chunk == self._next_chunk - 1:
            return self._next in (0, upto + 1)
        if upto != self._upto or chunk != self._next_chunk or self.current:
            return False
        self._next_chunk += 1
        if last:
            self._next = upto + 1
        return True
