"""Which parts of a step are attended to where: a pure function of what rows see, where blocks lie, and what a planner
has chosen.

The unit is a cut of positions (core/position_tree.py). A cut may be shipped if every position of it is attended to, and
lies in blocks that the cluster has exactly as the sequence has them: named, stored, and not encoded in the resident
set. A cut that is partly dropped, behind a window's edge, or not sealed yet stays here. So each process has whole cuts,
and computes the largest subtrees that it has whole: nodes of one tree, whose merge has the bits of a single call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS, ROOT, Subtree, subtrees_beside, subtrees_of
from kvcluster.sequences.attend_planner import SpanChoice, SpanFacts
from kvcluster.sequences.block_table import ABSENT
from kvcluster.sequences.blocks import SequenceBlock, StoreState
from kvcluster.sequences.state import SequenceState

SPAN_CUTS = 8
"""A span that is chosen as a whole has at most so many cuts, the first of which is a multiple of it: a subtree. So a
context is fetched in parts while the rest is shipped."""


class SeenBlocks(NamedTuple):
    """What a row sees: the blocks of these ranges of depths, of a sequence with `visible` tokens, of which the last
    `queries` attend."""

    state: SequenceState
    depths: tuple[range, ...]
    visible: int
    queries: int


class CutBlocks(NamedTuple):
    """A cut of positions, and the blocks that hold it. Blocks are nodes of a tree, so the last one identifies all of
    them.

    `loss` is the worst of them, and `held` says whether the resident set has a page of any: both hold as long as no
    page moves."""

    cut: int
    blocks: tuple[SequenceBlock, ...]
    loss: Loss
    held: bool

    @property
    def last(self) -> SequenceBlock:
        return self.blocks[-1]

    @property
    def private(self) -> bool:
        return self.last.private

    @property
    def resident(self) -> bool:
        """Whether the resident set has all of its pages."""
        return all(block.page is not None for block in self.blocks)


class AskedRow(NamedTuple):
    """What a row wants of one shard: the results of `subtrees`, of the blocks of `cuts`."""

    row: int
    cuts: tuple[CutBlocks, ...]
    subtrees: tuple[Subtree, ...]


class LocalRow(NamedTuple):
    """What of a row is attended to here: the blocks of these ranges of depths, and the results of `subtrees`."""

    depths: tuple[range, ...]
    subtrees: tuple[Subtree, ...]


@dataclass(frozen=True)
class ShipPlan:
    """A step's plan: what each shard is asked, what is left of each row, and which blocks are loaded and not lent."""

    asks: Mapping[ShardAddress, Sequence[AskedRow]]
    local: Sequence[LocalRow]
    fetched: Mapping[SequenceBlock, None] = field(default_factory=dict)


class ShardSpan(NamedTuple):
    """Consecutive cuts that one shard has, and the rows that attend to them: what a planner chooses for."""

    shard: ShardAddress
    rows: tuple[int, ...]
    cuts: tuple[CutBlocks, ...]

    @property
    def start(self) -> int:
        """Its first position."""
        return self.cuts[0].cut * CUT_TOKENS

    @property
    def blocks(self) -> Mapping[SequenceBlock, None]:
        """The blocks of all cuts, each once."""
        return {block: None for cut in self.cuts for block in cut.blocks}

    def facts(
        self, queries: Sequence[int], page_bytes: int, *, fetching: bool = False, lent: bool = False
    ) -> SpanFacts:
        """Returns the facts that a planner gets. `queries` are the query tokens of each row of the step."""
        absent = sum(block.page is None for block in self.blocks)
        return SpanFacts(
            self.start,
            (self.cuts[-1].cut + 1) * CUT_TOKENS,
            self.rows,
            sum(queries[row] for row in self.rows),
            len(subtrees_of(cut.cut for cut in self.cuts)),
            absent * page_bytes,
            self.shard.shard,
            self.shard.host,
            fetching,
            lent,
        )


def shippable_cuts(row: SeenBlocks) -> Iterator[CutBlocks]:
    """Yields the cuts of a row that may be shipped, in order, wherever they lie."""
    if not row.queries:
        return
    state = row.state
    for depths in row.depths:
        first = -(-depths.start * state.block_tokens // CUT_TOKENS)
        for cut in range(first, min(depths.stop * state.block_tokens, row.visible) // CUT_TOKENS):
            of_cut = _depths_of(cut, state.block_tokens)
            blocks = state.blocks[of_cut.start : of_cut.stop]
            if not _is_coded(state, of_cut) and _is_stored(blocks):
                yield _cut_blocks(cut, blocks)


def shard_spans(
    cuts: Sequence[Iterable[CutBlocks]], place_of: Callable[[CutBlocks], ShardAddress | None]
) -> list[ShardSpan]:
    """Returns the spans that a planner chooses for, ordered by their positions. `cuts` are those of each row that may
    be shipped; `place_of` returns the shard that has a cut whole, None if there is none."""
    return sorted(_runs(cuts, place_of), key=lambda span: (span.start, span.rows))


def ship_plan(rows: Sequence[SeenBlocks], spans: Sequence[ShardSpan], choices: Sequence[SpanChoice]) -> ShipPlan:
    """Returns the plan of a step from the choice that was made for each span."""
    asked: dict[ShardAddress, dict[int, list[CutBlocks]]] = {}
    fetched: dict[SequenceBlock, None] = {}
    for span, choice in zip(spans, choices, strict=True):
        if choice is SpanChoice.SHIP:
            for row in span.rows:
                asked.setdefault(span.shard, {}).setdefault(row, []).extend(span.cuts)
        elif choice is SpanChoice.FETCH:
            fetched.update(span.blocks)
    taken: list[dict[int, None]] = [{} for _ in rows]
    subtrees: list[list[Subtree]] = [[] for _ in rows]
    asks: dict[ShardAddress, list[AskedRow]] = {}
    for shard, by_row in asked.items():
        for row in sorted(by_row):
            mine = sorted(by_row[row], key=lambda one: one.cut)
            wanted = subtrees_of(cut.cut for cut in mine)
            asks.setdefault(shard, []).append(AskedRow(row, tuple(mine), tuple(wanted)))
            taken[row].update((cut.cut, None) for cut in mine)
            subtrees[row] += wanted
    local = [_local(row, sorted(taken[at]), subtrees[at]) for at, row in enumerate(rows)]
    return ShipPlan(asks, local, fetched)


# ------------------------------------------------------------------------------------------- helpers


def _depths_of(cut: int, block_tokens: int) -> range:
    return range(cut * CUT_TOKENS // block_tokens, -(-(cut + 1) * CUT_TOKENS // block_tokens))


def _cut_blocks(cut: int, blocks: Sequence[SequenceBlock]) -> CutBlocks:
    loss, held = max(block.loss for block in blocks), any(block.page is not None for block in blocks)
    return CutBlocks(cut, tuple(blocks), loss, held)


def _is_coded(state: SequenceState, depths: range) -> bool:
    """Whether the sequence uses any of these blocks in its encoded form, which no shard has."""
    return depths.start < state.encoded and any(state.table[depth] < ABSENT for depth in depths)


def _is_stored(blocks: Sequence[SequenceBlock]) -> bool:
    """Whether the cluster had all of these blocks, in one namespace."""
    private = blocks[-1].private
    return all(
        block.name is not None and block.private == private and (block.page is None or block.stored is StoreState.YES)
        for block in blocks
    )


def _runs(
    cuts: Sequence[Iterable[CutBlocks]], place_of: Callable[[CutBlocks], ShardAddress | None]
) -> Iterator[ShardSpan]:
    """Yields runs of consecutive cuts that the same rows see, on one shard, all of them resident or none of them as a
    whole, at most SPAN_CUTS."""
    seen: dict[tuple[int, SequenceBlock], tuple[CutBlocks, list[int]]] = {}
    for row, of_row in enumerate(cuts):
        for cut in of_row:
            seen.setdefault((cut.cut, cut.last), (cut, []))[1].append(row)
    together: dict[tuple[int, ...], list[CutBlocks]] = {}
    for cut, of_rows in seen.values():
        together.setdefault(tuple(of_rows), []).append(cut)
    for rows, alike in together.items():
        ordered = enumerate(sorted(alike, key=lambda one: one.cut))
        for (shard, *_), run in itertools.groupby(
            ordered, lambda at: (place_of(at[1]), at[1].resident, at[1].cut // SPAN_CUTS, at[1].cut - at[0])
        ):
            if shard is not None:
                yield ShardSpan(shard, rows, tuple(cut for _, cut in run))


def _local(row: SeenBlocks, shipped: Sequence[int], taken: Sequence[Subtree]) -> LocalRow:
    """Returns what is left of a row without these cuts, whose subtrees are `taken`."""
    if not shipped:
        return LocalRow(row.depths, (ROOT,))
    block_tokens, left = row.state.block_tokens, list[range]()
    for depths in row.depths:
        at, stop = depths.start * block_tokens, min(depths.stop * block_tokens, row.visible)
        for cut in shipped:
            start, end = cut * CUT_TOKENS, (cut + 1) * CUT_TOKENS
            if end <= at or start >= stop:
                continue
            if at < start:
                left.append(range(at, start))
            at = end
        if at < stop:
            left.append(range(at, stop))
    found: list[range] = []
    for span in left:
        depths = range(span.start // block_tokens, -(-span.stop // block_tokens))
        if found and depths.start <= found[-1].stop:
            depths = range(found.pop().start, depths.stop)
        found.append(depths)
    beside = subtrees_beside(sorted(taken, key=lambda one: one.start), 0, row.visible)
    mine = [each for each in beside if any(each.start < span.stop and span.start < each.stop for span in left)]
    return LocalRow(tuple(found), tuple(mine))
