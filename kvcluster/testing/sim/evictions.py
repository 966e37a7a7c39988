"""Judges an eviction order when a coordinator gives it: which blocks it may name, and in which order."""

from __future__ import annotations

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import BlockHash
from kvcluster.core.members import Member
from kvcluster.core.messages import EvictOrder, MoveOrder
from kvcluster.core.namespaces import CoordinatorNamespace
from kvcluster.testing.sim.violation import require


def judge_order(coordinator: Coordinator, member: Member, order: EvictOrder, now: int) -> None:
    """Raises Violation if an order given at `now` names a held or pinned block, or a block before its tail."""
    for space in coordinator.directory:
        ordered = {block: None for space_id, block in order.blocks if space_id == space.id}
        for block in ordered:
            require(not _promised(space, block, now), f"an order takes {block.hex()[:6]}, which is held or pinned")
        if ordered:
            _tails_first(space, member, order, ordered, now)


def _tails_first(
    space: CoordinatorNamespace, member: Member, order: EvictOrder, ordered: dict[BlockHash, None], now: int
) -> None:
    """A block is not evicted before the blocks after it in the same tier of that shard."""
    moves = member.orders.of(MoveOrder)
    moving = {move.hash for move in moves.moves} if moves is not None else ()
    for record in space.index:
        if record.parent not in ordered or record.hash in ordered or record.hash in moving:
            continue
        parent = space.index.get(record.parent)
        if parent is not None and record.copies.on(member.slot, order.tier):
            require(_promised(space, record.hash, now), f"{record.parent.hex()[:6]} is to be evicted before its tail")


def _promised(space: CoordinatorNamespace, block: BlockHash, now: int) -> bool:
    record = space.index.get(block)
    return record is not None and (record.held_until > now or space.pinned.get(block, 0) > now)
