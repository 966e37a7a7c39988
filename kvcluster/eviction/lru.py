"""Least recently used first: what vLLM, SGLang and Mooncake do by default."""

from __future__ import annotations

from kvcluster.eviction.policy import Block, Facts

DEPTH_BITS = 24
"""Enough for the depth of the longest sequence in blocks of one token. Deeper blocks count as equally deep."""


class LRU:
    """Least recently used first; at equal recency the deeper block first.

    A score is the stamp, shifted by DEPTH_BITS, plus the depth counted downwards: with stamps of 63 bits, 87 bits in
    all. The depth matters if the blocks of a chain alternate between shards, so that no block follows another.
    """

    scores_fall = False

    def __init__(self, facts: Facts | None = None) -> None:
        pass

    def score(self, block: Block, now: int) -> int:
        deepest = (1 << DEPTH_BITS) - 1
        return block.stamp << DEPTH_BITS | deepest - min(block.depth, deepest)

    def evicted(self, score: int, now: int) -> None:
        pass
