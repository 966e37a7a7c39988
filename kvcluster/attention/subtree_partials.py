"""Attention of several rows, each to subtrees of its own: what one place computes of a result that several share.

A row names its spans and the subtrees of which it wants results. Rows that want one subtree, and small subtrees, are
computed in one call, and spans that rows share are read once. Each result is that of `partial` within its subtree, so
it merges with those of other places into the bits of one call over all keys.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.attention.call import QueryRow, Scoring
from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.attention.partial import Partial, attend, merge_stacked
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
) -> list[list[Partial]]:
    """Returns for each row the result of each of its subtrees, in order. `query` is `[tokens, heads, dim]`: the tokens
    of all rows, one row after the other. `between` is called before each part of the work, which is one subtree or
    several small ones, and may raise. Raises as `partial`."""
    starts = [0, *itertools.accumulate(len(row.positions) for row in rows)]
    found: dict[tuple[int, Subtree], Partial] = {}
    for pieces in _parts(rows):
        between()
        asked, mine = [range(starts[piece.row], starts[piece.row + 1]) for piece in pieces], query
        if [piece.row for piece in pieces] != list(range(len(rows))):
            mine = query[torch.tensor(list(itertools.chain(*asked)), dtype=torch.int64)]
        made = [QueryRow(rows[piece.row].positions, piece.spans) for piece in pieces]
        withins = [piece.subtree for piece in pieces]
        out, lse = attend(mine, made, withins, layout, layer, scoring, threads=threads)
        counts = [len(each) for each in asked]
        for piece, its_out, its_lse in zip(pieces, torch.split(out, counts), torch.split(lse, counts), strict=True):
            found[piece.row, piece.subtree] = Partial(piece.subtree, its_out, its_lse)
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


class _Piece(NamedTuple):
    """What one row wants of one subtree, and the spans that have positions of it."""

    row: int
    subtree: Subtree
    spans: Sequence[PageSpan]


def _parts(rows: Sequence[SubtreeRow]) -> Iterator[list[_Piece]]:
    """Yields what is computed in one call: all that rows want of one subtree, and of more subtrees as long as that is
    little work."""
    wanted: dict[Subtree, list[_Piece]] = {}
    for number, row in enumerate(rows):
        for subtree in row.subtrees:
            wanted.setdefault(subtree, []).append(_Piece(number, subtree, _within(row.spans, subtree)))
    part, work = list[_Piece](), 0
    for pieces in wanted.values():
        keys = [1 + sum(span.tokens for span in piece.spans) for piece in pieces]
        more = sum(len(rows[piece.row].positions) * count for piece, count in zip(pieces, keys, strict=True))
        if part and work + more > _TOGETHER:
            yield part
            part, work = [], 0
        part, work = part + pieces, work + more
    if part:
        yield part


def _within(spans: Sequence[PageSpan], subtree: Subtree) -> Sequence[PageSpan]:
    """Returns the spans that have positions of a subtree."""
    first = bisect_right(spans, subtree.start, key=attrgetter("stop"))
    return spans[first : bisect_left(spans, subtree.stop, key=attrgetter("position"))]
