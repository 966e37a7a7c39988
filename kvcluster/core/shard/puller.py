"""Carries out pull orders: copies pages from another shard, one order after the other.

The shard reserves the pages under a write lease of its own and the shell fills them (Fetch). The Commit or Abort of
that lease ends the order, as for any writer. An order that arrives while another runs waits: the shell fetches for one
at a time, and the lease of a second would expire meanwhile. An order that arrives while another waits replaces it: the
coordinator gives one at a time, and has withdrawn the earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Effect, Fetch, PullOrder, Tombstone
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import Page
from kvcluster.core.shard.shard_state import ShardState


class _Pull(NamedTuple):
    order: PullOrder
    attempt: Attempt


class Puller:
    """The pull under way, and the order that waits for its end."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._running: _Pull | None = None
        self._next: PullOrder | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The attempt under which pages are being pulled, or None."""
        return self._running.attempt if self._running is not None else None

    def reset(self) -> None:
        """Drops the waiting order, because another coordinator gives the orders now. The running pull ends by
        itself."""
        self._next = None

    def take(self, order: PullOrder) -> None:
        """Queues a new order in place of one that waits."""
        self._drop_waiting()
        self._next = order

    def purge(self, stone: Tombstone) -> None:
        """Drops the waiting order if the tombstone covers it: the source may not have applied the purge yet."""
        if self._next is not None and stone.names(self._next.tenant, self._next.spec):
            self._drop_waiting()

    def begin(self, now: int) -> list[Effect]:
        """Begins the waiting pull if none is under way. The order ends at once if none of its pages is to be
        fetched."""
        if self._running is not None or self._next is None:
            return []
        order, self._next = self._next, None
        effects = self._begin(order, now)
        if not effects:
            self._state.order_cursor.ended(order)
        return effects

    def ended(self, attempt: Attempt, committed: int = 0) -> None:
        """Ends the running pull if the attempt whose lease has ended is its own. `committed`: pages that were
        fetched."""
        if self._running is not None and self._running.attempt == attempt:
            self._state.counters["pulled"] += committed
            self._state.order_cursor.ended(self._running.order)
            self._running = None

    def _drop_waiting(self) -> None:
        if self._next is not None:
            self._state.order_cursor.ended(self._next)
        self._next = None

    def _begin(self, order: PullOrder, now: int) -> list[Effect]:
        state = self._state
        space = state.namespaces.attach(order.tenant, order.spec)
        if space is None:
            return []
        space.forget_unused(state.pool)
        offers = [space.offer(state.pool, new, state.withdraw, order.codec, order.into) for new in order.pages]
        pages = [offer for offer in offers if isinstance(offer, Page)]
        if not pages:
            return []
        attempt = state.own.next()
        state.leases.grant(attempt, LeaseKind.WRITE, list(pages), now)
        self._running = _Pull(order, attempt)
        return [Fetch(attempt, space.id, order.source, tuple(page.slot() for page in pages))]
