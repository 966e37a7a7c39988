"""Judges the order stream from outside, at both of its ends: each order is given once, and carried out once.

The orders that a coordinator gave and those that a shard received are recorded here by number, and compared with what
the shard does and reports. As in oracle.py, each promise is one `require` with one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.ids import Attempt, Epoch
from kvcluster.core.messages import Effect, EvictOrder, Fetch, MoveOrder, Order, PullOrder, Report, ReportAck, Send
from kvcluster.core.shard.page import PageState
from kvcluster.core.shard.shard import Shard
from tests.sim.violation import require


class GivenOrders:
    """The orders of one coordinator to one shard incarnation."""

    def __init__(self) -> None:
        self._given: dict[int, Order] = {}

    def given(self, orders: Sequence[Order]) -> list[Order]:
        """Records the orders of an answer. Returns those that no earlier answer carried."""
        new: list[Order] = []
        for order in orders:
            before = self._given.get(order.number)
            if before is None:
                require(order.number > max(self._given, default=0), "an order has a lower number than an earlier one")
                self._given[order.number] = order
                new.append(order)
            require(before in (None, order), f"number {order.number} is given to two orders")
        return new


class HeardOrders:
    """The orders that one shard incarnation has received from its current coordinator, and how it carries them out."""

    def __init__(self) -> None:
        self._epoch = Epoch(0)
        self._highest = 0
        self._heard: dict[int, Order] = {}  # orders that the shard has not reported as ended
        self._pull: PullOrder | None = None  # the last pull, until it is begun
        self._fetched: dict[Attempt, PullOrder] = {}

    @property
    def moving(self) -> bool:
        """Whether pages may leave their tier because of an order to move."""
        return any(isinstance(order, MoveOrder) for order in self._heard.values())

    def answered(self, shard: Shard, ack: ReportAck) -> bool:
        """Takes an answer that the shard has stepped. Returns True if it brought an eviction that the shard had not
        received."""
        if ack.epoch > self._epoch:  # it only learns of the coordinator from this one, and ignores its orders
            self._epoch, self._highest = ack.epoch, 0
            self._heard.clear()
            self._pull = None
            return False
        if ack.epoch < self._epoch or ack.leave is not None or shard.state.stopping:  # one that stops accepts no orders
            return False
        new = [order for order in ack.orders if order.number > self._highest]
        for order in new:
            self._highest = order.number
            self._heard[order.number] = order
            if isinstance(order, PullOrder):
                self._pull = order
        evictions = [order for order in new if isinstance(order, EvictOrder)]
        for eviction in evictions:
            require(not _left_over(shard, eviction), "an eviction is accepted and not carried out")
        return bool(evictions)

    def stepped(self, shard: Shard, effects: list[Effect]) -> None:
        """Judges the effects of a step of the shard."""
        for effect in effects:
            if isinstance(effect, Fetch):
                self._fetch(effect)
            elif isinstance(effect, Send) and isinstance(effect.message, Report):
                self._told(shard, effect.message)

    def _fetch(self, effect: Fetch) -> None:
        order, self._pull = self._pull, None
        pages = [page.key for page in order.pages] if order is not None else []
        ordered = all(slot.key in pages for slot in effect.slots)
        require(ordered, "a shard fetches what it was not ordered to, or fetches it twice")
        assert order is not None
        self._fetched[effect.attempt] = order

    def _told(self, shard: Shard, report: Report) -> None:
        if report.coordinator != self._epoch:
            return
        accepted, running = report.orders
        require(accepted <= self._highest, "a shard acknowledges an order that it has not received")
        require(all(number in self._heard for number in running), "an order runs that was not received, or had ended")
        self._fetched = {of: order for of, order in self._fetched.items() if of in shard.leases}
        for order in self._fetched.values():
            ended = self._heard.get(order.number) is order and order.number not in running
            require(not ended, "a pull is said to have ended while its pages are still written")
        for number in [number for number in self._heard if report.orders.ended(number)]:
            del self._heard[number]


def _left_over(shard: Shard, order: EvictOrder) -> bool:
    """Whether the shard still gives readers any of these pages out of that tier."""
    return any(
        page.state is PageState.READY and page.tier is order.tier and (page.space, page.key.hash) in order.blocks
        for page in shard.pool.everything()
    )
