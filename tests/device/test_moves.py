"""What is moved between staging and blocks, by the table: in every layout, as a loop over all values moves it."""

from __future__ import annotations

from functools import partial

import pytest

from kvcluster.device.device import Range
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import Numbers, columns_bytes, record_bytes
from tests.device.moved import Arena, drawn

SEEDS = range(400)


def differs(arena: Arena, kernel: Scatter | Gather) -> bool:
    """Whether a kernel does something else than it should."""
    done = Arena(bytes(arena.known), "cpu")
    kernel.run(partial(shifted, done, arena.start - done.start))
    for record in kernel.records:
        arena.move(record, scatters=isinstance(kernel, Scatter))
    return bytes(done.known) != bytes(arena.known)


def test_records_of_all_layouts_are_moved_as_a_loop_over_their_values_moves_them() -> None:
    units = set()
    for seed in SEEDS:
        for arena, kernel in drawn(seed, "cpu"):
            assert not differs(arena, kernel), f"seed {seed}"
            units |= {launch.unit for launch in kernel.launches}
    assert units == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("field", Numbers._fields)
def test_a_number_of_a_launch_that_is_wrong_is_noticed(field: str) -> None:
    found = 0
    for seed in range(200):
        for arena, kernel in drawn(seed, "cpu"):
            wrong = Arena(bytes(arena.known), "cpu")
            words = wrong.known[kernel.table.address - arena.start :][: kernel.table.nbytes].cast("q")
            for launch in kernel.launches:
                words[launch.at + Numbers._fields.index(field)] -= 1
            shift = arena.start - wrong.start
            opened = partial(shifted, wrong, shift)
            try:
                kernel.run(opened)
            except (AssertionError, IndexError):
                found += 1
                continue
            for record in kernel.records:
                arena.move(record, scatters=isinstance(kernel, Scatter))
            table = slice(kernel.table.address - arena.start, kernel.table.address - arena.start + kernel.table.nbytes)
            arena.known[table] = wrong.known[table]
            found += bytes(arena.known) != bytes(wrong.known)
    assert found > 8


def shifted(arena: Arena, shift: int, wanted: Range) -> memoryview:
    return arena.opened(wanted._replace(address=wanted.address - shift))


def test_what_a_kernel_says_that_it_touches_is_what_it_touches() -> None:
    """Each end of each range is reached, and nothing else is."""
    for seed in range(100):
        for arena, kernel in drawn(seed, "cpu"):
            words = arena.opened(kernel.table).cast("q")
            planes = [plane for launch in kernel.launches for plane in launch.planes(words)]
            ranges = [(each.address, each.address + each.nbytes) for each in kernel.touched]
            touched = [(block, block + plane.numbers.element_bytes) for plane in planes for _, block in plane.pieces()]
            assert {start for start, _ in ranges} <= {start for start, _ in touched}
            assert {stop for _, stop in ranges} <= {stop for _, stop in touched}
            assert all(any(a <= start and stop <= b for a, b in ranges) for start, stop in touched)


def test_a_table_is_as_large_as_is_said() -> None:
    for seed in range(50):
        for _, kernel in drawn(seed, "cpu"):
            geometries = {id(record.geometry): record.geometry for record in kernel.records}.values()
            entries = sum(record_bytes(record.geometry) for record in kernel.records)
            most = entries + sum(map(columns_bytes, geometries))
            assert kernel.table.nbytes <= most
