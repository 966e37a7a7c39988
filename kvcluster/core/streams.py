"""The two streams between the coordinator and a shard: its orders to the shard, and the shard's reports to it.

The order stream: orders of the coordinator to one shard, numbered, accepted in order, ended in any order, bounded.
Orders are carried by the answers to reports (docs/adr/0007, 0036). Numbers belong to one coordinator epoch and only
grow. One counter numbers the orders to all shards, so that no number is used twice when a shard falls silent, returns,
or sends a new inventory. Every answer carries all orders that the shard is not known to have accepted, so the next
answer makes up for a lost one.

The shard accepts each order whose number is above all that it has accepted, and skips the others: a repeated or late
answer changes nothing. Accepted orders never wait for those of another kind: evictions end as they are accepted, moves
and pulls run beside later orders. Each report states the number up to which all orders are accepted, and which of these
still run (OrderProgress): the others have ended. A shard that learns of another coordinator forgets the numbers of the
previous one; an order of the previous one that still runs ends without a number.

The report stream: what a shard reports to the coordinator, numbered, acknowledged and bounded. Numbers belong to one
pair of (shard epoch, coordinator epoch) and begin at 1. The sender keeps unacknowledged events and sends them again;
the receiver skips those that it has, and asks for an inventory if a number is missing. If the sender had to drop events
(too many unacknowledged, or a new coordinator), it sends an inventory unasked: everything it holds, in chunks, marked
with the number of the last event that it includes. Later events have higher numbers and follow. One message is in
flight at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from kvcluster.core import limits
from kvcluster.core.messages import Order, OrderProgress, PageEvent, StreamEvent

K = TypeVar("K", bound=Order)


class OrderStream:
    """The sending half: the orders of one member that have not ended. `numbers` are shared with all other members."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._accepted = 0
        self._open: dict[int, Order] = {}  # by ascending number

    def __len__(self) -> int:
        return len(self._open)

    def give(self, make: Callable[[int], Order]) -> None:
        """Adds one more order, which `make` makes from its number."""
        order = make(next(self._numbers))
        assert self.of(type(order)) is None, "one order of a kind at a time"
        assert len(self) < limits.ORDERS_IN_FLIGHT, "more kinds of orders than may be in flight"
        assert order.number > max(self._open, default=0), "numbers only grow"
        self._open[order.number] = order

    def of(self, kind: type[K]) -> K | None:
        """Returns the order of that kind that has not ended; None if there is none."""
        return next((order for order in self._open.values() if isinstance(order, kind)), None)

    def unaccepted(self) -> tuple[Order, ...]:
        """Returns the orders that the next answer carries."""
        return tuple(order for number, order in self._open.items() if number > self._accepted)

    def heard(self, progress: OrderProgress) -> list[Order]:
        """Takes the progress that a report states. Removes the orders that have ended since, and returns them."""
        self._accepted = max(self._accepted, progress.accepted)
        ended = [order for number, order in self._open.items() if progress.ended(number)]
        for order in ended:
            del self._open[order.number]
        return ended

    def withdraw(self, order: Order) -> None:
        """Removes an order: it is not repeated, and its end is not awaited. The shard may still carry it out."""
        del self._open[order.number]

    def close(self) -> list[Order]:
        """Removes all orders of a member that was removed, and returns them."""
        orders = list(self._open.values())
        self._open.clear()
        return orders


class OrderCursor:
    """The receiving half: the orders that a shard has accepted. `report_soon` is called when the next report must not
    wait."""

    def __init__(self, report_soon: Callable[[], None]) -> None:
        self._say_soon = report_soon
        self._accepted = 0
        self._running: dict[int, Order] = {}

    @property
    def progress(self) -> OrderProgress:
        """The progress to state in the next report."""
        return OrderProgress(self._accepted, tuple(self._running))

    def reset(self) -> None:
        """Starts again for another coordinator, which uses numbers of its own."""
        self._accepted = 0
        self._running.clear()

    def accept(self, orders: Sequence[Order]) -> Iterator[Order]:
        """Yields the new orders of an answer one by one; each is accepted as it is yielded, and runs until `ended`.

        Stops when limits.ORDERS_IN_FLIGHT orders run: the coordinator repeats the rest.
        """
        for order in orders:
            if len(self._running) >= limits.ORDERS_IN_FLIGHT:
                return
            if order.number > self._accepted:
                self._accepted = order.number
                self._running[order.number] = order
                yield order

    def ended(self, order: Order) -> None:
        """Records that an order has ended, and asks for a report soon. Orders are compared by identity, since one of an
        earlier coordinator may have the number of a present one."""
        if self._running.get(order.number) is order:
            del self._running[order.number]
        self._say_soon()


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The content of the next message: events from number `first` on, or one chunk of an inventory."""

    first: int = 0
    events: tuple[StreamEvent, ...] = ()
    inventory: bool = False
    upto: int = 0
    chunk: int = 0
    last: bool = False
    pages: tuple[PageEvent, ...] = ()


class Everything(Protocol):
    """The events of an inventory, of known length, read one chunk at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, chunk: slice, /) -> Iterable[PageEvent]: ...


class ReportStream:
    """The sending half. `everything` returns all READY pages at the time of the call."""

    def __init__(self, everything: Callable[[], Everything]) -> None:
        self._everything = everything
        self._backlog: deque[StreamEvent] = deque()
        self._acked = 0
        self._inventory: Everything | None = None
        self._upto = 0
        self._chunk = 0
        self._owed = True  # a new coordinator knows nothing of this shard

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._acked + len(self._backlog)

    @property
    def acked(self) -> int:
        """The coordinator has all events up to this number; -1 while it is owed an inventory."""
        return -1 if self._owed else self._acked

    @property
    def has_news(self) -> bool:
        return self._owed or bool(self._backlog)

    def append(self, event: StreamEvent) -> None:
        if len(self._backlog) >= limits.STREAM_BACKLOG:
            self.owe_inventory()
        self._backlog.append(event)

    def reset(self) -> None:
        """Restarts the numbers for another coordinator, with an inventory first."""
        self._backlog.clear()
        self._acked = 0
        self._inventory = None
        self._owed = True

    def owe_inventory(self) -> None:
        """Drops the backlog and restarts with an inventory, because events were lost on either side."""
        self._acked += len(self._backlog)
        self._backlog.clear()
        self._inventory = None
        self._owed = True

    def next_piece(self) -> StreamPiece:
        """Returns the next message's content; the same again until `answered`."""
        if not self._owed:
            events = tuple(islice(self._backlog, limits.REPORTS_PER_MESSAGE))
            return StreamPiece(first=self._acked + 1, events=events)
        if self._inventory is None:
            # The snapshot includes the events of the backlog.
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
        """Records that the coordinator has `piece`, and all events up to `acked`."""
        if piece.inventory:
            if self._inventory is None or piece.chunk != self._chunk:
                return  # of an older inventory than the one now owed
            self._chunk += 1
            if piece.last:
                self._owed = False
                self._inventory = None
            return
        while self._acked < acked and self._backlog:
            self._backlog.popleft()
            self._acked += 1


class ReportCursor:
    """The receiving half: how much of one shard incarnation's stream the coordinator has received."""

    def __init__(self) -> None:
        self._next = 0  # 0: an inventory has to arrive first
        self._next_chunk = 0
        self._upto = 0  # of the latest inventory: a delayed chunk of an earlier one does not belong to it

    @property
    def acked(self) -> int:
        return max(0, self._next - 1)

    @property
    def current(self) -> bool:
        """Whether everything that was sent so far has been received."""
        return self._next > 0

    def news(self, first: int, events: Sequence[StreamEvent]) -> Sequence[StreamEvent] | None:
        """Returns the events not received before, or None if some are missing and an inventory is needed."""
        if self._next == 0:
            return None
        if first > self._next:
            self._next = self._next_chunk = 0
            return None
        fresh = events[self._next - first :]
        self._next += len(fresh)
        return fresh

    def chunk(self, chunk: int, *, upto: int, last: bool) -> bool:
        """Records an inventory chunk. Returns False if it is not the expected one.

        A repetition of the previous chunk is accepted, unless events were received after it: its answer was lost.
        Restarting the inventory for that would never finish if there are many chunks and the network loses a few
        answers.
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
