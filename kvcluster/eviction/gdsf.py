"""GreedyDual-Size-Frequency: evicts first the blocks that save the least computing for their bytes, and those not used
for long.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories
HPL-98-69R1, 1998, after P. Cao and S. Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997. A block's priority
is L + uses * cost / size. L, the *inflation*, is the priority of the last victim, and counts for a block with the value
that it had when the block was last used: so unused blocks are overtaken, and old uses lose their weight.

A lookup writes no priority into a block, only its stamp and its count. So the policy remembers the values of L over
time, and looks up the value at the block's stamp. It remembers the last INFLATIONS values; a block last used before
them counts as if it had been used at the first of them.

Counts age besides: they halve for each HALF_LIFE_NS for which a block is not used, as TinyLFU halves its own (G.
Einziger, R. Friedman, B. Manes, "TinyLFU", ACM TOS 2017). Otherwise a prompt of yesterday with many uses would stay
until the cache has turned over as often. Halving makes a score fall as time passes.
"""

from __future__ import annotations

from bisect import bisect_right

from kvcluster.eviction.lru import DEPTH_BITS
from kvcluster.eviction.policy import USES, Block, Facts

HALF_LIFE_NS = 600_000_000_000
"""Ten minutes: a conversation whose user thinks for that long is still warm."""

INFLATIONS = 1_024
"""Values of L that are remembered, at most one per STEP_NS: they span 17 minutes or more."""

STEP_NS = 1_000_000_000
_SHIFT = 20  # fractional bits of cost / size


class GDSF:
    """Cost is `facts.recompute`, size is `facts.nbytes`; at equal priority the deeper block is evicted first."""

    scores_fall = True

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._times = [0]  # the times at which L became ...
        self._inflations = [0]  # ... this; both ascend
        self._latest = 0

    def score(self, block: Block, now: int) -> int:
        idle_ns = max(0, now - block.stamp)
        uses = 1 + block.uses >> min(idle_ns // HALF_LIFE_NS, USES.bit_length())
        value = (max(uses, 1) * self._facts.recompute(block) << _SHIFT) // self._facts.nbytes(block)
        inflation = self._inflations[max(0, bisect_right(self._times, block.stamp) - 1)]
        deepest = (1 << DEPTH_BITS) - 1
        return inflation + value << DEPTH_BITS | deepest - min(block.depth, deepest)

    def evicted(self, score: int, now: int) -> None:
        self._latest = max(self._latest, score >> DEPTH_BITS)
        # Remembered values are not changed: no score changes because other blocks are taken in the same search.
        if self._latest > self._inflations[-1] and now - self._times[-1] >= STEP_NS:
            self._times.append(now)
            self._inflations.append(self._latest)
            if len(self._times) > INFLATIONS:
                del self._times[0], self._inflations[0]
