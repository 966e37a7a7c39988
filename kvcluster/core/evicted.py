"""What was lost, and when: a bounded memory of fingerprints, so that `explain` can say "evicted 40 s ago".

A fingerprint is the first eight bytes of a block hash. Two blocks with the same one would make an explanation
wrong, never a byte. The oldest is forgotten when the memory is full.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.reasons import Miss, MissReason


class EvictedMemory:
    """Block hash -> when its last copy was lost, and whether by eviction or with its shard."""

    def __init__(self, capacity: int = limits.EVICTED_FINGERPRINTS) -> None:
        self._capacity = capacity
        self._lost: dict[bytes, tuple[int, MissReason]] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, block: BlockHash, now: int, reason: MissReason) -> None:
        fingerprint = block[:8]
        self._lost.pop(fingerprint, None)
        self._lost[fingerprint] = (now, reason)
        if len(self._lost) > self._capacity:
            del self._lost[next(iter(self._lost))]

    def forget(self, block: BlockHash) -> None:
        """It is cached again."""
        self._lost.pop(block[:8], None)

    def why(self, block: BlockHash, now: int) -> Miss | None:
        """The miss that a lost block is answered with, its age in whole seconds."""
        lost = self._lost.get(block[:8])
        return None if lost is None else Miss(lost[1], f"{(now - lost[0]) // 1_000_000_000} s ago")
