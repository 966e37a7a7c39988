"""Handles the reports and inventories of shards: updates the index from them, and answers with orders. No message of a
worker is handled here.

A shard is a member from its first message on, and its copies count as soon as it reports them. Its slot
(replica_sets.py) dies when the incarnation is replaced, falls silent or sends a new inventory (record_sweeper.py).

*Orphans* are blocks that follow a block which is no longer recorded on any shard. No lookup reaches them, so they are
evicted first on every shard: their stamps are moved below all others, so that every policy finds them cold. When a
block leaves the index, those that directly follow it are noted; `Orphans` makes them cold, and notes those behind them
in turn, a bounded number at a time. If the block is recorded again, they become as warm as they were, as does a block
that a load or a store touches. A block that was reported before the one that it follows is no orphan: that one is
expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import MS, CoordinatorState
from kvcluster.core.coordinator.evictor import Evictor
from kvcluster.core.coordinator.index import COLD, BlockRecord, each_follower
from kvcluster.core.coordinator.members import Member, Membership
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.record_sweeper import RecordSweeper
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import (
    Answer,
    Effect,
    EvictOrder,
    Inventory,
    Leave,
    MoveOrder,
    Order,
    Persist,
    PullOrder,
    PurgedEvent,
    RemovedEvent,
    Report,
    ReportAck,
    Request,
    StreamEvent,
    Tombstone,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.streams import ReportCursor
from kvcluster.core.tiers import STAGING


class Orphans:
    """The blocks that are still to be examined, because the one before them was removed or is recorded again."""

    def __init__(self, namespaces: NamespaceTable, members: Membership) -> None:
        self._namespaces = namespaces
        self._members = members

    def settle(self) -> None:
        """Examines up to limits.ORPHANS_PER_STEP blocks: makes orphans cold, and those that no longer are orphans
        warm."""
        waiting = self._namespaces.orphans
        for _ in range(limits.ORPHANS_PER_STEP):
            if not waiting:
                return
            self._settle(waiting, *waiting.popleft())

    def _settle(self, waiting: deque[tuple[NamespaceId, BlockHash]], space_id: NamespaceId, block: BlockHash) -> None:
        space = self._namespaces.known(space_id)
        record = space.index.get(block) if space is not None else None
        if space is None or record is None:
            return
        parent = space.index.get(record.parent)
        cold = parent is None or parent.stamp < 0
        if cold == (record.stamp < 0):
            return
        record.stamp += -COLD if cold else COLD
        for slot, tier in record.copies.places if cold else ():
            member = self._members.at(slot)
            if member is not None:
                member.cold[tier].scores_fell()
        waiting.extend((space_id, follower) for follower in each_follower(record.followers))


def last_used(record: BlockRecord) -> int:
    """Returns the time of the last use of a block, also of an orphan."""
    return record.stamp + COLD if record.stamp < 0 else record.stamp


class ReportHandler:
    """Handles the messages of shards. The rebuilding ends early once `expected` shards have sent their inventories, if
    it is known how many there are."""

    def __init__(
        self,
        state: CoordinatorState,
        config: CoordinatorConfig,
        evictor: Evictor,
        tiering: Tiering,
        replicator: Replicator,
        sweeper: RecordSweeper,
        expected: int | None,
    ) -> None:
        self._state = state
        self._evictor = evictor
        self._orphans = Orphans(state.namespaces, state.members)
        self._tiering = tiering
        self._replicator = replicator
        self._sweeper = sweeper
        self._expected = expected
        self._drain = config.drain_ms * MS
        self._settle: dict[type[Order], Callable[[Member, Any], None]] = {
            EvictOrder: evictor.settle,
            MoveOrder: tiering.settle,
            PullOrder: replicator.settle,
        }

    def report(self, request: Request[Report], now: int) -> list[Effect]:
        m = request.question
        member, effects = self._identify_sender(request, now)
        if member is None:
            return effects
        fresh = member.cursor.news(m.first, m.events)
        if fresh is None:
            return [Answer(request.call, self._ack(member, now, inventory=True))]
        member.confirmed = True
        for event in fresh:
            self._apply(event, member, now)
        self._state.probes.take(member.info.shard, m.findings)
        effects = self._tiering.sampled(m.samples)
        self._tiering.wanted_on_device(member, m.wanted_on_device)
        for order in member.orders.heard(m.orders):
            self._settle[type(order)](member, order)
            if isinstance(order, EvictOrder):
                self._state.eraser.settle(order, now)
        self._give_orders(m, member, now)
        if member.draining and not self._state.rebuilding and self._may_go(m, member, now):
            self._state.members.dismiss(member)
            self.forget(member, lost=False)  # what could be moved is on other shards
            assert member.drain_until is not None
            self._state.counters["late_drains" if now >= member.drain_until else "drains"] += 1
            return [*effects, self._dismissal(request)]
        return [*effects, Answer(request.call, self._ack(member, now))]

    def inventory(self, request: Request[Inventory], now: int) -> list[Effect]:
        state, m = self._state, request.question
        known = state.members.get(m.info.shard)
        if m.chunk == 0 and m.coordinator == state.epoch:
            if known is not None and known.info.epoch == m.info.epoch and m.upto < known.cursor.acked:
                return [Answer(request.call, self._ack(known, now))]  # it was delayed: newer events are known by now
            # The shard reports all that it holds again: its old slot dies, and with it whatever is no longer true.
            if state.members.leave_reason(m.info) is None:
                again = known is not None and known.info.epoch == m.info.epoch
                self.forget(known, lost=not again)
                self._admit(m, now, known)
        member, effects = self._identify_sender(request, now)
        if member is None:
            return effects
        effects += self._learn(m.tombstones, now)
        if not member.cursor.chunk(m.chunk, upto=m.upto, last=m.last):
            return [*effects, Answer(request.call, self._ack(member, now, inventory=True))]
        member.purged = max((stone.number for stone in m.tombstones), default=0)
        for event in m.pages:
            self._apply(event, member, now)
        if m.last:
            self._replicator.joined()
            self._end_rebuilding_early(now)
        return [*effects, Answer(request.call, self._ack(member, now))]

    def forget(self, member: Member | None, *, lost: bool = True) -> None:
        """Removes a shard incarnation that is lost or, if not `lost`, that is drained or sends its inventory again. No
        answer names its slot from now on; its records are swept in later steps."""
        if member is not None:
            self._state.members.drop(member.info.shard)
            for order in member.orders.close():
                self._settle[type(order)](member, order)
            self._state.eraser.forget(member)
            self._tiering.forget(member)
            self._replicator.forget(member)
            self._sweeper.forget(member, lost=lost)

    def apply_tombstone(self, stone: Tombstone, now: int) -> int:
        """Forgets all blocks that this tombstone names, and every order to fetch them. Returns the number of blocks
        forgotten."""
        purged = self._state.apply_tombstone(stone)
        self._replicator.apply_tombstone(stone)
        return self._sweeper.purge(purged, now)

    # ------------------------------------------------------------------------------------- the sender

    def _identify_sender(self, request: Request[Report | Inventory], now: int) -> tuple[Member | None, list[Effect]]:
        """Returns the member that sent the message; or None and the answer, if the sender is not (or no longer) a
        member."""
        state, m = self._state, request.question
        if m.coordinator > state.epoch:
            if not state.rebuilding:  # a newer coordinator has taken over: this process ends
                return None, [Answer(request.call, ReportAck(state.epoch, 0)), Leave("a newer coordinator is known")]
            # Not just the next epoch: two coordinators that know of the same one would both take it, and never learn of
            # each other. The low bits of an epoch, which began as nanoseconds, serve as random bits.
            state.epoch = Epoch(m.coordinator + 1 + state.epoch % 65_536)
            for known in state.members.all():  # each numbers its stream again for this epoch, after an inventory
                known.cursor = ReportCursor()
        if state.members.leave_reason(m.info) is not None:
            return None, [self._dismissal(request)]
        member = state.members.get(m.info.shard)
        if m.coordinator != state.epoch:
            return None, [Answer(request.call, ReportAck(state.epoch, 0, inventory=True))]
        if member is None or m.info.epoch > member.info.epoch:
            self.forget(member)
            member = self._admit(m, now, member)
        member.info = m.info
        member.seen_at = now
        if m.info.draining and not member.draining:  # an earlier coordinator has ordered the drain
            self._replicator.drain(member, now + self._drain)
        for tenant, spec in m.specs:
            state.namespaces.attach(tenant, spec)
        return member, []

    def _admit(self, m: Report | Inventory, now: int, before: Member | None) -> Member:
        self._state.counters["restarted_shards"] += self._state.members.note_restart(m.info, before, now)
        member = self._state.members.admit(m.info, now)
        if before is not None and before.drain_until is not None:  # the drain outlives a restart
            self._replicator.drain(member, before.drain_until)
        return member

    def _dismissal(self, request: Request[Report | Inventory]) -> Answer:
        state = self._state
        return Answer(request.call, ReportAck(state.epoch, 0, leave=state.members.leave_reason(request.question.info)))

    def _ack(self, member: Member, now: int, *, inventory: bool = False) -> ReportAck:
        return ReportAck(
            self._state.epoch,
            0 if inventory else member.cursor.acked,
            inventory=inventory,
            orders=() if inventory else member.orders.unaccepted(),
            tombstones=self._state.tombstones.since(member.purged),
            drain=member.draining,
            probe=self._state.probes.order_for(member.info.shard, member.info.epoch, now),
        )

    # ------------------------------------------------------------------------------------- its events

    def _apply(self, event: StreamEvent, member: Member, now: int) -> None:
        state = self._state
        if isinstance(event, PurgedEvent):
            member.purged = max(member.purged, event.number)
            return
        space = state.namespaces.known(event.namespace)
        if space is None:
            return  # its tenant exceeds the limit of namespaces: the pages are never served and age out with the shard
        key = event.key
        if isinstance(event, RemovedEvent):
            self._remove_page(event, member, now)
            return
        if member.purged < space.purged:
            return  # the page was stored before a purge that the shard has not carried out yet
        state.counters["committed_pages"] += 1
        nbytes = space.page_bytes(key.group, key.part)
        state.tickets.written(space.id, space.tenant, key.hash, (key.group, key.part), nbytes)
        state.evicted.forget(event.namespace, key.hash)
        # A new block gets the stamp of its parent: if it were fresher, it would outlive the chain that it is useless
        # without.
        parent = space.index.get(event.parent)
        known = space.index.get(key.hash)
        before = known.copies if known is not None else state.book.none
        record = space.index.add(event, member.slot, parent.stamp if parent is not None else now)
        known = known or record
        assert known is not None
        state.members.charge(space, before, known.copies, [(key.group, key.part)])
        if record is not None:
            member.cold[event.tier].push(record)
            if space.spec.private:
                state.eraser.recorded((space.id, key.hash), now)
        if member.draining:
            self._replicator.committed(known, member)

    def _remove_page(self, event: RemovedEvent, member: Member, now: int) -> None:
        state, key = self._state, event.key
        space = state.namespaces.known(event.namespace)
        assert space is not None
        state.counters["corrupt_pages" if event.corrupt else "gone_pages"] += 1
        record = space.index.get(key.hash)
        before = record.copies if record is not None else state.book.none
        removed = space.index.remove(key.hash, member.slot, key.group, key.part, event.tier)
        if record is not None:
            state.members.charge(space, before, record.copies, [(key.group, key.part)])
        if record is not None and not record.copies.on(member.slot, event.tier):
            member.cold[event.tier].remove(record)
        if removed:
            if not event.corrupt and not space.spec.private and record is not None:
                state.eviction_ages[event.tier].add(max(0, now - last_used(record)))
            state.evicted.add(
                event.namespace, key.hash, now, MissReason.CORRUPT if event.corrupt else MissReason.EVICTED
            )
            space.pinned.discard(key.hash)
        elif record is not None and not record.copies.holds(member.slot, key.group, key.part):
            if event.corrupt:
                self._replicator.repair(space, record, before, member.slot)
            else:
                self._replicator.replica_lost(record, evicted=True)

    def _give_orders(self, m: Report, member: Member, now: int) -> None:
        """Gives the shard its next orders, one of each kind of which none is in progress."""
        if self._state.rebuilding or m.info.stopping:
            return
        self._orphans.settle()
        under_way, staging = member.orders.of, m.info.use(STAGING)
        evicting = under_way(EvictOrder) is not None
        if not evicting:
            self._state.eraser.order(member)
        # A draining shard does not evict to reach its watermark: those blocks are to be moved, not lost.
        if not evicting and (m.pressure or not member.draining):
            self._make_room(member, dict(m.pressure), now)
        elif under_way(MoveOrder) is None and 0 < staging.wanted_bytes <= m.info.next_below(STAGING).free_bytes:
            self._tiering.demote(member, {}, now)  # so that other shards can read what its disk tier holds
        # Free room goes to waiting reservations first. A full shard would also evict one copy to make room for another.
        if under_way(EvictOrder) is None and under_way(MoveOrder) is None and not m.pressure:
            if not member.draining:
                self._tiering.promote(member, now)
            if under_way(PullOrder) is None:
                self._state.counters["pulls"] += self._replicator.order(member, now)

    def _make_room(self, member: Member, pressing: Mapping[Tenant, int], now: int) -> None:
        """Orders the coldest blocks down one tier, and evicts the coldest blocks of the lowest tier. `pressing`: what
        the waiting reservations of each tenant lack."""
        *upper, lowest = member.info.tiers
        waited = 0 if upper else sum(pressing.values())
        if upper and member.orders.of(MoveOrder) is None:
            waited = self._tiering.demote(member, pressing, now)
        if member.orders.of(EvictOrder) is None:  # nothing is to be erased
            self._evictor.order(member, lowest, waited, pressing, now)
        ordered = any(member.orders.of(kind) is not None for kind in (EvictOrder, MoveOrder))
        cut_short = any(cold.cut_short for cold in member.cold.values())
        member.full = frozenset() if ordered or cut_short else frozenset(pressing)

    def _may_go(self, m: Report, member: Member, now: int) -> bool:
        """Whether a draining shard may leave: its drain time is up, or no transfer is running and every block that
        another shard has room for has a copy there."""
        assert member.drain_until is not None
        if now >= member.drain_until:
            return True
        # A shard that did not know of the drain when it sent this may have begun writes since; one that knows begins
        # none.
        # If the message is full, the shard may have more events to report. Which records have lost a copy is known only
        # when all have been swept.
        whole = len(m.events) < limits.REPORTS_PER_MESSAGE and not self._sweeper.of_lost_shards
        return whole and m.info.draining and not m.info.leases and self._replicator.drained(member)

    def _learn(self, tombstones: tuple[Tombstone, ...], now: int) -> list[Effect]:
        """Learns tombstones that a shard has carried out and this coordinator does not know, having lost its own.
        Gives new numbers to those that the shard would skip, so that it carries them out too."""
        state = self._state
        new = state.tombstones.learn(tombstones)
        renewed = state.tombstones.renew(tombstones, state.epoch)
        for stone in (*new, *renewed):
            self.apply_tombstone(stone, now)
        if new:  # events reported since the purge are forgotten too: ask for new inventories
            for member in state.members.all():
                member.cursor = ReportCursor()
        return [Persist(state.tombstones.all())] if new or renewed else []

    def _end_rebuilding_early(self, now: int) -> None:
        reported = sum(member.cursor.current for member in self._state.members.all())
        if self._expected is not None and reported >= self._expected:
            self._state.serve(now)
