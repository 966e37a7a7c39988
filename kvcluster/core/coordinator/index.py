"""The prefix index: block hash -> which shards hold which parts; and the lookup rule over it.

There is one index per namespace. A record is a slotted object in a dict; it refers to its copies through one shared
reference (replica_sets.py). A lookup writes three integers into each record that it promises: `stamp` (recency), `uses`
(frequency) and `held_until`. It moves nothing: the eviction queue catches up lazily (eviction_queue.py).

The lookup rule: boundary b (the first b blocks) is restorable if every group of the need has the blocks before b that
its reuse rule asks for: all of them, those in the window, or the last. The answer is the longest such b.

The *followers* of a block are the recorded blocks that directly follow it: none, one or many. Most blocks have one,
which is stored as a single reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.coordinator.event_emitter import EventEmitter
from kvcluster.core.coordinator.need_planner import NeedPlanner
from kvcluster.core.coordinator.replica_sets import Replica, ReplicaSet, ReplicaTable
from kvcluster.core.groups import Part, Reuse
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Need, PageEvent, Plan, Run, Tier
from kvcluster.core.miss import Miss
from kvcluster.eviction import USES

Followers = BlockHash | dict[BlockHash, None] | None


def with_follower(followers: Followers, block: BlockHash) -> Followers:
    """Returns these followers with one more."""
    if followers is None:
        return block
    if isinstance(followers, dict):
        followers[block] = None
        return followers
    return {followers: None, block: None}


def without_follower(followers: Followers, block: BlockHash) -> Followers:
    """Returns these followers without one of them."""
    if isinstance(followers, dict):
        del followers[block]
        return followers if len(followers) > 1 else next(iter(followers))
    assert followers == block, "a block that followed was not noted"
    return None


def each_follower(followers: Followers) -> Iterable[BlockHash]:
    """Returns the followers, in the order in which they were added."""
    if isinstance(followers, dict):
        return followers
    return () if followers is None else (followers,)


COLD = 1 << 63
"""What is taken from the stamp of an orphan (report_handler.py): more than any stamp."""


class BlockRecord:
    """What the coordinator knows about a block. `stamp` and `held_until` are nanoseconds of its own clock; `uses`
    counts the loads that were promised the block, up to USES, and is forgotten with the record. `followers` are the
    blocks of this index that directly follow it. The stamp of an orphan is negative (report_handler.py)."""

    __slots__ = ("copies", "depth", "followers", "hash", "held_until", "parent", "space", "stamp", "uses")

    def __init__(
        self, space: NamespaceId, block: BlockHash, parent: BlockHash, depth: int, stamp: int, copies: ReplicaSet
    ) -> None:
        self.space = space
        self.hash = block
        self.parent = parent
        self.depth = depth
        self.stamp = stamp
        self.uses = 0
        self.held_until = 0
        self.copies = copies
        self.followers: Followers = None

    @property
    def tiers(self) -> int:
        """A bit mask of the tiers that hold the block."""
        return self.copies.tiers


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest restorable boundary, plans for the blocks before it, and what stopped the walk.

    `miss` is the reason that the record at the boundary gives; None if there is no record (the index does not know the
    reason) or no further block.
    """

    blocks: int
    runs: tuple[Run, ...]
    miss: Miss | None


class PrefixIndex:
    """The blocks of one namespace. Reports changes of their tiers to `emitter`."""

    def __init__(
        self,
        space: NamespaceId,
        reuses: Sequence[Reuse],
        block_tokens: int,
        book: ReplicaTable,
        emitter: EventEmitter | None = None,
        *,
        counts_uses: bool = False,
        orphans: deque[tuple[NamespaceId, BlockHash]] | None = None,
    ) -> None:
        """`counts_uses`: whether `touch` counts how often a block is used, for eviction policies that look at it.
        `orphans` gets the blocks that follow one which was removed or is recorded again."""
        self._counts_uses = counts_uses
        self._orphans = orphans
        self._awaiting: dict[BlockHash, Followers] = {}  # by the block that is missing: those that follow it
        self._space = space
        self._reuses = tuple(reuses)
        self._block_tokens = block_tokens
        self._book = book
        self._emitter = emitter
        self._records: dict[BlockHash, BlockRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self._records.values())

    def standing(self) -> Iterator[BlockRecord]:
        """Iterates over the present records; skips those that are removed before their turn."""
        return (record for record in list(self._records.values()) if self._records.get(record.hash) is record)

    def get(self, block: BlockHash) -> BlockRecord | None:
        return self._records.get(block)

    def find(self, hashes: Sequence[BlockHash], need: Need, *, youngest: bool = False) -> PrefixMatch:
        """Returns the longest boundary of this chain that `need` can be restored to. Changes nothing.

        `youngest` selects among equal replicas (ReplicaTable.serve).
        """
        needed = [group for group, part in enumerate(need.parts) if part is not None]
        assert needed, "a need that names no group would be met by blocks that no shard holds"
        if all(self._reuses[group].kind == "prefix" for group in needed):
            return self._find_prefix(hashes, NeedPlanner(self._book, need, youngest=youngest))
        return self._find_mixed(hashes, NeedPlanner(self._book, need, youngest=youngest), needed, len(need.parts))

    def touch(self, hashes: Sequence[BlockHash], now: int, held_until: int) -> None:
        """Records that a load is promised these blocks: stamps them with `now`, counts one more use and holds them
        until `held_until`, or as long as another load holds them."""
        if not self._counts_uses:
            self.renew(hashes, now, held_until)
            return
        get = self._records.get
        for block in hashes:
            record = get(block)
            if record is not None:
                record.stamp = now
                if held_until > record.held_until:
                    record.held_until = held_until
                if record.uses < USES:
                    record.uses += 1

    def renew(self, hashes: Sequence[BlockHash], now: int, held_until: int) -> None:
        """Renews the stamp and the hold of blocks that a running load was promised. It counts no further use."""
        get = self._records.get
        for block in hashes:
            record = get(block)
            if record is not None:
                record.stamp = now
                if held_until > record.held_until:
                    record.held_until = held_until

    def release(self, hashes: Sequence[BlockHash], held_until: int) -> None:
        """Ends the hold that was given until exactly `held_until`; the later hold of another load stays."""
        get = self._records.get
        for block in hashes:
            record = get(block)
            if record is not None and record.held_until == held_until:
                record.held_until = 0

    def touch_ancestors(self, block: BlockHash, now: int, older_than: int) -> None:
        """Stamps `block` and its ancestors, because a sequence grows after it; otherwise roots would be evicted before
        leaves.

        The chain is walked again only if its end was stamped before `older_than`, so that a decoding sequence pays for
        its length now and then and not for each block. At most limits.ANCESTORS records are stamped.
        """
        record = self._records.get(block)
        if record is None or record.stamp >= older_than:
            return
        for _ in range(limits.ANCESTORS):
            if record is None or record.stamp >= now:
                break
            record.stamp = now
            record = self._records.get(record.parent)

    def add(self, event: PageEvent, slot: int, now: int) -> BlockRecord | None:
        """Records a READY page. Returns the record if that tier of the slot holds the block for the first time."""
        key = event.key
        copy = Replica(slot, key.group, key.part, event.tier, event.loss, event.codec)
        record = self._records.get(key.hash)
        if record is None:
            parent = self._records.get(event.parent)
            # The bytes object of the parent is shared, so that a chain costs one hash per block and not two.
            parent_hash = parent.hash if parent is not None else event.parent
            copies = self._book.add(self._book.none, copy)
            record = BlockRecord(self._space, key.hash, parent_hash, event.depth, now, copies)
            self._records[key.hash] = record
            record.followers = self._awaiting.pop(key.hash, None)
            if record.depth and parent is not None:
                parent.followers = with_follower(parent.followers, record.hash)
            elif record.depth:
                self._awaiting[record.parent] = with_follower(self._awaiting.get(record.parent), record.hash)
                some = next((self._records[block] for block in each_follower(record.followers)), None)
                if some is not None and some.stamp < 0 <= record.stamp:
                    record.stamp -= COLD  # the middle of a chain that is known to be broken
            self._unsettled(record.followers)
            self._emit_change(record, 0)
            return record
        before = record.copies
        record.copies = self._book.add(before, copy)
        self._emit_change(record, before.tiers)
        return None if before.on(slot, event.tier) else record

    def remove(self, block: BlockHash, slot: int, group: int, part: Part, tier: Tier) -> bool:
        """Forgets a page. Returns True if its block is removed with it."""
        record = self._records.get(block)
        if record is None:
            return False
        before = record.copies.tiers
        record.copies = self._book.remove(record.copies, slot, group, part, tier)
        self._emit_change(record, before)
        return self._drop_if_bare(record)

    def sweep(self, record: BlockRecord) -> bool:
        """Removes copies on dead shards from a record. Returns True if its block is removed with them."""
        before = record.copies.tiers
        record.copies = self._book.remaining(record.copies)
        self._emit_change(record, before)
        return self._drop_if_bare(record)

    def clear(self) -> dict[BlockHash, BlockRecord]:
        """Forgets all blocks and returns their records."""
        records, self._records, self._awaiting = self._records, {}, {}
        if self._emitter is not None:
            self._emitter.cleared(self._space)
        return records

    def _emit_change(self, record: BlockRecord, before: int) -> None:
        if self._emitter is not None and record.copies.tiers != before:
            self._emitter.changed(self._space, record, before)

    def _drop_if_bare(self, record: BlockRecord) -> bool:
        if record.copies.entries:
            return False
        del self._records[record.hash]
        parent = self._records.get(record.parent)
        if record.depth and parent is not None:
            parent.followers = without_follower(parent.followers, record.hash)
        elif record.depth:
            left = without_follower(self._awaiting.pop(record.parent), record.hash)
            if left is not None:
                self._awaiting[record.parent] = left
        if record.followers is not None:
            self._awaiting[record.hash] = record.followers
            self._unsettled(record.followers)
        return True

    def _unsettled(self, followers: Followers) -> None:
        """Queues these blocks for Orphans (report_handler.py): the block before them was removed, or is recorded
        again."""
        if self._orphans is not None:
            self._orphans.extend((self._space, block) for block in each_follower(followers))

    def check(self) -> None:
        """Raises AssertionError unless the followers of every block are those that name it as their parent."""
        found: dict[BlockHash, dict[BlockHash, None]] = {}
        for record in self:
            if record.depth:
                found.setdefault(record.parent, {})[record.hash] = None
        noted = {record.hash: record.followers for record in self if record.followers is not None} | self._awaiting
        assert {block: dict.fromkeys(each_follower(of)) for block, of in noted.items()} == found, "followers are wrong"
        assert not any(block in self._records for block in self._awaiting), "a missing block that is recorded"

    def _find_prefix(self, hashes: Sequence[BlockHash], asking: NeedPlanner) -> PrefixMatch:
        get = self._records.get
        runs: list[Run] = []
        last: ReplicaSet | None = None
        plan: Plan = ()
        start = 0
        stopped: Miss | None = None
        at = -1
        for at, block in enumerate(hashes):
            record = get(block)
            if record is None:
                break
            if record.copies is not last:
                served = asking.serve(record.copies)
                if not served.complete:
                    stopped = served.miss
                    break
                if served.plan != plan:
                    if at > start:
                        runs.append(Run(at - start, plan))
                    start, plan = at, served.plan
                last = record.copies
        else:
            at += 1
        if at > start:
            runs.append(Run(at - start, plan))
        return PrefixMatch(at, tuple(runs), stopped)

    def _find_mixed(
        self, hashes: Sequence[BlockHash], asking: NeedPlanner, needed: list[int], groups: int
    ) -> PrefixMatch:
        """Like `_find_prefix`, for groups that need only some of the blocks: a boundary may lie beyond a gap."""
        tail = dict.fromkeys(needed, 0)  # length of each group's run of consecutive blocks that ends here
        plans: list[Plan] = []
        misses: list[Miss | None] = []
        nothing: Plan = (None,) * groups
        best = 0
        for at, block in enumerate(hashes):
            record = self._records.get(block)
            served = asking.serve(record.copies) if record is not None else None
            plan = served.plan if served is not None else nothing
            plans.append(plan)
            misses.append(served.miss if served is not None else None)
            restorable = True
            for group in needed:
                tail[group] = tail[group] + 1 if plan[group] is not None else 0
                if tail[group] < self._reuses[group].blocks_needed(at + 1, self._block_tokens):
                    restorable = False
            if restorable:
                best = at + 1
            elif any(plan[group] is None and self._reuses[group].kind == "prefix" for group in needed):
                break  # a prefix group cannot be restored beyond a gap
        return PrefixMatch(best, _runs(plans[:best]), misses[best] if best < len(misses) else None)


def _runs(plans: Sequence[Plan]) -> tuple[Run, ...]:
    runs: list[Run] = []
    start = 0
    for at in range(1, len(plans) + 1):
        if at == len(plans) or plans[at] != plans[start]:
            runs.append(Run(at - start, plans[start]))
            start = at
    return tuple(runs)
