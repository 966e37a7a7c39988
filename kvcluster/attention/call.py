"""One call of attention, checked: which queries attend to which spans, and how scores are computed.

Nothing is read from a page before an `AttentionCall` exists, so a kernel need not check again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.core.position_tree import MAX_POSITION, ROOT, TREE_LEVELS, Subtree
from kvcluster.errors import CallerError

LATE = "attention took until its deadline"


@dataclass(frozen=True)
class QueryRow:
    """The queries of one sequence: the position of each query token, and the spans that it attends to.

    Spans ascend and do not overlap; positions between them are not attended to. Raises CallerError otherwise.
    """

    positions: Sequence[int]
    spans: Sequence[PageSpan]

    def __post_init__(self) -> None:
        for before, after in zip(self.spans, self.spans[1:], strict=False):
            if before.stop > after.position:
                raise CallerError(
                    f"spans overlap or are out of order: one ends at {before.stop}, the next starts at {after.position}"
                )


MAX_WINDOW = 2**62
"""Positions and their differences are int64."""


@dataclass(frozen=True)
class Scoring:
    """How scores are computed. A score is `scale` times the product of query and key, then
    `softcap * tanh(score / softcap)` if there is a softcap. With `causal`, a query sees the positions up to its own;
    with `window`, only the last so many of them."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if not _is_finite(self.scale):
            raise CallerError(f"scale is {self.scale!r}; it must be a finite number")
        if self.softcap is not None and not (_is_finite(self.softcap) and self.softcap > 0):
            raise CallerError(f"softcap is {self.softcap!r}; it must be a positive number, or None")
        if self.window is not None:
            if type(self.window) is not int or not 1 <= self.window <= MAX_WINDOW:
                raise CallerError(
                    f"window is {self.window!r}; it must be a number of positions from 1 to 2**62, or None"
                )
            if not self.causal:
                raise CallerError("a window needs causal=True")


def _is_finite(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One layer. `query` float32 `[tokens, heads, dim]`, contiguous; `positions` int64 `[tokens]`. Row i has the
    tokens from `starts[i]` up to `starts[i + 1]` and the spans `row_spans[i]`, which are indices into `spans`; of these
    only positions of the subtree `row_withins[i]` count. The query heads belong to the
    heads `heads[0]` up to `heads[1]` of the pages, in equal groups. Kernels raise TimeoutError between two cuts once
    `deadline_ns` of the monotonic clock has passed; 0 for none."""

    layout: PageLayout
    layer: int
    query: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    spans: tuple[PageSpan, ...]
    row_spans: tuple[tuple[int, ...], ...]
    row_withins: tuple[Subtree, ...]
    heads: tuple[int, int]
    scoring: Scoring
    deadline_ns: int = 0

    @property
    def within(self) -> Subtree:
        """A subtree that holds those of all rows: their own, if all rows have the same."""
        return self.row_withins[0] if len({*self.row_withins}) == 1 else ROOT

    @property
    def group_heads(self) -> int:
        """Query heads of one head of the pages."""
        return self.query.shape[1] // (self.heads[1] - self.heads[0])


def check_query(query: Tensor, layout: PageLayout, start: int, stop: int) -> None:
    """Raises CallerError for a query that does not fit heads `start` to `stop` of pages."""
    if not 0 <= start < stop <= layout.heads:
        raise CallerError(f"heads {start} to {stop} are no range of the {layout.heads} heads of a page")
    if query.dim() != 3 or query.shape[2] != layout.key.dim or not query.is_floating_point():
        raise CallerError(
            f"the query is {query.dtype} {list(query.shape)}, not floats [tokens, heads, {layout.key.dim}]"
        )
    if query.device.type != "cpu":
        raise CallerError("the query must be in memory of the CPU")
    if not query.shape[1] or query.shape[1] % (stop - start):
        raise CallerError(f"{query.shape[1]} query heads cannot be grouped over {stop - start} heads of pages")


def check_call(
    layout: PageLayout,
    layer: int,
    query: Tensor,
    rows: Sequence[QueryRow],
    heads: tuple[int, int] | None,
    scoring: Scoring,
    row_withins: Sequence[Subtree],
    deadline_ns: int = 0,
) -> AttentionCall:
    """Returns the call; `row_withins` has a subtree for each row. Raises CallerError for what does not fit."""
    if type(layer) is not int or not 0 <= layer < layout.layers:
        raise CallerError(f"there is no layer {layer!r}; a page has {layout.layers}, counted from 0")
    start, stop = (0, layout.heads) if heads is None else heads
    check_query(query, layout, start, stop)
    for within in dict.fromkeys(row_withins):
        if not (within.level >= 0 and within.index >= 0 and ROOT.contains(within)):
            raise CallerError(f"{within} is outside a tree of {TREE_LEVELS} levels")
    starts, positions = [0], list[int]()
    for row in rows:
        positions += row.positions
        starts.append(len(positions))
    if len(positions) != len(query):
        raise CallerError(f"the rows have {len(positions)} positions, and the query {len(query)} tokens")
    if positions and not 0 <= min(positions) <= max(positions) < MAX_POSITION:
        raise CallerError(f"a query position is outside 0 to {MAX_POSITION - 1}")
    spans, row_spans = _spans(layout, rows)
    return AttentionCall(
        layout,
        layer,
        query.detach().resolve_neg().float().contiguous(),
        torch.tensor(positions, dtype=torch.int64),
        tuple(starts),
        spans,
        row_spans,
        tuple(row_withins),
        (start, stop),
        scoring,
        deadline_ns,
    )


def _spans(layout: PageLayout, rows: Sequence[QueryRow]) -> tuple[tuple[PageSpan, ...], tuple[tuple[int, ...], ...]]:
    """Returns the distinct spans, without empty ones, and those of each row."""
    numbers: dict[PageSpan, int] = {}  # spans compare by identity
    row_spans = []
    for row in rows:
        filled = [span for span in row.spans if span.tokens]
        for span in filled:
            if span.pages.layout != layout:
                raise CallerError("a span's pages have another layout than this call")
        row_spans.append(tuple(numbers.setdefault(span, len(numbers)) for span in filled))
    return tuple(numbers), tuple(row_spans)
