"""The fixed binary tree over positions, along which partial results are merged.

Positions are cut every CUT_TOKENS. Each cut is a leaf of one infinite binary tree: the subtree `(level, index)` holds
the cuts from `index << level` up to `(index + 1) << level`. The shape of the tree depends on nothing but positions, so
floating-point sums along it have the same order wherever keys lie and whichever process computes them. A subtree
without keys is skipped, which changes no bit.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from kvcluster.errors import CallerError

CUT_TOKENS = 512
"""Positions of a leaf. Another value gives other bits."""

TREE_LEVELS = 31
MAX_POSITION = CUT_TOKENS << TREE_LEVELS

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Subtree:
    """A node of the tree, and all that is below it."""

    level: int
    index: int

    @property
    def start(self) -> int:
        """The first position."""
        return (self.index * CUT_TOKENS) << self.level

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return ((self.index + 1) * CUT_TOKENS) << self.level

    @property
    def parent(self) -> Subtree:
        return Subtree(self.level + 1, self.index >> 1)

    def contains(self, other: Subtree) -> bool:
        """Whether `other` is this subtree or lies below it."""
        return other.level <= self.level and other.index >> (self.level - other.level) == self.index


ROOT = Subtree(TREE_LEVELS, 0)


def subtrees(start: int, stop: int) -> list[Subtree]:
    """Returns the largest subtrees that together hold the positions from `start` up to `stop`, in order. Raises
    CallerError if either is no multiple of CUT_TOKENS, or they are out of order or range."""
    if start % CUT_TOKENS or stop % CUT_TOKENS or not 0 <= start <= stop <= MAX_POSITION:
        raise CallerError(f"positions {start} to {stop} are not a range of whole cuts of {CUT_TOKENS}")
    found, at, end = [], start // CUT_TOKENS, stop // CUT_TOKENS
    while at < end:
        level = min((end - at).bit_length() - 1, (at & -at).bit_length() - 1 if at else TREE_LEVELS)
        found.append(Subtree(level, at >> level))
        at += 1 << level
    return found


def subtrees_of(cuts: Iterable[int]) -> list[Subtree]:
    """Returns the largest subtrees that together hold exactly these cuts, which ascend, in order."""
    found: list[Subtree] = []
    for cut in cuts:
        found.append(Subtree(0, cut))
        while len(found) > 1 and found[-1].index & 1 and found[-2] == Subtree(found[-1].level, found[-1].index - 1):
            found[-2:] = [found[-1].parent]
    return found


def subtrees_beside(taken: Sequence[Subtree], start: int, stop: int) -> list[Subtree]:
    """Returns the largest subtrees that hold no position of `taken`, in order, of those that hold a position from
    `start` up to `stop`. `taken` is in order, and none of it lies within another."""
    found: list[Subtree] = []
    left = [(ROOT, 0, len(taken))]
    while left:
        at, low, high = left.pop()
        if at.stop <= start or at.start >= stop:
            continue
        if low == high:
            found.append(at)
        elif at.level > taken[low].level:
            middle = bisect_left(taken, at.start + (at.stop - at.start) // 2, low, high, key=attrgetter("start"))
            first = Subtree(at.level - 1, 2 * at.index)
            left += [(Subtree(at.level - 1, first.index + 1), middle, high), (first, low, middle)]
    return found


def fold(items: Mapping[Subtree, Item], merge: Callable[[Item, Item], Item]) -> tuple[Subtree, Item]:
    """Merges items, at least one, up to the smallest subtree that holds them all, and returns it with the result.

    `merge` gets the left item first. Raises CallerError if one of the subtrees lies within another.
    """
    found = dict(sorted(items.items(), key=lambda pair: pair[0].start))
    pairs = list(found)
    for left, right in itertools.pairwise(pairs):
        if left.stop > right.start:
            raise CallerError(f"{left} and {right} overlap: a position would be counted twice")
    level = min(subtree.level for subtree in found)
    while len(found) > 1:
        raised: dict[Subtree, Item] = {}
        for subtree, item in found.items():
            at = subtree.parent if subtree.level == level else subtree
            raised[at] = merge(raised[at], item) if at in raised else item
        found, level = raised, level + 1
    return next(iter(found.items()))
