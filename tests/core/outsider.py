"""Who listens to a coordinator's KV events and keeps a picture of its own: what every router does."""

from __future__ import annotations

from collections.abc import Iterable

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Effect, Publish, Tier
from kvcluster.core.messages.events import AllBlocksCleared, BlocksRemoved, BlocksStored

Picture = dict[tuple[NamespaceId, Tier], set[BlockHash]]


class Outsider:
    """`strict`: it has listened from the beginning, so that nothing is told that it knows."""

    def __init__(self, *, strict: bool = True) -> None:
        self.picture: Picture = {}
        self.tokens: dict[BlockHash, tuple[int, ...]] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.heard: list[Publish] = []
        self._strict = strict

    def hear(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self._hear(effect)

    def _hear(self, told: Publish) -> None:
        self.heard.append(told)
        assert told.events, "nothing is told"
        step = told.stream.block_tokens
        for event in told.events:
            if isinstance(event, AllBlocksCleared):
                for tier in Tier:
                    self.picture.pop((told.stream.namespace, tier), None)
                continue
            known = self.picture.setdefault((told.stream.namespace, event.tier), set())
            blocks = set(event.hashes)
            assert len(blocks) == len(event.hashes) > 0
            if isinstance(event, BlocksRemoved):
                assert blocks <= known or not self._strict, "what is removed was there"
                known -= blocks
                continue
            assert isinstance(event, BlocksStored)
            assert not (blocks & known and self._strict), "no second copy is told"
            known |= blocks
            assert len(event.tokens) in (0, len(event.hashes) * step)
            before = event.parent
            for at, block in enumerate(event.hashes):
                self.parents[block], before = before, block
                if event.tokens:
                    self.tokens[block] = event.tokens[at * step : (at + 1) * step]


def truth(coordinator: Coordinator) -> Picture:
    """What the index says, of copies on shards that are gone too, until they are swept."""
    picture: Picture = {}
    for space in coordinator.directory:
        for record in space.index:
            for copy in record.copies.entries:
                picture.setdefault((space.id, copy.tier), set()).add(record.hash)
    return picture


def same(one: Picture, other: Picture) -> bool:
    """Equal but for what is empty."""
    return {k: v for k, v in one.items() if v} == {k: v for k, v in other.items() if v}
