"""LRU stack distances of blocks that come in chains: how large a cache would have to be to still hold each of them.

The distance of a block is its place in the order of last use, counted from 1. An LRU cache of n blocks holds exactly
the blocks of distance n or less, so one pass over a trace gives the hits of every capacity (Mattson, Gecsei, Slutz and
Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal, 1970). The blocks that were used more
recently than a given one are counted in a tree of partial sums (Fenwick, 1994), as Bennett and Kruskal (LRU stack
processing, 1975) did.

A chain is used as a whole, and its root counts as its most recently used block: a cache evicts leaves before roots. So
of the blocks that one use touched, those that no later use has touched are always the end of its chain, and their
distances are consecutive numbers. The tree therefore has a cell for each use and not for each block, and a request
costs as many steps in it as its chain has runs of blocks that were last used together, which are few.

That holds where a hash always follows the same hashes. If two chains share a hash by accident, some distances are too
large, and nothing else goes wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple


class DistanceRun(NamedTuple):
    """`blocks` consecutive blocks of a chain; the first has the stack distance `nearest`, and each next one 1 more."""

    nearest: int
    blocks: int

    def within(self, capacity: int) -> int:
        """Returns how many of these blocks an LRU cache of `capacity` blocks holds: the leading ones."""
        return min(self.blocks, max(0, capacity - self.nearest + 1))

    def without(self, leading: int) -> DistanceRun:
        """Returns the run without its first `leading` blocks."""
        return DistanceRun(self.nearest + leading, self.blocks - leading)


class ChainStack:
    """The order of last use of all blocks seen so far. `uses`: how often `use` will be called at most."""

    def __init__(self, uses: int) -> None:
        self._last: dict[Hashable, int] = {}  # by block: the number of its last use, from 1
        self._sums = [0] * (uses + 1)  # a Fenwick tree: by use, how many blocks it was the last one of
        self._number = 0

    def __len__(self) -> int:
        """Returns how many different blocks have been used."""
        return len(self._last)

    def distances(self, chain: Iterable[Hashable]) -> list[DistanceRun]:
        """Returns the distances of the leading blocks of `chain`, up to the first block that was never used. They grow
        along the chain."""
        found: list[DistanceRun] = []
        reached = 0
        for last, same in groupby(map(self._last.get, chain)):
            if last is None:
                break
            blocks = sum(1 for _ in same)
            nearest = max(reached, len(self._last) - self._used_until(last)) + 1
            reached = nearest + blocks - 1
            found.append(DistanceRun(nearest, blocks))
        return found

    def use(self, chain: Sequence[Hashable]) -> None:
        """Makes the blocks of `chain` the most recently used ones, the first block first."""
        blocks = dict.fromkeys(chain, self._number + 1)
        if not blocks:
            return
        self._number += 1
        for last, same in groupby(map(self._last.get, blocks)):
            if last is not None:
                self._add(last, -sum(1 for _ in same))
        self._last.update(blocks)
        self._add(self._number, len(blocks))

    def _add(self, use: int, blocks: int) -> None:
        assert 1 <= use < len(self._sums), "the stack was made for fewer uses"
        while use < len(self._sums):
            self._sums[use] += blocks
            use += use & -use

    def _used_until(self, use: int) -> int:
        """Returns how many blocks were last used by `use` or before it."""
        blocks = 0
        while use:
            blocks += self._sums[use]
            use -= use & -use
        return blocks
