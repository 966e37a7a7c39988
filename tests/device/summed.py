"""Drawn verifications against xxhash itself: `python -m tests.device.summed SEED COUNT [cpu|cuda]` compares the Triton
kernels, in Triton's interpreter or on a card, and prints how many differ. test_verification.py compares the definition.
"""

from __future__ import annotations

import sys
from random import Random
from typing import NamedTuple

import xxhash

from kvcluster.device.device import Range
from kvcluster.device.verification import CopySums, SummedRecord, verification
from tests.device.moved import Arena

LAYER_STEP = 0x9E3779B97F4A7C15
LENGTHS = (248, 256, 264, 1016, 1024, 1032, 1088, 2048, 3000, 4096, 9216, 16384, 65536)
MOVED_WORDS = 8
"""Words of a table of moves before the records' own, of which some are layers."""


class Drawn(NamedTuple):
    """A kernel, the memory that it works in, and what it has to leave there: the words of the moves, the verdicts,
    which begin at `verdicts`, and the copies of the records."""

    arena: Arena
    kernel: CopySums
    verdicts: int
    moved: list[int]
    bad: list[int]
    copies: list[bytes]


def drawn(seed: int, device: str) -> Drawn:
    """Draws records, sound ones and others, one after the other with gaps, behind the table that verifies them."""
    rng = Random(seed)
    kinds = [(rng.choice(LENGTHS[: rng.choice((6, 9, 13))]), rng.randrange(1, 5)) for _ in range(rng.randrange(1, 5))]
    room = 2 * sum(layer_bytes * layers + 64 for layer_bytes, layers in kinds)
    start = 64 + 8 * (MOVED_WORDS + 200)
    scratch = start + room
    size = scratch + sum(layers * (layer_bytes // 16 + 64) for layer_bytes, layers in kinds) + 64
    content = bytearray(rng.randbytes(size))
    arena = Arena(bytes(content), device)
    records, bad, at = [], [], start
    moved = [rng.randrange(1, 9) for _ in range(MOVED_WORDS)]
    for number, (layer_bytes, layers) in enumerate(kinds):
        at += rng.choice((0, 8, 16)) - (arena.start + at) % 8
        data, first = bytes(content[at : at + layers * layer_bytes]), rng.getrandbits(64)
        sums = [
            xxhash.xxh3_64_intdigest(data[layer * layer_bytes :][:layer_bytes], (first + layer * LAYER_STEP) % 2**64)
            for layer in range(layers)
        ]
        bad.append(rng.random() < 0.4)
        if bad[-1]:  # one bit of a sum or of the bytes
            if rng.random() < 0.5:
                sums[rng.randrange(layers)] ^= 1 << rng.randrange(64)
            else:
                content[at + rng.randrange(layers * layer_bytes)] ^= 1 << rng.randrange(8)
        layers_at = number if rng.random() < 0.8 else None
        if bad[-1] and layers_at is not None:
            moved[layers_at] = 0
        source, into = arena.start + at, arena.start + at + len(data) + rng.choice((0, 8, 16))
        records.append(SummedRecord(Range(source, len(data)), into, first, sums, layers_at))
        at = into + len(data) - arena.start
    return _placed(arena, content, records, moved, [int(each) for each in bad], scratch, rng)


def _placed(
    arena: Arena,
    content: bytearray,
    records: list[SummedRecord],
    moved: list[int],
    bad: list[int],
    scratch: int,
    rng: Random,
) -> Drawn:
    at = 64 - arena.start % 8
    made = verification(records, MOVED_WORDS, arena.start + scratch + 8 - arena.start % 8)
    words, launches, verdicts, room = made
    assert room.address + room.nbytes <= arena.start + len(content)
    before = [value or rng.randrange(1, 9) for value in moved]
    table = b"".join(value.to_bytes(8, "little") for value in before) + words
    assert len(table) <= 8 * (MOVED_WORDS + 190)
    content[at : at + len(table)] = table
    arena.fill(content)
    kernel = CopySums(Range(arena.start + at, len(table)), MOVED_WORDS, launches, room, records)
    sources = [record.data.address - arena.start for record in records]
    copies = [bytes(content[at : at + record.data.nbytes]) for at, record in zip(sources, records, strict=True)]
    return Drawn(arena, kernel, verdicts, moved, bad, copies)


def is_right(drawn: Drawn, content: memoryview) -> bool:
    """Whether `content`, the bytes of the arena, is what the kernel has to leave."""
    start, kernel = drawn.arena.start, drawn.kernel
    words = content[kernel.table.address - start :][: kernel.table.nbytes].cast("Q")
    left = list(words[:MOVED_WORDS]), list(words[drawn.verdicts : drawn.verdicts + len(drawn.bad)])
    copies = [bytes(content[record.into - start :][: record.data.nbytes]) for record in kernel.records]
    return (*left, copies) == (drawn.moved, drawn.bad, drawn.copies)


def compared(seeds: range, device: str) -> tuple[list[int], int]:
    """Verifies the records of these seeds by the Triton kernels. Returns the seeds that differ, and how many records
    were bad."""
    from kvcluster.device import triton_sums

    differ, bad = [], 0
    for seed in seeds:
        case = drawn(seed, device)
        triton_sums.enqueue(case.kernel)
        if not is_right(case, case.arena.content()):
            differ.append(seed)
        bad += sum(case.bad)
    return differ, bad


def main(first: int, count: int, device: str) -> None:
    differ, bad = compared(range(first, first + count), device)
    for seed in differ:
        print(f"seed {seed} differs")
    print(f"{len(differ)} of {count} differ, {bad} bad records")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
