"""Which shards hold which parts of a block: immutable, interned sets of copies, and the plans they allow.

Millions of blocks lie in a few hundred ways ("all of it on shard 2", "two halves on shards 1 and 4"), so a
block's record holds one reference to a shared `Copies`, and what follows from a set (can it serve this need,
from where) is worked out once for each set and need, and not once for each block. This is what makes a
lookup a dictionary access and a comparison.

A shard incarnation is known here by its *slot*, a small integer that is never used again. Losing a shard
kills its slot: every plan is forgotten at once, and no answer names it again, whatever the records still say.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Need, Plan, ShardAddress, Source, Tier
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import Part

INTERNED = 65_536
"""Distinct sets remembered. Beyond it interning starts afresh: equal sets may then be two objects, which
costs memory and nothing else."""


class Copy(NamedTuple):
    """One READY page: on which slot, of which group and part, in which tier, with what loss, and how encoded."""

    slot: int
    group: int
    part: Part
    tier: Tier
    loss: Loss
    codec: Codec = Codec.RAW


class Served(NamedTuple):
    """What a set of copies can do for a need: sources by group, and why a group that has none has none."""

    plan: Plan
    complete: bool
    miss: Miss | None


class Copies:
    """An immutable set of copies. Made only by a CopyBook; compare with `is`."""

    __slots__ = ("_less", "_more", "_served", "_version", "entries", "tiers")

    def __init__(self, entries: tuple[Copy, ...]) -> None:
        self.entries = entries
        self.tiers = sum({1 << copy.tier for copy in entries})  # a bit for each that a copy is in
        self._more: dict[Copy, Copies] = {}
        self._less: dict[tuple[int, int, Part, Tier], Copies] = {}
        self._served: dict[tuple[Need, bool], Served] = {}
        self._version = 0

    def on(self, slot: int, tier: Tier | None = None) -> bool:
        """Does that shard hold any of it, in any tier or in that one?"""
        return any(copy.slot == slot and tier in (None, copy.tier) for copy in self.entries)

    def holds(self, slot: int, group: int, part: Part) -> bool:
        """Does that shard hold that page, in any tier?"""
        return any(copy[:3] == (slot, group, part) for copy in self.entries)


class CopyBook:
    """Interns Copies and knows which slots are alive."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Copy, ...], Copies] = {}
        self._alive: dict[int, ShardAddress] = {}
        self._retired: dict[int, None] = {}
        self._next_slot = 1
        self._version = 1
        self.none = self._intern(())

    @property
    def version(self) -> int:
        """Grows whenever a shard goes: what was worked out before may name it."""
        return self._version

    def open_slot(self, address: ShardAddress) -> int:
        """A new slot for a shard incarnation."""
        slot = self._next_slot
        self._next_slot += 1
        self._alive[slot] = address
        return slot

    def retire_slot(self, slot: int) -> None:
        """It is about to die: plans name it only for what nobody else has."""
        if slot not in self._retired:
            self._retired[slot] = None
            self._version += 1

    def kill_slot(self, slot: int) -> None:
        """No plan names this slot again."""
        self._retired.pop(slot, None)
        if self._alive.pop(slot, None) is not None:
            self._version += 1

    def alive(self, slot: int) -> bool:
        return slot in self._alive

    def address(self, slot: int) -> ShardAddress:
        """Where a living slot is reached."""
        return self._alive[slot]

    def add(self, copies: Copies, copy: Copy) -> Copies:
        """The set with `copy`, in place of any copy of the same part in that tier of that slot."""
        if copies._version != self._version:
            self._refresh(copies)
        more = copies._more.get(copy)
        if more is None:
            kept = [c for c in copies.entries if c[:4] != copy[:4]]
            more = self._intern(tuple(sorted([*kept, copy])))
            copies._more[copy] = more
        return more

    def remove(self, copies: Copies, slot: int, group: int, part: Part, tier: Tier) -> Copies:
        """The set without that part in that tier of that slot."""
        key = (slot, group, part, tier)
        less = copies._less.get(key)
        if less is None:
            kept = tuple(c for c in copies.entries if c[:4] != key)
            if len(kept) == len(copies.entries):
                return copies
            less = copies._less[key] = self._intern(kept)
        return less

    def remaining(self, copies: Copies) -> Copies:
        """The set without copies on dead slots."""
        if all(copy.slot in self._alive for copy in copies.entries):
            return copies
        return self._intern(tuple(c for c in copies.entries if c.slot in self._alive))

    def serve(self, copies: Copies, need: Need, *, youngest: bool = False) -> Served:
        """What these copies can do for `need`; worked out once for each pair.

        Of replicas that are as good as each other the oldest shard's serves, or the youngest's: so half of the
        workers read from the one and half from the other.
        """
        if copies._version != self._version:
            self._refresh(copies)
        served = copies._served.get((need, youngest))
        if served is None:
            if len(copies._served) >= 64:  # needs are few: one a rank and loss; anything more is abuse
                copies._served.clear()
            served = self._serve(copies, need, -1 if youngest else 1)
            copies._served[need, youngest] = served
        return served

    def _serve(self, copies: Copies, need: Need, direction: int) -> Served:
        plan: list[tuple[Source, ...] | None] = []
        miss: Miss | None = None
        for group, part in enumerate(need.parts):
            if part is None:
                plan.append(None)
                continue
            sources, reason = self._cover(copies, group, part, need, direction)
            plan.append(sources)
            miss = miss or reason
        return Served(tuple(plan), miss is None, miss)

    def _cover(
        self, copies: Copies, group: int, part: Part, need: Need, direction: int
    ) -> tuple[tuple[Source, ...] | None, Miss | None]:
        if not copies.entries:
            return None, Miss(MissReason.NEVER_SEEN)
        alive = [c for c in copies.entries if c.slot in self._alive and self._alive[c.slot].shard not in need.avoid]
        if not alive:
            return None, Miss(MissReason.SHARD_LOST)
        touching = [c for c in alive if c.group == group and c.part.intersect(part)]
        # What stays before what goes; then the cheapest first: fast tier, little loss; then the one that covers most,
        # then by the age of the shard.
        touching.sort(
            key=lambda c: (c.slot in self._retired, c.tier, c.loss, -_area(c.part.intersect(part)), direction * c.slot)
        )
        chosen = _tile(part, [c for c in touching if c.loss <= need.accept])
        if chosen is None:
            for loss in Loss:  # by rising loss: what the caller would have to accept at least
                if _tile(part, [c for c in touching if c.loss <= loss]):
                    return None, Miss(MissReason.LOSSY, f"only with {loss.name.lower()}")
            if _tile(part, [c for c in copies.entries if c.group == group]):
                return None, Miss(MissReason.SHARD_LOST)
            held = ", ".join(str(c.part) for c in touching) or "nothing"
            return None, Miss(MissReason.PART, f"group {group}: asked for {part}; held: {held}")
        return tuple(Source(group, c.part, self._alive[c.slot], c.tier, c.loss) for c in chosen), None

    def _refresh(self, copies: Copies) -> None:
        """A slot has died since: plans may name it, and a way to a set that holds it would keep that set for ever."""
        copies._version = self._version
        copies._served.clear()
        copies._more.clear()

    def _intern(self, entries: tuple[Copy, ...]) -> Copies:
        copies = self._interned.get(entries)
        if copies is None:
            if len(self._interned) >= INTERNED:
                self._interned.clear()
            copies = Copies(entries)
            self._interned[entries] = copies
        return copies


def _area(part: Part | None) -> int:
    return part.layers * part.heads if part else 0


def _tile(part: Part, candidates: list[Copy]) -> list[Copy] | None:
    """The first candidates that together cover `part`, each adding something; None where they do not."""
    for copy in candidates:  # almost always one page holds all of it
        if copy.part.intersect(part) == part:
            return [copy]
    layers = _cuts(part.layer_start, part.layer_stop, [(c.part.layer_start, c.part.layer_stop) for c in candidates])
    heads = _cuts(part.head_start, part.head_stop, [(c.part.head_start, c.part.head_stop) for c in candidates])
    missing = {(a, b): None for a in layers for b in heads}
    chosen: list[Copy] = []
    for copy in candidates:
        held = copy.part
        cells = [
            cell
            for cell in missing
            if held.layer_start <= cell[0] < held.layer_stop and held.head_start <= cell[1] < held.head_stop
        ]
        if cells:
            chosen.append(copy)
            for cell in cells:
                del missing[cell]
    return chosen if not missing else None


def _cuts(start: int, stop: int, ranges: list[tuple[int, int]]) -> list[int]:
    """Where the cells of a grid begin that no range cuts through."""
    edges = sorted({start, *(edge for pair in ranges for edge in pair if start < edge < stop)})
    return edges
