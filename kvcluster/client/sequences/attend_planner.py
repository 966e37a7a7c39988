"""The choice that attention makes for each span of a step: read it here, bring it here, or send the query to it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvcluster.client.sequences.attend_speeds import AttendSpeeds
from kvcluster.client.sequences.shipping_account import ShippingAccount


class SpanChoice(Enum):
    """Where a span is attended to.

        choice = kvcluster.SpanChoice.SHIP

    A planner returns one for each span of a step (AttendPlanner).
    """

    LOCAL = "local"  # where its pages are at hand: in the resident set, lent by a shard of this host, or else loaded
    FETCH = "fetch"  # in the resident set, into which it is loaded and where it stays
    SHIP = "ship"  # at the shard that has its pages: the query goes there, and results come back
    SHIP_AND_FETCH = "ship_and_fetch"  # as SHIP, while it is loaded into the resident set for the steps that follow


class SpanFacts(NamedTuple):
    """What is known of a span when it is chosen: positions `start` to `stop`, whole cuts, all of which one shard has.

        span = kvcluster.SpanFacts(0, 512, (0,), 1, results=1, absent_bytes=65536, shard="shard-0", host="node-1")

    `rows` are the rows of the batch that attend to it, with `queries` query tokens in all. A query token that is sent
    to it brings back `results` results. `absent_bytes` are those of its pages, of all layers, that are not in the
    resident set. `shard` is the name of the shard that has it, `host` where that runs. It is `fetching` while these
    pages are being loaded already, and `lent` if the shard lends pages to this process, which runs on its host.
    """

    start: int
    stop: int
    rows: tuple[int, ...]
    queries: int
    results: int
    absent_bytes: int
    shard: str
    host: str
    fetching: bool = False
    lent: bool = False

    @property
    def resident(self) -> bool:
        """Whether all of its pages are in the resident set."""
        return not self.absent_bytes

    @property
    def tokens(self) -> int:
        """Its positions."""
        return self.stop - self.start


class StepFacts(NamedTuple):
    """What is known of a step when its spans are chosen.

        class ShipWhatHasNoRoom:
            def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
                ship, fetch = kvcluster.SpanChoice.SHIP, kvcluster.SpanChoice.FETCH
                away = sum(span.absent_bytes for span in step.spans)
                return [fetch if away <= step.room_bytes else ship for _ in step.spans]

    `spans` are ordered by their first positions. Of the `layers`, the last `layers_left` are still to be attended to:
    all, unless a step is planned again. `queries` are the query tokens of each row. A query token of a layer has
    `query_bytes`, and a result of it `result_bytes`. The resident set has room for `room_bytes` of pages beside those
    that this batch has there. `speeds` are what was measured so far, and `account` is what shipping has cost this
    batch.
    """

    spans: tuple[SpanFacts, ...]
    layers: int
    layers_left: int
    queries: tuple[int, ...]
    query_bytes: int
    result_bytes: int
    room_bytes: int
    speeds: AttendSpeeds
    account: ShippingAccount


class AttendPlanner(Protocol):
    """Chooses for each span of a step that a shard has whole.

        class ShipDecodeSteps:
            def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
                ship, fetch = kvcluster.SpanChoice.SHIP, kvcluster.SpanChoice.FETCH
                return [ship if span.queries <= 8 else fetch for span in step.spans]

    It is asked once a step, and again when a page has moved meanwhile, or when the first message of this client has
    come back; its choice serves all layers. A span that the shard does not attend to after all is loaded.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns where each span is attended to."""


class ShipAbsent:
    """Ships every span that is not in the resident set.

        with client.sequence(token_ids) as sequence:
            out = sequence.attend(0, query, planner=kvcluster.ShipAbsent())

    The plainest planner: it compares no costs.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns SHIP, or LOCAL for what is in the resident set."""
        return [SpanChoice.LOCAL if span.resident else SpanChoice.SHIP for span in step.spans]
