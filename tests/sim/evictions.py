"""Judges an eviction order when a coordinator gives it: which blocks it may name, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import EvictOrder, MoveOrder, Tier
from kvcluster.core.quotas import Quotas
from tests.sim.violation import require


def judge_order(
    coordinator: Coordinator,
    member: Member,
    order: EvictOrder,
    now: int,
    pressing: Mapping[Tenant, int],
    floors: float,
    quotas: Quotas,
) -> None:
    """Raises Violation if an order given at `now` names a block of an open sequence, a pinned one, a held one for no
    other tenant that waits below its floor, or a block before its tail, or spares one of a superseded version of a
    run's weights for it. A private block that no sequence claims may always be erased. `pressing`, `floors` and
    `quotas` are as in judge_floors."""
    held = held_bytes(coordinator, member, order.tier)
    floor = _floors(coordinator, member, order, held, {**held, **pressing}, floors, quotas)
    needy = [tenant for tenant in pressing if held.get(tenant, 0) < floor[tenant]]
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
    _superseded_first(coordinator, member, order, now)


def _superseded_first(coordinator: Coordinator, member: Member, order: EvictOrder, now: int) -> None:
    """No block is taken of a version in use while one of a superseded version of the same tenant, which nothing spares
    and nothing follows, stays in the same tier of that shard."""
    state = coordinator.state
    ordered = dict.fromkeys(order.blocks)
    stays: dict[Tenant, BlockHash] = {}
    for space in state.namespaces:
        if not state.engines.versions.superseded(space.tenant, space.spec):
            continue
        leads = {record.parent: None for record in space.index}
        for record in space.index:
            spared = _promised(space, record.hash, now) or state.tables.claims(space.id, record.hash)
            alone = record.hash not in leads and len(record.copies.places) == 1
            if alone and not spared and (space.id, record.hash) not in ordered and record in member.cold[order.tier]:
                stays[space.tenant] = record.hash
    for space_id, block in order.blocks:
        space_of = state.namespaces.known(space_id)
        taken = state.namespaces.record(space_id, block)
        if taken is None or space_of is None or space_of.spec.private or taken.stamp < 0:
            continue
        if len(taken.copies.places) > 1 or state.engines.versions.superseded(space_of.tenant, space_of.spec):
            continue
        spares = stays.get(space_of.tenant)
        what = spares.hex()[:6] if spares is not None else ""
        require(spares is None, f"{block.hex()[:6]} is to be evicted before {what} of superseded weights")


def judge_floors(
    coordinator: Coordinator,
    member: Member,
    order: EvictOrder,
    pressing: Mapping[Tenant, int],
    floors: float,
    quotas: Quotas,
    excess: Callable[[Tenant], int],
) -> None:
    """Raises Violation if an order takes what a tenant has below its floor, beyond what its own reservations lack, and
    its `excess` over its limit. `floors`: the share of the tier that all floors have together, but for those of
    `quotas`.

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
                nbytes = charged_bytes(space, record, member, order.tier)
                taken[space.tenant] = taken.get(space.tenant, 0) + nbytes
                largest = max(largest, nbytes)
    held = held_bytes(coordinator, member, order.tier)
    if len({*held, *pressing}) < 2:
        return
    floor = _floors(coordinator, member, order, held, held, floors, quotas)
    for tenant, nbytes in taken.items():
        if tenant not in held:
            continue  # replicas, which are charged to no tenant
        left = held[tenant] - nbytes
        kept = min(held[tenant], floor[tenant]) - pressing.get(tenant, 0) - largest - excess(tenant)
        require(left >= kept, f"an order takes blocks of {tenant} below its floor, for another tenant")


def held_bytes(coordinator: Coordinator, member: Member, tier: Tier) -> dict[Tenant, int]:
    """Returns what each tenant has in that tier of the shard, of those that have anything."""
    held: dict[Tenant, int] = {}
    for space in coordinator.state.namespaces:
        for record in space.index:
            held[space.tenant] = held.get(space.tenant, 0) + charged_bytes(space, record, member, tier)
    return {tenant: nbytes for tenant, nbytes in held.items() if nbytes}


def charged_bytes(space: CoordinatorNamespace, record: BlockRecord, member: Member, tier: Tier) -> int:
    return sum(
        space.page_bytes(copy.group, copy.part, copy.codec)
        for copy in record.copies.of(member.slot)
        if copy.tier is tier
        and not any(
            other.slot < copy.slot and (other.group, other.part) == (copy.group, copy.part)
            for other in record.copies.entries
        )
    )


def _floors(
    coordinator: Coordinator,
    member: Member,
    order: EvictOrder,
    held: Mapping[Tenant, int],
    tenants: Iterable[Tenant],
    share: float,
    quotas: Quotas,
) -> dict[Tenant, int]:
    """Returns the floor of each of these tenants there: the part of its own floor that this shard has of the tier, and
    by weight a part of what those leave of the share of all."""
    use, tenants = member.info.use(order.tier), list(dict.fromkeys(tenants))
    full_bytes = use.capacity_bytes - use.free_bytes - use.writing_bytes
    part = min(1.0, sum(held.values()) / full_bytes) if full_bytes > 0 else 1.0
    everywhere = sum(one.info.use(order.tier).capacity_bytes for one in coordinator.state.members.all())
    own = {tenant: quotas.of(tenant).of(order.tier) for tenant in tenants}
    floors = {tenant: (quota.floor or 0) * use.capacity_bytes // max(1, everywhere) for tenant, quota in own.items()}
    most = int(0.8 * use.capacity_bytes * part)
    if (named := sum(floors.values())) > most:
        floors = {tenant: floor * most // named for tenant, floor in floors.items()}
    left = max(0, int(share * use.capacity_bytes * part) - sum(floors.values()))
    weights = {
        tenant: quota.weight if quota.weight is not None else (quota.floor is None) * 1.0
        for tenant, quota in own.items()
    }
    for tenant, weight in weights.items():
        floors[tenant] += int(left * weight / sum(weights.values())) if weight else 0
    return floors


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
