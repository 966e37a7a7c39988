"""The memory of a shard: real bytes, and the faults that befall them.

What was written where is remembered beside it, so that a reader's mismatch can be told from a mistake: bytes that
nobody corrupted have to be right.
"""

from __future__ import annotations

import random

from kvcluster.core.messages import PageSlot

UNIT_BYTES = 64
"""What two pages never share (allocator.ALIGN_BYTES)."""


class Memory:
    """An arena of `nbytes`. `rotten` are the ranges that a fault changed, until they are written again."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)
        self._view = memoryview(self._bytes)
        self.rotten: dict[int, None] = {}

    def write(self, offset: int, data: bytes) -> None:
        """Writes over a range, which is sound again."""
        self._bytes[offset : offset + len(data)] = data
        if self.rotten:
            for byte in [byte for byte in self.rotten if offset <= byte < offset + len(data)]:
                del self.rotten[byte]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A private copy of a range."""
        return bytes(self._view[offset : offset + nbytes])

    def view(self, slot: PageSlot) -> memoryview:
        """The page as it lies there."""
        return self._view[slot.offset : slot.offset + slot.nbytes]

    def flip(self, rng: random.Random, offset: int, nbytes: int) -> None:
        """Turns one bit of a range over."""
        byte = offset + rng.randrange(nbytes)
        self._bytes[byte] ^= 1 << rng.randrange(8)
        self.rotten[byte] = None

    def spoil(self, offset: int, nbytes: int) -> None:
        """What was written to this range was not what its writer had sent."""
        self.rotten.update(dict.fromkeys(range(offset, offset + nbytes)))

    def is_rotten(self, offset: int, nbytes: int) -> bool:
        """Has a fault changed any of this range?"""
        return bool(self.rotten) and any(offset <= byte < offset + nbytes for byte in self.rotten)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """The same bytes but for one bit, as a bad wire makes them."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
