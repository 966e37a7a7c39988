"""Who is to have another copy of what: turns heat, pins, losses and drains into pull orders.

A *wish* is a block that is to lie on so many shards that stay. Hot runs, pinned blocks and what a lost shard has left
with fewer copies than it had become wishes; and of a draining shard every block that it alone holds, the last used
first. A shard that reports, has room beyond its watermark and no pull under way is given the next wishes that it can
fulfil: pages of one namespace from one source. What came is what its stream says; what did not is wished for again, a
few times. Nothing is evicted for a copy, and no copy is moved: a source loses its own when it is told to, or goes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.drain_list import DrainList
from kvcluster.core.hot_prefixes import HotPrefixes
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member, Membership
from kvcluster.core.messages import NewPage, PageKey, PullOrder, ShardAddress, Tier, Tombstone
from kvcluster.core.miss import Loss
from kvcluster.core.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.replica_sets import ReplicaSet, ReplicaTable
from kvcluster.core.spec import Part
from kvcluster.core.tiers import ADDRESSABLE, FASTEST, STAGING, Takes

MS = 1_000_000
TRIES = 3
"""How often a wish goes into an order: a source that rots or a target that fills up is no reason to go on for ever."""

RETRY_NS = 250 * MS
"""A wish that went into an order waits so long for the next. A target whose room is in pieces says at once that nothing
fitted, and would be told the same again at once, without end."""

INSPECTED = 2_048
"""Wishes looked at for one order: most are for somebody else, or fulfilled."""

Wished = tuple[NamespaceId, BlockHash]

Staying = dict[tuple[int, Part], list[int]]
"""Where each page of a block lies, by group and part: the slots of shards that are neither gone nor about to go."""


class _Wish:
    __slots__ = ("copies", "most", "not_before", "tries")

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.most = 0  # so many there were at once since it was wished for
        self.tries = TRIES
        self.not_before = 0


class _Kind(NamedTuple):
    """What the pages of one order have in common: a copy that has lost more meanwhile is none of these."""

    source: ShardAddress
    codec: Codec
    loss: Loss
    into: Tier


class _Missing(NamedTuple):
    kind: _Kind
    pages: list[NewPage]


class Replicator:
    """Keeps the wishes and makes the orders."""

    def __init__(
        self, config: CoordinatorConfig, directory: NamespaceTable, book: ReplicaTable, members: Membership
    ) -> None:
        self._low = config.low_free
        self._hot_replicas = config.hot_replicas
        self._hot_prefixes = HotPrefixes(
            loads=config.hot_loads, window_ns=config.hot_window_ms * MS, run_blocks=config.run_blocks
        )
        self._directory = directory
        self._book = book
        self._members = members
        self._wishes: dict[Wished, _Wish] = {}
        self._parked: dict[Wished, _Wish] = {}  # there are too few shards for them at present
        self._under_way: dict[int, dict[Wished, _Wish]] = {}  # by the slot of the shard that pulls
        self._draining: dict[int, dict[Wished, _Wish]] = {}  # by the slot of the shard that goes
        self._listing: dict[int, DrainList] = {}  # likewise: what is not among its wishes yet
        self._placed: dict[int, dict[Wished, None]] = {}  # likewise: what has come to another because of that
        self._stuck: dict[int, int] = {}  # likewise: how many in a row `drained` has seen that nobody has room for

    def loaded(self, space: CoordinatorNamespace, hashes: Sequence[BlockHash], now: int) -> None:
        """A load was promised these blocks, a chain from its first block on."""
        if self._hot_replicas > 1 and len(self._members) > 1:
            for run in self._hot_prefixes.loaded(hashes, now):
                for block in run:
                    self.want(space, block, self._hot_replicas)

    def want(self, space: CoordinatorNamespace, block: BlockHash, copies: int) -> None:
        """This block is to lie on so many shards, as far as there are as many with room."""
        wished = (space.id, block)
        known = self._wishes.get(wished)
        if known is not None:
            known.copies = max(known.copies, copies)
        elif len(self._wishes) < limits.WISHES:
            self._wishes[wished] = _Wish(copies)

    def joined(self) -> None:
        """One more shard has told all that it holds: what there were too few of them for may be possible now."""
        parked, self._parked = self._parked, {}
        for wished, wish in parked.items():
            if len(self._wishes) < limits.WISHES:
                self._wishes.setdefault(wished, wish)

    def drain(self, member: Member, until: int) -> None:
        """This shard is to go. What it holds now and alone is to go elsewhere; so is what is still written to it."""
        member.drain_until = until
        self._book.retire_slot(member.slot)
        self._draining.setdefault(member.slot, {})
        self._placed.setdefault(member.slot, {})
        self._listing[member.slot] = DrainList(member.slot, (space.index for space in self._directory))
        self.list_some()

    @property
    def listing(self) -> bool:
        """Are there blocks on shards that are to go which `list_some` has yet to look at?"""
        return bool(self._listing)

    def list_some(self) -> None:
        """Lists some more blocks of shards that are to go."""
        slot = next(iter(self._listing), None)
        if slot is None:
            return
        for record in self._listing[slot].some():
            space = self._directory.known(record.space)
            if space is None or space.index.get(record.hash) is not record:
                continue
            self._draining[slot].setdefault((record.space, record.hash), _Wish(1))
            copies = self._most_copies(record, slot)
            if copies > 1:  # it survives, but with one copy less
                self.want(space, record.hash, copies)
        if self._listing[slot].done:
            del self._listing[slot]

    def committed(self, record: BlockRecord, member: Member) -> None:
        """This block is on that shard now. On one that is to go, it is to have a place elsewhere."""
        wishes = self._draining.get(member.slot)
        if wishes is not None:
            wishes.setdefault((record.space, record.hash), _Wish(1))

    def order(self, target: Member, now: int) -> bool:
        """Gives a shard that has just reported its next pull. Returns False where there is none for it."""
        if not target.takes or all(self._room(target, tier) <= 0 for tier in ADDRESSABLE):
            return False
        for wishes in (*self._draining.values(), self._wishes):
            taken = self._pick(target, wishes, now)
            if taken is not None:
                self._under_way[target.slot] = taken
                return True
        for wished in list(islice(self._wishes, INSPECTED)):  # none of them is for this shard: others have their turn
            self._wishes[wished] = self._wishes.pop(wished)
        return False

    def settle(self, member: Member, order: PullOrder) -> None:
        """Its pull has ended, or the shard has. What is still wished for goes on the list again."""
        ordered: dict[BlockHash, list[NewPage]] = {}
        for page in order.pages:
            ordered.setdefault(page.key.hash, []).append(page)
        alive = self._book.alive(member.slot)
        for wished, wish in self._under_way.pop(member.slot, {}).items():
            record = self._record(wished)
            going = [slot for slot in self._draining if record is not None and record.copies.on(slot)]
            if record is not None and alive and _came(record, member.slot, ordered.get(record.hash, ())):
                staying = self._staying(record)
                copies = self._fewest(record, staying)
                if copies > wish.most:  # another copy of it is another matter; one that comes and goes is none
                    wish.most, wish.tries, wish.not_before = copies, TRIES, 0
                for slot in going:
                    self._placed[slot][wished] = None
                if copies >= min(wish.copies, self._stayers()):
                    self._park(wished, wish, copies)
                    continue  # it has what was wished for: if that is evicted soon, it is not to be brought again
            if record is None or not (wish.tries or going):  # what goes is tried until it does
                continue
            (self._draining[going[0]] if going else self._wishes).setdefault(wished, wish)

    def forget(self, member: Member) -> None:
        """Its shard is gone."""
        for by_slot in (self._draining, self._listing, self._placed, self._stuck):
            by_slot.pop(member.slot, None)

    def apply_tombstone(self, stone: Tombstone) -> None:
        """What it names is pulled by nobody any more. A source may not have heard of the purge when a target has, which
        would then keep for good what was purged."""
        for member in self._members.all():
            pull = member.orders.of(PullOrder)
            if pull is not None and stone.names(pull.tenant, pull.spec):
                member.orders.withdraw(pull)
                self.settle(member, pull)

    def repair(self, space: CoordinatorNamespace, record: BlockRecord, before: ReplicaSet, slot: int) -> None:
        """It has lost what it had on that shard: pages that lie elsewhere too are to have as many copies as before."""
        held = [(copy.group, copy.part) for copy in before.of(slot)]
        lost = [page for page in held if not record.copies.holds(slot, *page)]
        left = Counter(_pages(record))
        copies = max((left[page] for page in lost), default=0)
        if copies:
            self.want(space, record.hash, copies + 1)
        self.replica_lost(record)

    def replica_lost(self, record: BlockRecord, *, evicted: bool = False) -> None:
        """It has fewer copies. Where a shard that is to go has one, that is no place for it to stay.

        What was brought elsewhere because of that and was the coldest there has had its place: it would be again.
        """
        wished = (record.space, record.hash)
        for slot, wishes in self._draining.items():
            if record.copies.on(slot) and not (evicted and wished in self._placed[slot]):
                wishes.setdefault(wished, _Wish(1))

    def drained(self, member: Member) -> bool:
        """Has all that this shard alone holds, and anybody has room for, gone elsewhere?"""
        members = self._members.all()
        pulls = [other.orders.of(PullOrder) for other in members]
        if any(pull is not None and pull.source.shard == member.info.shard for pull in pulls):
            return False  # what is on its way is on no list
        if member.slot in self._listing:
            return False
        wishes = self._draining.get(member.slot, {})
        stayers = self._stayers()
        takers = [m for m in members if m.takes and any(self._room(m, tier) > 0 for tier in ADDRESSABLE)]
        for wished in list(islice(wishes, max(1, INSPECTED // max(1, len(takers))))):  # each may be asked of each taker
            wish, record = wishes[wished], self._record(wished)
            staying = self._staying(record) if record is not None else {}
            if record is None or not self._lacks(record, staying, min(wish.copies, stayers)):
                del wishes[wished]
            elif any(self._fits(other, record, staying, wish.copies) for other in takers):
                self._stuck[member.slot] = 0
                return False
            else:  # others have their turn
                wishes[wished] = wishes.pop(wished)
                self._stuck[member.slot] = self._stuck.get(member.slot, 0) + 1
        if any(not (other.cursor.current or other.draining) for other in members):
            return not wishes  # what they will have room for is not known yet
        return self._stuck.get(member.slot, 0) >= len(wishes)

    def check(self) -> None:
        """Every order has its wishes and every shard that goes its list; for whoever checks invariants."""
        members = {member.slot: member for member in self._members.all()}
        pulls = {slot: member.orders.of(PullOrder) for slot, member in members.items()}
        assert all(pulls[slot] is not None for slot in self._under_way), "wishes of an order that has ended"
        for member in members.values():
            assert (member.slot in self._draining) == member.draining, "a shard goes, and nobody asks what it has"
            pull = pulls[member.slot]
            if pull is not None:
                assert pull.source.shard != member.info.shard, "a shard is to pull from itself"
                space = pull.spec.namespace(pull.tenant)
                wished = self._under_way[member.slot]
                assert all((space, page.key.hash) in wished for page in pull.pages), (
                    "pages of a pull that are on no list of wishes"
                )
        assert all(slot in members for slot in (*self._draining, *self._stuck)), "a shard that is gone is drained on"
        assert all(slot in self._draining for slot in self._listing), "a shard is listed that does not go"
        assert list(self._placed) == list(self._draining), "what was moved is remembered as long as its shard goes"
        under_way = [wished for wishes in self._under_way.values() for wished in wishes]
        assert len(set(under_way)) == len(under_way), "two shards pull one block at a time"
        assert len(self._wishes) <= limits.WISHES + len(members) * limits.PULL_PAGES, "wishes without end"
        assert len(self._parked) <= limits.WISHES, "wishes without end that no present shard can fulfil"

    # --------------------------------------------------------------------------------------- one order

    def _pick(self, target: Member, wishes: dict[Wished, _Wish], now: int) -> dict[Wished, _Wish] | None:
        """Wishes that this shard can fulfil from one source, taken off their list; they are in its order then."""
        pages: list[NewPage] = []
        taken: dict[Wished, _Wish] = {}
        kind: _Kind | None = None
        space: CoordinatorNamespace | None = None
        stayers, nbytes = self._stayers(), 0
        for wished in list(islice(wishes, INSPECTED)):
            wish, record = wishes[wished], self._record(wished)
            if record is None:
                del wishes[wished]
                continue
            staying = self._staying(record)
            if not self._lacks(record, staying, min(wish.copies, stayers)):
                del wishes[wished]
                self._park(wished, wish, self._fewest(record, staying))
                continue
            if wish.not_before > now or self._is_under_way(wished):
                continue
            if space is not None and record.space != space.id:
                continue
            found = self._missing(record, staying, wish.copies, target)
            if found is None or kind not in (None, found.kind):
                continue
            more = self._bytes(record, found)
            if nbytes + more > self._room(target, found.kind.into):
                continue  # something smaller may fit
            if pages and (nbytes + more > limits.PULL_BYTES or len(pages) + len(found.pages) > limits.PULL_PAGES):
                break
            nbytes += more
            kind, space = found.kind, self._directory.known(record.space)
            pages += found.pages[: limits.PULL_PAGES]
            wish.tries -= 1
            wish.not_before = now + RETRY_NS
            taken[wished] = wishes.pop(wished)
        if kind is None or space is None:
            return None
        named = (kind.source, space.tenant, space.spec, tuple(pages), kind.codec, kind.into)
        target.orders.give(lambda number: PullOrder(number, *named))
        return taken

    def _missing(self, record: BlockRecord, staying: Staying, copies: int, target: Member) -> _Missing | None:
        """Pages of this block that `target` could bring nearer to so many copies, of one kind."""
        source: tuple[int, Codec, Loss, Tier] | None = None
        pages: dict[tuple[int, Part], NewPage] = {}
        # What has lost least; and what was decoded as it was encoded, so that it will never be encoded again.
        for copy in sorted(record.copies.entries, key=lambda copy: (copy.loss, -copy.codec, copy.slot)):
            slots = staying.get((copy.group, copy.part), [])
            into = min(copy.tier, STAGING)  # nothing but a demotion writes into a store
            into = into if target.info.use(into).capacity_bytes else FASTEST
            if copy.codec is not Codec.RAW and into.spec.takes is Takes.RAW:
                continue
            if not self._book.alive(copy.slot) or source not in (None, (copy.slot, copy.codec, copy.loss, into)):
                continue
            if copy.slot == target.slot or target.slot in slots or len(slots) >= copies:
                continue
            source = copy.slot, copy.codec, copy.loss, into
            key = PageKey(record.hash, copy.group, copy.part)
            pages.setdefault((copy.group, copy.part), NewPage(key, record.parent, record.depth, copy.loss))
        if source is None:
            return None
        return _Missing(_Kind(self._book.address(source[0]), *source[1:]), list(pages.values()))

    def _fits(self, target: Member, record: BlockRecord, staying: Staying, copies: int) -> bool:
        """Could this shard take what is missing of it?"""
        found = self._missing(record, staying, copies, target)
        return found is not None and self._bytes(record, found) <= self._room(target, found.kind.into)

    def _park(self, wished: Wished, wish: _Wish, copies: int) -> None:
        """Keeps a wish until the next shard joins, if it wants more than the `copies` that the present ones allow."""
        if copies < wish.copies and len(self._parked) < limits.WISHES:
            self._parked[wished] = wish

    def _lacks(self, record: BlockRecord, staying: Staying, copies: int) -> bool:
        """Has any page of it fewer copies than that, on shards that stay?"""
        return self._fewest(record, staying) < copies

    def _fewest(self, record: BlockRecord, staying: Staying) -> int:
        """On so many shards that stay every page of it lies."""
        alive = (copy for copy in record.copies.entries if self._book.alive(copy.slot))
        return min((len(staying.get((copy.group, copy.part), ())) for copy in alive), default=sys.maxsize)

    def _most_copies(self, record: BlockRecord, slot: int) -> int:
        """On how many shards the page of it lies that this one shares with most."""
        pages = Counter(_pages(record, self._book))
        return max((pages[copy.group, copy.part] for copy in record.copies.of(slot)), default=0)

    def _stayers(self) -> int:
        """On how many shards anything could lie for longer."""
        return sum(not member.draining for member in self._members.all())

    def _is_under_way(self, wished: Wished) -> bool:
        """Does any shard pull it now? Two that are to go may both wish for it."""
        return any(wished in taken for taken in self._under_way.values())

    def _staying(self, record: BlockRecord) -> Staying:
        """Where each page of it lies, but for shards that are gone or about to go."""
        staying: Staying = {}
        for copy in record.copies.entries:
            if self._book.alive(copy.slot) and copy.slot not in self._draining:
                slots = staying.setdefault((copy.group, copy.part), [])
                if copy.slot not in slots:  # its twin in another tier is no other copy
                    slots.append(copy.slot)
        return staying

    def _room(self, member: Member, tier: Tier) -> int:
        """Bytes of that tier that may be filled without a need to evict for it."""
        return member.info.use(tier).room(self._low)

    def _record(self, wished: Wished) -> BlockRecord | None:
        return self._directory.record(*wished)

    def _bytes(self, record: BlockRecord, missing: _Missing) -> int:
        """What these pages of it take."""
        space = self._directory.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        return sum(space.page_bytes(page.key.group, page.key.part, missing.kind.codec) for page in missing.pages)


def _pages(record: BlockRecord, book: ReplicaTable | None = None) -> list[tuple[int, Part]]:
    """Its pages, each as often as shards have it; of those alone that are alive, by this book."""
    entries = dict.fromkeys(copy[:3] for copy in record.copies.entries if book is None or book.alive(copy.slot))
    return [(group, part) for _, group, part in entries]


def _came(record: BlockRecord, slot: int, ordered: Sequence[NewPage]) -> bool:
    """Does that shard hold all the pages of this block that it was to pull?"""
    return all(record.copies.holds(slot, page.key.group, page.key.part) for page in ordered)
