"""Records are copied and compared with their sums as xxhash makes them, and what differs is not moved."""

from __future__ import annotations

from functools import partial

from tests.device.moved import Arena
from tests.device.summed import drawn, is_right
from tests.device.test_moves import shifted


def test_records_of_all_lengths_have_the_verdict_that_xxhash_gives_them() -> None:
    bad = 0
    for seed in range(400):
        case = drawn(seed, "cpu")
        done = Arena(bytes(case.arena.known), "cpu")
        case.kernel.run(partial(shifted, done, case.arena.start - done.start))
        assert is_right(case, done.known), f"seed {seed}"
        bad += sum(case.bad)
    assert bad > 100
