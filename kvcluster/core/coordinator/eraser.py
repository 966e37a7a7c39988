"""Erasure: orders the eviction of private blocks that no open sequence claims, before any other victim and without
pressure.

No lookup finds a private block, so one that no table names (block_tables.py) can never be used again. A block whose
last claim ends is erased at once, in every tier of every shard that holds it. A block that is recorded without a claim
gets a grace first: it was committed before its worker sent the table, or after the worker closed it; or the coordinator
has restarted or missed a message, and the worker has not sent its tables again. The grace counts from the first record,
from the end of the rebuilding, or from the release of the tables; while rebuilding nothing is erased. A block that is
claimed in the meantime is left alone, and a copy that appears later (a move or a pull was under way) is recorded again
and gets a grace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvcluster.core import limits
from kvcluster.core.coordinator.block_tables import BlockTables, ClaimedName
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.messages import EvictOrder, Tier


class Eraser:
    """Knows the private blocks without a claim, and gives the orders to erase them."""

    def __init__(self, grace_ns: int, namespaces: NamespaceTable, book: ReplicaTable, tables: BlockTables) -> None:
        self._grace = grace_ns
        self._book = book
        self._namespaces = namespaces
        self._tables = tables
        # When each block was first recorded without a claim, in order of time. These times, and `_since`, leave out the
        # time for which this process was stalled (`_late`), since claims could not arrive.
        self._waiting: dict[ClaimedName, int] = {}
        self._since: int | None = None  # the end of the rebuilding
        self._late = 0
        self._pending: dict[int, dict[ClaimedName, None]] = {}  # by slot: blocks to erase there

    @property
    def next_due(self) -> int | None:
        """Returns the time when the next grace ends; None if none is running."""
        first = next(iter(self._waiting.values()), None)
        if first is None or self._since is None:
            return None
        return max(first, self._since) + self._grace + self._late

    def serve(self, now: int) -> None:
        """Records the end of the rebuilding."""
        self._since = now - self._late

    def extend(self, late_ns: int) -> None:
        """Extends every grace by the time for which this process was stalled."""
        self._late += late_ns

    def recorded(self, name: ClaimedName, now: int) -> None:
        """Starts the grace of a private block that a shard has reported, or whose holder is to send its tables again,
        unless it is claimed or has one already."""
        if not self._tables.claims(*name):
            self._waiting.setdefault(name, now - self._late)

    def in_grace(self, name: ClaimedName) -> bool:
        """Whether a block without a claim is kept for its worker to claim it."""
        return name in self._waiting

    def claimed(self, name: ClaimedName) -> None:
        """Ends the grace of a block that a table names now."""
        self._waiting.pop(name, None)

    def unclaimed(self, name: ClaimedName) -> None:
        """Has a private block erased wherever it is recorded."""
        self._waiting.pop(name, None)
        record = self._namespaces.record(*name)
        for slot in record.copies.slots if record is not None else ():
            if self._book.alive(slot):
                self._pending.setdefault(slot, {})[name] = None

    def end_graces(self, now: int) -> None:
        """Has some of the blocks erased whose grace has ended."""
        for _ in range(limits.GRACES_PER_STEP):
            due = self.next_due
            if due is None or due > now:
                return
            name = next(iter(self._waiting))
            if self._tables.claims(*name):
                del self._waiting[name]
            else:
                self.unclaimed(name)

    def order(self, member: Member) -> None:
        """Gives this shard, which has no eviction order, the next one to erase blocks of one of its tiers, if there are
        any."""
        pending = self._pending.get(member.slot, {})
        tier: Tier | None = None
        blocks: list[ClaimedName] = []
        for name in list(islice(pending, limits.EVICTIONS_PER_ORDER)):
            record = None if self._tables.claims(*name) else self._namespaces.record(*name)
            tiers = [one for one in Tier if record.copies.on(member.slot, one)] if record is not None else []
            if tiers and tier is None:
                tier = tiers[0]
            if record is not None and tier in tiers:
                assert tier is not None
                blocks.append(name)
                member.cold[tier].remove(record)
                tiers.remove(tier)
            if not tiers:
                del pending[name]
        if not pending:
            self._pending.pop(member.slot, None)
        if blocks and tier is not None:
            erased, of = tuple(blocks), tier
            member.orders.give(lambda number: EvictOrder(number, erased, of))

    def settle(self, order: EvictOrder, now: int) -> None:
        """Handles the end of an eviction order, or of its shard: a private block that is still recorded gets another
        grace."""
        for name in order.blocks:
            space = self._namespaces.known(name[0])
            if space is not None and space.spec.private and space.index.get(name[1]) is not None:
                self.recorded(name, now)

    def forget(self, member: Member) -> None:
        """Forgets what a removed shard was to erase."""
        self._pending.pop(member.slot, None)

    def check(self, members: Sequence[Member]) -> None:
        """Checks that each private block on a shard is claimed, has a grace, or is to be erased there. Raises
        AssertionError."""
        slots = {member.slot: member.orders.of(EvictOrder) for member in members}
        assert all(slot in slots for slot in self._pending), "pages are to be erased on a shard that is gone"
        for space in self._namespaces:
            for record in space.index if space.spec.private else ():
                name = record.space, record.hash
                if name in self._waiting or self._tables.claims(*name):
                    continue
                for slot in record.copies.slots:
                    order = slots.get(slot)
                    ordered = order is not None and name in order.blocks
                    due = ordered or slot not in slots or name in self._pending.get(slot, {})
                    assert due, "a private page that nothing claims and nothing erases"
