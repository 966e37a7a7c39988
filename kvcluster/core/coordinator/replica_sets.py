"""Which shards hold which parts of a block: immutable, interned sets of copies, and the plans they allow.

Millions of blocks are placed in a few hundred ways ("all of it on shard 2", "two halves on shards 1 and 4"). So a
block's record holds one reference to a shared `ReplicaSet`, and what follows from a set (whether it can serve a need,
and from where) is computed once for each set and need, not for each block. This makes a lookup a dictionary access and
a comparison.

A shard incarnation is identified here by its *slot*, a small integer that is never used again. When a shard is lost,
its slot is killed: every plan is forgotten at once and no answer names it again, even while records still do.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part, bits, cover
from kvcluster.core.messages import Need, Plan, ShardAddress, Source, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.tiers import INGEST, READ_ORDER

INTERNED = 65_536
"""Limit on the distinct sets that are remembered, and on the numbered copies. Beyond it interning starts again with an
empty table: equal sets may then be two objects, which costs only memory."""

_64_BITS = 2**64 - 1

NEEDS = 4_096
"""Limit on the numbered needs. Beyond it numbering starts again with an empty table; results under an old number are
forgotten with their set."""

NAMED_PARTS = 8
"""Limit on the held parts that a miss lists: more would not help its reader."""


class Replica(NamedTuple):
    """One READY page: its slot, group, part, tier, loss and codec."""

    slot: int
    group: int
    part: Part
    tier: Tier
    loss: Loss
    codec: Codec = Codec.RAW


class Served(NamedTuple):
    """What a set of copies can do for a need: the sources of each group, or the reason why it has none."""

    plan: Plan
    complete: bool
    miss: Miss | None


class ReplicaSet:
    """An immutable set of copies. Made only by a ReplicaTable; compare with `is`.

    `entries` are sorted, so the copies on one shard are adjacent and a page is found by bisection. `places` counts
    copies by slot and tier. `digest` is the exclusive or of one number per copy (Zobrist, A New Hashing Method with
    Application for Game Playing, 1970): the set with one copy more or less is found without a look at the other copies.
    """

    __slots__ = ("_less", "_more", "_served", "_version", "digest", "entries", "places", "tiers")

    def __init__(self, entries: tuple[Replica, ...], places: dict[tuple[int, Tier], int], digest: int) -> None:
        self.entries = entries
        self.places = places
        self.digest = digest
        self.tiers = sum({1 << tier for _, tier in places})  # a bit mask of the tiers that hold a copy
        self._more: dict[Replica, ReplicaSet] = {}
        self._less: dict[tuple[int, int, Part, Tier], ReplicaSet] = {}
        self._served: dict[int, Served] = {}  # by the number of the need
        self._version = 0

    @property
    def slots(self) -> list[int]:
        """The slots of the shards that hold any part of the block."""
        return list(dict.fromkeys(slot for slot, _ in self.places))

    def on(self, slot: int, tier: Tier | None = None) -> bool:
        """Whether that shard holds any part of the block: in `tier`, or in any tier if None."""
        return any((slot, one) in self.places for one in (Tier if tier is None else (tier,)))

    def of(self, slot: int) -> tuple[Replica, ...]:
        """Returns the copies on that shard."""
        return self.entries[self.find(slot) : self.find(slot + 1)]

    def holds(self, slot: int, group: int, part: Part) -> bool:
        """Whether that shard holds that page, in any tier."""
        at = self.find(slot, group, part)
        return self.entries[at : at + 1] != () and self.entries[at][:3] == (slot, group, part)

    def find(self, *name: object) -> int:
        """Returns the index of the first copy whose leading fields are not less than these."""
        return bisect_left(self.entries, name, key=lambda copy: copy[: len(name)])


class ReplicaTable:
    """Interns ReplicaSets and knows which slots are alive.

    `work` grows with the cost of computing what a set can do (limits.COVER_WORK), and bounds a request over many blocks
    (need_planner.py).
    """

    def __init__(self) -> None:
        self._interned: dict[int, ReplicaSet] = {}  # by digest
        self._numbers: dict[Replica, int] = {}
        self._drawn = 0
        self._alive: dict[int, ShardAddress] = {}
        self._retired: dict[int, None] = {}
        self._next_slot = 1
        self._version = 1
        self._needs: dict[tuple[Need, bool], int] = {}
        self._next_need = 0
        self.work = 0
        self.none = self._interned[0] = ReplicaSet((), {}, 0)

    @property
    def version(self) -> int:
        """Grows whenever a shard is retired or killed: earlier results may name it."""
        return self._version

    def open_slot(self, address: ShardAddress) -> int:
        """Returns a new slot for a shard incarnation."""
        slot = self._next_slot
        self._next_slot += 1
        self._alive[slot] = address
        return slot

    def retire_slot(self, slot: int) -> None:
        """Marks a slot whose shard is draining: plans prefer copies elsewhere."""
        if slot not in self._retired:
            self._retired[slot] = None
            self._version += 1

    def kill_slot(self, slot: int) -> None:
        """Removes a slot: no plan names it again."""
        self._retired.pop(slot, None)
        if self._alive.pop(slot, None) is not None:
            self._version += 1

    def alive(self, slot: int) -> bool:
        return slot in self._alive

    def stays(self, slot: int) -> bool:
        """Whether the shard with that slot is alive and not draining."""
        return slot in self._alive and slot not in self._retired

    def address(self, slot: int) -> ShardAddress:
        """Returns the address of the shard with that slot, which must be alive."""
        return self._alive[slot]

    def add(self, copies: ReplicaSet, copy: Replica) -> ReplicaSet:
        """Returns the set with `copy`, which replaces any copy of the same part in the same tier of the same slot."""
        self._refresh(copies)
        more = copies._more.get(copy)
        if more is None:
            at = copies.find(*copy[:4])
            there = copies.entries[at : at + 1]
            stop = at + 1 if there and there[0][:4] == copy[:4] else at
            more = copies._more[copy] = self._replace(copies, at, stop, (copy,))
        return more

    def remove(self, copies: ReplicaSet, slot: int, group: int, part: Part, tier: Tier) -> ReplicaSet:
        """Returns the set without that part in that tier of that slot."""
        name = (slot, group, part, tier)
        less = copies._less.get(name)
        if less is None:
            at = copies.find(*name)
            there = copies.entries[at : at + 1]
            if not there or there[0][:4] != name:
                return copies
            less = copies._less[name] = self._replace(copies, at, at + 1, ())
        return less

    def remaining(self, copies: ReplicaSet) -> ReplicaSet:
        """Returns the set without copies on dead slots."""
        for slot in copies.slots:
            if slot not in self._alive:
                copies = self._replace(copies, copies.find(slot), copies.find(slot + 1), ())
        return copies

    def serve(self, copies: ReplicaSet, need: Need, *, youngest: bool = False) -> Served:
        """Returns what these copies can do for `need`; computed once for each pair.

        Of equally good replicas the one on the oldest shard serves, or with `youngest` the one on the youngest. So half
        of the workers read from one and half from the other.
        """
        number = self.number(need, youngest)
        return self.known(copies, number) or self.work_out(copies, need, number, youngest)

    def number(self, need: Need, youngest: bool) -> int:
        """Returns the number under which results for this need are cached: a need is slow to hash, and a lookup asks it
        of every block of a chain."""
        number = self._needs.get((need, youngest))
        if number is None:
            if len(self._needs) >= NEEDS:
                self._needs.clear()
            number = self._needs[need, youngest] = self._next_need
            self._next_need += 1
        return number

    def known(self, copies: ReplicaSet, number: int) -> Served | None:
        """Returns the cached result for the need of that number; None if there is none."""
        self._refresh(copies)
        return copies._served.get(number)

    def work_out(self, copies: ReplicaSet, need: Need, number: int, youngest: bool) -> Served:
        """Computes and caches what these copies can do for the need of that number."""
        if len(copies._served) >= 64:  # few needs are in use: one per rank and loss; more is abuse
            copies._served.clear()
        self.work += 32
        avoid = frozenset(need.avoid)
        usable = {slot: self._alive[slot] for slot in copies.slots if slot in self._alive}
        usable = {slot: address for slot, address in usable.items() if address.shard not in avoid}
        plan: list[tuple[Source, ...] | None] = []
        miss: Miss | None = None
        for group, part in enumerate(need.parts):
            if part is None:
                plan.append(None)
                continue
            sources, reason = self._cover(copies, group, part, need.accept, usable, -1 if youngest else 1)
            plan.append(sources)
            miss = miss or reason
        served = copies._served[number] = Served(tuple(plan), miss is None, miss)
        return served

    def stored(self, copies: ReplicaSet, group: int, part: Part, accept: Loss) -> bool:
        """Whether any shard holds exactly that page, with no more loss than `accept`."""
        self.work += len(copies.places)
        for slot in copies.slots if copies.entries else ():
            at = copies.find(slot, group, part) if slot in self._alive else len(copies.entries)
            for copy in islice(copies.entries, at, at + len(Tier)):
                if copy[:3] == (slot, group, part) and copy.loss <= accept:
                    return True
        return False

    def _cover(
        self, copies: ReplicaSet, group: int, part: Part, accept: Loss, usable: dict[int, ShardAddress], direction: int
    ) -> tuple[tuple[Source, ...] | None, Miss | None]:
        if not copies.entries:
            return None, Miss(MissReason.NEVER_SEEN)
        if not usable:
            return None, Miss(MissReason.SHARD_LOST)
        self.work += len(copies.entries)
        touching = [c for c in copies.entries if c.group == group and c.part.intersect(part)]
        # Order: shards that stay before those that drain; then the cheapest (little work to read, little loss); then
        # the copy that covers most; then by the age of the shard.
        touching.sort(
            key=lambda c: (
                c.slot in self._retired,
                READ_ORDER[c.tier],
                c.loss,
                -_area(c.part.intersect(part)),
                direction * c.slot,
            )
        )
        chosen = self._tile(part, [c for c in touching if c.loss <= accept and c.slot in usable])
        if chosen is None:
            return None, self._why_not(group, part, accept, touching, usable)
        # Clients older than the GPU tier do not know it; they get a raw copy, as from RAM.
        return tuple(Source(group, c.part, usable[c.slot], max(c.tier, INGEST), c.loss) for c in chosen), None

    def _tile(self, part: Part, candidates: list[Replica]) -> list[Replica] | None:
        """Returns the first candidates that together cover `part`, each of which adds something; None if they do
        not."""
        for copy in candidates:  # almost always one page holds all of it
            if copy.part.intersect(part) == part:
                return [copy]
        firsts = self._firsts(part, candidates)
        chosen, whole = cover(part, [copy.part for copy in firsts])
        return [firsts[index] for index in chosen] if whole and len(chosen) <= limits.PARTS_PER_BLOCK else None

    def _why_not(
        self, group: int, part: Part, accept: Loss, touching: list[Replica], usable: dict[int, ShardAddress]
    ) -> Miss:
        """Returns the reason: the least loss that the caller would have to accept, a lost shard, or which parts are
        held."""
        # Usable copies by rising loss, then the rest: the copy that fills the last hole determines the reason.
        ranked = sorted(touching, key=lambda c: (c.slot not in usable, c.loss))
        firsts = self._firsts(part, ranked)
        chosen, whole = cover(part, [copy.part for copy in firsts])
        last = firsts[chosen[-1]] if whole else None
        if last is not None and last.slot not in usable:
            return Miss(MissReason.SHARD_LOST)
        if last is not None and last.loss > accept:
            return Miss(MissReason.LOSSY, f"only with {last.loss.name.lower()}")
        here = [copy for copy in touching if copy.slot in usable]
        held = ", ".join(str(copy.part) for copy in here[:NAMED_PARTS]) or "nothing"
        more = f" and {len(here) - NAMED_PARTS} more" if len(here) > NAMED_PARTS else ""
        return Miss(MissReason.PART, f"group {group}: asked for {part}; held: {held}{more}")

    def _firsts(self, part: Part, candidates: list[Replica]) -> list[Replica]:
        """Returns the first candidate of each part, since another one adds nothing; at most limits.PARTS_COMPARED."""
        firsts: dict[Part, Replica] = {}
        for copy in candidates:
            firsts.setdefault(copy.part, copy)
        compared = list(islice(firsts.values(), limits.PARTS_COMPARED))
        self.work += len(compared) * (1 + bits(part, len(compared)) // 4_096)
        return compared

    def _refresh(self, copies: ReplicaSet) -> None:
        """Clears the caches of a set if a slot was retired or killed since: plans may name it, and a link to a set that
        contains it would keep that set alive for ever."""
        if copies._version != self._version:
            copies._version = self._version
            copies._served.clear()
            copies._more.clear()

    def _number_of(self, copy: Replica) -> int:
        """Returns the random number of a copy, from which set digests are made."""
        number = self._numbers.get(copy)
        if number is None:
            if len(self._numbers) >= INTERNED:
                self._numbers.clear()
            self._drawn += 1
            number = self._numbers[copy] = _mixed(self._drawn)
        return number

    def _replace(self, copies: ReplicaSet, start: int, stop: int, new: tuple[Replica, ...]) -> ReplicaSet:
        """Returns the set with the copies `entries[start:stop]` replaced by `new`."""
        digest, places = copies.digest, dict(copies.places)
        for copy in copies.entries[start:stop]:
            digest ^= self._number_of(copy)
            places[copy.slot, copy.tier] -= 1
            if not places[copy.slot, copy.tier]:
                del places[copy.slot, copy.tier]
        for copy in new:
            digest ^= self._number_of(copy)
            places[copy.slot, copy.tier] = places.get((copy.slot, copy.tier), 0) + 1
        entries = copies.entries[:start] + new + copies.entries[stop:]
        known = self._interned.get(digest)
        if known is not None and known.entries == entries:
            return known
        if len(self._interned) >= INTERNED:
            self._interned.clear()
        known = self._interned[digest] = ReplicaSet(entries, places, digest)
        return known


def _mixed(count: int) -> int:
    """Returns 64 pseudo-random bits, different for each count: SplitMix64 (Steele et al., Fast Splittable Pseudorandom
    Number Generators, 2014)."""
    mixed = count * 0x9E3779B97F4A7C15 & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31


def _area(part: Part | None) -> int:
    return part.layers * part.heads if part else 0
