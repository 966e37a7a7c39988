"""The choice that attention makes for each span of a step: read it here, bring it here, or send the query to it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

FEW_TOKENS = 8
"""Up to this many new tokens, sending queries to shards takes less time than loading a context of 32,768 tokens, over
all links that were measured but one: the limit was 9 to 37 tokens there; over that one it never did
(docs/measurements.md)."""


class SpanChoice(Enum):
    """Where a span is attended to.

        choice = kvcluster.SpanChoice.SHIP

    A planner returns one for each span of a step (AttendPlanner).
    """

    LOCAL = "local"  # where its pages are at hand: in the resident set, lent by a shard of this host, or else loaded
    FETCH = "fetch"  # in the resident set, into which it is loaded and where it stays
    SHIP = "ship"  # at the shard that has its pages: the query goes there, and results come back


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

        class FetchAllOrNothing:
            def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
                ship, fetch = kvcluster.SpanChoice.SHIP, kvcluster.SpanChoice.FETCH
                away = sum(span.absent_bytes for span in step.spans)
                return [fetch if away <= step.room_bytes else ship for _ in step.spans]

    `spans` are ordered by their first positions. `queries` are the query tokens of each row. A query token of a layer
    has `query_bytes`, and a result of it `result_bytes`. The resident set has room for `room_bytes` of pages beside
    those that this batch has there.
    """

    spans: tuple[SpanFacts, ...]
    layers: int
    queries: tuple[int, ...]
    query_bytes: int
    result_bytes: int
    room_bytes: int


class AttendPlanner(Protocol):
    """Chooses for each span of a step that a shard has whole.

        class ShipDecodeSteps:
            def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
                ship, fetch = kvcluster.SpanChoice.SHIP, kvcluster.SpanChoice.FETCH
                return [ship if span.queries <= 8 else fetch for span in step.spans]

    It is called once a step, and again when a page has moved meanwhile; its choice holds for all layers. If a shard
    fails to attend to its span, the span is loaded.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns where each span is attended to."""


class ShipAbsent:
    """Ships every span that is not in the resident set.

        with client.sequence(token_ids, prefetch=False) as sequence:
            out = sequence.attend(0, query, planner=kvcluster.ShipAbsent())

    For a context that is asked one question, or larger than memory: up to FEW_TOKENS new tokens take less time so, and
    more take longer than after loading it. Without a planner, everything is loaded.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns SHIP, or LOCAL for what is in the resident set."""
        return [SpanChoice.LOCAL if span.resident else SpanChoice.SHIP for span in step.spans]


class FetchWhatFits:
    """Fetches spans while the resident set has room for them, and keeps them there. Of the others it ships those whose
    queries and results are fewer bytes than their pages; the rest is streamed.

        with client.sequence(token_ids, prefetch=False) as sequence:
            out = sequence.attend(0, query, planner=kvcluster.FetchWhatFits())

    For a generation of many tokens over a context that may be larger than the resident set.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns LOCAL for what is at hand, FETCH for what fits, from the first span on, and else SHIP or LOCAL."""
        room, choices = step.room_bytes, list[SpanChoice]()
        for span in step.spans:
            if span.resident or span.lent or span.fetching:
                choices.append(SpanChoice.LOCAL)
            elif span.absent_bytes <= room:
                room -= span.absent_bytes
                choices.append(SpanChoice.FETCH)
            else:
                sent = span.queries * (step.query_bytes + step.result_bytes * span.results)
                choices.append(SpanChoice.SHIP if sent * step.layers < span.absent_bytes else SpanChoice.LOCAL)
        return choices
