"""Bugs of shards and of their shells: fences, pages and leases, tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvcluster.core.leases import LeaseBook
from kvcluster.core.messages import Abort, Answer, Done, GoneEvent, OrderProgress, PinGrant
from kvcluster.core.miss import Loss
from kvcluster.core.order_stream import OrderCursor
from kvcluster.core.page import PageAction, PageState
from kvcluster.core.pin_handler import PinHandler
from kvcluster.core.pool import PagePool
from kvcluster.core.report_handler import ReportHandler
from kvcluster.core.report_sender import ReportSender
from kvcluster.core.shard import Shard
from kvcluster.core.withdrawal import Withdrawal
from kvcluster.pages import checksum
from kvcluster.testing.sim.bugs.planting import Patch, planted
from kvcluster.testing.sim.disk import Disk
from kvcluster.testing.sim.shard_storage import ShardStorage

# ---------------------------------------------------------------------------------------------- fences


@planted
def no_epoch_fence() -> list[Patch]:
    """A shard does not compare the epoch in a worker's question with its own."""
    original = Shard._check
    return [(Shard, "_check", lambda self, tenant, m: original(self, tenant, replace(m, epoch=self.epoch)))]


@planted
def no_coordinator_fence() -> list[Patch]:
    """Shards obey any coordinator that answers, and an older one does not step down."""
    answered, hear = ReportSender.answered, ReportHandler._hear

    def heed(self: ReportSender, ack: Any, now: int) -> bool:
        return answered(self, replace(ack, epoch=max(ack.epoch, self.coordinator)), now)

    def hear_all(self: ReportHandler, request: Any, now: int) -> Any:
        m = request.question
        known = replace(m, coordinator=min(m.coordinator, self._state.epoch))
        return hear(self, replace(request, question=known), now)

    return [(ReportSender, "answered", heed), (ReportHandler, "_hear", hear_all)]


@planted
def acknowledged_before_accepted() -> list[Patch]:
    """A shard records the numbers of all orders of an answer first, and then finds that none of them is new."""
    original = OrderCursor.accept

    def accept(self: OrderCursor, orders: Any) -> Any:
        self._accepted = max([self._accepted, *(order.number for order in orders)])
        return original(self, orders)

    return [(OrderCursor, "accept", accept)]


@planted
def ended_when_accepted() -> list[Patch]:
    """A shard reports a running order as ended."""
    return [(OrderCursor, "progress", property(lambda self: OrderProgress(self._accepted)))]


@planted
def no_drift_margin() -> list[Patch]:
    """A shard uses its term to the last nanosecond, as if all clocks ran alike."""
    original = ReportSender.__init__

    def init(self: ReportSender, config: Any, *, membership_ttl_ms: int, everything: Any) -> None:
        original(self, config, membership_ttl_ms=membership_ttl_ms, everything=everything)
        self._term = membership_ttl_ms * 1_000_000

    return [(ReportSender, "__init__", init)]


@planted
def late_commit() -> list[Patch]:
    """A lease that was revoked may still be committed."""
    return [(LeaseBook, "running", lambda self, attempt: attempt in self)]


# ----------------------------------------------------------------------------------------------- pages


@planted
def skipped_unpin() -> list[Patch]:
    """A page that was condemned while it was read is not unpinned."""
    original = PagePool.unpin

    def unpin(self: PagePool, page: Any) -> bool:
        return False if page.state is PageState.CONDEMNED else original(self, page)

    return [(PagePool, "unpin", unpin)]


@planted
def forgotten_generation() -> list[Patch]:
    """A condemned page is freed at once, even if it is still read."""

    def free(self: PagePool, page: Any) -> bool:
        if page.state is not PageState.CONDEMNED:
            return False
        self._act(page, PageAction.LAST_UNPIN)
        del self._condemned[page.generation]
        self._free(page)
        return True

    return [(PagePool, "_free_if_unread", free)]


@planted
def condemned_served() -> list[Patch]:
    """A condemned page that is still being read is granted to one more reader."""
    original: Callable[..., list[Any]] = Shard._pin

    def pin(self: Shard, request: Any, space: Any, now: int) -> list[Any]:
        m, effects = request.question, original(self, request, space, now)
        lease = next((lease for lease in self.leases.all() if lease.attempt == m.attempt), None)
        answer = effects[0] if effects else None  # no answer yet if pages have to be read from disk
        if lease is None or not isinstance(answer, Answer) or not isinstance(answer.reply, PinGrant):
            return effects
        pages = list(answer.reply.pages)
        for at, key in enumerate(m.keys):
            for page in self.pool.everything():
                if lease.pages[at] is None and page.state is PageState.CONDEMNED and page.key == key:
                    page.pins += 1
                    lease.pages[at], pages[at] = page, page.slot()
        return [Answer(request.call, PinGrant(tuple(pages))), *effects[1:]]

    return [(Shard, "_pin", pin)]


@planted
def commit_before_verifying() -> list[Patch]:
    """A store is committed with the writer's sums, and the bytes in the page are not verified."""
    return [(ShardStorage, "verify", lambda self, namespace, slot, sums: checksum.pack_sums(sums))]


@planted
def lost_abort() -> list[Patch]:
    """A writer's abort is acknowledged and ignored."""
    original = Shard._end

    def end(self: Shard, request: Any, now: int) -> list[Any]:
        heard = not isinstance(request.question, Abort)
        return original(self, request, now) if heard else [Answer(request.call, Done())]

    return [(Shard, "_end", end)]


@planted
def freed_by_time() -> list[Patch]:
    """A lease that expires gives its pages back, even if its session has not stopped moving bytes."""
    original = Shard._tick

    def tick(self: Shard, m: Any, now: int) -> list[Any]:
        effects = original(self, m, now)
        for effect in effects:
            lease = self.leases.end(effect.attempt) if hasattr(effect, "attempt") else None
            if lease is not None:
                self.pool.give_back(lease)
        return effects

    return [(Shard, "_tick", tick)]


@planted
def condemned_by_word() -> list[Patch]:
    """A page that a reader suspects is condemned without being verified."""
    original = Shard._suspect

    def suspect(self: Shard, request: Any, space: Any, now: int) -> list[Any]:
        for key in request.question.keys:
            page = self.pool.get(space.id, key)
            if page is not None and page.state is PageState.READY:
                self.pool.condemn(page)
                self._sender.tell(GoneEvent(space.id, key, corrupt=True))
        return original(self, request, space, now)

    return [(Shard, "_suspect", suspect)]


@planted
def wrong_page_served() -> list[Patch]:
    """For some pages the bytes of the next page are sent."""
    original = ShardStorage.load_layer

    def load_layer(self: ShardStorage, item: int, slot: Any, layer: int) -> Any:
        beyond = slot._replace(offset=slot.offset + slot.nbytes)
        if slot.generation % 16 == 0 and len(self._memory.view(beyond)) == slot.nbytes:
            slot = beyond
        return original(self, item, slot, layer)

    return [(ShardStorage, "load_layer", load_layer)]


# ----------------------------------------------------------------------------------------------- tiers


@planted
def loss_not_asked() -> list[Patch]:
    """A reader that accepts no loss gets pages that were demoted since they were promised to it."""
    original = PagePool.find

    def find(self: PagePool, space: Any, key: Any, accept: Loss, *, encoded: bool = False) -> Any:
        return original(self, space, key, Loss.Q4, encoded=encoded)

    return [(PagePool, "find", find)]


@planted
def encoded_twice() -> list[Patch]:
    """A decoded page stays when its encoded twin is removed, and is later encoded again."""

    def withdraw(self: Withdrawal, page: Any, *, corrupt: bool = False) -> None:
        self._pool.condemn(page)
        self._report_sender.tell(GoneEvent(page.space, page.key, corrupt=corrupt, tier=page.tier))

    return [(Withdrawal, "__call__", withdraw)]


@planted
def moved_unverified() -> list[Patch]:
    """A page is encoded without being verified first."""
    return [(ShardStorage, "matches", lambda self, namespace, slot, data: data is not None)]


@planted
def disk_unverified() -> list[Patch]:
    """A page that is read from disk is not verified."""
    original = PinHandler.staged

    def staged(self: PinHandler, m: Any, *, may_grant: bool) -> Any:
        return original(self, replace(m, corrupt=()), may_grant=may_grant)

    return [(PinHandler, "staged", staged)]


@planted
def purge_kept_before_done() -> list[Patch]:
    """A purge is recorded as carried out at once, though the files still hold the pages."""
    original = Disk.erase

    def erase(self: Disk, order: Any) -> None:
        heads = dict(self._heads)
        original(self, order)
        self._heads = heads

    return [(Disk, "erase", erase)]


@planted
def private_copy_given_back() -> list[Patch]:
    """The private copy of a page that was read from disk is freed as soon as its reader is answered."""
    original = PagePool.lend

    def lend(self: PagePool, copy: Any, sums: bytes) -> None:
        original(self, copy, sums)
        self._free(copy)

    return [(PagePool, "lend", lend)]
