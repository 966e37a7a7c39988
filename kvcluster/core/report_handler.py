"""What shards tell, and what they are told in answer: reports and inventories in, the index and orders out.

A shard is a member from its first word on, its copies count as they are told, and its slot (replica_sets.py) dies with
its incarnation, its silence or a new inventory. Nothing a worker says comes in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator_state import MS, CoordinatorState
from kvcluster.core.evictor import Evictor
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member
from kvcluster.core.messages import (
    Answer,
    Effect,
    EvictOrder,
    GoneEvent,
    Inventory,
    Leave,
    MoveOrder,
    Order,
    Persist,
    PullOrder,
    PurgedEvent,
    Report,
    ReportAck,
    Request,
    StreamEvent,
    Tombstone,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.replicator import Replicator
from kvcluster.core.report_stream import ReportCursor
from kvcluster.core.tiering import Tiering
from kvcluster.core.tiers import STAGING

SWEEP_BLOCKS = 4_096
"""Records looked at in one step for what they still say of lost shards, or because they were purged."""

COPIES_SWEPT = 16
"""Copies of a record that count as one record more."""


class ReportHandler:
    """The coordinator's ear. `expected` shards end the rebuilding early."""

    def __init__(
        self,
        state: CoordinatorState,
        config: CoordinatorConfig,
        evictor: Evictor,
        tiering: Tiering,
        replicator: Replicator,
        expected: int,
    ) -> None:
        self._state = state
        self._evictor = evictor
        self._tiering = tiering
        self._replicator = replicator
        self._expected = expected
        self._drain = config.drain_ms * MS
        self._settle: dict[type[Order], Callable[[Member, Any], None]] = {
            EvictOrder: evictor.settle,
            MoveOrder: tiering.settle,
            PullOrder: replicator.settle,
        }
        self._sweep: list[
            tuple[Iterator[tuple[NamespaceId, BlockHash]], int | None]
        ] = []  # with its slot, where what it held is lost
        self._purged: list[dict[BlockHash, BlockRecord]] = []

    @property
    def sweeping(self) -> bool:
        """Do records still name lost shards, or are purged blocks yet to be noted?"""
        return bool(self._sweep or self._purged)

    def report(self, request: Request[Report], now: int) -> list[Effect]:
        m = request.question
        member, effects = self._hear(request, now)
        if member is None:
            return effects
        fresh = member.cursor.news(m.first, m.events)
        if fresh is None:
            return [Answer(request.call, self._ack(member, inventory=True))]
        for event in fresh:
            self._apply(event, member, now)
        effects = self._tiering.sampled(m.samples)
        for order in member.orders.heard(m.orders):
            self._settle[type(order)](member, order)
        self._give_orders(m, member, now)
        if member.draining and not self._state.rebuilding and self._may_go(m, member, now):
            self._state.members.dismiss(member)
            self.forget(member, lost=False)  # what had a place elsewhere is there
            return [*effects, self._dismissal(request)]
        return [*effects, Answer(request.call, self._ack(member))]

    def inventory(self, request: Request[Inventory], now: int) -> list[Effect]:
        state, m = self._state, request.question
        known = state.members.get(m.info.shard)
        if m.chunk == 0 and m.coordinator == state.epoch:
            if known is not None and known.info.epoch == m.info.epoch and m.upto < known.cursor.acked:
                return [Answer(request.call, self._ack(known))]  # it was long on its way: more is known by now
            # All that was known of this shard is told anew: its old slot dies, and with it what is no longer true.
            if state.members.farewell(m.info) is None:
                again = known is not None and known.info.epoch == m.info.epoch
                self.forget(known, lost=not again)
                self._admit(m, now, known)
        member, effects = self._hear(request, now)
        if member is None:
            return effects
        effects += self._learn(m.tombstones, now)
        if not member.cursor.chunk(m.chunk, upto=m.upto, last=m.last):
            return [*effects, Answer(request.call, self._ack(member, inventory=True))]
        member.purged = max((stone.number for stone in m.tombstones), default=0)
        for event in m.pages:
            self._apply(event, member, now)
        if m.last:
            self._replicator.joined()
            self._end_rebuilding_early()
        return [*effects, Answer(request.call, self._ack(member))]

    def forget(self, member: Member | None, *, lost: bool = True) -> None:
        """A shard incarnation is gone, or (not `lost`) is drained or tells anew what it holds. No answer names its slot
        from now on; records are swept in later steps."""
        if member is not None:
            self._state.members.drop(member.info.shard)
            for order in member.orders.close():
                self._settle[type(order)](member, order)
            self._tiering.forget(member)
            self._replicator.forget(member)
            names = chain.from_iterable([cold.drain() for cold in member.cold.values()])
            self._sweep.append((names, member.slot if lost else None))

    def apply_tombstone(self, stone: Tombstone, now: int) -> int:
        """Forgets all that this tombstone names, and every order to fetch it. How many blocks that were."""
        purged = [records for records in self._state.apply_tombstone(stone) if records]
        self._replicator.apply_tombstone(stone)
        self._purged += purged
        blocks = sum(map(len, purged))
        self._note_purged(now)
        return blocks

    def _note_purged(self, now: int) -> None:
        """Remembers some of what was purged as evicted, so that `explain` can say so."""
        state = self._state
        for _ in range(SWEEP_BLOCKS):
            while self._purged and not self._purged[-1]:
                self._purged.pop()
            if not self._purged:
                return
            block, record = self._purged[-1].popitem()
            if state.directory.record(record.space, block) is None:
                state.evicted.add(block, now, MissReason.EVICTED)

    def sweep_some(self, now: int) -> None:
        """Cleans some records of lost shards; what they leave with fewer copies is to get others."""
        self._note_purged(now)
        state, left = self._state, SWEEP_BLOCKS
        while self._sweep and left > 0:
            left -= 1
            names, slot = self._sweep[-1]
            name = next(names, None)
            if name is None:
                self._sweep.pop()
                continue
            space = state.directory.known(name[0])
            record = space.index.get(name[1]) if space is not None else None
            if space is None or record is None:
                continue
            before = record.copies
            left -= len(before.entries) // COPIES_SWEPT
            if space.index.sweep(record):
                state.evicted.add(record.hash, now, MissReason.SHARD_LOST)
                space.pinned.pop(record.hash, None)
            elif slot is not None:
                self._replicator.repair(space, record, before, slot)
            else:
                self._replicator.replica_lost(record)

    # ------------------------------------------------------------------------------------- who speaks

    def _hear(self, request: Request[Report | Inventory], now: int) -> tuple[Member | None, list[Effect]]:
        """The member that speaks, or what to tell a speaker that is none (yet, or any more)."""
        state, m = self._state, request.question
        if m.coordinator > state.epoch:
            if not state.rebuilding:  # somebody newer coordinates: this process is over
                return None, [Answer(request.call, ReportAck(state.epoch, 0)), Leave("a newer coordinator is known")]
            # Not merely the next: two that know of the same one would both take it, and never learn of one another.
            # The low bits of an epoch, which began as nanoseconds, are as good as drawn.
            state.epoch = Epoch(m.coordinator + 1 + state.epoch % 65_536)
            for known in state.members.all():  # each numbers its stream anew for this epoch, after an inventory
                known.cursor = ReportCursor()
        if state.members.farewell(m.info) is not None:
            return None, [self._dismissal(request)]
        member = state.members.get(m.info.shard)
        if m.coordinator != state.epoch:
            return None, [Answer(request.call, ReportAck(state.epoch, 0, inventory=True))]
        if member is None or m.info.epoch > member.info.epoch:
            self.forget(member)
            member = self._admit(m, now, member)
        member.info = m.info
        member.seen_at = now
        if m.info.draining and not member.draining:  # an earlier coordinator has told it to
            self._replicator.drain(member, now + self._drain)
        for tenant, spec in m.specs:
            state.directory.attach(tenant, spec)
        return member, []

    def _admit(self, m: Report | Inventory, now: int, before: Member | None) -> Member:
        member = self._state.members.admit(m.info, now)
        if before is not None and before.drain_until is not None:  # it goes, however often it begins anew
            self._replicator.drain(member, before.drain_until)
        return member

    def _dismissal(self, request: Request[Report | Inventory]) -> Answer:
        state = self._state
        return Answer(request.call, ReportAck(state.epoch, 0, leave=state.members.farewell(request.question.info)))

    def _ack(self, member: Member, *, inventory: bool = False) -> ReportAck:
        return ReportAck(
            self._state.epoch,
            0 if inventory else member.cursor.acked,
            inventory=inventory,
            orders=() if inventory else member.orders.unaccepted(),
            tombstones=self._state.tombstones.since(member.purged),
            drain=member.draining,
        )

    # ------------------------------------------------------------------------------------ what is told

    def _apply(self, event: StreamEvent, member: Member, now: int) -> None:
        state = self._state
        if isinstance(event, PurgedEvent):
            member.purged = max(member.purged, event.number)
            return
        space = state.directory.known(event.namespace)
        if space is None:
            return  # a tenant over its bound: its pages are served to nobody and age out with the shard
        key = event.key
        if isinstance(event, GoneEvent):
            self._gone(event, member, now)
            return
        if member.purged < space.purged:
            return  # it was there before the purge, of which the shard has not heard
        state.counters["committed_pages"] += 1
        state.tickets.written((space.id, key.hash, key.group, key.part))
        state.evicted.forget(key.hash)
        # A new block is as old as its chain: fresher than its parent, it would stay where it is of no use.
        parent = space.index.get(event.parent)
        record = space.index.add(event, member.slot, parent.stamp if parent is not None else now)
        if record is not None:
            member.cold[event.tier].push(record)
        if member.draining and (known := space.index.get(key.hash)) is not None:
            self._replicator.committed(known, member)

    def _gone(self, event: GoneEvent, member: Member, now: int) -> None:
        state, key = self._state, event.key
        space = state.directory.known(event.namespace)
        assert space is not None
        state.counters["corrupt_pages" if event.corrupt else "gone_pages"] += 1
        record = space.index.get(key.hash)
        before = record.copies if record is not None else state.book.none
        gone = space.index.remove(key.hash, member.slot, key.group, key.part, event.tier)
        if record is not None and not record.copies.on(member.slot, event.tier):
            member.cold[event.tier].remove(record)
        if gone:
            state.evicted.add(key.hash, now, MissReason.CORRUPT if event.corrupt else MissReason.EVICTED)
            space.pinned.pop(key.hash, None)
        elif record is not None and not record.copies.holds(member.slot, key.group, key.part):
            if event.corrupt:
                self._replicator.repair(space, record, before, member.slot)
            else:
                self._replicator.replica_lost(record, evicted=True)

    def _give_orders(self, m: Report, member: Member, now: int) -> None:
        """Writes down what the shard is to do next, of each kind of which nothing is under way."""
        if self._state.rebuilding:
            return
        under_way, staging = member.orders.of, m.info.use(STAGING)
        # What a draining shard holds beyond its watermark is to be moved and not to be lost.
        if under_way(EvictOrder) is None and (m.pressure_bytes or not member.draining):
            self._make_room(member, m.pressure_bytes, now)
        elif under_way(MoveOrder) is None and 0 < staging.wanted_bytes <= m.info.next_below(STAGING).free_bytes:
            self._tiering.demote(member, 0, now)  # so that others can read what it has in stores
        # What is made free is for those who wait for it, and a full shard would evict for one copy another.
        if under_way(EvictOrder) is None and under_way(MoveOrder) is None and not m.pressure_bytes:
            if not member.draining:
                self._tiering.promote(member)
            if under_way(PullOrder) is None:
                self._state.counters["pulls"] += self._replicator.order(member, now)

    def _make_room(self, member: Member, pressure_bytes: int, now: int) -> None:
        """Orders the coldest a tier down, and the coldest of the lowest tier out of it."""
        *upper, lowest = member.info.tiers
        waited = pressure_bytes
        if upper:
            waited = 0
            if member.orders.of(MoveOrder) is None:
                waited = self._tiering.demote(member, pressure_bytes, now)
        self._evictor.order(member, lowest, waited, now)
        ordered = any(member.orders.of(kind) is not None for kind in (EvictOrder, MoveOrder))
        cut_short = any(cold.cut_short for cold in member.cold.values())
        member.full = pressure_bytes > 0 and not ordered and not cut_short

    def _may_go(self, m: Report, member: Member, now: int) -> bool:
        """Is a draining shard of no more use? Running transfers end first, and what has a place elsewhere is there."""
        assert member.drain_until is not None
        if now >= member.drain_until:
            return True
        # A full message may not be all that it has to tell; and who has lost a copy is known when all are swept.
        told = len(m.events) < limits.REPORTS_PER_MESSAGE and not self._sweep
        return told and not m.info.leases and self._replicator.drained(member)

    def _learn(self, tombstones: tuple[Tombstone, ...], now: int) -> list[Effect]:
        """A coordinator that has lost its own learns of purges from whoever carried them out; what a shard passed over,
        it is to carry out too."""
        state = self._state
        new = state.tombstones.learn(tombstones)
        renewed = state.tombstones.renew(tombstones, state.epoch)
        for stone in (*new, *renewed):
            self.apply_tombstone(stone, now)
        if new:  # what they told since is forgotten too: it is asked for again
            for member in state.members.all():
                member.cursor = ReportCursor()
        return [Persist(state.tombstones.all())] if new or renewed else []

    def _end_rebuilding_early(self) -> None:
        if sum(member.cursor.current for member in self._state.members.all()) >= self._expected:
            self._state.rebuild_until = None
