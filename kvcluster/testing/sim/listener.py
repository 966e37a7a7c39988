"""A subscriber to the KV events of one coordinator incarnation, and its publisher, which may drop some.

It models what runtime/event_publisher.py promises. A publisher that drops an event voids its stream: nothing that was
told of that namespace counts any more, and the coordinator is asked to tell all blocks again (`Retell`). A coordinator
that starts has a new publisher, so each incarnation has a new listener.

Once the coordinator has told everything that it has to tell, the listener's picture must equal the coordinator's index.
Parents and token ids are judged against the right ones (content.py) as they are told.
"""

from __future__ import annotations

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.messages import Publish
from kvcluster.core.messages.events import BlocksStored
from kvcluster.testing.event_picture import EventPicture, indexed
from kvcluster.testing.sim import content
from kvcluster.testing.sim.promises import hold


class EventListener:
    """Hears the events of one coordinator."""

    def __init__(self) -> None:
        self._picture = EventPicture()
        self.behind = False
        """Was an event dropped since the last Retell began?"""

    def lose(self, told: Publish) -> None:
        """The publisher drops what one step of the coordinator has to say of one namespace."""
        self._picture.clear(told.stream.namespace)
        self._picture.strict = False
        self.behind = True

    def hear(self, told: Publish) -> None:
        """Takes in what one step of the coordinator has to say of one namespace."""
        picture = self._picture
        picture.hear(told)
        model = content.BY_SPACE[told.stream.namespace]
        for event in told.events:
            for block in event.hashes if isinstance(event, BlocksStored) else ():
                parent, tokens = content.origin(model, block)
                hold(picture.parents[block] == parent, "a block is told with another parent than its own")
                hold(picture.tokens.get(block, tokens) == tokens, "a block is told with token ids of another")

    def retelling(self) -> None:
        """The coordinator begins to tell all blocks again, which makes good what was dropped before."""
        self.behind = False

    def judge(self, coordinator: Coordinator) -> None:
        """Raises Violation where the picture is not what the index says, once the coordinator has told everything."""
        if not self.behind and not coordinator.retelling:
            hold(self._picture.blocks == indexed(coordinator), "a listener that heard every KV event is wrong")
