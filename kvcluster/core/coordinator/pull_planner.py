"""Which pages of a block a shard could pull, and from which other shard, so that the block gets nearer to its number of
copies.

Only copies on shards that *stay* count: those that are alive and not draining. The pages of one pull are of one kind:
from one source, with one codec and one loss, into one tier. The planner keeps nothing between calls: it reads the
replicas (replica_sets.py) and the room that the shards have reported. Requests and orders are the replicator's.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.replica_sets import Replica, ReplicaTable
from kvcluster.core.groups import Part
from kvcluster.core.messages import NewPage, PageKey, ShardAddress, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.tiers import ADDRESSABLE, INGEST, STAGING, Takes

Staying = dict[tuple[int, Part], list[int]]
"""The slots that hold each page of a block, by group and part: only shards that are alive and not draining."""


class PullKind(NamedTuple):
    """What all pages of one order share. A copy that has lost more since is of another kind."""

    source: ShardAddress
    codec: Codec
    loss: Loss
    into: Tier


class MissingPages(NamedTuple):
    """Pages of one block that a shard lacks and could pull."""

    kind: PullKind
    pages: list[NewPage]


class PullPlanner:
    """Plans pulls of single blocks. A pull leaves at least `low_free`, a fraction of a tier, free at the target."""

    def __init__(self, namespaces: NamespaceTable, book: ReplicaTable, *, low_free: float) -> None:
        self._namespaces = namespaces
        self._book = book
        self._low = low_free

    def staying(self, record: BlockRecord) -> Staying:
        """Returns the slots that hold each page of the block, without shards that are lost or draining."""
        staying: Staying = {}
        for copy in record.copies.entries:
            if self._book.stays(copy.slot):
                slots = staying.setdefault((copy.group, copy.part), [])
                if copy.slot not in slots:  # a second tier of one shard is not another copy
                    slots.append(copy.slot)
        return staying

    def fewest(self, record: BlockRecord, staying: Staying) -> int:
        """Returns the number of staying shards that hold the page with the fewest such copies."""
        alive = (copy for copy in record.copies.entries if self._book.alive(copy.slot))
        return min((len(staying.get((copy.group, copy.part), ())) for copy in alive), default=sys.maxsize)

    def missing(self, record: BlockRecord, staying: Staying, copies: int, target: Member) -> MissingPages | None:
        """Returns the pages of this block, of one kind, that `target` could pull to bring it nearer to `copies`
        copies."""
        source: tuple[int, Codec, Loss, Tier] | None = None
        pages: dict[tuple[int, Part], NewPage] = {}
        # Least loss first; then the encoded copy before one decoded from it, so that the page need not be encoded
        # again.
        for copy in sorted(record.copies.entries, key=lambda copy: (copy.loss, -copy.codec, copy.slot)):
            slots = staying.get((copy.group, copy.part), [])
            into = self._into(target, record, copy)
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
        return MissingPages(PullKind(self._book.address(source[0]), *source[1:]), list(pages.values()))

    def _into(self, target: Member, record: BlockRecord, copy: Replica) -> Tier:
        """Returns the tier of the target for a copy: the one that the copy lies in, or the next that a shard pulls
        into, since only a shard's own moves write to its GPU and its disk. If RAM has no room, it is the tier below."""
        into = min(max(copy.tier, INGEST), STAGING)
        if not target.info.use(into).capacity_bytes:
            return INGEST
        if into is STAGING:
            return STAGING
        nbytes = self._namespaces.bytes_on(record, copy.slot, copy.tier)
        return STAGING if self.room(target, into) < nbytes <= self.room(target, STAGING) else into

    def fits(self, target: Member, record: BlockRecord, staying: Staying, copies: int) -> bool:
        """Whether this shard has room for the pages of the block that are missing."""
        found = self.missing(record, staying, copies, target)
        return found is not None and self.nbytes(record, found) <= self.room(target, found.kind.into)

    def has_room(self, member: Member) -> bool:
        """Whether the shard takes replicas and has room in any tier."""
        return member.takes_replicas and any(self.room(member, tier) > 0 for tier in ADDRESSABLE)

    def room(self, member: Member, tier: Tier) -> int:
        """Returns the bytes of that tier that can be filled without falling below its low watermark."""
        return member.info.use(tier).room(self._low)

    def nbytes(self, record: BlockRecord, missing: MissingPages) -> int:
        """Returns the bytes that these pages of the block take."""
        space = self._namespaces.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        return sum(space.page_bytes(page.key.group, page.key.part, missing.kind.codec) for page in missing.pages)
