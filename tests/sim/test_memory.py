from __future__ import annotations

import random

from tests.sim.memory import Memory, flipped


def test_a_flip_changes_one_bit_and_is_remembered_until_the_range_is_written_again() -> None:
    memory = Memory(128)
    memory.write(0, bytes(range(64)))
    memory.flip(random.Random(1), 0, 64)
    changed = int.from_bytes(memory.read(0, 64), "big") ^ int.from_bytes(bytes(range(64)), "big")
    assert changed.bit_count() == 1
    assert memory.is_rotten(0, 64) and not memory.is_rotten(64, 64)
    memory.write(0, bytes(range(64)))
    assert not memory.is_rotten(0, 64)


def test_what_a_writer_did_not_send_is_rotten_from_the_start() -> None:
    memory = Memory(128)
    memory.write(64, bytes(32))
    memory.spoil(64, 32)
    assert memory.is_rotten(90, 10) and not memory.is_rotten(96, 32)


def test_a_bad_wire_turns_one_bit_over() -> None:
    data = bytes(32)
    assert int.from_bytes(flipped(random.Random(3), data), "big").bit_count() == 1
    assert data == bytes(32)
