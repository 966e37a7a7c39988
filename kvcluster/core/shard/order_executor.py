"""Executes what the coordinator asks of a shard: carries out orders, applies the tombstones of purges, drains.

Each order of the stream (core/streams.py) is accepted once and passed to the executor of its kind: evictions are
carried out here at once, moves between tiers by tier_mover.py, pulls by puller.py. Tombstones and drains are not
orders (docs/adr/0036). The tombstones of an answer are applied before its orders, which were given after the purge.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import Any

from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.core.messages import (
    Effect,
    Erase,
    EvictOrder,
    MoveOrder,
    Order,
    PageKey,
    PullOrder,
    PurgedEvent,
    ReportAck,
    Revoke,
    Tombstone,
)
from kvcluster.core.miss import PURGING
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.puller import Puller
from kvcluster.core.shard.reserve_queue import lost
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.tier_mover import TierMover


class OrderExecutor:
    """Handles the coordinator's answers to reports. A new kind of order gets an executor in `_executors`."""

    def __init__(self, state: ShardState, tier_mover: TierMover, puller: Puller) -> None:
        self._state = state
        self._tier_mover = tier_mover
        self._puller = puller
        self._executors: dict[type[Order], Callable[[Any], None]] = {
            EvictOrder: self._evict,
            MoveOrder: tier_mover.take,
            PullOrder: puller.take,
        }

    def reset(self) -> None:
        """Forgets the orders of the last coordinator; another one gives them from now on."""
        self._state.order_cursor.reset()
        self._tier_mover.reset()
        self._puller.reset()

    def carry_out(self, ack: ReportAck, now: int) -> list[Effect]:
        """Carries out what the coordinator's answer asks for and is not done yet; a shard that is stopping carries out
        purges only. Returns the effects."""
        if ack.drain and not self._state.draining:
            self._state.draining = True
            self._state.report_sender.report_soon()
        effects: list[Effect] = []
        stones = [stone for stone in ack.tombstones if stone.number > self._state.tombstones.highest]
        if stones:
            named = self._named(stones)
            if not self._drop(named):  # the coordinator repeats its answer until all is done
                self._state.report_sender.report_soon()
                return []
            effects += self._apply_tombstones(stones, named)
        if self._state.stopping:
            return effects
        for order in self._state.order_cursor.accept(ack.orders):
            self._executors[type(order)](order)
        return [*effects, *self._puller.begin(now)]

    def _evict(self, order: EvictOrder) -> None:
        for namespace, block in order.blocks:
            space = self._state.namespaces.known(namespace)
            if space is None:
                continue
            for group, part in space.parts:  # all parts of a block are evicted together
                page = self._state.pool.on(order.tier, namespace, PageKey(block, group, part))
                if page is not None and page.state is PageState.READY:
                    self._state.withdraw(page)
                    self._state.counters["evicted"] += 1
        self._state.order_cursor.ended(order)

    def _named(self, stones: Sequence[Tombstone]) -> dict[NamespaceId, None]:
        """Returns the namespaces that any of these tombstones names."""
        of_tenant: dict[Tenant, list[Tombstone]] = {}
        for stone in stones:
            of_tenant.setdefault(stone.tenant, []).append(stone)
        return {
            space.id: None
            for space in self._state.namespaces
            if any(stone.names(space.tenant, space.spec) for stone in of_tenant.get(space.tenant, ()))
        }

    def _drop(self, spaces: dict[NamespaceId, None]) -> bool:
        """Condemns pages of these namespaces, at most PURGED_PAGES_PER_STEP. Returns True if no READY one is left."""
        pages: list[Page] = []
        if any(self._state.pool.parts(space) for space in spaces):
            found = (page for page in self._state.pool.ready() if page.space in spaces)
            pages = list(islice(found, limits.PURGED_PAGES_PER_STEP + 1))
        for page in pages[: limits.PURGED_PAGES_PER_STEP]:
            self._state.pool.condemn(page)
            self._state.counters["purged"] += 1
        return len(pages) <= limits.PURGED_PAGES_PER_STEP

    def _apply_tombstones(self, stones: Sequence[Tombstone], named: dict[NamespaceId, None]) -> list[Effect]:
        """Ends all writes that these tombstones cover, records the tombstones, and reports them to the coordinator as
        applied. Called when no READY page that they cover is left."""
        effects = self._stop_writers(named)
        for stone in stones:
            self._puller.purge(stone)
            self._state.tombstones.add(stone)
            self._state.report_sender.tell(PurgedEvent(stone.number))
        if any(tier.spec.durable for tier in self._state.pool.tiers):
            effects.append(Erase(tuple(stones), self._state.tombstones.all()))
        return effects

    def _stop_writers(self, spaces: Container[NamespaceId]) -> list[Effect]:
        stopped = [
            lease.attempt
            for lease in self._state.leases.writers()
            if any(page is not None and page.space in spaces for page in lease.pages)
        ]
        revoked = [Revoke(attempt, PURGING) for attempt in self._state.leases.revoke(stopped)]
        return [*revoked, *map(lost, self._state.queue.withdraw_namespaces(spaces))]
