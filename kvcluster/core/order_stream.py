"""The order stream: what the coordinator wants of a shard, numbered, accepted in order, ended in any order, bounded.

Orders ride on the answers to reports (docs/adr/0007, 0036). Numbers belong to one coordinator epoch and only grow. One
counter numbers the orders to all shards, so that no number is used twice when a shard falls silent, comes back, or
tells anew what it holds. Every answer carries the orders that the shard is not known to have accepted: where one is
lost, the next makes it good.

The shard accepts each order whose number is above all that it has accepted, and passes over the others: a repeated or
late answer changes nothing. Accepted orders never wait for those of another kind: evictions end as they are accepted,
moves and pulls run beside what is ordered next. Each report says up to which number all is accepted and which of these
still run (OrderProgress): the others have ended. A shard that hears another coordinator forgets the numbers of the one
before; an order of that one which still runs ends under no number.
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
        """One more order, which `make` makes from its number."""
        order = make(next(self._numbers))
        assert self.of(type(order)) is None, "one order of a kind at a time"
        assert len(self) < limits.ORDERS_IN_FLIGHT, "more kinds of orders than may be in flight"
        assert order.number > max(self._open, default=0), "numbers only grow"
        self._open[order.number] = order

    def of(self, kind: type[K]) -> K | None:
        """The order of that kind that has not ended."""
        return next((order for order in self._open.values() if isinstance(order, kind)), None)

    def unaccepted(self) -> tuple[Order, ...]:
        """What the next answer carries."""
        return tuple(order for number, order in self._open.items() if number > self._accepted)

    def heard(self, progress: OrderProgress) -> list[Order]:
        """A report has said this. Returns the orders that have ended since, which leave the stream."""
        self._accepted = max(self._accepted, progress.accepted)
        ended = [order for number, order in self._open.items() if progress.ended(number)]
        for order in ended:
            del self._open[order.number]
        return ended

    def withdraw(self, order: Order) -> None:
        """It is repeated no more, and its end is not awaited. The shard may carry it out all the same."""
        del self._open[order.number]

    def close(self) -> list[Order]:
        """The member is gone. Returns the orders that have not ended, which leave the stream."""
        orders = list(self._open.values())
        self._open.clear()
        return orders


class OrderCursor:
    """The receiving half: what a shard has accepted of its coordinator. `say_soon`: the next report must not wait."""

    def __init__(self, say_soon: Callable[[], None]) -> None:
        self._say_soon = say_soon
        self._accepted = 0
        self._running: dict[int, Order] = {}

    @property
    def progress(self) -> OrderProgress:
        """What the next report tells."""
        return OrderProgress(self._accepted, tuple(self._running))

    def reset(self) -> None:
        """Another coordinator orders from now on, by numbers of its own."""
        self._accepted = 0
        self._running.clear()

    def accept(self, orders: Sequence[Order]) -> Iterator[Order]:
        """The orders of an answer that are new, one by one, each accepted as it is returned and running until `ended`.

        Stops where as many run as may: the coordinator repeats the rest.
        """
        for order in orders:
            if len(self._running) >= limits.ORDERS_IN_FLIGHT:
                return
            if order.number > self._accepted:
                self._accepted = order.number
                self._running[order.number] = order
                yield order

    def ended(self, order: Order) -> None:
        """Nothing is done for it any more. One of an earlier coordinator has no number here: it is known by itself."""
        if self._running.get(order.number) is order:
            del self._running[order.number]
        self._say_soon()
