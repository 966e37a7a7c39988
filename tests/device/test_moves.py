"""What is moved between staging and blocks, by the table: in every layout, as a loop over all values moves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import RECORD_BYTES, columns_bytes
from tests.device.moved import Arena, drawn

SEEDS = range(400)


def differs(arena: Arena, kernel: Scatter | Gather, run: Scatter | Gather) -> bool:
    """Whether `run` does something else than `kernel` should."""
    done = Arena(bytes(arena.known), "cpu")
    shift = arena.start - done.start
    run.run(lambda wanted: done.opened(wanted._replace(address=wanted.address - shift)))
    for record in kernel.records:
        arena.move(record, scatters=isinstance(kernel, Scatter))
    return bytes(done.known) != bytes(arena.known)


def test_records_of_all_layouts_are_moved_as_a_loop_over_their_values_moves_them() -> None:
    units = set()
    for seed in SEEDS:
        for arena, kernel in drawn(seed, "cpu"):
            assert not differs(arena, kernel, kernel), f"seed {seed}"
            units |= {launch.unit for launch in kernel.launches}
    assert units == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("field", ["head_at", "staged_first", "staged_layer", "count", "layers", "plane_count"])
def test_a_number_of_a_launch_that_is_wrong_is_noticed(field: str) -> None:
    """All but `layers`, by which only a grid is made: the table says how many a record has."""
    found = 0
    for seed in range(150):
        for arena, kernel in drawn(seed, "cpu"):
            launches = [replace(launch, **{field: getattr(launch, field) - 1}) for launch in kernel.launches]
            try:
                found += differs(arena, kernel, replace(kernel, launches=launches))
            except (AssertionError, IndexError):
                found += 1
    assert (found == 0) if field == "layers" else found > 10


def test_what_a_kernel_says_that_it_touches_is_what_it_touches() -> None:
    """Each end of each range is reached, and nothing else is."""
    for seed in range(100):
        for arena, kernel in drawn(seed, "cpu"):
            words = arena.opened(kernel.table).cast("q")
            pieces = [piece for launch in kernel.launches for piece in launch.pieces(words)]
            ranges = [(each.address, each.address + each.nbytes) for each in kernel.touched]
            touched = [(block, block + nbytes) for _, block, nbytes in pieces]
            assert {start for start, _ in ranges} <= {start for start, _ in touched}
            assert {stop for _, stop in ranges} <= {stop for _, stop in touched}
            assert all(any(a <= start and stop <= b for a, b in ranges) for start, stop in touched)


def test_a_table_is_as_large_as_is_said() -> None:
    for seed in range(50):
        for _, kernel in drawn(seed, "cpu"):
            geometries = {id(record.geometry): record.geometry for record in kernel.records}.values()
            most = len(kernel.records) * RECORD_BYTES + sum(map(columns_bytes, geometries))
            assert kernel.table.nbytes <= most
