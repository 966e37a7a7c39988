"""Bugs of shards and of their shells: fences, pages and leases, tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.report_handler import ReportHandler
from kvcluster.core.messages import Abort, Answer, Done, OrderProgress, PinGrant, RemovedEvent, Tier, Verified
from kvcluster.core.miss import Loss
from kvcluster.core.shard.leases import LeaseBook
from kvcluster.core.shard.page import PageState
from kvcluster.core.shard.pin_handler import PinHandler
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.report_sender import ReportSender
from kvcluster.core.shard.scrubber import Scrubber
from kvcluster.core.shard.shard import Shard
from kvcluster.core.shard.shard_namespaces import ShardNamespaces
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.shutdown_saver import ShutdownSaver
from kvcluster.core.shard.tier_mover import PageMoves, TierMover
from kvcluster.core.shard.withdrawal import Withdrawal
from kvcluster.core.shard.worker_handler import WorkerHandler
from kvcluster.core.streams import OrderCursor
from kvcluster.core.tenant_shares import HolderShares
from kvcluster.memory import checksum
from tests.sim.bugs.planting import planted
from tests.sim.disk import Disk
from tests.sim.scenario import FIRST_WITH_GPUS
from tests.sim.shard_storage import ShardStorage

# ---------------------------------------------------------------------------------------------- fences


@planted(WorkerHandler, "_refused")
def no_epoch_fence(original: Any, self: WorkerHandler, tenant: Any, m: Any) -> Any:
    """A shard does not compare the epoch in a worker's question with its own."""
    return original(self, tenant, replace(m, epoch=self._state.epoch))


@planted(ReportSender, "answered")
def no_coordinator_fence(original: Any, self: ReportSender, ack: Any, now: int) -> Any:
    """Shards obey any coordinator that answers, and an older one does not step down."""
    return original(self, replace(ack, epoch=max(ack.epoch, self.coordinator)), now)


@no_coordinator_fence.also(ReportHandler, "_identify_sender")
def _identify_sender(original: Any, self: ReportHandler, request: Any, now: int) -> Any:
    m = request.question
    known = replace(m, coordinator=min(m.coordinator, self._state.epoch))
    return original(self, replace(request, question=known), now)


@planted(OrderCursor, "accept")
def acknowledged_before_accepted(original: Any, self: OrderCursor, orders: Any) -> Any:
    """A shard records the numbers of all orders of an answer first, and then finds that none of them is new."""
    self._accepted = max([self._accepted, *(order.number for order in orders)])
    return original(self, orders)


@planted(OrderCursor, "progress")
def ended_when_accepted(original: Any, self: OrderCursor) -> OrderProgress:
    """A shard reports a running order as ended."""
    return OrderProgress(self._accepted)


@planted(ReportSender, "__init__")
def no_drift_margin(original: Any, self: ReportSender, config: Any, *, membership_ttl_ms: int, everything: Any) -> None:
    """A shard uses its term to the last nanosecond, as if all clocks ran alike."""
    original(self, config, membership_ttl_ms=membership_ttl_ms, everything=everything)
    self._term = membership_ttl_ms * 1_000_000


@planted(LeaseBook, "running")
def late_commit(original: Any, self: LeaseBook, attempt: Any) -> bool:
    """A lease that was revoked may still be committed."""
    return attempt in self


@planted(LeaseBook, "extend")
def ended_by_a_stall(original: Any, self: LeaseBook, late_ns: int) -> None:
    """After its shard was stalled, a lease is over that nothing could renew meanwhile."""


# ----------------------------------------------------------------------------------------------- pages


@planted(PagePool, "unpin")
def skipped_unpin(original: Any, self: PagePool, pages: Any) -> None:
    """A page that was condemned while it was read is not unpinned."""
    original(self, [page for page in pages if page.state is not PageState.CONDEMNED])


@planted(PagePool, "condemn")
def forgotten_generation(original: Any, self: PagePool, page: Any) -> None:
    """A condemned page is freed at once, even if it is still read."""
    original(self, page)
    if page.state is PageState.CONDEMNED:
        self._free_condemned(page)


@planted(WorkerHandler, "pin")
def condemned_served(original: Any, self: WorkerHandler, request: Any, space: Any, now: int) -> list[Any]:
    """A condemned page that is still being read is granted to one more reader."""
    m = request.question
    effects: list[Any] = original(self, request, space, now)
    lease = next((lease for lease in self._state.leases.all() if lease.attempt == m.attempt), None)
    answer = effects[0] if effects else None  # no answer yet if pages have to be read from disk
    if lease is None or not isinstance(answer, Answer) or not isinstance(answer.reply, PinGrant):
        return effects
    pages = list(answer.reply.pages)
    for at, key in enumerate(m.keys):
        for page in self._state.pool.everything():
            if lease.pages[at] is None and page.state is PageState.CONDEMNED and page.key == key:
                page.pins += 1
                lease.pages[at], pages[at] = page, page.slot()
    return [Answer(request.call, PinGrant(tuple(pages))), *effects[1:]]


@planted(ShardStorage, "verify")
def commit_before_verifying(original: Any, self: ShardStorage, namespace: Any, slot: Any, sums: list[int]) -> bytes:
    """A store is committed with the writer's sums, and the bytes in the page are not verified."""
    return checksum.pack_sums(sums)


@planted(WorkerHandler, "end")
def lost_abort(original: Any, self: WorkerHandler, request: Any, now: int) -> Any:
    """A writer's abort is acknowledged and ignored."""
    heard = not isinstance(request.question, Abort)
    return original(self, request, now) if heard else [Answer(request.call, Done())]


@planted(Shard, "_tick")
def freed_by_time(original: Any, self: Shard, m: Any, now: int) -> list[Any]:
    """A lease that expires gives its pages back, even if its session has not stopped moving bytes."""
    effects: list[Any] = original(self, m, now)
    for effect in effects:
        lease = self.leases.end(effect.attempt) if hasattr(effect, "attempt") else None
        if lease is not None:
            self.pool.give_back(lease)
    return effects


@planted(WorkerHandler, "suspect")
def condemned_by_word(original: Any, self: WorkerHandler, request: Any, space: Any, now: int) -> Any:
    """A page that a reader suspects is condemned without being verified."""
    for key in request.question.keys:
        page = self._state.pool.get(space.id, key)
        if page is not None and page.state is PageState.READY:
            self._state.pool.condemn(page)
            self._state.report_sender.tell(RemovedEvent(space.id, key, corrupt=True))
    return original(self, request, space, now)


@planted(ShardStorage, "load_layer")
def wrong_page_served(original: Any, self: ShardStorage, item: int, slot: Any, layer: int) -> Any:
    """For some pages the bytes of the next page are sent."""
    beyond = slot._replace(offset=slot.offset + slot.nbytes)
    if slot.generation % 16 == 0 and len(self._memory[slot.tier].view(beyond)) == slot.nbytes:
        slot = beyond
    return original(self, item, slot, layer)


@planted(ShardNamespaces, "find")
def tenant_not_compared(original: Any, self: ShardNamespaces, space_id: Any, tenant: Any, reads: Any = ()) -> Any:
    """A shard serves the pages of a namespace to any tenant that can name it."""
    return self.known(space_id)


@planted(Scrubber, "end")
def wrong_page_condemned(original: Any, self: Scrubber, m: Verified) -> None:
    """Where a batch of pages is verified, the page before the corrupt one is condemned."""
    original(self, replace(m, corrupt=tuple(max(0, index - 1) for index in m.corrupt)))


@planted(HolderShares, "remove")
def share_not_returned(original: Any, self: HolderShares, owner: Any) -> None:
    """What a holder gives back still counts towards its share."""


# ----------------------------------------------------------------------------------------------- tiers


@planted(PagePool, "find")
def loss_not_asked(original: Any, self: PagePool, space: Any, key: Any, accept: Loss, **reader: bool) -> Any:
    """A reader that accepts no loss gets pages that were demoted since they were promised to it."""
    return original(self, space, key, Loss.Q4, **reader)


@planted(Withdrawal, "__call__")
def encoded_twice(original: Any, self: Withdrawal, page: Any, *, corrupt: bool = False) -> None:
    """A decoded page stays when its encoded twin is removed, and is later encoded again."""
    self._pool.condemn(page)
    self._report_sender.tell(RemovedEvent(page.space, page.key, corrupt=corrupt, tier=page.tier))


@planted(ShardStorage, "matches")
def moved_unverified(original: Any, self: ShardStorage, namespace: Any, slot: Any, data: bytes | None) -> bool:
    """A page is encoded without being verified first."""
    return data is not None


@planted(PinHandler, "staged")
def disk_unverified(original: Any, self: PinHandler, m: Any, now: int) -> Any:
    """A page that is read from disk is not verified."""
    return original(self, replace(m, corrupt=()), now)


@planted(Disk, "erase")
def purge_kept_before_done(original: Any, self: Disk, order: Any) -> None:
    """A purge is recorded as carried out at once, though the files still hold the pages."""
    heads = dict(self._heads)
    original(self, order)
    self._heads = heads


@planted(PagePool, "lend")
def private_copy_given_back(original: Any, self: PagePool, copy: Any, sums: bytes) -> None:
    """The private copy of a page that was read from disk is freed as soon as its reader is answered."""
    original(self, copy, sums)
    self._free(copy)


@planted(ShardState, "takes_writes", first=500)
def stores_while_stopping(original: Any, self: ShardState, now: int) -> bool:
    """A shard that saves its pages because it is to stop accepts new stores."""
    return self.member(now) and not self.draining


@planted(ShutdownSaver, "_is_private")
def private_pages_saved(original: Any, self: ShutdownSaver, space: Any) -> bool:
    """A shard that stops saves the private pages of sequences, too."""
    return False


# ------------------------------------------------------------------------------------------- pools on GPUs


@planted(PageMoves, "reserve", first=FIRST_WITH_GPUS)
def promoted_without_its_loss(original: Any, self: PageMoves, source: Any, to: Any, codec: Any, nbytes: int) -> Any:
    """A page that was encoded is exact again once it is decoded."""
    page = original(self, source, to, codec, nbytes)
    if page is not None and to < source.tier:
        page.loss = codec.loss
    return page


@planted(PagePool, "condemn", first=FIRST_WITH_GPUS)
def gpu_page_freed_while_read(original: Any, self: PagePool, page: Any) -> None:
    """A page that leaves the GPU gives its room to others, though a reader's copy is still made of it."""
    original(self, page)
    if page.tier is Tier.GPU and page.pins:
        self._free(page)


@planted(PagePool, "others", first=FIRST_WITH_GPUS)
def gpu_room_counted_twice(original: Any, self: PagePool, wanted_bytes: int = 0) -> Any:
    """A shard reports the whole of its GPU pool as free, so the coordinator promotes more than there is room for."""
    uses = original(self, wanted_bytes)
    return tuple(use._replace(free_bytes=use.capacity_bytes) if use.tier is Tier.GPU else use for use in uses)


@planted(TierMover, "_arrived", first=10_043_000)
def copy_of_a_decoded_page_kept(original: Any, self: TierMover, source: Any, target: Any) -> None:
    """A copy on the GPU of a page that was decoded in RAM stays when the encoded page is removed, and is encoded again
    later."""
    original(self, source, target)
    if target.tier < source.tier:
        target.decoded = source.codec is not Codec.RAW
