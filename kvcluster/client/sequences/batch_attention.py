"""Attention of a batch of sequences over their pages, wherever these lie.

Each call finds the blocks that its queries see, has absent ones lent or loaded, and attends to all of them in place.
If the resident set has no room for all that it sees, they are streamed (streamed_attention.py).
Spans are made again only when a table has changed or a sequence has grown: the layers of a step share them. Whatever
may be taken away while it is read is asked for afterwards, and the call is repeated if it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress

from torch import Tensor

from kvcluster.attention import PageLayout, PageSpan, Partial, QueryRow, merge, partial
from kvcluster.client.sequences.absent_blocks import BlockFetch
from kvcluster.client.sequences.batch_row import BatchRow, Scores
from kvcluster.client.sequences.blocks import SequenceBlock
from kvcluster.client.sequences.page_map import PageMap
from kvcluster.client.sequences.resources import SequenceResources
from kvcluster.client.sequences.shared_spans import RowBlocks, shared_spans
from kvcluster.client.sequences.state import SequenceState
from kvcluster.client.sequences.streamed_attention import StreamedAttention, StreamedCall
from kvcluster.errors import CallerError, LostTokens, ResidentSetFull
from kvcluster.transport.base import Deadline

_TRIES = 4
"""How often a call is repeated because pages were taken away while they were read."""


class BatchAttention:
    """The attention of these sequences, of one client, in this order. One thread at a time may use it."""

    def __init__(self, states: Sequence[SequenceState], resources: SequenceResources) -> None:
        self._states = states
        self._runner = resources.runner
        self._loads = resources.loads
        self._group = resources.group
        self._part = resources.part
        self._maps = [PageMap(state, self._runner.memory, self._loads.absent) for state in states]
        self._streamed = StreamedAttention(states, self._maps, resources)
        self._made: tuple[Hashable, list[QueryRow]] = ((), [])

    def attend(
        self, layer: int, query: Tensor, queries: Sequence[int], scores: Scores, threads: int, deadline: Deadline
    ) -> Tensor:
        """Returns `[tokens, heads, value_dim]` in the query's dtype: for each sequence the last `queries[i]` tokens
        that this layer has attend to all up to themselves. Raises as Sequence.attend."""
        self._runner.memory.check_layer(layer)
        self._check(query, queries)
        rows = [
            self._row(layer, state, count, scores.window) for state, count in zip(self._states, queries, strict=True)
        ]
        layout = PageLayout(
            self._group, self._states[0].block_tokens, self._part.layers, self._part.heads, scores.latent_values
        )
        for _ in range(_TRIES):
            result = self._once(rows, layout, layer, query, scores, threads, deadline)
            if result is not None:
                out = result if scores.sinks is None else merge([result], sinks=scores.sinks)
                return out.out.to(query.dtype)
        raise LostTokens(0, "the pages of this sequence are taken away again and again while attention reads them")

    # ------------------------------------------------------------------------------------------- helpers

    def _once(
        self,
        rows: Sequence[BatchRow],
        layout: PageLayout,
        layer: int,
        query: Tensor,
        scores: Scores,
        threads: int,
        deadline: Deadline,
    ) -> Partial | None:
        """Attends. Returns None if a page was taken away meanwhile. What the resident set has no room for is
        streamed."""
        time_ms = deadline.remaining_s() * 1e3
        with self._runner.lock:
            missing = self._missing(rows)
        blocks = self._blocks(rows) if missing else []
        if len(blocks) <= self._runner.machine.pages.capacity:
            with suppress(ResidentSetFull), self._runner.holding(blocks) if blocks else nullcontext():
                return self._read(rows, layout, layer, query, scores, threads, deadline)
        self._wait(layer, deadline)
        return self._streamed.attend(
            StreamedCall(rows, layout, layer, query, scores, threads, time_ms), lambda: self._ready(layer)
        )

    def _read(
        self,
        rows: Sequence[BatchRow],
        layout: PageLayout,
        layer: int,
        query: Tensor,
        scores: Scores,
        threads: int,
        deadline: Deadline,
    ) -> Partial | None:
        """Attends. Returns None if a page was taken away before or while it was read."""
        self._provide(rows, layer, deadline)
        with self._runner.reading():
            with self._runner.lock:
                ready = not self._missing(rows) and self._ready(layer)
                made = self._query_rows(layout, rows, scores.window) if ready else []
                loans = {loan: None for each in self._maps for loan in each.loans}
            if not ready:
                return None
            result = partial(
                query,
                made,
                layout,
                layer,
                scale=scores.scale,
                softcap=scores.softcap,
                window=scores.window,
                threads=threads,
            )
        return None if [loan for loan in loans if not self._loads.valid(loan)] else result

    def _check(self, query: Tensor, queries: Sequence[int]) -> None:
        if len(queries) != len(self._states) or any(type(count) is not int or count < 0 for count in queries):
            raise CallerError(
                f"got {list(queries)} query tokens; expected a number for each of {len(self._states)} rows"
            )
        shape = getattr(query, "shape", None)
        if shape is None or shape[:1] != (sum(queries),):
            given = type(query).__name__ if shape is None else list(shape)
            raise CallerError(f"the query is {given}; expected [{sum(queries)}, heads, head_dim]")

    def _row(self, layer: int, state: SequenceState, queries: int, window: int | None) -> BatchRow:
        if state.closed:
            raise CallerError("this sequence is closed")
        visible = state.length + (state.step if layer in state.appended else 0)
        if queries > visible:
            raise CallerError(f"{queries} tokens attend, and layer {layer} has {visible}: append them first")
        first = 0 if window is None else max(0, visible - queries - window + 1) // state.block_tokens
        stop, dropped = state.blocks_for(visible) if queries else first, state.dropped
        depths = range(first, min(stop, dropped.start)), range(max(first, dropped.stop), stop)
        return BatchRow(tuple(each for each in depths if each), visible, queries)

    def _provide(self, rows: Sequence[BatchRow], layer: int, deadline: Deadline) -> None:
        """Has absent blocks lent or loaded, and waits until what is being loaded has this layer."""
        with self._runner.lock:
            missing = self._missing(rows)
        if missing:
            loss = self._loads.provide(missing, deadline)
            with self._runner.lock:
                self._missing(rows)
                for state in self._states:
                    state.loss = max(state.loss, loss)
        self._wait(layer, deadline)

    def _wait(self, layer: int, deadline: Deadline) -> None:
        """Waits until what is being loaded into the resident set has this layer."""
        with self._runner.lock:
            fetches = self._fetches()
        for fetch in fetches:
            if not fetch.transfer.wait_layer(self._model_layer(layer), deadline.remaining_s() * 1e3):
                self._loads.finish(fetch, deadline)

    def _missing(self, rows: Sequence[BatchRow]) -> list[SequenceBlock]:
        found: dict[SequenceBlock, None] = {}
        for pages, row in zip(self._maps, rows, strict=True):
            for depths in row.depths:
                found.update(dict.fromkeys(pages.missing(depths.start, depths.stop)))
        return [*found]

    def _blocks(self, rows: Sequence[BatchRow]) -> list[SequenceBlock]:
        found: dict[SequenceBlock, None] = {}
        for state, row in zip(self._states, rows, strict=True):
            for depths in row.depths:
                found.update(dict.fromkeys(state.blocks[depths.start : depths.stop]))
        return [*found]

    def _fetches(self) -> list[BlockFetch]:
        return [*{fetch: None for pages in self._maps for fetch in pages.fetches}]

    def _ready(self, layer: int) -> bool:
        return all(fetch.transfer.layer_done(self._model_layer(layer)) for fetch in self._fetches())

    def _model_layer(self, layer: int) -> int:
        return self._group.layers[self._part.layer_start + layer]

    def _query_rows(self, layout: PageLayout, rows: Sequence[BatchRow], window: int | None) -> list[QueryRow]:
        """Returns the rows of the call: those of the last one if nothing has changed."""
        key = (layout, window, *rows, *(pages.version for pages in self._maps))
        if self._made[0] != key:
            each = [
                RowBlocks(at, self._states[at].blocks, depths.start, depths.stop)
                for at, row in enumerate(rows)
                for depths in row.depths
            ]
            spans: list[list[PageSpan]] = [[] for _ in rows]
            for shared in shared_spans(each):
                tokens = max(rows[row].visible for row in shared.rows)
                span = self._maps[shared.rows[0]].span(layout, shared.first, shared.stop, tokens)
                for row in shared.rows:
                    spans[row].append(span)
            made = [QueryRow(range(row.visible - row.queries, row.visible), spans[at]) for at, row in enumerate(rows)]
            self._made = key, made
        return self._made[1]
