"""Bugs of coordinators and of their shells: knowledge, orders, purges, KV events."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from kvcluster.core.coordinator import members
from kvcluster.core.coordinator.admin_handler import AdminHandler
from kvcluster.core.coordinator.block_facts import ReplicasFirst
from kvcluster.core.coordinator.event_emitter import EventEmitter
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.coordinator.evictor import Evictor
from kvcluster.core.coordinator.members import Membership
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.prepare_handler import PrepareHandler
from kvcluster.core.coordinator.record_sweeper import RecordSweeper
from kvcluster.core.coordinator.replica_sets import Replica, ReplicaSet, ReplicaTable
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.coordinator.report_handler import ReportHandler
from kvcluster.core.coordinator.tenant_floors import TenantExcess, TenantFloors
from kvcluster.core.coordinator.tenant_limits import QuotaHolder, TenantLimits
from kvcluster.core.coordinator.tickets import HeldBlocks, PageWriters, TicketBook
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.groups import Part
from kvcluster.core.messages import Persist, Tick
from kvcluster.core.shard.order_executor import OrderExecutor
from kvcluster.core.streams import OrderStream, ReportCursor
from kvcluster.core.tombstones import Tombstones
from kvcluster.eviction.lru import DEPTH_BITS, LRU
from kvcluster.replay.core_stepper import CoreProcess
from tests.sim import content
from tests.sim.bugs.planting import planted
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.scenario import FIRST_WITH_GRANTS, FIRST_WITH_QUOTAS, FIRST_WITH_RUNS


@planted(ReportCursor, "chunk")
def stale_inventory(original: Any, self: ReportCursor, chunk: int, *, upto: int, last: bool) -> bool:
    """Chunks of an inventory are accepted as they come, even if they belong to another inventory."""
    self._next_chunk = chunk + 1
    if last:
        self._next = upto + 1
    return True


@planted(CoordinatorProcess, "perform")
def purge_not_on_disk(original: Any, self: CoordinatorProcess, effect: Any) -> None:
    """A purge is acknowledged and never written to disk."""
    if not isinstance(effect, Persist):
        original(self, effect)


@planted(ReplicaTable, "kill_slot")
def lost_shard_named(original: Any, self: ReplicaTable, slot: Any) -> None:
    """Plans that name a lost shard are kept."""


@planted(TenantFloors, "closed")
def floors_not_kept(original: Any, self: TenantFloors, tenant: Any) -> bool:
    """What a tenant has below its floor is evicted for others."""
    return False


@planted(HeldBlocks, "fitting")
def holds_without_bound(original: Any, self: HeldBlocks, space: Any, tenant: Any, hashes: Any, **bounds: Any) -> int:
    """A tenant's tickets hold all that they name, however many bytes that is."""
    return len(hashes)


@planted(members, "charged")
def replicas_charged(original: Any, copies: ReplicaSet, group: int, part: Part) -> list[Replica]:
    """A tenant is charged for each copy of its blocks, so that others may evict the only copies of some."""
    return [copy for copy in copies.entries if (copy.group, copy.part) == (group, part)]


@planted(ReportHandler, "_give_orders")
def evicts_while_rebuilding(original: Any, self: ReportHandler, m: Any, member: Any, now: int) -> None:
    """A coordinator that knows only some shards orders evictions."""
    until, self._state.rebuild_until = self._state.rebuild_until, None
    original(self, m, member, now)
    self._state.rebuild_until = until


@planted(CoreProcess, "catch_up")
def judged_after_a_stall(original: Any, self: CoreProcess) -> None:
    """A process that was stalled judges deadlines first, and steps the messages that arrived meanwhile afterwards."""
    deadline = self.core.next_deadline()
    if deadline is not None and deadline <= self.now():
        self.step(Tick())
    original(self)


@planted(NamespaceTable, "apply_tombstone")
def forgotten_tombstone(original: Any, self: NamespaceTable, stone: Any) -> Any:
    """A purge removes the records, and forgets that there was a purge."""
    before = [(space, space.purged) for space in self]
    records = original(self, stone)
    for space, purged in before:
        space.purged = purged
    return records


@planted(OrderExecutor, "_stop_writers")
def purged_writers_go_on(original: Any, self: OrderExecutor, space: Any) -> list[Any]:
    """A shard that carries out a purge does not stop the writers of older pages."""
    return []


@planted(Replicator, "drained")
def drained_too_early(original: Any, self: Replicator, member: Any) -> bool:
    """A draining shard is told to leave before another shard has fetched the blocks that only it holds."""
    return True


@planted(Evictor, "_spares")
def evicts_what_is_promised(original: Any, self: Evictor, record: Any, now: int, despite_holds: bool) -> bool:
    """An order takes blocks that are held for a load, or that an operator has pinned."""
    return False


@planted(OrderStream, "give")
def order_number_used_again(original: Any, self: OrderStream, make: Any) -> None:
    """Order numbers are counted from the unfinished orders, so that a new order gets the number of one that has
    ended."""
    self._numbers = count(len(self) + 1)
    original(self, make)


@planted(Membership, "admit")
def order_numbers_reset(original: Any, self: Membership, info: Any, now: int) -> Any:
    """The orders to a shard are counted from 1 again when it sends its inventory again, though the shard goes on
    counting."""
    self._order_numbers = count(1)
    return original(self, info, now)


@planted(EvictionQueue, "_is_leaf")
def roots_go_first(original: Any, self: EvictionQueue[Any], state: int) -> bool:
    """A block that others follow may be evicted; of equally cold blocks the beginning of a conversation is evicted
    first."""
    return state % 2 == 1


@roots_go_first.also(LRU, "score")
def _score(original: Any, self: LRU, block: Any, now: int) -> Any:
    return block.stamp << DEPTH_BITS | block.depth


@planted(PrepareHandler, "_answered_before")
def repeat_treated_as_new(original: Any, self: PrepareHandler, attempt: Any, space: Any, kind: Any) -> None:
    """A prepare that is repeated because its answer was lost is answered as if it were a new one."""
    ticket = self._state.tickets.end((space.tenant, attempt))
    if ticket is not None:
        self._release(ticket)


@planted(PageWriters, "end")
def writer_not_forgotten(original: Any, self: PageWriters, *ticket: Any) -> None:
    """The writer of a page is remembered though it has given up."""


@planted(Tombstones, "since")
def purge_skipped(original: Any, self: Tombstones, number: int) -> Any:
    """A shard is not sent the purge that follows the last one that it has carried out."""
    return original(self, number + 1)


@planted(Tiering, "settle")
def claimed_demotion_forgotten(original: Any, self: Tiering, member: Any, order: Any) -> None:
    """A claimed block that was to be demoted, and has stayed where it is, is never looked at again."""
    original(self, member, replace(order, moves=tuple(move for move in order.moves if not move.keeps)))


@planted(Tiering, "_demotion")
def claim_not_kept_below(original: Any, self: Tiering, record: Any, to: Any, now: int) -> Any:
    """A claimed block for which there is no room below is evicted by its demotion."""
    return original(self, record, to, now)._replace(keeps=False)


@planted(RecordSweeper, "sweep_some")
def swept_in_part(original: Any, self: RecordSweeper, now: int) -> None:
    """The records of a lost shard that one step has no time for are never swept."""
    original(self, now)
    self._slots.clear()


@planted(EventEmitter, "changed")
def removal_not_told(original: Any, self: EventEmitter, space: Any, record: Any, before: int) -> None:
    """KV events report what is stored in a tier, and not what is removed from it."""
    if record.tiers & ~before:
        original(self, space, record, before & record.tiers)


@planted(EventEmitter, "republish_some")
def retold_in_part(original: Any, self: EventEmitter) -> None:
    """A coordinator that publishes all blocks again forgets the rest after its first step."""
    original(self)
    self._to_republish.clear()


@planted(EventEmitter, "remember")
def tokens_of_another(
    original: Any, self: EventEmitter, space: Any, hashes: Any, tokens: Any, block_tokens: int, now: int
) -> None:
    """KV events give the token ids of the first block of a store for all of its blocks."""
    original(self, space, hashes, tuple(tokens[:block_tokens]) * len(hashes), block_tokens, now)


@planted(Dispatcher, "__init__", first=FIRST_WITH_GRANTS)
def readers_change_what_they_read(original: Any, self: Dispatcher[Any], *args: Any, **tables: Any) -> None:
    """A grant lets its bearer change the owner's KV too."""
    original(self, *args, **tables | {"reading": [*tables["reading"], *tables["in_namespace"]]})


@planted(HeldBlocks, "fitting", first=FIRST_WITH_GRANTS)
def readers_hold_without_bound(
    original: Any, self: HeldBlocks, space: Any, tenant: Any, hashes: Any, **bounds: Any
) -> int:
    """What a tenant reads of another it may hold as if it were alone."""
    owner = content.BY_SPACE[space].tenant
    return len(hashes) if owner != tenant else int(original(self, space, tenant, hashes, **bounds))


@planted(TenantLimits, "room", first=FIRST_WITH_QUOTAS)
def stores_beyond_the_limit(original: Any, self: TenantLimits, tenant: Any, tier: Any) -> None:
    """A store is granted however much its tenant has."""


@planted(TicketBook, "writing_bytes", first=FIRST_WITH_QUOTAS)
def writing_not_counted(original: Any, self: TicketBook, tenant: Any) -> int:
    """A tenant may store what is left of its limit several times over: what it is writing does not count."""
    return 0


@planted(TenantLimits, "excess", first=FIRST_WITH_QUOTAS)
def lowered_limit_evicts_nothing(original: Any, self: TenantLimits, member: Any, tier: Any) -> dict[Any, int]:
    """What a tenant has beyond its limit stays until there is no room."""
    return {}


@planted(TenantExcess, "closed", first=FIRST_WITH_QUOTAS)
def another_pays_for_the_excess(original: Any, self: TenantExcess, tenant: Any) -> bool:
    """The coldest blocks are evicted for a tenant beyond its limit, of whichever tenant."""
    return False


@planted(AdminHandler, "set_quotas", first=FIRST_WITH_QUOTAS)
def changed_quotas_not_taken(original: Any, self: AdminHandler, m: Any, now: int) -> Any:
    """A coordinator keeps the first quotas that it was told."""
    first = not self._state.quotas.quotas.tenants
    return original(self, m, now) if first else []


@planted(Membership, "stored_bytes", first=FIRST_WITH_QUOTAS)
def replicas_count_to_the_limit(original: Any, self: Membership, tier: Any, tenant: Any) -> int:
    """A tenant's replicas count to its limit, so that it loses its only copies of other blocks."""
    replicated = any(member.stored[tier].tenants.get(tenant) for member in self.all()[1:])
    return int(original(self, tier, tenant)) * (2 if replicated else 1)


@planted(TenantLimits, "floors", first=FIRST_WITH_QUOTAS)
def floors_of_quotas_not_kept(original: Any, self: TenantLimits, member: Any, tier: Any, tenants: Any) -> Any:
    """All tenants have the same floor, whatever the quotas say."""
    held, self._held = self._held, QuotaHolder()
    floors = original(self, member, tier, tenants)
    self._held = held
    return floors


@planted(QuotaHolder, "pinned", first=FIRST_WITH_QUOTAS)
def pins_beyond_the_quota(original: Any, self: QuotaHolder, tenant: Any) -> None:
    """A tenant pins its share of all bytes, whatever its quota."""


@planted(ReplicasFirst, "score", first=FIRST_WITH_RUNS)
def superseded_kept(original: Any, self: ReplicasFirst, block: Any, now: int) -> int:
    """Blocks of superseded weights are evicted like any others."""
    self._superseded = lambda space: False
    return int(original(self, block, now))
