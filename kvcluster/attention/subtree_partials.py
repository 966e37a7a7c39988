"""Attention of several rows, each to subtrees of its own: what one place computes of a result that several share.

A row names its spans and the subtrees of which it wants results. Rows that want one subtree are computed in one call,
and spans that they share are read once. Each result is that of `partial` within its subtree, so it merges with those of
other places into the bits of one call over all keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.attention.call import QueryRow, Scoring
from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.attention.partial import Partial, merge, partial
from kvcluster.core.position_tree import ROOT, Subtree


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
    of all rows, one row after the other. `between` is called before each subtree, and may raise. Raises as `partial`.
    """
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.positions))
    wanted: dict[Subtree, list[int]] = {}
    for number, row in enumerate(rows):
        for subtree in row.subtrees:
            wanted.setdefault(subtree, []).append(number)
    found: dict[tuple[int, Subtree], Partial] = {}
    for subtree, numbers in wanted.items():
        between()
        whole = len(numbers) == len(rows)
        mine = query if whole else torch.cat([query[starts[number] : starts[number + 1]] for number in numbers])
        made = [QueryRow(rows[number].positions, _within(rows[number].spans, subtree)) for number in numbers]
        result = partial(
            mine,
            made,
            layout,
            layer,
            scale=scoring.scale,
            softcap=scoring.softcap,
            window=scoring.window,
            within=subtree,
            threads=threads,
        )
        at = 0
        for number in numbers:
            stop = at + len(rows[number].positions)
            found[number, subtree] = Partial(subtree, result.out[at:stop], result.lse[at:stop])
            at = stop
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
        each = [[ordered[number][at] for number in numbers] for at in range(len(subtrees))]
        merged = merge(
            [
                Partial(subtree, torch.cat([one.out for one in ones]), torch.cat([one.lse for one in ones]))
                for subtree, ones in zip(subtrees, each, strict=True)
            ]
        )
        counts = [len(ordered[number][0].out) for number in numbers]
        parts = zip(torch.split(merged.out, counts), torch.split(merged.lse, counts), strict=True)
        found.update(zip(numbers, parts, strict=True))
    outs, lses = zip(*(found[number] for number in range(len(rows))), strict=True)
    return Partial(ROOT, torch.cat(outs), torch.cat(lses))


def _within(spans: Sequence[PageSpan], subtree: Subtree) -> Sequence[PageSpan]:
    """Returns the spans that have positions of a subtree."""
    first = bisect_right(spans, subtree.start, key=attrgetter("stop"))
    return spans[first : bisect_left(spans, subtree.stop, key=attrgetter("position"))]
