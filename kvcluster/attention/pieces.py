"""Attention in pieces of bounded work. Between two pieces a shard checks deadlines and renews leases.

Work that is too much for one piece is divided: first by queries, as long as there are more than the core works on
together; then into the halves of its subtree, whose results merge into that of the whole; at last into single query
tokens and cuts. No bit depends on where it was divided (core/position_tree.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.attention.call import QueryRow, Scoring
from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.attention.partial import Result, attend, merge_two
from kvcluster.core.attend_work import attend_work
from kvcluster.core.position_tree import CUT_TOKENS, Subtree

_QUERIES = 128
"""Queries of one head of the pages that the native core works on together (native/attention_blocks.hpp): with fewer,
keys would be read more often."""


class AttentionPiece(NamedTuple):
    """What some query tokens of one row want of one subtree: `tokens` of the query, at `positions`, and the spans of
    the row that have positions of it."""

    tokens: range
    positions: range
    subtree: Subtree
    spans: Sequence[PageSpan]


class PieceAttention:
    """Attention of one query `[tokens, heads, dim]` to one layer, in pieces of at most `most_work` multiplications;
    None: undivided. `between` is called before each piece."""

    def __init__(
        self,
        query: Tensor,
        layout: PageLayout,
        layer: int,
        scoring: Scoring,
        threads: int,
        between: Callable[[], object],
        most_work: int | None,
        deadline_ns: int,
    ) -> None:
        self._query = query
        self._layout = layout
        self._layer = layer
        self._scoring = scoring
        self._threads = threads
        self._between = between
        self._most = most_work
        self._deadline_ns = deadline_ns

    def results(self, pieces: Sequence[AttentionPiece]) -> list[Result]:
        """Returns `out` and `lse` of each. Raises as `attend`, and what `between` raises."""
        if self._most is None or self._work(pieces) <= self._most:
            return self._attend(pieces)
        one, tokens = pieces[0], sum(len(piece.tokens) for piece in pieces)
        if any(piece.subtree != one.subtree for piece in pieces):
            return self._halves(pieces)
        queries = tokens * self._query.shape[1] // self._layout.heads
        if one.subtree.level and (queries <= _QUERIES or tokens == 1):
            return self._children(pieces)
        return self._halves(pieces) if tokens > 1 else self._attend(pieces)

    def _attend(self, pieces: Sequence[AttentionPiece]) -> list[Result]:
        self._between()
        rows = [QueryRow(piece.positions, piece.spans) for piece in pieces]
        query = self._query_of([piece.tokens for piece in pieces])
        withins = [piece.subtree for piece in pieces]
        threads, deadline_ns = self._threads, self._deadline_ns
        out, lse = attend(
            query, rows, withins, self._layout, self._layer, self._scoring, threads=threads, deadline_ns=deadline_ns
        )
        counts = [len(piece.tokens) for piece in pieces]
        return list(zip(torch.split(out, counts), torch.split(lse, counts), strict=True))

    def _query_of(self, tokens: Sequence[range]) -> Tensor:
        if all(before.stop == after.start for before, after in itertools.pairwise(tokens)):
            return self._query[tokens[0].start : tokens[-1].stop]
        return self._query[torch.tensor(list(itertools.chain(*tokens)), dtype=torch.int64)]

    def _halves(self, pieces: Sequence[AttentionPiece]) -> list[Result]:
        """Computes the pieces in two halves; a single one by halves of its query tokens."""
        if len(pieces) > 1:
            half = len(pieces) // 2
            return self.results(pieces[:half]) + self.results(pieces[half:])
        one = pieces[0]
        half = len(one.tokens) // 2
        parts = [
            one._replace(tokens=one.tokens[at], positions=one.positions[at]) for at in (slice(half), slice(half, None))
        ]
        outs, lses = zip(*(result for part in parts for result in self.results([part])), strict=True)
        return [(torch.cat(outs), torch.cat(lses))]

    def _children(self, pieces: Sequence[AttentionPiece]) -> list[Result]:
        """Computes the halves of the subtree that all pieces want, and merges them."""
        parent = pieces[0].subtree
        made: list[list[Result]] = []
        for index in (2 * parent.index, 2 * parent.index + 1):
            child = Subtree(parent.level - 1, index)
            mine = [piece._replace(subtree=child, spans=spans_within(piece.spans, child)) for piece in pieces]
            if any(piece.spans for piece in mine):
                made.append(self.results(mine))
        return made[0] if len(made) == 1 else [merge_two(*both) for both in zip(*made, strict=True)]

    def _work(self, pieces: Sequence[AttentionPiece]) -> int:
        heads, channels = self._query.shape[1], self._layout.key.dim + self._layout.value_dim
        return sum(
            attend_work(
                len(piece.tokens),
                min(cuts_before(piece.spans)[-1], 1 << piece.subtree.level),
                heads=heads,
                channels=channels,
            )
            for piece in pieces
        )


def spans_within(spans: Sequence[PageSpan], subtree: Subtree) -> Sequence[PageSpan]:
    """Returns the spans that have positions of a subtree, out of those of a row, which ascend."""
    first = bisect_right(spans, subtree.start, key=attrgetter("stop"))
    return spans[first : bisect_left(spans, subtree.stop, key=attrgetter("position"))]


def cuts_before(spans: Iterable[PageSpan]) -> list[int]:
    """Returns for each span of a row, and for their end, of how many cuts the spans before it have positions."""
    counts, last = [0], -1
    for span in spans:
        stop = (span.stop - 1) // CUT_TOKENS
        counts.append(counts[-1] + max(0, stop - max(last, span.position // CUT_TOKENS - 1)))
        last = max(last, stop)
    return counts
