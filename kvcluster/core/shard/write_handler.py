"""Writes of workers to one shard: a page is reserved for one writer, and becomes readable when that writer commits it.

The handler grants a write lease over the pages that have room; if they have none, the reservation may wait for it
(reserve_queue.py). The checksums in the commit are those of bytes that the shell has verified. A page is READY from the
commit on: only then is it reported, scrubbed and read. Other shards' pages that this shard pulls (puller.py) are
committed here as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.messages import (
    Answer,
    Commit,
    CommitGrant,
    Effect,
    PageSlot,
    Request,
    Reserve,
    WriteGrant,
    Written,
)
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.puller import Puller
from kvcluster.core.shard.reserve_queue import lost
from kvcluster.core.shard.scrubber import Scrubber
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState


class WriteHandler:
    """The reservations and commits of one shard."""

    def __init__(self, state: ShardState, scrubber: Scrubber, puller: Puller) -> None:
        self._state = state
        self._scrubber = scrubber
        self._puller = puller

    def reserve(self, request: Request[Reserve], space: ShardNamespace, now: int) -> list[Effect]:
        """Grants a write lease over the pages that have room, at once or when the reservation has waited for room. All
        pages are LOST if the shard takes no writes."""
        m = request.question
        space.forget_unused(self._state.pool)
        refused = space.refusal(self._state.pool, dict.fromkeys((page.key.group, page.key.part) for page in m.pages))
        if refused is not None:
            return [Answer(request.call, refused)]
        if not self._state.takes_writes(now):
            return [lost(request)]
        wait_ns = min(m.wait_ns, self._state.leases.ttl_ns)
        if wait_ns > 0 and self._may_take(space, 0) and self._state.queue.must_wait(m, space):
            self._state.queue.add(request, space, now + wait_ns)
            self._state.report_sender.report_soon()
            return []
        return [self._grant(request, space, now)]

    def serve(self, now: int) -> list[Effect]:
        """Grants waiting reservations: those that now find room, in order of arrival, and what fits to those that have
        waited long enough. All are LOST if the shard takes no writes."""
        if not self._state.takes_writes(now):
            return [lost(request) for request in self._state.queue.everyone()]
        effects: list[Effect] = []
        while (served := self._state.queue.next_served(now)) is not None:
            effects.append(self._grant(*served, now))
        return effects

    def commit(self, m: Commit, now: int) -> CommitGrant:
        """Ends the lease: makes the named pages READY and frees the others. All are LOST if the lease has expired, or
        the shard is no member."""
        in_time = self._state.leases.running(m.attempt) and self._state.member(now)
        lease = self._state.leases.end(m.attempt)
        if lease is None or lease.kind is not LeaseKind.WRITE or not in_time:
            self._puller.ended(m.attempt)
            self._state.counters["late"] += 1
            if lease is not None:
                self._state.counters["aborted"] += self._state.pool.give_back(lease)
            return CommitGrant((Written.LOST,) * len(m.indices))
        outcome: list[Written] = []
        self._state.pool.use([page for page in lease.pages if page is not None])
        for index, sums in zip(m.indices, m.sums, strict=True):
            page = lease.pages[index] if index < len(lease.pages) else None
            if page is None:
                outcome.append(Written.LOST)
                continue
            lease.pages[index] = None
            outcome.append(self._commit(page, sums))
        committed = outcome.count(Written.COMMITTED)
        self._state.counters["commits"] += committed
        self._puller.ended(m.attempt, committed)
        self._state.counters["aborted"] += self._state.pool.give_back(lease)
        return CommitGrant(tuple(outcome))

    def committed(self, page: Page) -> None:
        """Registers a page that is now READY, and withdraws its copies in other tiers that have more loss."""
        self._register(page, self._state.pool.elsewhere(page))

    def _commit(self, page: Page, sums: bytes) -> Written:
        others = self._state.pool.elsewhere(page)
        for other in others:
            if other.state is PageState.READY and other.loss <= page.loss:  # it was committed first
                self._state.pool.abort(page)
                return Written.DUPLICATE
        self._state.pool.commit(page, sums)
        self._register(page, others)
        return Written.COMMITTED

    def _register(self, page: Page, others: Sequence[Page]) -> None:
        """As `committed`; `others` are the pages for the same key in other tiers."""
        if page.tier.spec.addressable:  # a page in a store is verified when it is read
            self._scrubber.committed(page)
        self._state.report_sender.tell(page.event())
        for other in others:
            if other.state is PageState.READY and other.loss > page.loss:
                self._state.withdraw(other)

    def _grant(self, request: Request[Reserve], space: ShardNamespace, now: int) -> Answer:
        m = request.question
        pages: list[Page | None] = []
        outcomes: list[PageSlot | Written] = []
        nbytes, shared = 0, self._state.namespaces.tenants > 1
        for new in m.pages:
            may_take = not shared or self._may_take(space, nbytes)
            offer = space.offer(self._state.pool, new, self._state.withdraw) if may_take else Written.FULL
            if isinstance(offer, Page):
                nbytes += offer.nbytes
                pages.append(offer)
                outcomes.append(offer.slot())
            else:
                pages.append(None)
                outcomes.append(offer)
        self._state.counters["duplicates"] += outcomes.count(Written.DUPLICATE)
        self._state.counters["full"] += outcomes.count(Written.FULL)
        self._state.leases.grant(m.attempt, LeaseKind.WRITE, pages, now, request.tenant)
        return Answer(request.call, WriteGrant(tuple(outcomes)))

    def _may_take(self, space: ShardNamespace, nbytes: int) -> bool:
        """Whether the tenant may reserve so many bytes and a page more. Where there are several tenants, none reserves
        more than its share of all bytes without sending them."""
        return self._state.namespaces.tenants == 1 or not self._state.leases.written.full(space.tenant, nbytes + 1)
