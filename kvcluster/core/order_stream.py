"""The order stream: orders of the coordinator to one shard, numbered, accepted in order, ended in any order, bounded.

Orders are carried by the answers to reports (docs/adr/0007, 0036). Numbers belong to one coordinator epoch and only
grow. One counter numbers the orders to all shards, so that no number is used twice when a shard falls silent, comes
back, or sends a new inventory. Every answer carries all orders that the shard is not known to have accepted, so the
next answer makes up for a lost one.

The shard accepts each order whose number is above all that it has accepted, and skips the others: a repeated or late
answer changes nothing. Accepted orders never wait for those of another kind: evictions end as they are accepted, moves
and pulls run beside later orders. Each report says up to which number all orders are accepted and which of these still
run (OrderProgress): the others have ended. A shard that learns of another coordinator forgets the numbers of the
previous one; an order of the previous one that still runs ends without a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvcluster.core import limits
from kvcluster.core.messages import Order, OrderProgress

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
        """Removes all orders of a member that is gone, and returns them."""
        orders = list(self._open.values())
        self._open.clear()
        return orders


class OrderCursor:
    """The receiving half: the orders that a shard has accepted. `say_soon` is called when the next report must not
    wait."""

    def __init__(self, say_soon: Callable[[], None]) -> None:
        self._say_soon = say_soon
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
