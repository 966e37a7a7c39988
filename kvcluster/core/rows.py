"""Rows: many named tuples, made at once. Messages about thousands of pages consist of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, TypeVar

Row = TypeVar("Row", bound=NamedTuple)


def make_rows(kind: type[Row], *columns: Iterable[object]) -> list[Row]:
    """Returns a `kind` for each row of the columns, one column for each field. An endless column (itertools.repeat) may
    stand for a value that all rows share: the shortest column determines the number of rows.

    This takes about half the time of calling `kind` for each row, which is a Python function.
    """
    assert len(columns) == len(kind._fields), f"{kind.__name__} has {len(kind._fields)} fields, not {len(columns)}"
    return list(map(partial(tuple.__new__, kind), zip(*columns, strict=False)))
