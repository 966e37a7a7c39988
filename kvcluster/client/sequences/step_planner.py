"""Has a planner choose where the spans of a step are attended to, once for all layers, and remembers why.

It gathers what the planner is told (StepFacts): where blocks lie, what of them is here or on its way, how much room is
left, and what was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from kvcluster.client.sequences.attend_explanation import AttendExplanation, SpanPlace
from kvcluster.client.sequences.attend_planner import AttendPlanner, SpanChoice, SpanFacts, StepFacts
from kvcluster.client.sequences.resources import SequenceResources
from kvcluster.client.sequences.ship_plan import (
    SeenBlocks,
    ShardSpan,
    ShipPlan,
    shard_spans,
    ship_plan,
    shippable_cuts,
)
from kvcluster.client.sequences.shipping_account import ShippingAccount
from kvcluster.client.sequences.state import SequenceState
from kvcluster.errors import CallerError
from kvcluster.transport.base import Deadline

_RESERVE = 16
"""1/16 of the resident set is not counted as room: sequences grow."""


class StepPlanner:
    """The plans of one batch. One thread at a time may use it."""

    def __init__(self, states: Sequence[SequenceState], resources: SequenceResources) -> None:
        self.account = ShippingAccount()
        self._states = states
        self._runner = resources.runner
        self._loads = resources.loads
        self._remote = resources.remote
        self._layers = resources.part.layers
        self._key: Hashable = None
        self._plan = ShipPlan({}, [])
        self._facts: StepFacts | None = None
        self._choices: Sequence[SpanChoice] = ()
        self._why = ""

    def plan(
        self,
        rows: Sequence[SeenBlocks],
        planner: AttendPlanner,
        query_bytes: int,
        result_bytes: int,
        deadline: Deadline,
    ) -> ShipPlan:
        """Returns the plan of this step: that of the last call if nothing has changed. A query token of a layer has
        `query_bytes`, and each result of it `result_bytes`. Raises CallerError if the planner does not choose for each
        span."""
        places = self._remote.places
        with self._runner.lock:
            if not self._runner.readers:
                self._loads.settle()
            key = (planner, query_bytes, *rows, *(state.table.version for state in self._states))
            if self._key == (places.version, *key):
                return self._plan
            cuts = [list(shippable_cuts(row)) for row in rows]
        places.locate(itertools.chain(*cuts), deadline)
        version = places.version
        with self._runner.lock:
            spans = shard_spans(cuts, places.place_of)
            facts = self._told(rows, spans, query_bytes, result_bytes)
        why = getattr(planner, "explain", None)
        self._why = str(why(facts)) if why is not None and facts.spans else ""
        choices = planner.choose(facts)
        if len(choices) != len(spans):
            raise CallerError(f"{type(planner).__name__} chose for {len(choices)} spans; this step has {len(spans)}")
        self._key, self._plan = (version, *key), ship_plan(rows, spans, choices)
        self._facts, self._choices = facts, choices
        self._remote.count_choices(choices)
        return self._plan

    def explain(self) -> AttendExplanation:
        """Returns where the spans of the last step were attended to, and why."""
        spans = () if self._facts is None else self._facts.spans
        places = [_place(span, choice) for span, choice in zip(spans, self._choices, strict=True)]
        return AttendExplanation(tuple(places), self._why)

    # ------------------------------------------------------------------------------------------- helpers

    def _told(
        self, rows: Sequence[SeenBlocks], spans: Sequence[ShardSpan], query_bytes: int, result_bytes: int
    ) -> StepFacts:
        """Returns what the planner is told. Called in the lock."""
        absent, queries = self._loads.absent, tuple(row.queries for row in rows)
        page_bytes = self._runner.machine.pages.page_bytes
        facts = [
            span.facts(
                queries,
                page_bytes,
                fetching=any(block in absent.fetched for block in span.blocks),
                lent=any(block in absent.lent for block in span.blocks) or self._remote.lends(span.shard),
            )
            for span in spans
        ]
        room = self._room_bytes() if any(fact.absent_bytes for fact in facts) else 0
        speeds = self._remote.speeds
        speeds.link = self._loads.link()
        return StepFacts(tuple(facts), self._layers, queries, query_bytes, result_bytes, room, speeds, self.account)

    def _room_bytes(self) -> int:
        """Returns the bytes that can be taken without a page of this batch."""
        pages = self._runner.machine.pages
        blocks = dict.fromkeys(block for state in self._states for block in state.blocks)
        mine = sum(pages.may_go(block) for block in blocks) * pages.page_bytes
        return max(0, pages.available_bytes - mine - pages.capacity * pages.page_bytes // _RESERVE)


def _place(span: SpanFacts, choice: SpanChoice) -> SpanPlace:
    return SpanPlace(span.start, span.stop, span.rows, span.shard, choice)
