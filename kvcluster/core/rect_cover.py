"""Which of several rectangles of layers and heads are needed to fill another one.

The rectangle to fill is cut at every edge of a part, into rows of layers and columns of heads that no edge crosses.
What is still missing of this grid is one integer with a bit for each cell, so a part is compared with it in a few
operations on integers, whatever the number of cells that it spans. For n parts that is n operations on at most
(2n + 1)^2 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.groups import Part


def cover(whole: Part, parts: Sequence[Part]) -> tuple[list[int], bool]:
    """Takes the parts in order and returns the indices of those that fill something that no earlier one does, up to the
    one that fills the last hole. The second value is False if all parts together do not fill `whole`."""
    held = [part.intersect(whole) for part in parts]
    rows = _edges(whole.layer_start, whole.layer_stop, [(p.layer_start, p.layer_stop) for p in held if p])
    columns = _edges(whole.head_start, whole.head_stop, [(p.head_start, p.head_stop) for p in held if p])
    width = len(columns) - 1
    missing = (1 << width * (len(rows) - 1)) - 1
    first_column = _repeated(width, len(rows) - 1)
    chosen: list[int] = []
    for index, part in enumerate(held):
        if part is None:
            continue
        top, bottom = rows[part.layer_start], rows[part.layer_stop]
        starts = (first_column & (1 << width * (bottom - top)) - 1) << width * top
        cells = (starts << columns[part.head_stop]) - (starts << columns[part.head_start])
        filled = cells & missing
        if filled:
            chosen.append(index)
            missing ^= filled
            if not missing:
                break
    return chosen, not missing


def bits(whole: Part, parts: int) -> int:
    """Returns the maximum number of bits of the grid for `parts` parts: the cost of one part in `cover`."""
    most = 2 * parts + 1
    return min(most, whole.layers) * min(most, whole.heads)


def _edges(start: int, stop: int, ranges: list[tuple[int, int]]) -> dict[int, int]:
    """Returns the coordinates at which a grid is cut, each with the number of its cut."""
    edges = {start, stop, *(edge for pair in ranges for edge in pair)}
    return {edge: number for number, edge in enumerate(sorted(edges))}


def _repeated(width: int, rows: int) -> int:
    """Returns an integer with the lowest bit of each of `rows` rows set."""
    bit, doubled = 1, 1
    while doubled < rows:
        bit |= bit << width * doubled
        doubled *= 2
    return bit & (1 << width * rows) - 1
