"""What a subscriber to KV events knows: which blocks are in which tier, rebuilt from the events alone.

Routers and indexers keep such a picture. If it has received every event since its coordinator started, or every event
of a Republish and all after it, it equals the coordinator's index (`indexed`).

Invariant of a `strict` picture, which has received everything: no block is stored twice in a tier, and no block is
removed that was not there.
"""

from __future__ import annotations

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Publish, Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream

Blocks = dict[tuple[NamespaceId, Tier], set[BlockHash]]
"""The blocks in each tier of each namespace. Empty sets are left out."""


class EventPicture:
    """Applies events. `hear` raises AssertionError if an event contradicts the picture."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.blocks: Blocks = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}
        """The parent of each stored block, as last published; None at the beginning of a sequence."""
        self.tokens: dict[BlockHash, tuple[int, ...]] = {}
        """The token ids of each block for which some were published."""

    def hear(self, told: Publish) -> None:
        """Applies the events that one step of a coordinator published for one namespace."""
        assert told.events, "a Publish without events"
        for event in told.events:
            if isinstance(event, AllBlocksCleared):
                self.clear(told.stream.namespace)
            elif isinstance(event, BlocksStored):
                self._stored(told.stream, event)
            else:
                self._removed(told.stream, event)

    def clear(self, space: NamespaceId) -> None:
        """Forgets all blocks of that namespace."""
        for tier in Tier:
            self.blocks.pop((space, tier), None)

    def _stored(self, stream: EventStream, event: BlocksStored) -> None:
        known = self.blocks.setdefault((stream.namespace, event.tier), set())
        assert len(set(event.hashes)) == len(event.hashes) > 0
        assert not (self.strict and known.intersection(event.hashes)), "a block is stored twice"
        assert len(event.tokens) in (0, len(event.hashes) * stream.block_tokens), "token ids of some blocks only"
        known.update(event.hashes)
        parent = event.parent
        for at, block in enumerate(event.hashes):
            self.parents[block], parent = parent, block
            if event.tokens:
                self.tokens[block] = tuple(event.tokens[at * stream.block_tokens : (at + 1) * stream.block_tokens])

    def _removed(self, stream: EventStream, event: BlocksRemoved) -> None:
        place = stream.namespace, event.tier
        known = self.blocks.setdefault(place, set())
        assert len(set(event.hashes)) == len(event.hashes) > 0
        assert known.issuperset(event.hashes) or not self.strict, "a block is removed that was not there"
        known.difference_update(event.hashes)
        if not known:
            del self.blocks[place]


def indexed(coordinator: Coordinator) -> Blocks:
    """Returns what the index says of public blocks, including replicas on lost shards until they are swept."""
    blocks: Blocks = {}
    for space in coordinator.state.namespaces:
        if space.spec.private:
            continue
        for record in space.index:
            for copy in record.copies.entries:
                blocks.setdefault((space.id, copy.tier), set()).add(record.hash)
    return blocks
