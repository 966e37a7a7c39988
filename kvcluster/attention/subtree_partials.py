"""Attention of several rows, each to subtrees of its own: the part of a result that one process computes.

A row names its spans and the subtrees of which it wants results. Rows that want one subtree, and small subtrees, are
computed in one call, and spans that rows share are read once. Each result is that of `partial` within its subtree, so
it merges with those of other processes into the bits of one call over all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.attention.call import Scoring
from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.attention.partial import Partial, merge_stacked
from kvcluster.attention.pieces import AttentionPiece, PieceAttention, spans_within
from kvcluster.core.position_tree import ROOT, Subtree

_TOGETHER = 1 << 16
"""Products of query tokens and keys that one call computes of several subtrees: some milliseconds of work."""


class SubtreeRow(NamedTuple):
    """The queries of one sequence at `positions`, the spans that it attends to here, in ascending order, and the
    subtrees of which results are wanted."""

    positions: range
    spans: Sequence[PageSpan]
    subtrees: Sequence[Subtree]


def subtree_partials(
    query: Tensor,
    rows: Sequence[SubtreeRow],
    layout: PageLayout,
    layer: int,
    scoring: Scoring,
    *,
    threads: int = 1,
    between: Callable[[], object] = lambda: None,
    most_work: int | None = None,
    deadline_ns: int = 0,
) -> list[list[Partial]]:
    """Returns for each row the result of each of its subtrees, in order. `query` is `[tokens, heads, dim]`: the tokens
    of all rows, one row after the other. `between` is called before each piece of the work, and may raise. A piece is
    one subtree or several small ones; with `most_work` none has more multiplications (core/attend_work.py), unless it
    is one query token and one cut. Raises as `partial`, and TimeoutError once `deadline_ns` of the monotonic clock has
    passed; 0 for none."""
    starts = [0, *itertools.accumulate(len(row.positions) for row in rows)]
    made = PieceAttention(query, layout, layer, scoring, threads, between, most_work, deadline_ns)
    found: dict[tuple[int, Subtree], Partial] = {}
    for part in _parts(rows, starts):
        results = made.results([piece for _, piece in part])
        for (row, piece), (out, lse) in zip(part, results, strict=True):
            found[row, piece.subtree] = Partial(piece.subtree, out, lse)
    return [[found[number, subtree] for subtree in row.subtrees] for number, row in enumerate(rows)]


def merge_rows(rows: Sequence[Sequence[Partial]], value_dim: int, heads: int) -> Partial:
    """Merges the partials of each row, and returns the results of all rows, one after the other. A row without partials
    has no query tokens. Rows with the same subtrees are merged together."""
    alike: dict[tuple[Subtree, ...], list[int]] = {}
    ordered = [sorted(row, key=lambda one: one.subtree.start) for row in rows]
    for number, row in enumerate(ordered):
        alike.setdefault(tuple(one.subtree for one in row), []).append(number)
    found = {number: (torch.zeros(0, heads, value_dim), torch.zeros(0, heads)) for number in alike.pop((), ())}
    for subtrees, numbers in alike.items():
        each = [ordered[number][at] for at in range(len(subtrees)) for number in numbers]
        outs = torch.cat([one.out for one in each]).view(len(subtrees), -1, heads, value_dim)
        lses = torch.cat([one.lse for one in each]).view(len(subtrees), -1, heads)
        merged = merge_stacked(subtrees, outs, lses)
        counts = [len(ordered[number][0].out) for number in numbers]
        parts = zip(torch.split(merged.out, counts), torch.split(merged.lse, counts), strict=True)
        found.update(zip(numbers, parts, strict=True))
    made = [found[number] for number in range(len(rows))]
    return Partial(ROOT, torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made]))


def _parts(rows: Sequence[SubtreeRow], starts: Sequence[int]) -> Iterator[list[tuple[int, AttentionPiece]]]:
    """Yields what is computed in one call, with the row of each piece: all that rows want of one subtree, and of more
    subtrees as long as that is little work."""
    wanted: dict[Subtree, list[tuple[int, AttentionPiece]]] = {}
    for number, row in enumerate(rows):
        tokens = range(starts[number], starts[number + 1])
        for subtree in row.subtrees:
            piece = AttentionPiece(tokens, row.positions, subtree, spans_within(row.spans, subtree))
            wanted.setdefault(subtree, []).append((number, piece))
    part, work = list[tuple[int, AttentionPiece]](), 0
    for pieces in wanted.values():
        more = sum(len(piece.tokens) * (1 + sum(span.tokens for span in piece.spans)) for _, piece in pieces)
        if part and work + more > _TOGETHER:
            yield part
            part, work = [], 0
        part, work = part + pieces, work + more
    if part:
        yield part
