"""A subscriber to the KV events of one coordinator incarnation, and its publisher, which may drop some.

It models what runtime/event_publisher.py promises. A publisher that drops an event voids its stream: nothing published
of that namespace so far counts any more, and the coordinator is asked to publish all blocks again (`Republish`). A
coordinator that starts has a new publisher, so each incarnation has a new listener.

Once the coordinator has published everything, the listener's picture must equal the coordinator's index. Parents and
token ids are compared with the correct ones (content.py) as they arrive.
"""

from __future__ import annotations

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.messages import Publish
from kvcluster.core.messages.reports import BlocksStored
from tests.sim import content
from tests.sim.event_picture import EventPicture, indexed
from tests.sim.violation import require


class EventListener:
    """Receives the events of one coordinator."""

    def __init__(self) -> None:
        self._picture = EventPicture()
        self.behind = False
        """Whether an event was dropped since the last Republish began."""

    def lose(self, told: Publish) -> None:
        """The publisher drops the events that one step of the coordinator made for one namespace."""
        self._picture.clear(told.stream.namespace)
        self._picture.strict = False
        self.behind = True

    def hear(self, told: Publish) -> None:
        """Applies the events that one step of the coordinator made for one namespace."""
        picture = self._picture
        picture.hear(told)
        model = content.BY_SPACE[told.stream.namespace]
        for event in told.events:
            for block in event.hashes if isinstance(event, BlocksStored) else ():
                require(content.private_holder(block) is None, "a private block is published")
                parent, tokens = content.origin(model, block)
                require(picture.parents[block] == parent, "a block is published with a wrong parent")
                require(picture.tokens.get(block, tokens) == tokens, "a block is published with token ids of another")

    def republishing(self) -> None:
        """The coordinator begins to publish all blocks again, which makes up for all events dropped before."""
        self.behind = False

    def judge(self, coordinator: Coordinator) -> None:
        """Raises Violation if the picture differs from the index, once the coordinator has published everything."""
        if not self.behind and not coordinator.republishing:
            require(self._picture.blocks == indexed(coordinator), "a listener that got every KV event is wrong")
