"""Pages are divided among exchanges completely, in order, evenly, and never into pieces that are too small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.limits import STREAM_BYTES, WIDE_STREAM_BYTES
from kvcluster.transfers.pieces import split_among_exchanges

PAGE = STREAM_BYTES // 4


@given(st.lists(st.integers(1, 3 * STREAM_BYTES), max_size=60), st.integers(0, 9))
def test_the_shares_are_all_pages_in_order_and_none_is_empty(sizes: list[int], most: int) -> None:
    runs = split_among_exchanges(sizes, most)
    assert [at for run in runs for at in run] == list(range(len(sizes)))
    assert all(runs) and len(runs) <= max(1, most)


@given(st.lists(st.integers(1, 3 * STREAM_BYTES), min_size=1, max_size=60), st.integers(1, 9))
def test_shares_are_even_up_to_a_page(sizes: list[int], most: int) -> None:
    runs = split_among_exchanges(sizes, most)
    even = sum(sizes) / len(runs)
    for run in runs:
        assert sum(sizes[at] for at in run) < even + max(sizes)


@pytest.mark.parametrize(
    ("pages", "most", "shares"),
    [
        (0, 2, []),
        (1, 2, [1]),
        (7, 2, [7]),
        (8, 2, [4, 4]),
        (9, 2, [5, 4]),
        (9, 1, [9]),
        (12, 8, [6, 6]),
        (47, 8, [24, 23]),
        (48, 8, [16, 16, 16]),
        (100, 4, [25, 25, 25, 25]),
    ],
)
def test_each_of_several_shares_has_as_much_as_a_stream_is_worth(pages: int, most: int, shares: list[int]) -> None:
    assert [len(run) for run in split_among_exchanges([PAGE] * pages, most)] == shares


def test_no_run_is_longer_than_it_may_be() -> None:
    assert split_among_exchanges([PAGE] * 7, 2, 3) == [range(3), range(3, 6), range(6, 7)]
    assert split_among_exchanges([PAGE] * 8, 2, 3) == [range(3), range(3, 4), range(4, 7), range(7, 8)]
    assert split_among_exchanges([], 2, 3) == []


def test_one_large_page_is_not_divided() -> None:
    assert split_among_exchanges([9 * STREAM_BYTES], 4) == [range(1)]
    assert split_among_exchanges([3 * WIDE_STREAM_BYTES, 1, 1], 3) == [range(1), range(1, 2), range(2, 3)]
