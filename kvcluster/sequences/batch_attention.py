"""Attention of a batch of sequences over their pages, wherever these lie.

Each call finds the blocks that its queries see, borrows or loads the absent ones, and attends to all of them in place.
If the resident set has no room for all of them, they are streamed (streamed_attention.py). Pages that may be withdrawn
while they are read are checked afterwards, and the call is repeated if one was.

With a planner, shards attend to some of the blocks that they have (ship_plan.py, remote_attention.py), while this
process attends to the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple, TypeVar

from torch import Tensor

from kvcluster.attention import (
    PageLayout,
    Partial,
    QueryRow,
    Scoring,
    SubtreeRow,
    merge,
    merge_rows,
    partial,
    subtree_partials,
)
from kvcluster.attention.call import check_query
from kvcluster.attention.partial import check_sinks
from kvcluster.core.miss import Loss
from kvcluster.errors import CallerError, LostTokens, ResidentSetFull
from kvcluster.sequences.attend_planner import AttendPlanner
from kvcluster.sequences.batch_pages import BatchPages
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.layer_query import LayerQuery, layer_query
from kvcluster.sequences.remote_attention import Shipment
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.ship_plan import SeenBlocks, ShipPlan
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.statistics import AttendExplanation
from kvcluster.sequences.step_planner import StepPlanner
from kvcluster.sequences.streamed_attention import StreamedAttention, StreamedCall
from kvcluster.transfers.deadlines import remaining_ms
from kvcluster.transport.base import Deadline

R = TypeVar("R")

_TRIES = 4
"""How often a call is repeated because pages were withdrawn while they were read."""


class Scores(NamedTuple):
    """How scores are computed: see Sequence.attend."""

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    latent_values: int | None = None


class _Step(NamedTuple):
    """What all parts of one call need: its layer, the layout of pages, and its deadline."""

    layer: int
    layout: PageLayout
    scoring: Scoring
    threads: int
    deadline: Deadline


class BatchAttention:
    """The attention of these sequences, of one client, in this order. One thread at a time may use it."""

    def __init__(self, states: Sequence[SequenceState], resources: SequenceResources) -> None:
        self._states = states
        self._runner = resources.runner
        self._loads = resources.loads
        self._group = resources.group
        self._part = resources.part
        self._pages = BatchPages(states, resources)
        self._streamed = StreamedAttention(self._pages, resources)
        self._remote = resources.remote
        self._planner = StepPlanner(states, resources)
        self._failures: list[LostTokens] = []  # why loads of this call failed

    def attend(
        self,
        layer: int,
        query: Tensor,
        queries: Sequence[int],
        scores: Scores,
        threads: int,
        deadline: Deadline,
        planner: AttendPlanner | None = None,
    ) -> Tensor:
        """Returns `[tokens, heads, value_dim]` in the query's dtype: for each sequence the last `queries[i]` tokens
        that this layer has attend to all up to themselves. Raises as Sequence.attend."""
        self._runner.memory.check_layer(layer)
        self._check(query, queries)
        if type(threads) is not int or threads < 1:
            raise CallerError(f"threads is {threads!r}; expected a number from 1 on")
        layout = PageLayout(
            self._group, self._states[0].block_tokens, self._part.layers, self._part.heads, scores.latent_values
        )
        scoring = Scoring(layout.key.dim**-0.5 if scores.scale is None else scores.scale, scores.softcap, scores.window)
        check_query(query, layout, 0, layout.heads)
        if scores.sinks is not None:
            check_sinks(scores.sinks, query.shape[1])
        with self._runner.lock:
            if not self._runner.readers:
                self._loads.settle()  # what has arrived is found faster in the resident set
        rows = [
            self._row(layer, state, count, scores.window) for state, count in zip(self._states, queries, strict=True)
        ]
        step = _Step(layer, layout, scoring, threads, deadline)
        result = self._attended(rows, planner, query, step)
        out = result if scores.sinks is None else merge([result], sinks=scores.sinks)
        return out.out.to(query.dtype)

    def explain(self) -> AttendExplanation:
        """Returns where the spans of the last step that had a planner were attended to, and why."""
        return self._planner.explain()

    # ------------------------------------------------------------------------------------------- helpers

    def _attended(
        self, rows: Sequence[SeenBlocks], planner: AttendPlanner | None, query: Tensor, step: _Step
    ) -> Partial:
        """Attends as the planner chooses. If a shard fails, the step is planned again: what it was asked for is placed
        on another shard, or attended to here. If there is no room for the local part of a plan, everything is attended
        to here. Raises LostTokens if a shard has failed and there is no room here for what it had."""
        tries, lost, busy = 0, None, False
        sent = layer_query(step.layer, query, rows, step.layout, step.scoring) if planner is not None else None
        while True:
            plan = None
            if planner is not None and sent is not None and tries < _TRIES:
                plan = self._planner.plan(sent, rows, planner, step.deadline)
            try:
                if plan is not None and sent is not None and (plan.asks or plan.fetched):
                    with suppress(ResidentSetFull):
                        result, shipment = self._shipped(rows, plan, query, sent, step)
                        if result is not None:
                            return result
                        tries, busy = tries + 1, shipment.busy
                        lost = shipment.lost if lost is None else min(lost, shipment.lost or lost)
                        continue
                return self._whole(rows, query, step)
            except ResidentSetFull:
                if lost is not None:
                    why = f"the shard that had token {lost} of this sequence does not attend to it, and no other has it"
                    raise LostTokens(lost, f"{why}; there is no room to load it") from None
                if not busy or not step.deadline.remaining_s():
                    raise
                self._remote.pause()
                tries = 0

    def _whole(self, rows: Sequence[SeenBlocks], query: Tensor, step: _Step) -> Partial:
        """Attends to everything here."""

        def compute(made: Sequence[QueryRow]) -> Partial:
            scoring = step.scoring
            return partial(
                query,
                made,
                step.layout,
                step.layer,
                scale=scoring.scale,
                softcap=scoring.softcap,
                window=scoring.window,
                threads=step.threads,
            )

        return self._repeated(lambda: self._read_or_streamed(rows, query, step, compute), step.deadline)

    def _read_or_streamed(
        self,
        rows: Sequence[SeenBlocks],
        query: Tensor,
        step: _Step,
        compute: Callable[[Sequence[QueryRow]], Partial],
    ) -> Partial | None:
        """Attends. Streams what the resident set has no room for. Returns None if a page was withdrawn meanwhile."""
        time_ms = remaining_ms(step.deadline)
        blocks = self._needed(rows)
        if len(blocks) <= self._runner.machine.pages.capacity:
            with suppress(ResidentSetFull):
                return self._held(rows, blocks, {}, step, compute)
        self._wait(rows, step.layer, step.deadline)
        call = StreamedCall(rows, step.layout, step.layer, query, step.scoring, step.threads, time_ms)
        return self._streamed.attend(call, lambda: self._pages.ready(rows, step.layer))

    def _shipped(
        self, rows: Sequence[SeenBlocks], plan: ShipPlan, query: Tensor, sent: LayerQuery, step: _Step
    ) -> tuple[Partial | None, Shipment]:
        """Attends as planned. Returns None in place of the result if a shard failed; the next plan then differs."""
        left = [row._replace(depths=local.depths) for row, local in zip(rows, plan.local, strict=True)]

        def compute(made: Sequence[QueryRow]) -> list[list[Partial]]:
            mine = [
                SubtreeRow(range(row.visible - row.queries, row.visible), one.spans, local.subtrees)
                for row, one, local in zip(rows, made, plan.local, strict=True)
            ]
            return subtree_partials(query, mine, step.layout, step.layer, step.scoring, threads=step.threads)

        def attend_once() -> list[list[Partial]] | None:
            return self._held(left, self._needed(left), plan.fetched, step, compute)

        shipment = self._remote.ship(plan, sent, step.deadline)
        results = self._repeated(attend_once, step.deadline)
        if not shipment.wait(step.deadline):
            return None, shipment
        for row, partials in shipment.results.items():
            results[row] += partials
        with self._runner.lock:
            for row in shipment.results:
                self._states[row].loss = max(self._states[row].loss, shipment.loss)
        return merge_rows(results, step.layout.value_dim, query.shape[1]), shipment

    def _repeated(self, attempt: Callable[[], R | None], deadline: Deadline) -> R:
        """Calls `attempt` until it returns a result, and returns that. It returns None if pages were withdrawn
        meanwhile, or could not be loaded. Raises LostTokens if that happens too often, or the deadline has passed."""
        self._failures.clear()
        for _ in range(_TRIES):
            result = attempt()
            if result is not None:
                return result
            if not deadline.remaining_s():
                break
        why = "the pages of this sequence are taken away again and again while attention reads them"
        raise self._failures[-1] if self._failures else LostTokens(0, why)

    def _held(
        self,
        rows: Sequence[SeenBlocks],
        blocks: Sequence[SequenceBlock],
        fetched: Mapping[SequenceBlock, None],
        step: _Step,
        compute: Callable[[Sequence[QueryRow]], R],
    ) -> R | None:
        """Returns `compute` of the rows; these blocks stay where they are while it runs. Those of `fetched` are loaded,
        and not lent. Returns None if a page was withdrawn before or while it was read."""
        with self._runner.holding(blocks, step.deadline) if blocks else nullcontext():
            self._provide(rows, fetched, step.layer, step.deadline)
            with self._runner.reading(step.deadline):
                with self._runner.lock:
                    ready = not self._pages.missing(rows) and self._pages.ready(rows, step.layer)
                    made = self._pages.query_rows(step.layout, rows) if ready else []
                    loans = self._pages.loans()
                if not ready:
                    return None
                result = compute(made)
                return None if [loan for loan in loans if not self._loads.valid(loan)] else result

    def _needed(self, rows: Sequence[SeenBlocks]) -> list[SequenceBlock]:
        """Returns the blocks that have to be in the resident set together: all that the rows see, or none if none of
        them is absent."""
        with self._runner.lock:
            missing = self._pages.missing(rows)
        return self._blocks(rows) if missing else []

    def _check(self, query: Tensor, queries: Sequence[int]) -> None:
        if len(queries) != len(self._states) or any(type(count) is not int or count < 0 for count in queries):
            raise CallerError(
                f"got {list(queries)} query tokens; expected a number for each of {len(self._states)} rows"
            )
        shape = getattr(query, "shape", None)
        if shape is None or shape[:1] != (sum(queries),):
            given = type(query).__name__ if shape is None else list(shape)
            raise CallerError(f"the query is {given}; expected [{sum(queries)}, heads, head_dim]")

    def _row(self, layer: int, state: SequenceState, queries: int, window: int | None) -> SeenBlocks:
        if state.closed:
            raise CallerError("this sequence is closed")
        visible = state.length + (state.step if layer in state.appended else 0)
        if queries > visible:
            raise CallerError(f"{queries} tokens attend, and layer {layer} has {visible}: append them first")
        first = 0 if window is None else max(0, visible - queries - window + 1) // state.block_tokens
        stop, dropped = state.blocks_for(visible) if queries else first, state.dropped
        depths = range(first, min(stop, dropped.start)), range(max(first, dropped.stop), stop)
        return SeenBlocks(state, tuple(each for each in depths if each), visible, queries)

    def _provide(
        self, rows: Sequence[SeenBlocks], fetched: Mapping[SequenceBlock, None], layer: int, deadline: Deadline
    ) -> None:
        """Borrows absent blocks or begins to load them, and waits until this layer of the loads under way has
        arrived."""
        with self._runner.lock:
            missing = self._pages.missing(rows)
        if missing:
            loss = Loss.EXACT
            for lend in (False, True):
                mine = [block for block in missing if (block in fetched) != lend]
                loss = max(loss, self._loads.provide(mine, deadline, lend=lend)) if mine else loss
            with self._runner.lock:
                self._pages.missing(rows)
                self._pages.add_loss(loss)
        self._wait(rows, layer, deadline)

    def _wait(self, rows: Sequence[SeenBlocks], layer: int, deadline: Deadline) -> None:
        """Waits until this layer has arrived of all blocks that the rows see and that are being loaded into the
        resident set."""
        with self._runner.lock:
            fetches = self._pages.fetches(rows)
        for fetch in fetches:
            if not fetch.transfer.wait_layer(self._pages.model_layer(layer), remaining_ms(deadline)):
                why = self._loads.finish(fetch, deadline)
                self._failures += [why] if why is not None else []

    def _blocks(self, rows: Sequence[SeenBlocks]) -> list[SequenceBlock]:
        found: dict[SequenceBlock, None] = {}
        for state, row in zip(self._states, rows, strict=True):
            for depths in row.depths:
                found.update(dict.fromkeys(state.blocks[depths.start : depths.stop]))
        return [*found]
