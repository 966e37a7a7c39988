"""What is remembered about evicted blocks: a bounded memory of lost blocks, and a histogram of ages.

EvictionHistory lets `explain` report "evicted 40 s ago". It is a table of fixed size, allocated once. A fingerprint
selects the cell of a block; a later loss overwrites an earlier one in the same cell. A fingerprint is eight bytes of a
digest of the namespace and the hash, so a hash that a tenant chooses is not explained by what another tenant lost. Two
blocks with the same fingerprint can make an explanation wrong, but never a byte of KV.

AgeHistogram counts in fixed buckets for how long blocks had not been used when their last copy was evicted. That is how
long a cache of this size keeps a block: if it falls below the time between two turns of a conversation, the second turn
misses. An age is added in constant time, and nothing is kept of the block.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from itertools import accumulate

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


AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
"""Upper bounds of the buckets, in seconds; a last bucket has all that is older."""

_NS = 1_000_000_000


class AgeHistogram:
    """The number of ages in each bucket, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self.total_ns = 0

    def add(self, age_ns: int) -> None:
        self._counts[bisect_left(AGE_BOUNDS_S, age_ns / _NS)] += 1
        self.total_ns += age_ns

    def cumulative(self) -> tuple[int, ...]:
        """Returns for each of AGE_BOUNDS_S the number of ages up to it, and last the number of all."""
        return tuple(accumulate(self._counts))
