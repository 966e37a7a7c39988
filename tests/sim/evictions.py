"""Judges an eviction order when a coordinator gives it: which blocks it may name, and in which order."""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import EvictOrder, MoveOrder, Tier
from tests.sim.violation import require


def judge_order(
    coordinator: Coordinator,
    member: Member,
    order: EvictOrder,
    now: int,
    pressing: Mapping[Tenant, int],
    floors: float,
) -> None:
    """Raises Violation if an order given at `now` names a block of an open sequence, a pinned one, a held one for no
    other tenant that waits below its floor, or a block before its tail. A private block that no sequence claims may
    always be erased. `pressing` and `floors` are as in judge_floors."""
    held = _held_bytes(coordinator, member, order)
    floor = _floor(member, order, held, pressing, floors)
    needy = [tenant for tenant in pressing if held.get(tenant, 0) < floor]
    for space in coordinator.state.namespaces:
        ordered = {block: None for space_id, block in order.blocks if space_id == space.id}
        claimed = [block for block in ordered if coordinator.state.tables.claims(space.id, block)]
        require(not claimed, f"an order takes {' '.join(block.hex()[:6] for block in claimed)} of open sequences")
        if space.spec.private:
            continue
        for block in ordered:
            require(space.pinned.until(block) <= now, f"an order takes {block.hex()[:6]}, which is pinned")
            yields = any(tenant != space.tenant for tenant in needy) and space.tenant not in needy
            spares = _promised(space, block, now) and not yields
            require(not spares, f"an order takes {block.hex()[:6]}, which is held, for no tenant below its floor")
        if ordered:
            _tails_first(coordinator, space, member, order, ordered, now)


def judge_floors(
    coordinator: Coordinator, member: Member, order: EvictOrder, pressing: Mapping[Tenant, int], floors: float
) -> None:
    """Raises Violation if an order takes what a tenant has below its floor, beyond what its own reservations lack.
    `floors`: the share of the tier that all floors have together.

    A page counts where it was first of the shards that have it. The last block that an order takes of a tenant may be
    larger than what was left to take.
    """
    taken: dict[Tenant, int] = {}
    largest = 0
    for space in coordinator.state.namespaces:
        ordered = {block: None for space_id, block in order.blocks if space_id == space.id}
        if ordered and space.spec.private:
            return  # what no sequence claims any more is erased, whatever is left
        for record in space.index:
            if record.hash in ordered:
                nbytes = _charged_bytes(space, record, member, order.tier)
                taken[space.tenant] = taken.get(space.tenant, 0) + nbytes
                largest = max(largest, nbytes)
    held = _held_bytes(coordinator, member, order)
    if len({*held, *pressing}) < 2:
        return
    floor = _floor(member, order, held, {}, floors)
    for tenant, nbytes in taken.items():
        left = held[tenant] - nbytes
        kept = min(held[tenant], floor) - pressing.get(tenant, 0) - largest
        require(left >= kept, f"an order takes blocks of {tenant} below its floor, for another tenant")


def _held_bytes(coordinator: Coordinator, member: Member, order: EvictOrder) -> dict[Tenant, int]:
    """Returns what each tenant has in that tier of the shard, of those that have anything."""
    held: dict[Tenant, int] = {}
    for space in coordinator.state.namespaces:
        for record in space.index:
            held[space.tenant] = held.get(space.tenant, 0) + _charged_bytes(space, record, member, order.tier)
    return {tenant: nbytes for tenant, nbytes in held.items() if nbytes}


def _charged_bytes(space: CoordinatorNamespace, record: BlockRecord, member: Member, tier: Tier) -> int:
    return sum(
        space.page_bytes(copy.group, copy.part, copy.codec)
        for copy in record.copies.of(member.slot)
        if copy.tier is tier
        and not any(
            other.slot < copy.slot and (other.group, other.part) == (copy.group, copy.part)
            for other in record.copies.entries
        )
    )


def _floor(
    member: Member, order: EvictOrder, held: Mapping[Tenant, int], more: Mapping[Tenant, int], floors: float
) -> int:
    """Returns the floor of each tenant that has anything there, or is one of those `more`."""
    use = member.info.use(order.tier)
    full_bytes = use.capacity_bytes - use.free_bytes - use.writing_bytes
    part = min(1.0, sum(held.values()) / full_bytes) if full_bytes > 0 else 1.0
    return int(floors * use.capacity_bytes * part) // max(1, len({*held, *more}))


def _tails_first(
    coordinator: Coordinator,
    space: CoordinatorNamespace,
    member: Member,
    order: EvictOrder,
    ordered: dict[BlockHash, None],
    now: int,
) -> None:
    """A block is not evicted before the blocks after it in the same tier of that shard."""
    moves = member.orders.of(MoveOrder)
    moving = {move.hash for move in moves.moves} if moves is not None else ()
    for record in space.index:
        if record.parent not in ordered or record.hash in ordered or record.hash in moving:
            continue
        parent = space.index.get(record.parent)
        if parent is not None and record.copies.on(member.slot, order.tier):
            spared = _promised(space, record.hash, now) or coordinator.state.tables.claims(space.id, record.hash) > 0
            require(spared, f"{record.parent.hex()[:6]} is to be evicted before its tail")


def _promised(space: CoordinatorNamespace, block: BlockHash, now: int) -> bool:
    record = space.index.get(block)
    return record is not None and (record.held_until > now or space.pinned.until(block) > now)
