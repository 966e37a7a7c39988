"""Claims about rows: many named tuples, made at once."""

from __future__ import annotations

from itertools import repeat

import pytest

from kvcluster.core.columns import make_rows
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PageKey

PART = Part(0, 4, 0, 2)
HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]


def test_rows_are_what_calling_the_kind_makes() -> None:
    rows = make_rows(PageKey, HASHES, repeat(1), repeat(PART))
    assert rows == [PageKey(name, 1, PART) for name in HASHES]
    assert all(type(row) is PageKey for row in rows) and rows[2].hash == HASHES[2]


def test_no_rows_are_made_of_empty_columns() -> None:
    assert make_rows(PageKey, [], repeat(1), repeat(PART)) == []


def test_a_column_for_each_field_is_required() -> None:
    with pytest.raises(AssertionError, match="PageKey has 3 fields, not 2"):
        make_rows(PageKey, HASHES, repeat(1))
