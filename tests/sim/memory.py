"""The memory of a shard: real bytes, and the faults that corrupt them.

Which bytes a fault has changed is recorded beside them, so that a reader's mismatch can be told from a bug: bytes that
no fault touched must be correct.
"""

from __future__ import annotations

import random

from kvcluster.core.messages import PageSlot

UNIT_BYTES = 64
"""The unit that two pages never share (allocator.ALIGN_BYTES)."""


class Memory:
    """The memory of one tier, of `nbytes`. `rotten` are the bytes that a fault changed and that were not rewritten
    since."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)
        self._view = memoryview(self._bytes)
        self.rotten: dict[int, None] = {}

    def write(self, offset: int, data: bytes) -> None:
        """Overwrites a range, which is sound again."""
        self._bytes[offset : offset + len(data)] = data
        if self.rotten:
            for byte in [byte for byte in self.rotten if offset <= byte < offset + len(data)]:
                del self.rotten[byte]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns a private copy of a range."""
        return bytes(self._view[offset : offset + nbytes])

    def view(self, slot: PageSlot) -> memoryview:
        """Returns a view of the page."""
        return self._view[slot.offset : slot.offset + slot.nbytes]

    def flip(self, rng: random.Random, offset: int, nbytes: int) -> None:
        """Flips one bit of a range."""
        byte = offset + rng.randrange(nbytes)
        self._bytes[byte] ^= 1 << rng.randrange(8)
        self.rotten[byte] = None

    def spoil(self, offset: int, nbytes: int) -> None:
        """Marks a range as written with bytes that differ from what the writer sent."""
        self.rotten.update(dict.fromkeys(range(offset, offset + nbytes)))

    def is_rotten(self, offset: int, nbytes: int) -> bool:
        """Whether a fault has changed any byte of this range."""
        return bool(self.rotten) and any(offset <= byte < offset + nbytes for byte in self.rotten)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Returns the same bytes with one bit flipped, as a bad wire does."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
