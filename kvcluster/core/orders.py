"""What a shard does because the coordinator says so: evict, move between tiers (mover.py), fetch from another shard,
bury what was purged, drain.

Orders ride on the answers to reports (docs/adr/0007) and are repeated until the shard has said that they are done,
so each is numbered and carried out once. An eviction is done at once. A pull takes its time: the shard reserves
the pages under a lease of its own, the shell fills them, and its Commit or Abort ends the pull, as for any writer.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId, Tenant
from kvcluster.core.leases import LeaseBook, LeaseKind, OwnAttempts
from kvcluster.core.messages import (
    Effect,
    Erase,
    EvictOrder,
    Fetch,
    PageKey,
    PullOrder,
    PurgedEvent,
    ReportAck,
    Revoke,
    Tier,
    Tombstone,
)
from kvcluster.core.mover import Mover
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.spaces import Spaces
from kvcluster.core.tombstones import Tombstones
from kvcluster.core.uplink import Uplink
from kvcluster.core.waiting import WaitingRoom, lost
from kvcluster.core.withdrawal import Withdrawal


class Orders:
    """What has been carried out so far. `evicted` and `pulled` are the numbers that reports tell."""

    def __init__(
        self,
        pool: PagePool,
        leases: LeaseBook,
        spaces: Spaces,
        waiting: WaitingRoom,
        uplink: Uplink,
        own: OwnAttempts,
        withdraw: Withdrawal,
        mover: Mover,
        counters: dict[str, int],
        tombstones: Tombstones,
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._spaces = spaces
        self._waiting = waiting
        self._uplink = uplink
        self._own = own
        self._withdraw = withdraw
        self._mover = mover
        self._counters = counters
        self._pulling: tuple[int, Attempt] | None = None
        self.evicted = 0
        self.pulled = 0
        self.tombstones = tombstones
        self.draining = False

    @property
    def attempt(self) -> Attempt | None:
        """Under which pages are being pulled."""
        return self._pulling[1] if self._pulling is not None else None

    def begin_anew(self) -> None:
        """Another coordinator counts its orders from 1. A pull of the last one's ends under no number."""
        self.evicted = self.pulled = 0
        self._mover.begin_anew()
        if self._pulling is not None:
            self._pulling = (0, self._pulling[1])

    def carry_out(self, ack: ReportAck, now: int) -> list[Effect]:
        """What the coordinator's answer asks for, as far as it is not done."""
        if ack.drain and not self.draining:
            self.draining = True
            self._uplink.say_soon()
        effects: list[Effect] = []
        stones = [stone for stone in ack.tombstones if stone.number > self.tombstones.highest]
        if stones:
            named = self._named(stones)
            if not self._drop(named):  # the coordinator repeats itself until all is done
                self._uplink.say_soon()
                return []
            effects += self._bury(stones, named)
        if ack.order is not None and ack.order.number > self.evicted:
            self._evict(ack.order)
        if ack.move is not None:
            self._mover.take(ack.move)
        if ack.pull is not None and ack.pull.number > self.pulled and self._pulling is None:
            effects += self._pull(ack.pull, now)
        return effects

    def ended(self, attempt: Attempt, committed: int = 0) -> None:
        """The lease of this attempt has ended, perhaps that of a pull, with so many pages that came."""
        if self._pulling is not None and self._pulling[1] == attempt:
            self._counters["pulled"] += committed
            self._pull_ended(self._pulling[0])

    def _evict(self, order: EvictOrder) -> None:
        self.evicted = order.number
        self._uplink.say_soon()
        for namespace, block in order.blocks:
            space = self._spaces.known(namespace)
            if space is None:
                continue
            for group, part in space.parts:  # the parts of a block go together
                page = self._pool.on(order.tier, namespace, PageKey(block, group, part))
                if page is not None and page.state is PageState.READY:
                    self._withdraw(page)
                    self._counters["evicted"] += 1

    def _pull(self, order: PullOrder, now: int) -> list[Effect]:
        space = self._spaces.attach(order.tenant, order.spec)
        if space is not None:
            space.forget_unused(self._pool)
        pages: list[Page] = []
        for new in order.pages if space is not None else ():
            assert space is not None
            offer = space.offer(self._pool, new, self._withdraw, order.codec, order.into)
            if isinstance(offer, Page):
                pages.append(offer)
        if space is None or not pages:
            self._pull_ended(order.number)
            return []
        attempt = self._own.next()
        self._leases.grant(attempt, LeaseKind.WRITE, list(pages), now)
        self._pulling = (order.number, attempt)
        return [Fetch(attempt, space.id, order.source, tuple(page.slot() for page in pages))]

    def _pull_ended(self, number: int) -> None:
        self._pulling = None
        self.pulled = max(self.pulled, number)
        self._uplink.say_soon()

    def _named(self, stones: Sequence[Tombstone]) -> dict[NamespaceId, None]:
        """The namespaces that any of these tombstones names."""
        of_tenant: dict[Tenant, list[Tombstone]] = {}
        for stone in stones:
            of_tenant.setdefault(stone.tenant, []).append(stone)
        return {
            space.id: None
            for space in self._spaces
            if any(stone.names(space.tenant, space.spec) for stone in of_tenant.get(space.tenant, ()))
        }

    def _drop(self, spaces: dict[NamespaceId, None]) -> bool:
        """Condemns pages of these namespaces, as many as one step may. True where no READY one is left."""
        pages: list[Page] = []
        if any(self._pool.parts(space) for space in spaces):
            found = (page for page in self._pool.ready() if page.space in spaces)
            pages = list(islice(found, limits.BURIED_PAGES + 1))
        for page in pages[: limits.BURIED_PAGES]:
            self._pool.condemn(page)
            self._counters["purged"] += 1
        return len(pages) <= limits.BURIED_PAGES

    def _bury(self, stones: Sequence[Tombstone], named: dict[NamespaceId, None]) -> list[Effect]:
        """What these tombstones name is gone: what is being written of before goes too, and both sides remember it."""
        effects = self._stop_writers(named)
        for stone in stones:
            self.tombstones.add(stone)
            self._uplink.tell(PurgedEvent(stone.number))
        if Tier.DISK in self._pool.allocators:
            effects.append(Erase(tuple(stones), self.tombstones.all()))
        return effects

    def _stop_writers(self, spaces: Container[NamespaceId]) -> list[Effect]:
        stopped = [
            lease.attempt
            for lease in self._leases.writers()
            if any(page is not None and page.space in spaces for page in lease.pages)
        ]
        revoked = [Revoke(attempt) for attempt in self._leases.revoke(stopped)]
        return [*revoked, *map(lost, self._waiting.withdraw_namespaces(spaces))]
