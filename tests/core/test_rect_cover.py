"""Which parts fill a rectangle, compared with a check of every cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import Part, bits, cover
from tests.core.oracle import cells, covered

ranges = st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True).map(sorted)
rects = st.tuples(ranges, ranges).map(lambda pair: Part(*pair[0], *pair[1]))
SQUARE = Part(0, 4, 0, 4)


@given(rects, st.lists(rects, max_size=8))
def test_each_part_that_fills_something_is_chosen_until_nothing_is_missing(whole: Part, parts: list[Part]) -> None:
    missing, expected = cells(whole), list[int]()
    for index, part in enumerate(parts):
        if missing & cells(part):
            expected.append(index)
            missing -= cells(part)
    assert cover(whole, parts) == (expected, covered(whole, parts))


def test_parts_after_the_one_that_leaves_no_hole_are_not_looked_at() -> None:
    assert cover(SQUARE, [Part(0, 2, 0, 4), SQUARE, SQUARE]) == ([0, 1], True)


def test_nothing_fills_nothing() -> None:
    assert cover(SQUARE, []) == ([], False)
    assert cover(SQUARE, [Part(4, 5, 0, 4)]) == ([], False)


@given(rects, st.lists(rects, max_size=8))
def test_the_grid_has_no_more_cells_than_the_rectangle_and_the_edges_of_its_parts_allow(
    whole: Part, parts: list[Part]
) -> None:
    layers = {whole.layer_start, *(edge for part in parts for edge in part[:2])}
    heads = {whole.head_start, *(edge for part in parts for edge in part[2:])}
    rows = sum(whole.layer_start <= edge < whole.layer_stop for edge in layers)
    columns = sum(whole.head_start <= edge < whole.head_stop for edge in heads)
    assert rows * columns <= bits(whole, len(parts)) <= len(cells(whole))
