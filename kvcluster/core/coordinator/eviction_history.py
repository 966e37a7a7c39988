"""The eviction history: a bounded memory of lost blocks, so that `explain` can say "evicted 40 s ago".

It is a table of fixed size, allocated once. A fingerprint selects the cell of a block; a later loss overwrites an
earlier one in the same cell. A fingerprint is eight bytes of a digest of the namespace and the hash, so a hash that a
tenant chooses is not explained by what another tenant lost. Two blocks with the same fingerprint can make an
explanation wrong, but never a byte of KV.
"""

from __future__ import annotations

import hashlib

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.miss import Miss, MissReason

_REASONS = (MissReason.EVICTED, MissReason.SHARD_LOST, MissReason.CORRUPT)
_REASON_BITS = 2


class EvictionHistory:
    """Namespace and block hash -> when its last copy was lost, and how: evicted, corrupt, or with its shard."""

    def __init__(self, capacity: int = limits.EVICTED_FINGERPRINTS) -> None:
        self._capacity = capacity
        # Two numbers per cell: the fingerprint; and the time of the loss in nanoseconds (which fits for seventy years)
        # above the reason plus one in the two lowest bits, so that 0 means an empty cell.
        self._cells = memoryview(bytearray(16 * capacity)).cast("Q")

    def add(self, space: NamespaceId, block: BlockHash, now: int, reason: MissReason) -> None:
        cell, fingerprint = self._find(space, block)
        self._cells[cell] = fingerprint
        self._cells[cell + 1] = now << _REASON_BITS | _REASONS.index(reason) + 1

    def forget(self, space: NamespaceId, block: BlockHash) -> None:
        """Forgets a block that is cached again."""
        cell, fingerprint = self._find(space, block)
        if self._cells[cell] == fingerprint:
            self._cells[cell + 1] = 0

    def why(self, space: NamespaceId, block: BlockHash, now: int) -> Miss | None:
        """Returns the miss for a lost block, with its age in whole seconds; None if the block is not remembered."""
        cell, fingerprint = self._find(space, block)
        lost_at, reason = divmod(self._cells[cell + 1], 1 << _REASON_BITS)
        if self._cells[cell] != fingerprint or not reason:
            return None
        return Miss(_REASONS[reason - 1], f"{(now - lost_at) // 1_000_000_000} s ago")

    def _find(self, space: NamespaceId, block: BlockHash) -> tuple[int, int]:
        """Returns the index of this block's cell, and its fingerprint."""
        fingerprint = int.from_bytes(hashlib.blake2b(block, digest_size=8, key=space).digest(), "big")
        return 2 * (fingerprint % self._capacity), fingerprint
