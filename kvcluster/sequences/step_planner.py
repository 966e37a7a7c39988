"""Has a planner choose where the spans of a step are attended to, once for all layers, and remembers what it chose.

For each step it makes the planner's StepFacts: where blocks lie, which of them are in this process or on their way to
it, and how many bytes of pages are free.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvcluster.attention.span_results import result_bytes
from kvcluster.core.groups import DTYPE_BYTES
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.errors import CallerError
from kvcluster.sequences.attend_planner import AttendPlanner, SpanChoice, SpanFacts, StepFacts
from kvcluster.sequences.layer_query import LayerQuery
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.ship_plan import (
    SeenBlocks,
    ShardSpan,
    ShipPlan,
    shard_spans,
    ship_plan,
    shippable_cuts,
)
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.statistics import AttendExplanation, SpanPlace
from kvcluster.transport.base import Deadline

_RESERVE = 16
"""1/16 of the resident set is not counted as room: sequences grow."""


class _KnownSpans(NamedTuple):
    """The spans of a batch and the facts of each. They hold as long as `key`, which changes when a page moves, is the
    same."""

    key: Hashable
    spans: tuple[ShardSpan, ...]
    facts: tuple[SpanFacts, ...]
    room_bytes: int


class StepPlanner:
    """The plans of one batch. One thread at a time may use it."""

    def __init__(self, states: Sequence[SequenceState], resources: SequenceResources) -> None:
        self._states = states
        self._runner = resources.runner
        self._loads = resources.loads
        self._remote = resources.remote
        self._layers = resources.part.layers
        self._key: Hashable = None
        self._planner: AttendPlanner | None = None
        self._plan = ShipPlan({}, [])
        self._known = _KnownSpans(None, (), (), 0)
        self._step: StepFacts | None = None  # the facts of the last plan; then the choice for each of its spans
        self._choices: Sequence[SpanChoice] = ()

    def plan(
        self, query: LayerQuery, rows: Sequence[SeenBlocks], planner: AttendPlanner, deadline: Deadline
    ) -> ShipPlan:
        """Returns the plan of this step: that of the last call if nothing has changed. Raises CallerError if the
        planner does not choose for each span."""
        known = self._spans(rows, deadline)
        seen = ((row.depths, row.visible, row.queries) for row in rows)
        query_bytes = query.heads * query.dim * DTYPE_BYTES[query.dtype]
        key = (query_bytes, known.key, *seen)
        if self._key == key and self._planner is planner:
            return self._plan
        facts = tuple(
            fact._replace(lent=True) if not fact.resident and self._remote.lends(span.shard) else fact
            for span, fact in zip(known.spans, known.facts, strict=True)
        )
        queries = tuple(row.queries for row in rows)
        sizes = query_bytes, result_bytes(1, query.heads, query.value_dim)
        step = StepFacts(facts, self._layers, queries, *sizes, known.room_bytes)
        choices = planner.choose(step)
        if len(choices) != len(facts):
            raise CallerError(f"{type(planner).__name__} chose for {len(choices)} spans; this step has {len(facts)}")
        self._key, self._planner, self._plan = key, planner, ship_plan(rows, known.spans, choices)
        self._step, self._choices = step, choices
        self._remote.counter.chose(choices)
        return self._plan

    def explain(self) -> AttendExplanation:
        """Returns where the spans of the last step were attended to, and why: the planner is asked now."""
        if self._step is None:
            return AttendExplanation((), "")
        explain = getattr(self._planner, "explain", None)
        why = str(explain(self._step)) if explain is not None and self._step.spans else ""
        return AttendExplanation(tuple(map(_place, self._step.spans, self._choices)), why)

    # ------------------------------------------------------------------------------------------- helpers

    def _spans(self, rows: Sequence[SeenBlocks], deadline: Deadline) -> _KnownSpans:
        """Returns the spans of these rows: those of the last step if no page has moved and no cut was filled. What has
        been stored meanwhile is noticed with the next block."""
        places, absent = self._remote.places, self._loads.absent
        with self._runner.lock:
            moved = absent.generation, len(absent.fetches), len(absent.lent)
            key = (*moved, *(state.table.version for state in self._states), *map(_cuts_key, rows))
            if self._known.key == (places.version, *key):
                return self._known
            cuts = [list(shippable_cuts(row)) for row in rows]
        places.locate(itertools.chain(*cuts), deadline)
        version = places.version
        with self._runner.lock:
            spans = tuple(shard_spans(cuts, places.place_of))
            facts = self._facts(rows, spans)
            room = self._room_bytes() if any(fact.absent_bytes for fact in facts) else 0
        self._known = _KnownSpans((version, *key), spans, facts, room)
        return self._known

    def _facts(self, rows: Sequence[SeenBlocks], spans: Sequence[ShardSpan]) -> tuple[SpanFacts, ...]:
        """Returns the facts of each span that a planner gets. Called in the lock."""
        absent, queries = self._loads.absent, [row.queries for row in rows]
        page_bytes = self._runner.machine.pages.page_bytes
        return tuple(
            span.facts(
                queries,
                page_bytes,
                fetching=any(map(self._loads.fetching, span.blocks)),
                lent=any(block in absent.lent for block in span.blocks),
            )
            for span in spans
        )

    def _room_bytes(self) -> int:
        """Returns the bytes that can be taken without a page of this batch. Called in the lock."""
        pages = self._runner.machine.pages
        blocks = dict.fromkeys(block for state in self._states for block in state.blocks)
        mine = sum(pages.may_go(block) for block in blocks) * pages.page_bytes
        return max(0, pages.available_bytes - mine - pages.capacity * pages.page_bytes // _RESERVE)


def _cuts_key(row: SeenBlocks) -> Hashable:
    """Returns what the cuts of a row depend on, beside its table."""
    return row.depths[0].start if row.depths else 0, row.state.dropped, row.visible // CUT_TOKENS, row.queries


def _place(span: SpanFacts, choice: SpanChoice) -> SpanPlace:
    return SpanPlace(span.start, span.stop, span.rows, span.shard, choice)
