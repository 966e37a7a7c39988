"""The spans of pages that the rows of a batch attend to. Blocks that several rows share, forks of one sequence say, are
one span, which attention reads once for all of them.

Blocks are nodes of a tree (blocks.py), so two rows share what comes before the first block in which they differ, which
is found by bisection. It knows no memory: a span is a range of depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcluster.client.sequences.blocks import SequenceBlock


class SharedSpan(NamedTuple):
    """The blocks from depth `first` up to `stop`, which are the same in all of `rows`, in ascending order."""

    first: int
    stop: int
    rows: tuple[int, ...]


class RowBlocks(NamedTuple):
    """A row's blocks from depth `first` up to `stop`, out of those of its sequence."""

    blocks: Sequence[SequenceBlock]
    first: int
    stop: int


def shared_spans(rows: Sequence[RowBlocks]) -> list[SharedSpan]:
    """Returns spans that cover each row's blocks once. Those of a row ascend in the order in which they are returned.
    Rows that begin at different depths share nothing."""
    spans: list[SharedSpan] = []
    left: list[tuple[int, list[int]]] = []
    begins: dict[int, list[int]] = {}
    for row, blocks in enumerate(rows):
        if blocks.first < blocks.stop:
            begins.setdefault(blocks.first, []).append(row)
    left += begins.items()
    while left:
        depth, members = left.pop()
        same: dict[SequenceBlock, list[int]] = {}
        for row in members:
            if depth < rows[row].stop:
                same.setdefault(rows[row].blocks[depth], []).append(row)
        for together in same.values():
            stop = min(_shared_until(rows[together[0]], rows[row], depth) for row in together)
            spans.append(SharedSpan(depth, stop, tuple(together)))
            left.append((stop, together))
    return spans


def _shared_until(one: RowBlocks, other: RowBlocks, depth: int) -> int:
    """Returns the depth up to which two rows, which share the block at `depth`, have the same blocks."""
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
