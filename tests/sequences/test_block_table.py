"""A block table keeps its address, and each reader learns from which entry on it has changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.sequences.block_table import ABSENT, BlockTable

CAPACITY = 12
CHANGES = st.lists(st.tuples(st.sampled_from(["append", "set", "cut", "copy", "read"]), st.integers(0, CAPACITY - 1)))


def test_entries_are_changed_in_place() -> None:
    table = BlockTable(CAPACITY)
    seen = table.memory
    table.append(7)
    table.append(8)
    table[0] = ABSENT
    assert ([*table], len(table), [*seen[:2]]) == ([ABSENT, 8], 2, [ABSENT, 8])
    table.cut(1)
    assert ([*table], [*seen[:2]]) == ([ABSENT], [ABSENT, ABSENT])
    with pytest.raises(IndexError):
        table[1]


@given(changes=CHANGES)
def test_each_of_two_readers_keeps_a_mirror_by_reading_what_has_changed_since(changes: list[tuple[str, int]]) -> None:
    table, other = BlockTable(CAPACITY), BlockTable(CAPACITY)
    for entry in (50, 51, 52):
        other.append(entry)
    mirrors: list[tuple[int, list[int]]] = [(0, []), (0, [])]

    def read(reader: int) -> None:
        version, mirror = mirrors[reader]
        first = table.changed_since(version)
        if first is not None:
            mirror[first:] = [*table][first:]
        mirrors[reader] = table.version, mirror
        assert mirror == [*table]

    for what, number in changes:
        if what == "append" and len(table) < CAPACITY:
            table.append(number)
        elif what == "set" and len(table):
            table[number % len(table)] = number
        elif what == "cut":
            table.cut(number)
        elif what == "copy":
            table.copy_from(other, min(number, len(other)))
        elif what == "read":
            read(number % 2)
    read(0)
    read(1)
    assert table.changed_since(table.version) is None
