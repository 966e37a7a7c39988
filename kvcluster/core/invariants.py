"""Invariants that must hold between any two steps, for tests, the simulator and debugging.

Each function raises AssertionError with a message that names the violation. It changes nothing.
"""

from __future__ import annotations

from collections import Counter

from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.groups import Part
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import EvictOrder, MoveOrder, Tier
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import PageState
from kvcluster.core.shard.shard import Shard
from kvcluster.core.tiers import Takes


def check_shard(shard: Shard) -> None:
    """Checks conservation of space, that no two pages overlap, and that every pin and every WRITING page has a
    lease."""
    pool = shard.pool
    pool.check()
    pins: dict[int, int] = {}
    writing: dict[int, int] = {}
    for lease in shard.leases.all():
        for page in lease.pages:
            if page is None:
                continue
            counted = pins if lease.kind is LeaseKind.READ else writing
            counted[page.generation] = counted.get(page.generation, 0) + 1
    end = dict.fromkeys(pool.tiers, 0)
    for page in sorted(pool.everything(), key=lambda page: page.offset):
        assert page.offset >= end[page.tier], f"page {page.generation} lies on another"
        end[page.tier] = page.offset + page.nbytes
        assert page.pins == pins.pop(page.generation, 0), f"page {page.generation} has pins without a lease"
        writers = writing.pop(page.generation, 0)
        assert (page.state is PageState.WRITING) == (writers == 1), f"page {page.generation} and its writers disagree"
        assert page.state is not PageState.FREE
        assert bool(page.sums) == (page.state is not PageState.WRITING), "READY means summed"
    for tier, allocator in pool.allocators.items():
        assert end[tier] <= allocator.capacity_bytes, "a page lies beyond the end of its tier"
    for page in pool.ready():
        assert pool.below_of(page) is not None or not page.decoded, "a decoded page has no twin in a tier below"
        assert page.tier.spec.takes is not Takes.RAW or page.codec is Codec.RAW, "an encoded page in a raw tier"
        assert page.loss >= page.codec.loss, "a page's loss is less than that of its codec"
    assert not pins and not writing, "a lease holds pages that are gone"
    own = shard.own_attempts
    assert all(attempt in shard.leases for attempt in own), "an own attempt of the shard has no lease"
    assert len(set(own)) == len(own), "two operations of the shard share a lease"
    accepted, running = shard.order_progress
    assert all(number <= accepted for number in running), "an order runs that was not accepted"


def check_coordinator(coordinator: Coordinator) -> None:
    """Checks that every record is reachable by its hash, has replicas and can be evicted, and that members and slots
    agree."""
    book = coordinator.state.book
    members = coordinator.state.members.all()
    slots = dict.fromkeys(member.slot for member in members)
    recorded = {(slot, tier): 0 for slot in slots for tier in Tier}
    assert len(slots) == len(members), "two members share a slot"
    assert all(book.alive(slot) for slot in slots), "a member's slot is dead"
    sweeping = coordinator.next_deadline() == 0
    for space in coordinator.state.namespaces:
        space.index.check()
        for record in space.index:
            assert space.index.get(record.hash) is record
            assert record.space == space.id
            assert record.copies.entries, "a record without copies"
            for slot, tier in dict.fromkeys((copy.slot, copy.tier) for copy in record.copies.entries):
                assert sweeping or slot in slots, "a record names a lost shard, and no sweep is due"
                if slot in slots:
                    recorded[slot, tier] += 1
        assert all(space.index.get(block) is not None for block in space.pinned), "a pin of a block that is gone"
    pins = coordinator.state.namespaces.pins
    pins.check()
    for member in members:
        ordered = dict.fromkeys(Tier, 0)
        evict, move = member.orders.of(EvictOrder), member.orders.of(MoveOrder)
        if evict is not None:
            ordered[evict.tier] += len(evict.blocks)
        for leaves in (member.info.above(one.to) for one in (move.moves if move is not None else ())):
            if leaves is not None:
                ordered[leaves] += 1
        assert not len(member.orders) or not coordinator.rebuilding, "a rebuilding coordinator has given an order"
        for tier, cold in member.cold.items():
            cold.check()
            assert len(cold) <= recorded[member.slot, tier], "a queue has records that the index does not have"
            assert recorded[member.slot, tier] <= len(cold) + ordered[tier], "a record that is never evicted"
    _check_charges(coordinator)
    coordinator.replicator.check()
    coordinator.state.tables.check()
    coordinator.state.eraser.check(members)
    for space in coordinator.state.namespaces:
        latest = coordinator.state.tombstones.latest(space.tenant, space.spec)
        assert space.purged == latest, "a namespace's latest purge is not recorded in it"
        for member in members:
            if member.purged < latest:
                still_recorded = any(record.copies.on(member.slot) for record in space.index)
                assert not still_recorded, "a purged block is recorded on a shard that has not applied the purge"


def _check_charges(coordinator: Coordinator) -> None:
    """Checks that each tenant is charged for each page once, where it is on the shard that joined first."""
    stored: dict[tuple[int, Tier], Counter[Tenant]] = {}
    for space in coordinator.state.namespaces:
        for record in space.index:
            keepers: dict[tuple[int, Part], int] = {}  # copies are sorted by slot
            for copy in record.copies.entries:
                if copy.slot == keepers.setdefault((copy.group, copy.part), copy.slot):
                    nbytes = space.page_bytes(copy.group, copy.part, copy.codec)
                    stored.setdefault((copy.slot, copy.tier), Counter())[space.tenant] += nbytes
    for member in coordinator.state.members.all():
        for tier, charged in member.stored.items():
            what: Counter[Tenant] = stored.get((member.slot, tier), Counter())
            assert dict(charged.tenants) == dict(what), "tenants are not charged for what is stored"
