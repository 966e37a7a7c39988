"""Footprints: which bytes a destination takes, and whether two destinations of one call share any.

A footprint is `width` bytes at `start + sum(index * stride)` for all indices of its dimensions, one of which is the
rows of a group's blocks. Layers that lie at equal distances are one footprint, so a cache that was allocated as one has
one or two. One sort by address finds the footprints that lie apart. Footprints that alternate in memory, as the layers
of a pool of pages do, share no byte if they begin at different places of a row. Only the rest is compared, dimension by
dimension: where both have a stride in common, by the difference of their indices alone, so that the number of blocks
does not matter.
Pairs that are alike, at the same distance, are compared once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_MOST_STEPS = 100_000
"""After this many comparisons two footprints count as overlapping: a tenth of a second. Memory of engines takes tens;
more are needed only where unlike strides interleave."""

_FEW = 8
"""Up to this many differences of indices are tried; if more are possible, each index is."""


class BlockRows:
    """The rows of a group's blocks, counted from the first; equal to no other. `first`: the number of that."""

    __slots__ = ("first", "gap", "ids", "sorted")

    def __init__(self, rows: Sequence[int]) -> None:
        numbers = sorted(set(rows))
        self.first = numbers[0]
        self.sorted = [number - self.first for number in numbers]
        self.ids = set(self.sorted)
        self.gap = min([second - first for first, second in pairwise(self.sorted)], default=1)


class Dim(NamedTuple):
    """One dimension: its indices, all up to some number or those of rows, and their stride, no less than 0."""

    stride: int
    indices: range | BlockRows

    @property
    def all(self) -> Sequence[int]:
        return self.indices if isinstance(self.indices, range) else self.indices.sorted

    @property
    def ids(self) -> Container[int]:
        return self.indices if isinstance(self.indices, range) else self.indices.ids

    @property
    def reach(self) -> int:
        """From the first index to the last, in bytes."""
        return self.all[-1] * self.stride

    @property
    def gap(self) -> int:
        """The least distance of two indices, in bytes."""
        return self.stride * (1 if isinstance(self.indices, range) else self.indices.gap)

    def differ_by(self, other: Dim, difference: int) -> bool:
        """Whether some index of `other` is so much more than some index of this one."""
        ids = other.ids
        return any(index + difference in ids for index in self.all)


Dims = tuple[Dim, ...]


class Extent:
    """The bytes that layers of one kind take for the blocks of a group, counted from where row 0 begins. `dims`: from
    the greatest gap on, those that continue one another joined. `row_reach`: from the first byte of a row to behind its
    last."""

    __slots__ = ("dims", "first", "reach", "row_reach", "row_stride", "width")

    def __init__(self, width: int, rows: BlockRows, row_stride: int, inner: Sequence[tuple[int, int]] = ()) -> None:
        """`inner`: (count, stride) of the other dimensions. Strides are no less than 0."""
        joined: list[tuple[int, int]] = []
        for count, stride in sorted(inner, key=lambda dim: dim[1]):
            if count == 1:
                continue
            if not joined and stride == width:
                width *= count
            elif joined and stride == joined[-1][0] * joined[-1][1]:
                joined[-1] = joined[-1][0] * count, joined[-1][1]
            else:
                joined.append((count, stride))
        dims = [Dim(stride, range(count)) for count, stride in joined]
        self.row_reach = _reach(width, dims)
        if len(rows.sorted) > 1:
            dims.append(Dim(row_stride, rows))
        dims.sort(key=lambda dim: -dim.gap)
        self.width, self.dims, self.row_stride = width, tuple(dims), row_stride
        self.first = rows.first * row_stride
        self.reach = _reach(width, dims)

    @property
    def is_runs(self) -> bool:
        """Whether each row is one run of bytes, as are buffers."""
        return len(self.dims) == 1 and isinstance(self.dims[0].indices, BlockRows)


class Footprint:
    """An extent of a group's memory, from the address `start` on."""

    __slots__ = ("extent", "group", "start", "stop")

    def __init__(self, group: int, row_0: int, extent: Extent) -> None:
        self.group = group
        self.start = row_0 + extent.first
        self.stop = self.start + extent.reach
        self.extent = extent

    def places(self) -> Iterator[tuple[int, int]]:
        """Returns from where to where each row lies, if it is one run."""
        (dim,), width = self.extent.dims, self.extent.width
        firsts = (self.start + index * dim.stride for index in dim.all)
        return ((first, first + width) for first in firsts)


def first_shared(footprints: Sequence[Footprint]) -> tuple[Footprint, Footprint] | None:
    """Returns two of these that have a byte in common, None if there are none. None of them meets itself."""
    known: dict[object, bool] = {}
    for cluster in _clusters(footprints):
        strides = {each.extent.row_stride for each in cluster}
        for one, other in _in_turns(cluster, *strides) if len(strides) == 1 else _meeting(cluster):
            alike = one.extent, other.extent, other.start - one.start
            if alike not in known:
                known[alike] = _meet(one, other)
            if known[alike]:
                return one, other
    return None


def _clusters(footprints: Sequence[Footprint]) -> Iterator[list[Footprint]]:
    """Yields those whose bounds overlap, in order; none that lies alone."""
    cluster: list[Footprint] = []
    stop = 0
    for each in sorted(footprints, key=lambda each: each.start):
        if each.start >= stop:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(each)
        stop = max(stop, each.stop)
    if len(cluster) > 1:
        yield cluster


def _meeting(cluster: Sequence[Footprint]) -> Iterator[tuple[Footprint, Footprint]]:
    """Yields the pairs whose bounds overlap."""
    return _overlapping([(each.start, each.stop, each) for each in cluster])


def _in_turns(cluster: Sequence[Footprint], stride: int) -> Iterator[tuple[Footprint, Footprint]]:
    """As `_meeting`, of footprints with the same row stride: by where within that distance each begins."""
    if max(each.extent.row_reach for each in cluster) > stride:
        return _meeting(cluster)
    begins = [each.start % stride for each in cluster]
    turns = [(at, at + each.extent.row_reach, each) for at, each in zip(begins, cluster, strict=True)]
    turns += [(first + stride, last + stride, each) for first, last, each in turns]
    turns.sort(key=lambda place: place[0])
    return (pair for pair in _overlapping(turns) if pair[0] is not pair[1])


def _overlapping(places: Sequence[tuple[int, int, Footprint]]) -> Iterator[tuple[Footprint, Footprint]]:
    """Yields the pairs of places, each from where to where, that overlap. They are in order."""
    active: list[tuple[int, int, Footprint]] = []
    for each in places:
        active = [before for before in active if before[1] > each[0]]
        for before in active:
            yield before[2], each[2]
        active.append(each)


def _meet(one: Footprint, other: Footprint) -> bool:
    if one.extent.is_runs and other.extent.is_runs:
        places = sorted((*one.places(), *other.places()))
        return any(second[0] < first[1] for first, second in pairwise(places))
    extent, theirs = one.extent, other.extent
    return _Comparison().meet(other.start - one.start, extent.width, extent.dims, theirs.width, theirs.dims)


class _Comparison:
    """Compares two footprints, in a bounded number of steps."""

    def __init__(self) -> None:
        self._steps = 0

    def meet(self, distance: int, width: int, dims: Dims, other_width: int, others: Dims) -> bool:
        """Whether two boxes have a byte in common, of which the second begins `distance` behind the first."""
        self._steps += 1
        if distance >= _reach(width, dims) or -distance >= _reach(other_width, others):
            return False
        if not (dims or others) or self._steps > _MOST_STEPS:
            return True
        if dims and others and dims[0].stride == others[0].stride:
            tried = self._by_differences(distance, width, dims, other_width, others)
            if tried is not None:
                return tried
        if not dims or (others and dims[0].gap < others[0].gap):
            return self.meet(-distance, other_width, others, width, dims)
        (stride, _), reach, other_reach = dims[0], _reach(width, dims[1:]), _reach(other_width, others)
        first, last = (distance - reach) // stride + 1, (distance + other_reach - 1) // stride
        indices = dims[0].all
        return any(
            self.meet(distance - index * stride, width, dims[1:], other_width, others)
            for index in indices[bisect_left(indices, first) : bisect_right(indices, last)]
        )

    def _by_differences(self, distance: int, width: int, dims: Dims, other_width: int, others: Dims) -> bool | None:
        """As `meet`, if both have the first stride in common; None if too many differences of indices are possible."""
        one, other = dims[0], others[0]
        reach, other_reach = _reach(width, dims[1:]), _reach(other_width, others[1:])
        least = max((-other_reach - distance) // one.stride + 1, -one.all[-1])
        most = min((reach - 1 - distance) // one.stride, other.all[-1])
        if most - least >= _FEW:
            return None
        return any(
            self.meet(distance + difference * one.stride, width, dims[1:], other_width, others[1:])
            and one.differ_by(other, difference)
            for difference in range(least, most + 1)
        )


def _reach(width: int, dims: Sequence[Dim]) -> int:
    return width + sum([dim.reach for dim in dims])
