"""The choice that attention makes for each span of a sequence: read it here, bring it here, or send the query to it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol


class SpanChoice(Enum):
    """Where a span is attended to.

        choice = kvcluster.SpanChoice.SHIP

    A planner returns one for each span (AttendPlanner).
    """

    LOCAL = "local"  # where its pages are at hand: in the resident set, lent by a shard of this host, or else loaded
    FETCH = "fetch"  # in the resident set, into which it is loaded and where it stays
    SHIP = "ship"  # at the shard that has its pages: the query goes there, and results come back


class SpanFacts(NamedTuple):
    """What is known of a span when it is chosen: positions `start` to `stop`, whole cuts, all of which one shard has.

        span = kvcluster.SpanFacts(0, 512, (0,), queries=1, resident=False, shard="shard-0", host="node-1")

    `rows` are the rows of the batch that attend to it, with `queries` query tokens in all. `resident`: whether all of
    its pages are in the resident set. `shard` is the name of the shard, `host` where it runs.
    """

    start: int
    stop: int
    rows: tuple[int, ...]
    queries: int
    resident: bool
    shard: str
    host: str


class AttendPlanner(Protocol):
    """Chooses for each span of a step that a shard has whole.

        class ShipDecodeSteps:
            def choose(self, span: kvcluster.SpanFacts) -> kvcluster.SpanChoice:
                few = span.queries <= 8
                return kvcluster.SpanChoice.SHIP if few else kvcluster.SpanChoice.FETCH

    It is asked again when a sequence or a page has changed, and its choice serves all layers until then. A span that
    the shard does not attend to after all is loaded.
    """

    def choose(self, span: SpanFacts) -> SpanChoice:
        """Returns where this span is attended to."""


class ShipAbsent:
    """Ships every span that is not in the resident set.

        sequence = client.sequence(token_ids)
        out = sequence.attend(0, query, planner=kvcluster.ShipAbsent())

    The plainest planner: it compares no costs.
    """

    def choose(self, span: SpanFacts) -> SpanChoice:
        """Returns SHIP, or LOCAL for what is in the resident set."""
        return SpanChoice.LOCAL if span.resident else SpanChoice.SHIP
