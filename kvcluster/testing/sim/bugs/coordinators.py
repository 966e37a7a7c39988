"""Bugs of coordinators and of their shells: knowledge, orders, purges, KV events."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvcluster.core import members
from kvcluster.core.event_emitter import EventEmitter
from kvcluster.core.eviction_queue import EvictionQueue
from kvcluster.core.evictor import Evictor
from kvcluster.core.members import Membership
from kvcluster.core.messages import Persist, Tick
from kvcluster.core.namespaces import NamespaceTable
from kvcluster.core.order_executor import OrderExecutor
from kvcluster.core.order_stream import OrderStream
from kvcluster.core.prepare_handler import PrepareHandler
from kvcluster.core.replica_sets import Replica, ReplicaSet, ReplicaTable
from kvcluster.core.replicator import Replicator
from kvcluster.core.report_handler import ReportHandler
from kvcluster.core.report_stream import ReportCursor
from kvcluster.core.spec import Part
from kvcluster.core.tenant_floors import TenantFloors
from kvcluster.eviction.lru import DEPTH_BITS, LRU
from kvcluster.testing.core_process import CoreProcess
from kvcluster.testing.sim.bugs.planting import Patch, planted
from kvcluster.testing.sim.coordinator import CoordinatorProcess


@planted
def stale_inventory() -> list[Patch]:
    """Chunks of an inventory are accepted as they come, even if they belong to another inventory."""

    def chunk(self: ReportCursor, chunk: int, *, upto: int, last: bool) -> bool:
        self._next_chunk = chunk + 1
        if last:
            self._next = upto + 1
        return True

    return [(ReportCursor, "chunk", chunk)]


@planted
def purge_not_on_disk() -> list[Patch]:
    """A purge is acknowledged and never written to disk."""
    original = CoordinatorProcess.perform

    def perform(self: CoordinatorProcess, effect: Any) -> None:
        if not isinstance(effect, Persist):
            original(self, effect)

    return [(CoordinatorProcess, "perform", perform)]


@planted
def lost_shard_named() -> list[Patch]:
    """Plans that name a lost shard are kept."""
    return [(ReplicaTable, "kill_slot", lambda self, slot: None)]


@planted
def floors_not_kept() -> list[Patch]:
    """What a tenant has below its floor is evicted for others."""
    return [(TenantFloors, "closed", lambda self, tenant: False)]


@planted
def replicas_charged() -> list[Patch]:
    """A tenant is charged for each copy of its blocks, so that others may evict the only copies of some."""

    def charged(copies: ReplicaSet, group: int, part: Part) -> list[Replica]:
        return [copy for copy in copies.entries if (copy.group, copy.part) == (group, part)]

    return [(members, "charged", charged)]


@planted
def evicts_while_rebuilding() -> list[Patch]:
    """A coordinator that knows only some shards orders evictions."""
    original = ReportHandler._give_orders

    def give(self: ReportHandler, m: Any, member: Any, now: int) -> None:
        until, self._state.rebuild_until = self._state.rebuild_until, None
        original(self, m, member, now)
        self._state.rebuild_until = until

    return [(ReportHandler, "_give_orders", give)]


@planted
def judged_after_a_stall() -> list[Patch]:
    """A process that was stalled judges deadlines first, and steps the messages that arrived meanwhile afterwards."""
    original = CoreProcess.catch_up

    def catch_up(self: CoreProcess) -> None:
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.step(Tick())
        original(self)

    return [(CoreProcess, "catch_up", catch_up)]


@planted
def forgotten_tombstone() -> list[Patch]:
    """A purge removes the records, and forgets that there was a purge."""
    original = NamespaceTable.apply_tombstone

    def apply_tombstone(self: NamespaceTable, stone: Any) -> Any:
        before = [(space, space.purged) for space in self]
        records = original(self, stone)
        for space, purged in before:
            space.purged = purged
        return records

    return [(NamespaceTable, "apply_tombstone", apply_tombstone)]


@planted
def purged_writers_go_on() -> list[Patch]:
    """A shard that carries out a purge does not stop the writers of older pages."""
    return [(OrderExecutor, "_stop_writers", lambda self, space: [])]


@planted
def drained_too_early() -> list[Patch]:
    """A draining shard is told to leave before another shard has fetched the blocks that only it holds."""
    return [(Replicator, "drained", lambda self, member: True)]


@planted
def evicts_what_is_promised() -> list[Patch]:
    """An order takes blocks that are held for a load, or that an operator has pinned."""
    return [(Evictor, "_spares", lambda self, record, now: False)]


@planted
def order_number_used_again() -> list[Patch]:
    """Order numbers are counted from the unfinished orders, so that a new order gets the number of one that has
    ended."""
    original = OrderStream.give

    def give(self: OrderStream, make: Any) -> None:
        self._numbers = count(len(self) + 1)
        original(self, make)

    return [(OrderStream, "give", give)]


@planted
def order_numbers_reset() -> list[Patch]:
    """The orders to a shard are counted from 1 again when it sends its inventory again, though the shard goes on
    counting."""
    original = Membership.admit

    def admit(self: Membership, info: Any, now: int) -> Any:
        self._order_numbers = count(1)
        return original(self, info, now)

    return [(Membership, "admit", admit)]


@planted
def roots_go_first() -> list[Patch]:
    """A block that others follow may be evicted; of equally cold blocks the beginning of a conversation is evicted
    first."""
    return [
        (EvictionQueue, "_is_leaf", staticmethod(lambda state: state % 2 == 1)),
        (LRU, "score", lambda self, block, now: block.stamp << DEPTH_BITS | block.depth),
    ]


@planted
def repeat_treated_as_new() -> list[Patch]:
    """A prepare that is repeated because its answer was lost is answered as if it were a new one."""

    def forget(self: PrepareHandler, attempt: Any, space: Any, kind: Any) -> None:
        ticket = self._state.tickets.end((space.tenant, attempt))
        if ticket is not None:
            self._release(ticket)

    return [(PrepareHandler, "_answered_before", forget)]


@planted
def swept_in_part() -> list[Patch]:
    """The records of a lost shard that one step has no time for are never swept."""
    original = ReportHandler.sweep_some

    def sweep_some(self: ReportHandler, now: int) -> None:
        original(self, now)
        self._sweep.clear()

    return [(ReportHandler, "sweep_some", sweep_some)]


@planted
def removal_not_told() -> list[Patch]:
    """KV events report what is stored in a tier, and not what is removed from it."""
    original = EventEmitter.changed

    def changed(self: EventEmitter, space: Any, record: Any, before: int) -> None:
        if record.tiers & ~before:
            original(self, space, record, before & record.tiers)

    return [(EventEmitter, "changed", changed)]


@planted
def retold_in_part() -> list[Patch]:
    """A coordinator that publishes all blocks again forgets the rest after its first step."""
    original = EventEmitter.tell_some

    def tell_some(self: EventEmitter) -> None:
        original(self)
        self._retelling.clear()

    return [(EventEmitter, "tell_some", tell_some)]


@planted
def tokens_of_another() -> list[Patch]:
    """KV events give the token ids of the first block of a store for all of its blocks."""
    original = EventEmitter.remember

    def remember(self: EventEmitter, space: Any, hashes: Any, tokens: Any, block_tokens: int) -> None:
        original(self, space, hashes, tuple(tokens[:block_tokens]) * len(hashes), block_tokens)

    return [(EventEmitter, "remember", remember)]
