"""Where the pages lie that the rows of a batch attend to. Used under the lock of the sequences; the rows that it
returns are read without it.

The layers of a step see the same pages, so rows are made again only when a table has changed or a sequence has grown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from kvcluster.attention import PageLayout, PageSpan, QueryRow
from kvcluster.core.miss import Loss
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.missing_tokens import BlockFetch
from kvcluster.sequences.page_map import PageMap, groups_of_same_pages
from kvcluster.sequences.remote_spans import RowBlocks, SharedSpan, shared_spans
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.ship_plan import SeenBlocks
from kvcluster.sequences.state import SequenceState
from kvcluster.transfers.zero_copy import BorrowedBlocks


class BatchPages:
    """The pages of these sequences. `rows` of a call are what each of them sees, in their order."""

    def __init__(self, states: Sequence[SequenceState], resources: SequenceResources) -> None:
        self.states = states
        self._group = resources.group
        self._part = resources.part
        self._maps = [PageMap(state, resources.runner.memory, resources.loads.absent) for state in states]
        self._made: tuple[Hashable, list[QueryRow]] = ((), [])

    def missing(self, rows: Sequence[SeenBlocks]) -> list[SequenceBlock]:
        """Returns the blocks that the rows see and that have no page, each once."""
        found: dict[SequenceBlock, None] = {}
        for pages, row in zip(self._maps, rows, strict=True):
            for depths in row.depths or (range(0),):  # also brings the loans up to date
                found.update(dict.fromkeys(pages.missing(depths.start, depths.stop)))
        return [*found]

    def fetches(self, rows: Sequence[SeenBlocks]) -> list[BlockFetch]:
        """Returns the loads under way, into the resident set, of blocks that the rows see."""
        found: dict[BlockFetch, None] = {}
        for pages, row in zip(self._maps, rows, strict=True):
            found.update(dict.fromkeys(pages.fetches(row.depths)))
        return [*found]

    def model_layer(self, layer: int) -> int:
        """Returns the number in the model of a layer of the pages."""
        return self._group.layers[self._part.layer_start + layer]

    def ready(self, rows: Sequence[SeenBlocks], layer: int) -> bool:
        """Whether this layer has arrived in the loads under way."""
        return all(fetch.transfer.layer_done(self.model_layer(layer)) for fetch in self.fetches(rows))

    def loans(self) -> list[BorrowedBlocks]:
        """Returns the loans of the pages that are borrowed."""
        return [*{loan: None for pages in self._maps for loan in pages.loans}]

    def add_loss(self, loss: Loss) -> None:
        """Records the loss of what the sequences attend to: what they compute from it has lost as much."""
        for state in self.states:
            state.loss = max(state.loss, loss)

    def query_rows(self, layout: PageLayout, rows: Sequence[SeenBlocks]) -> list[QueryRow]:
        """Returns the rows as attention takes them. No block that they see may be missing."""
        key = (layout, *rows, *(pages.version for pages in self._maps))
        if self._made[0] != key:
            depths = range(max(len(state.blocks) for state in self.states))
            self._made = key, self.query_rows_within(layout, rows, range(len(rows)), depths, None)
        return self._made[1]

    def query_rows_within(
        self,
        layout: PageLayout,
        rows: Sequence[SeenBlocks],
        numbers: range,
        depths: range,
        places: Mapping[SequenceBlock, int] | None,
    ) -> list[QueryRow]:
        """As `query_rows`, of the rows with these numbers, and of the blocks of these depths alone. Missing blocks are
        read raw at the addresses `places`."""
        ranges = [
            RowBlocks(at, self.states[at].blocks, max(depths.start, seen.start), min(depths.stop, seen.stop))
            for at in numbers
            for seen in rows[at].depths
            if max(depths.start, seen.start) < min(depths.stop, seen.stop)
        ]
        spans: dict[int, list[PageSpan]] = {at: [] for at in numbers}
        for shared in self._of_same_pages(shared_spans(ranges)):
            tokens = max(rows[row].visible for row in shared.rows)
            span = self._maps[shared.rows[0]].span(layout, shared.first, shared.stop, tokens, places)
            for row in shared.rows:
                spans[row].append(span)
        return [QueryRow(range(rows[at].visible - rows[at].queries, rows[at].visible), spans[at]) for at in numbers]

    def _of_same_pages(self, spans: Sequence[SharedSpan]) -> Iterator[SharedSpan]:
        """Yields these spans, divided where rows have the same blocks in different forms: one fork may have encoded
        what another goes on to read raw. Each reads its own."""
        for shared in spans:
            if len(shared.rows) == 1:
                yield shared
                continue
            maps = [self._maps[row] for row in shared.rows]
            for depths, groups in groups_of_same_pages(maps, range(shared.first, shared.stop)):
                for group in groups:
                    yield SharedSpan(depths.start, depths.stop, tuple(shared.rows[at] for at in group))
