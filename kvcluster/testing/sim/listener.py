"""A subscriber to the KV events of one coordinator incarnation, as a router or an indexer is one.

It rebuilds from events alone which blocks lie in which tier. When it has heard everything that its coordinator has to
say, this picture must equal the coordinator's index. Parents and token ids are judged against the right ones
(content.py).

It models what runtime/publishing.py promises. A publisher that drops an event voids the stream: the next batch of that
namespace begins with AllBlocksCleared, and the coordinator is asked to tell all blocks again (`Retell`). A coordinator
that starts has a new publisher, so each incarnation has a new listener.

Invariant: while nothing has been lost, no block is stored twice in a tier and no block is removed that was not there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Publish, Tier
from kvcluster.core.messages.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream
from kvcluster.testing.sim import content
from kvcluster.testing.sim.promises import hold

Picture = dict[tuple[NamespaceId, Tier], set[BlockHash]]
"""The blocks in each tier of each namespace. An empty set is left out."""


class Listener:
    """Hears the events of one coordinator. `loss` is the share of events that its publisher drops; `ask_again` is
    called for each, and has the coordinator tell all blocks again some time later."""

    def __init__(self, rng: random.Random, loss: float, ask_again: Callable[[], None]) -> None:
        self._rng = rng
        self._loss = loss
        self._ask_again = ask_again
        self._strict = True
        self._picture: Picture = {}
        self.behind = False
        """Has it lost what no Retell since has told again?"""

    def hear(self, told: Publish) -> None:
        """Takes in what one step of the coordinator has to say of one namespace."""
        hold(bool(told.events), "nothing is told")
        if self._loss and self._rng.random() < self._loss:
            self._clear(told.stream.namespace)
            self._strict = False
            self.behind = True
            self._ask_again()
            return
        for event in told.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(told.stream.namespace)
            elif isinstance(event, BlocksStored):
                self._stored(told.stream, event)
            else:
                self._removed(told.stream, event)

    def retelling(self) -> None:
        """From now on the coordinator tells all blocks again: what was lost before is made good when it has ended."""
        self._strict = False
        self.behind = False

    def judge(self, coordinator: Coordinator) -> None:
        """Raises Violation where the picture is not what the index says, once the coordinator has told everything."""
        if not self.behind and not coordinator.retelling:
            hold(self._picture == indexed(coordinator), "a listener that heard every KV event has another picture")

    def _clear(self, space: NamespaceId) -> None:
        for tier in Tier:
            self._picture.pop((space, tier), None)

    def _stored(self, stream: EventStream, event: BlocksStored) -> None:
        known = self._picture.setdefault((stream.namespace, event.tier), set())
        model = content.BY_SPACE[stream.namespace]
        hold(not (self._strict and known.intersection(event.hashes)), "a block is told twice")
        hold(len(event.tokens) in (0, len(event.hashes) * stream.block_tokens), "token ids of some blocks are told")
        parent = event.parent
        for at, block in enumerate(event.hashes):
            right_parent, right_tokens = content.origin(model, block)
            tokens = event.tokens[at * stream.block_tokens : (at + 1) * stream.block_tokens]
            hold(parent == right_parent, "a block is told with another parent than its own")
            hold(tokens in ((), right_tokens), "a block is told with token ids of another")
            parent = block
        known.update(event.hashes)

    def _removed(self, stream: EventStream, event: BlocksRemoved) -> None:
        place = stream.namespace, event.tier
        known = self._picture.setdefault(place, set())
        hold(known.issuperset(event.hashes) or not self._strict, "a block is removed that was not there")
        known.difference_update(event.hashes)
        if not known:
            del self._picture[place]


def indexed(coordinator: Coordinator) -> Picture:
    """What the index says, with copies on lost shards until they are swept."""
    picture: Picture = {}
    for space in coordinator.directory:
        for record in space.index:
            for copy in record.copies.entries:
                picture.setdefault((space.id, copy.tier), set()).add(record.hash)
    return picture
