"""Judges the order stream from outside, at both of its ends: each order is given once, and carried out once.

What a coordinator gave and what a shard heard are remembered here by number, and compared with what the shard does and
with what it tells. As in oracle.py, each promise is one `hold` with one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.ids import Attempt, Epoch
from kvcluster.core.messages import Effect, EvictOrder, Fetch, MoveOrder, Order, PullOrder, Report, ReportAck, Send
from kvcluster.core.pool import PageState
from kvcluster.core.shard import Shard
from kvcluster.testing.sim.promises import hold


class GivenOrders:
    """What one coordinator has ordered one shard incarnation."""

    def __init__(self) -> None:
        self._given: dict[int, Order] = {}

    def given(self, orders: Sequence[Order]) -> list[Order]:
        """An answer carries these. Returns those that no answer has carried before."""
        new: list[Order] = []
        for order in orders:
            before = self._given.get(order.number)
            if before is None:
                hold(order.number > max(self._given, default=0), "an order has a lower number than one of before")
                self._given[order.number] = order
                new.append(order)
            hold(before in (None, order), f"number {order.number} is given to two orders")
        return new


class HeardOrders:
    """What one shard incarnation has heard of its present coordinator, and what it makes of it."""

    def __init__(self) -> None:
        self._epoch = Epoch(0)
        self._highest = 0
        self._heard: dict[int, Order] = {}  # that the shard has not told to have ended
        self._pull: PullOrder | None = None  # the last one, until it is begun
        self._fetched: dict[Attempt, PullOrder] = {}

    @property
    def moving(self) -> bool:
        """May pages leave their tier because a move was ordered?"""
        return any(isinstance(order, MoveOrder) for order in self._heard.values())

    def answered(self, shard: Shard, ack: ReportAck) -> bool:
        """The shard has stepped this answer. Returns True where it brought an eviction that it had not heard."""
        if ack.epoch > self._epoch:  # by which it learns whom to ask; what it orders is not heeded
            self._epoch, self._highest = ack.epoch, 0
            self._heard.clear()
            self._pull = None
            return False
        if ack.epoch < self._epoch or ack.leave is not None:
            return False
        new = [order for order in ack.orders if order.number > self._highest]
        for order in new:
            self._highest = order.number
            self._heard[order.number] = order
            if isinstance(order, PullOrder):
                self._pull = order
        evictions = [order for order in new if isinstance(order, EvictOrder)]
        for eviction in evictions:
            hold(not _left_over(shard, eviction), "an eviction is accepted and not carried out")
        return bool(evictions)

    def stepped(self, shard: Shard, effects: list[Effect]) -> None:
        """The shard does this now."""
        for effect in effects:
            if isinstance(effect, Fetch):
                self._fetch(effect)
            elif isinstance(effect, Send) and isinstance(effect.message, Report):
                self._told(shard, effect.message)

    def _fetch(self, effect: Fetch) -> None:
        order, self._pull = self._pull, None
        pages = [page.key for page in order.pages] if order is not None else []
        ordered = all(slot.key in pages for slot in effect.slots)
        hold(ordered, "a shard fetches what it was not ordered to, or fetches it twice")
        assert order is not None
        self._fetched[effect.attempt] = order

    def _told(self, shard: Shard, report: Report) -> None:
        if report.coordinator != self._epoch:
            return
        accepted, running = report.orders
        hold(accepted <= self._highest, "a shard acknowledges an order that it has not heard")
        hold(all(number in self._heard for number in running), "an order runs that was not heard, or had ended")
        self._fetched = {of: order for of, order in self._fetched.items() if of in shard.leases}
        for order in self._fetched.values():
            ended = self._heard.get(order.number) is order and order.number not in running
            hold(not ended, "a pull is said to have ended while its pages are still written")
        for number in [number for number in self._heard if report.orders.ended(number)]:
            del self._heard[number]


def _left_over(shard: Shard, order: EvictOrder) -> bool:
    """Does the shard still give any of these to readers out of that tier?"""
    return any(
        page.state is PageState.READY and page.tier is order.tier and (page.space, page.key.hash) in order.blocks
        for page in shard.pool.everything()
    )
