"""The spans of pages that the rows of a batch attend to. Blocks that several rows share, forks of one sequence say, are
one span, which attention reads once for all of them.

Blocks are nodes of a tree (blocks.py), so two rows share what comes before the first block in which they differ, which
is found by bisection. It knows no memory: a span is a range of depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcluster.sequences.blocks import SequenceBlock


class SharedSpan(NamedTuple):
    """The blocks from depth `first` up to `stop`, which are the same in all of `rows`, in ascending order."""

    first: int
    stop: int
    rows: tuple[int, ...]


class RowBlocks(NamedTuple):
    """The blocks of a row from depth `first` up to `stop`, out of those of its sequence."""

    row: int
    blocks: Sequence[SequenceBlock]
    first: int
    stop: int


def shared_spans(ranges: Sequence[RowBlocks]) -> list[SharedSpan]:
    """Returns spans that cover each range once. `ranges` has those of a row in ascending order; so do the spans that
    are returned. Ranges that begin at different depths share nothing."""
    spans: list[SharedSpan] = []
    begins: dict[int, list[RowBlocks]] = {}
    for each in ranges:
        begins.setdefault(each.first, []).append(each)
    left = sorted(begins.items(), reverse=True)
    while left:
        depth, members = left.pop()
        same: dict[SequenceBlock, list[RowBlocks]] = {}
        for each in members:
            if depth < each.stop:
                same.setdefault(each.blocks[depth], []).append(each)
        for together in same.values():
            stop = min(_shared_until(together[0], each, depth) for each in together)
            spans.append(SharedSpan(depth, stop, tuple(each.row for each in together)))
            left.append((stop, together))
    return sorted(spans)


def _shared_until(one: RowBlocks, other: RowBlocks, depth: int) -> int:
    """Returns the depth up to which two ranges, which share the block at `depth`, have the same blocks."""
    low, high = depth + 1, min(one.stop, other.stop)
    if one is other or one.blocks[high - 1] is other.blocks[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one.blocks[middle] is other.blocks[middle]:
            low = middle + 1
        else:
            high = middle
    return low
