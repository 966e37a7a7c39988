"""The query of one layer of a step as it is sent to shards, in messages that are within the limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from kvcluster.attention import PageLayout, Scoring
from kvcluster.attention.span_results import pack_query, result_bytes
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.position_tree import Subtree
from kvcluster.sequences.ship_plan import AskedRow, SeenBlocks


class LayerQuery(NamedTuple):
    """The query of one layer of a step: `data` is `[tokens, heads, dim]` of `dtype`, `starts` and `positions` say for
    each row where its tokens begin there, and at which position; the last of `starts` is the number of tokens."""

    layer: int
    data: memoryview
    heads: int
    dim: int
    value_dim: int
    dtype: str
    starts: Sequence[int]
    positions: Sequence[int]
    scoring: Scoring
    latent_values: int

    def tokens(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]

    def of_rows(self, rows: Sequence[int]) -> memoryview:
        """Returns the bytes of the query tokens of these rows."""
        if list(rows) == list(range(len(self.starts) - 1)):
            return self.data
        each = self.data.nbytes // max(1, self.starts[-1])
        return memoryview(b"".join(self.data[each * self.starts[row] : each * self.starts[row + 1]] for row in rows))


def layer_query(
    layer: int, query: Tensor, rows: Sequence[SeenBlocks], layout: PageLayout, scoring: Scoring
) -> LayerQuery | None:
    """Returns the query `[tokens, heads, dim]` of these rows as it is sent; None if it does not fit the pages or the
    limits. Then attention in this process says what is wrong with it, or does it."""
    fits = query.dim() == 3 and query.is_floating_point() and query.shape[2] == layout.key.dim
    if not fits or not query.shape[1] or query.shape[1] % layout.heads or len(query) > limits.ATTEND_TOKENS:
        return None
    dtype, data = pack_query(query)
    made = LayerQuery(
        layer,
        data,
        query.shape[1],
        query.shape[2],
        layout.value_dim,
        dtype,
        [0, *itertools.accumulate(row.queries for row in rows)],
        [row.visible - row.queries for row in rows],
        scoring,
        layout.latent_values or 0,
    )
    return made if _may_ship(made) else None


def split_asks(rows: Sequence[AskedRow], query: LayerQuery) -> list[list[AskedRow]]:
    """Divides what is asked of one shard into messages that are within the limits: one, but for long prompts."""
    if _fits(rows, query):
        return [list(rows)]
    parts: list[list[AskedRow]] = []
    for row in rows:
        for mine in _by_subtrees(row, query):
            last = parts[-1] if parts else []
            if last and last[-1].row == row.row:
                before = last[-1]
                grown = [*last[:-1], AskedRow(row.row, before.cuts + mine.cuts, before.subtrees + mine.subtrees)]
            else:
                grown = [*last, mine]
            if last and _fits(grown, query):
                parts[-1] = grown
            else:
                parts.append([mine])
    return parts


def _may_ship(query: LayerQuery) -> bool:
    """Whether a query of this size may be sent at all: it, and the smallest result of any of its rows, are within the
    limits."""
    rows = range(len(query.starts) - 1)
    most = max((query.tokens(row) for row in rows), default=0)
    return (
        query.data.nbytes <= limits.ATTEND_BYTES
        and result_bytes(most, query.heads, query.value_dim) <= limits.ATTEND_BYTES
        and _work(query, most, 1) <= limits.ATTEND_WORK
    )


def _by_subtrees(row: AskedRow, query: LayerQuery) -> Iterator[AskedRow]:
    """Yields what a row wants, a subtree at a time; one that is too much for a message, by halves."""
    left = list(reversed(row.subtrees))
    while left:
        subtree = left.pop()
        cuts = tuple(cut for cut in row.cuts if subtree.contains(Subtree(0, cut.cut)))
        mine = AskedRow(row.row, cuts, (subtree,))
        if subtree.level and not _fits([mine], query):
            first = Subtree(subtree.level - 1, 2 * subtree.index)
            left += [Subtree(first.level, first.index + 1), first]
        else:
            yield mine


def _fits(rows: Sequence[AskedRow], query: LayerQuery) -> bool:
    """Whether one message takes what these rows ask for."""
    tokens = [query.tokens(row.row) for row in rows]
    names = sum(len(row.cuts) for row in rows)
    results = sum(len(row.subtrees) * count for row, count in zip(rows, tokens, strict=True))
    work = sum(_work(query, count, len(row.cuts)) for row, count in zip(rows, tokens, strict=True))
    return (
        len(rows) <= limits.ATTEND_ROWS
        and sum(tokens) <= limits.ATTEND_TOKENS
        and names <= limits.SPANS_PER_CALL
        and result_bytes(results, query.heads, query.value_dim) <= limits.ATTEND_BYTES
        and work <= limits.ATTEND_WORK
    )


def _work(query: LayerQuery, tokens: int, cuts: int) -> int:
    return attend_work(tokens, cuts, heads=query.heads, channels=query.dim + query.value_dim)
