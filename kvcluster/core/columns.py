"""Rows: named tuples about thousands of pages, made at once, or kept as columns until one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Row = TypeVar("Row", bound=NamedTuple)


def make_rows(kind: type[Row], *columns: Iterable[object]) -> list[Row]:
    """Returns a `kind` for each row of the columns, one column for each field. An endless column (itertools.repeat) may
    stand for a value that all rows share: the shortest column determines the number of rows.

    This takes about half the time of calling `kind` for each row, which is a Python function.
    """
    assert len(columns) == len(kind._fields), f"{kind.__name__} has {len(kind._fields)} fields, not {len(columns)}"
    return list(map(partial(tuple.__new__, kind), zip(*columns, strict=False)))


class ColumnSequence(Sequence[T]):
    """A sequence of rows that holds columns and makes a row when it is asked for one. Subclasses have `__len__` and
    `__getitem__`. It equals every sequence of equal rows.

    A load or store of thousands of pages hands such sequences on and makes no object for each page. Objects that live
    as long as the transfer have Python's cycle collector walk the whole heap again and again, and an engine's heap is
    large.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list
