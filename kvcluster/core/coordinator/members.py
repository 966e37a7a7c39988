"""The shards that a coordinator knows, each in its present incarnation.

A member is *joining* until its inventory is complete and it has reported once more: the blocks that it has reported so
far may be loaded, but nothing new is placed on it. That report shows that the shard knows of its membership; before, it
refuses all writes. It is *up* until the coordinator has received nothing from it for the membership term; then it is
*lost*, and its slot is killed (replica_sets.py). One that is *draining* is up, but nothing new is placed on it; once it
has been dismissed, every further message of that incarnation is answered with `leave`. So is a report of an older
incarnation. One that is *stopping* saves its pages and ends soon: nothing new is placed on it, and it gets no orders.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import count
from typing import TypeAlias, TypeVar

from kvcluster.core import limits
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.coordinator.replica_sets import ReplicaSet, ReplicaTable
from kvcluster.core.coordinator.tenant_floors import StoredBytes, charged
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import EvictOrder, LeaveReason, MoveOrder, Order, PullOrder, ShardAddress, ShardInfo, Tier
from kvcluster.core.placement import Candidate, choose
from kvcluster.core.streams import OrderStream, ReportCursor
from kvcluster.core.tiers import ADDRESSABLE

V = TypeVar("V")
QueueMaker: TypeAlias = Callable[[int, Tier], EvictionQueue[BlockRecord]]
"""Makes the eviction queue of one tier of the shard with that slot."""


class Member:
    """One shard incarnation."""

    __slots__ = (
        *("address", "cold", "confirmed", "cursor", "drain_until", "full", "info", "orders"),
        *("purged", "seen_at", "slot", "stored"),
    )

    def __init__(
        self, info: ShardInfo, slot: int, address: ShardAddress, queue: QueueMaker, orders: OrderStream
    ) -> None:
        self.info = info
        self.slot = slot
        self.address = address
        self.cursor = ReportCursor()
        self.confirmed = False  # the shard has reported since it sent its inventory
        self.orders = orders
        self.cold: dict[Tier, EvictionQueue[BlockRecord]] = {tier: queue(slot, tier) for tier in Tier}
        self.stored: dict[Tier, StoredBytes] = {tier: StoredBytes() for tier in Tier}
        self.seen_at = 0
        self.full: frozenset[Tenant] = frozenset()  # their reservations wait for room, and nothing could be evicted
        self.purged = 0  # tombstones up to this number are carried out, as far as it has reported
        self.drain_until: int | None = None  # while draining: blocks without a copy elsewhere by then are lost

    @property
    def draining(self) -> bool:
        return self.drain_until is not None

    @property
    def joined(self) -> bool:
        """Whether its inventory is complete, and the shard knows that it is a member."""
        return self.cursor.current and self.confirmed

    @property
    def state(self) -> str:
        if not self.joined:
            return "joining"
        if self.info.stopping:
            return "stopping"
        return "draining" if self.draining else "up"

    @property
    def takes_replicas(self) -> bool:
        """Whether blocks of other shards may be copied to it: no reservation waits there in vain."""
        return self._is_open and not self.full

    def takes(self, tenant: Tenant) -> bool:
        """Whether new blocks of this tenant may be placed on it."""
        return self._is_open and tenant not in self.full

    @property
    def _is_open(self) -> bool:
        return self.joined and not self.draining and not self.info.stopping


class Membership:
    """Members by shard name."""

    def __init__(self, ttl_ns: int, book: ReplicaTable, queue: QueueMaker) -> None:
        self._ttl = ttl_ns
        self._book = book
        self._queue = queue
        self._members: dict[ShardId, Member] = {}
        self._by_slot: dict[int, Member] = {}
        self._order_numbers = count(1)
        self.lost: dict[ShardId, ShardInfo] = {}
        self._restarts: dict[ShardId, tuple[int, int]] = {}  # how often, and the time of the last one
        self._dismissed: dict[ShardId, Epoch] = {}
        self.leaving: dict[ShardId, str] = {}  # addresses of those whose nodes end, until the reconciler has read them

    def __len__(self) -> int:
        return len(self._members)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def get(self, shard: ShardId) -> Member | None:
        return self._members.get(shard)

    def at(self, slot: int) -> Member | None:
        """Returns the member that has this slot; None if its incarnation was lost."""
        return self._by_slot.get(slot)

    @property
    def addressable_bytes(self) -> int:
        """The capacity of all shards in the addressable tiers, where claimed and pinned blocks mostly stay."""
        members = self._members.values()
        return sum(member.info.use(tier).capacity_bytes for member in members for tier in ADDRESSABLE)

    def capacity_bytes(self, tier: Tier) -> int:
        """Returns the size of that tier on all shards together."""
        return sum(member.info.use(tier).capacity_bytes for member in self._members.values())

    def stored_bytes(self, tier: Tier, tenant: Tenant) -> int:
        """Returns the bytes that a tenant is charged for in that tier of all shards."""
        return sum(member.stored[tier].tenants.get(tenant, 0) for member in self._members.values())

    def open_orders(self) -> dict[type[Order], int]:
        """Returns the number of orders of each kind that shards have not ended."""
        members = self._members.values()
        kinds: tuple[type[Order], ...] = (EvictOrder, MoveOrder, PullOrder)
        return {kind: sum(member.orders.of(kind) is not None for member in members) for kind in kinds}

    @property
    def next_expiry(self) -> int | None:
        return min((member.seen_at + self._ttl for member in self._members.values()), default=None)

    def restarts(self, shard: ShardId, now: int) -> tuple[int, int]:
        """Returns how often this shard has restarted, and how many nanoseconds ago the last time; zeros if it has
        not."""
        count, at = self._restarts.get(shard, (0, now))
        return count, now - at

    def note_restart(self, info: ShardInfo, before: Member | None, now: int) -> bool:
        """Counts a restart if this shard, which is about to be admitted, had an earlier incarnation, `before` or one
        that was lost, and returns whether it had. A shard that was drained and returns has not restarted."""
        known = before.info if before is not None else self.lost.get(info.shard)
        restarted = known is not None and known.epoch < info.epoch
        if restarted:
            count, _ = self.restarts(info.shard, now)
            _note(self._restarts, info.shard, (count + 1, now))
        return restarted

    def admit(self, info: ShardInfo, now: int) -> Member:
        """Adds a new incarnation, or the present one when it starts its inventory again. Gives it a new slot in either
        case."""
        self.drop(info.shard)
        address = info.at
        orders = OrderStream(self._order_numbers)
        member = Member(info, self._book.open_slot(address), address, self._queue, orders)
        member.seen_at = now
        self._members[info.shard] = self._by_slot[member.slot] = member
        self.lost.pop(info.shard, None)
        return member

    def charge(
        self, space: CoordinatorNamespace, before: ReplicaSet, after: ReplicaSet, parts: Iterable[tuple[int, Part]]
    ) -> None:
        """Charges the tenant for the copies of these (group, part) pairs as they are `after` a change of a block."""
        if before is after:
            return
        for group, part in parts:
            for copies, sign in ((charged(before, group, part), -1), (charged(after, group, part), 1)):
                for copy in copies:
                    member = self._by_slot.get(copy.slot)
                    if member is not None:
                        nbytes = sign * space.page_bytes(group, part, copy.codec)
                        member.stored[copy.tier].add(space.id, space.tenant, nbytes)

    @property
    def largest_bytes(self) -> int:
        """The capacity of the largest RAM tier, in which a page has to fit to be written; 0 without shards."""
        return max((member.info.capacity_bytes for member in self._members.values()), default=0)

    def place(self, run: BlockHash, tenant: Tenant, host: str, *, page_bytes: int, purged: int) -> Member | None:
        """Returns the member to place the run on whose first hash is `run`, written from `host` in pages of up to
        `page_bytes`; None if none has room.

        A member that has not yet carried out tombstone `purged` is not chosen: it would drop the new pages along with
        the purged ones.
        """
        candidates = [
            Candidate(
                shard=member.info.shard,
                host=member.info.host,
                weight_bytes=member.info.capacity_bytes,
                available=member.takes(tenant) and member.purged >= purged and member.info.capacity_bytes >= page_bytes,
            )
            for member in self._members.values()
        ]
        chosen = choose(run, candidates, host)
        return self._members[chosen.shard] if chosen is not None else None

    def forget(self, space: NamespaceId) -> None:
        """Removes a namespace, which has no record left in the index, from all eviction queues."""
        for member in self._members.values():
            for tier in Tier:
                member.cold[tier].forget(space)
                member.stored[tier].forget(space)

    def scores_fell(self) -> None:
        """Has all leaves of all eviction queues scored again by the next searches."""
        for member in self._members.values():
            for queue in member.cold.values():
                queue.scores_fell()

    def drop(self, shard: ShardId) -> Member | None:
        member = self._members.pop(shard, None)
        if member is not None:
            del self._by_slot[member.slot]
            self._book.kill_slot(member.slot)
        return member

    def dismiss(self, member: Member) -> None:
        """Removes a drained member: later messages of this incarnation do not bring it back."""
        self.drop(member.info.shard)
        _note(self._dismissed, member.info.shard, member.info.epoch)

    def leave_node(self, member: Member) -> None:
        """Notes that the node of this member is to be taken down, for the reconciler (actors/reconciler.py)."""
        _note(self.leaving, member.info.shard, member.info.address)

    def leave_reason(self, info: ShardInfo) -> LeaveReason | None:
        """Returns why this incarnation has to leave; None if it may stay."""
        member = self._members.get(info.shard)
        dismissed = self._dismissed.get(info.shard, 0)
        if info.epoch == dismissed:
            return LeaveReason.DRAINED
        newest = member.info.epoch if member is not None else dismissed
        return LeaveReason.REPLACED if info.epoch < newest else None

    def drop_silent(self, now: int) -> list[Member]:
        """Drops the members that were silent for the whole term, and returns them: they are lost."""
        silent = [member for member in self._members.values() if member.seen_at + self._ttl <= now]
        for member in silent:
            self.drop(member.info.shard)
            _note(self.lost, member.info.shard, member.info)
        return silent

    def forget_lost(self, expected: Container[ShardId]) -> None:
        """Forgets the lost shards that are not expected back: shards of other names have taken their places."""
        self.lost = {shard: info for shard, info in self.lost.items() if shard in expected}

    def extend(self, late_ns: int) -> None:
        """Extends all terms by the time for which this process was stalled, since it could not receive reports."""
        for member in self._members.values():
            member.seen_at += late_ns
            if member.drain_until is not None:
                member.drain_until += late_ns


def _note(of_past: dict[ShardId, V], shard: ShardId, what: V) -> None:
    """Remembers something of the last shards to which it happened, a bounded number of them."""
    of_past.pop(shard, None)
    of_past[shard] = what
    if len(of_past) > limits.PAST_SHARDS:
        del of_past[next(iter(of_past))]
