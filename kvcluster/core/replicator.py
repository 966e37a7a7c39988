"""Who is to have another copy of what: turns heat, pins, losses and drains into pull orders.

A *wish* is a block that is to lie on so many shards that stay. Hot runs, pinned blocks and what a lost shard has left
with fewer copies than it had become wishes; and of a draining shard every block that it alone holds, the last used
first. A shard that reports, has room beyond its watermark and no pull under way is given the next wishes that it can
fulfil: pages of one namespace from one source. What came is what its stream says; what did not is wished for again, a
few times. Nothing is evicted for a copy, and no copy is moved: a source loses its own when it is told to, or goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.copies import CopyBook
from kvcluster.core.directory import Directory, Space
from kvcluster.core.heat import Heat
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member, Membership
from kvcluster.core.messages import NewPage, PageKey, PullOrder, ShardAddress

MS = 1_000_000
TRIES = 3
"""How often a wish goes into an order: a source that rots or a target that fills up is no reason to go on for ever."""

INSPECTED = 2_048
"""Wishes looked at for one order: most are for somebody else, or fulfilled."""

Wished = tuple[NamespaceId, BlockHash]


class _Wish:
    __slots__ = ("copies", "tries")

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.tries = TRIES


class Replicator:
    """Keeps the wishes and makes the orders."""

    def __init__(self, config: CoordinatorConfig, directory: Directory, book: CopyBook, members: Membership) -> None:
        self._low = config.low_free
        self._hot_replicas = config.hot_replicas
        self._heat = Heat(loads=config.hot_loads, window_ns=config.hot_window_ms * MS, run_blocks=config.run_blocks)
        self._directory = directory
        self._book = book
        self._members = members
        self._wishes: dict[Wished, _Wish] = {}
        self._under_way: dict[int, dict[Wished, _Wish]] = {}  # by the slot of the shard that pulls
        self._draining: dict[int, dict[Wished, _Wish]] = {}  # by the slot of the shard that goes

    def loaded(self, space: Space, hashes: Sequence[BlockHash], now: int) -> None:
        """A load was promised these blocks, a chain from its first block on."""
        if self._hot_replicas > 1 and len(self._members) > 1:
            for run in self._heat.loaded(hashes, now):
                for block in run:
                    self.want(space, block, self._hot_replicas)

    def want(self, space: Space, block: BlockHash, copies: int) -> None:
        """This block is to lie on so many shards, as far as there are as many with room."""
        wished = (space.id, block)
        known = self._wishes.get(wished)
        if known is not None:
            known.copies = max(known.copies, copies)
        elif len(self._wishes) < limits.WISHES:
            self._wishes[wished] = _Wish(copies)

    def drain(self, member: Member, until: int) -> None:
        """This shard is to go. What it holds now and alone is to go elsewhere; so is what is still written to it."""
        member.drain_until = until
        self._draining.setdefault(member.slot, {})
        records = [record for space in self._directory for record in space.index if record.copies.on(member.slot)]
        # The last used first, and chains from their roots on: what does not fit any more is what would be missed least.
        records.sort(key=lambda record: (-record.stamp, record.depth))
        for record in records:
            self.committed(record, member)

    def committed(self, record: BlockRecord, member: Member) -> None:
        """This block is on that shard now. On one that is to go, it is to have a place elsewhere."""
        wishes = self._draining.get(member.slot)
        if wishes is not None:
            wishes.setdefault((record.space, record.hash), _Wish(1))

    def order(self, target: Member, now: int) -> None:
        """Gives a shard that has just reported its next pull, if there is one for it."""
        assert target.pull is None, "one pull at a time"
        room = self._room(target)
        if not target.takes or room <= 0:
            return
        for wishes in (*self._draining.values(), self._wishes):
            taken = self._pick(target, wishes, min(room, limits.PULL_BYTES))
            if taken is not None:
                self._under_way[target.slot] = taken
                return

    def settle(self, member: Member) -> None:
        """Its pull has ended, or the shard has. What is still wished for goes on the list again."""
        member.pull = None
        for wished, wish in self._under_way.pop(member.slot, {}).items():
            record = self._record(wished)
            if record is None or not wish.tries:
                continue
            going = [slot for slot in self._draining if record.copies.on(slot)]
            (self._draining[going[0]] if going else self._wishes).setdefault(wished, wish)
        if not self._book.alive(member.slot):
            self._draining.pop(member.slot, None)

    def drained(self, member: Member) -> bool:
        """Has all that this shard alone holds, and anybody has room for, gone elsewhere?"""
        wishes = self._draining.get(member.slot, {})
        for wished in list(islice(wishes, INSPECTED)):
            if not self._lacks(wished, wishes[wished]):
                del wishes[wished]
        if not wishes:
            return True
        others = [other for other in self._members.all() if not other.draining]
        if any(
            not other.cursor.current or (other.pull is not None and other.pull.source.shard == member.info.shard)
            for other in others
        ):
            return False  # what they will have room for is not known yet
        smallest = min((self._page_bytes(wished) for wished in islice(wishes, INSPECTED)), default=0)
        return not any(other.takes and self._room(other) >= smallest for other in others)

    # --------------------------------------------------------------------------------------- one order

    def _pick(self, target: Member, wishes: dict[Wished, _Wish], room: int) -> dict[Wished, _Wish] | None:
        """Wishes that this shard can fulfil from one source, taken off their list; they are in its order then."""
        pages: list[NewPage] = []
        taken: dict[Wished, _Wish] = {}
        source: ShardAddress | None = None
        space: Space | None = None
        for wished in list(islice(wishes, INSPECTED)):
            wish, record = wishes[wished], self._record(wished)
            if record is None or not self._lacks(wished, wish):
                del wishes[wished]
                continue
            if space is not None and record.space != space.id:
                continue
            found = self._missing(record, wish.copies, target)
            if found is None or (source is not None and found[0] != source):
                continue
            of_space = self._directory.known(record.space)
            assert of_space is not None
            nbytes = sum(of_space.page_bytes(page.key.group, page.key.part) for page in found[1])
            if nbytes > room or len(pages) + len(found[1]) > limits.PULL_PAGES:
                break
            room -= nbytes
            source, space = found[0], of_space
            pages += found[1]
            wish.tries -= 1
            taken[wished] = wishes.pop(wished)
        if source is None or space is None:
            return None
        target.pulls += 1
        target.pull = PullOrder(target.pulls, source, space.tenant, space.spec, tuple(pages))
        return taken

    def _missing(self, record: BlockRecord, copies: int, target: Member) -> tuple[ShardAddress, list[NewPage]] | None:
        """The pages of this block that `target` could bring nearer to so many copies, and one shard that has them."""
        source: int | None = None
        pages: list[NewPage] = []
        staying = self._staying(record)
        for copy in record.copies.entries:
            if not self._book.alive(copy.slot) or source not in (None, copy.slot):
                continue
            slots = staying.get((copy.group, copy.part), [])
            if copy.slot == target.slot or target.slot in slots or len(slots) >= copies:
                continue
            source = copy.slot
            key = PageKey(record.hash, copy.group, copy.part)
            pages.append(NewPage(key, record.parent, record.depth, copy.loss))
        return None if source is None else (self._book.address(source), pages)

    def _lacks(self, wished: Wished, wish: _Wish) -> bool:
        """Has any page of it fewer copies than wished for, on shards that stay, and could it have more?"""
        record = self._record(wished)
        if record is None:
            return False
        staying = self._staying(record)
        copies = min(wish.copies, sum(not member.draining for member in self._members.all()))
        return any(len(staying.get((copy.group, copy.part), ())) < copies for copy in record.copies.entries)

    def _staying(self, record: BlockRecord) -> dict[tuple[int, object], list[int]]:
        """Where each page of it lies, but for shards that are gone or about to go."""
        staying: dict[tuple[int, object], list[int]] = {}
        for copy in record.copies.entries:
            if self._book.alive(copy.slot) and copy.slot not in self._draining:
                staying.setdefault((copy.group, copy.part), []).append(copy.slot)
        return staying

    def _room(self, member: Member) -> int:
        """Bytes that may be filled without a need to evict for it."""
        return member.info.free_bytes - int(self._low * member.info.capacity_bytes)

    def _record(self, wished: Wished) -> BlockRecord | None:
        space = self._directory.known(wished[0])
        return space.index.get(wished[1]) if space is not None else None

    def _page_bytes(self, wished: Wished) -> int:
        """Bytes of the block's smallest page."""
        record, space = self._record(wished), self._directory.known(wished[0])
        assert record is not None and space is not None
        return min(space.page_bytes(copy.group, copy.part) for copy in record.copies.entries)
