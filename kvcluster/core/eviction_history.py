"""What was lost, and when: a bounded memory of fingerprints, so that `explain` can say "evicted 40 s ago".

A table of fixed size, which takes its memory once and never grows. A block's hash says which cell is its own; what
was lost later takes the cell of what was lost before. A fingerprint is eight bytes of the hash. Two blocks with the
same one would make an explanation wrong, never a byte.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Miss, MissReason

_REASONS = (MissReason.EVICTED, MissReason.SHARD_LOST, MissReason.CORRUPT)
_REASON_BITS = 2


class EvictionHistory:
    """Block hash -> when its last copy was lost, and how: evicted, corrupt, or with its shard."""

    def __init__(self, capacity: int = limits.EVICTED_FINGERPRINTS) -> None:
        self._capacity = capacity
        # Two numbers a cell: a fingerprint; and the nanosecond, which fits for seventy years, with one more than the
        # reason below it, so that 0 is an empty cell.
        self._cells = memoryview(bytearray(16 * capacity)).cast("Q")

    def add(self, block: BlockHash, now: int, reason: MissReason) -> None:
        cell, fingerprint = self._find(block)
        self._cells[cell] = fingerprint
        self._cells[cell + 1] = now << _REASON_BITS | _REASONS.index(reason) + 1

    def forget(self, block: BlockHash) -> None:
        """It is cached again."""
        cell, fingerprint = self._find(block)
        if self._cells[cell] == fingerprint:
            self._cells[cell + 1] = 0

    def why(self, block: BlockHash, now: int) -> Miss | None:
        """The miss that a lost block is answered with, its age in whole seconds."""
        cell, fingerprint = self._find(block)
        lost_at, reason = divmod(self._cells[cell + 1], 1 << _REASON_BITS)
        if self._cells[cell] != fingerprint or not reason:
            return None
        return Miss(_REASONS[reason - 1], f"{(now - lost_at) // 1_000_000_000} s ago")

    def _find(self, block: BlockHash) -> tuple[int, int]:
        """Where this block's cell begins, and its fingerprint."""
        fingerprint = int.from_bytes(block[:8], "big")
        return 2 * (fingerprint % self._capacity), fingerprint
