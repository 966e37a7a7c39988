"""GreedyDual-Size-Frequency: what saves least computing for its bytes goes first, and what was not used for long.

L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories
HPL-98-69R1, 1998, after P. Cao and S. Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997. A block's priority
is L + uses * cost / size. L, the *inflation*, is the priority of the last victim, and counts for a block as it was when
the block was last used: so what is not used is overtaken, and old uses lose their weight.

A lookup writes no priority into a block, only its stamp and its count. So the policy remembers when L was what, and
looks up what it was at the block's stamp. It remembers the last INFLATIONS values; what was used before them counts
as if it had been used at the first of them.

Counts age besides: they halve for each HALF_LIFE_NS that a block is not used, as TinyLFU halves its own (G. Einziger,
R. Friedman, B. Manes, "TinyLFU", ACM TOS 2017). Without it a prompt of yesterday with many uses would stay until the
cache has turned over as often. This makes a score fall while time passes.
"""

from __future__ import annotations

from bisect import bisect_right

from kvcluster.eviction.lru import DEPTH_BITS
from kvcluster.eviction.policy import USES, Block, Facts

HALF_LIFE_NS = 600_000_000_000
"""Ten minutes: a conversation whose user thinks for so long is still warm."""

INFLATIONS = 1_024
"""Values of L that are remembered, at most one for each STEP_NS: 17 minutes and more."""

STEP_NS = 1_000_000_000
_SHIFT = 20  # bits behind the point of cost / size


class GDSF:
    """Cost is `facts.recompute`, size is `facts.nbytes`; at equal priority the deeper goes first."""

    falls = True

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._times = [0]  # since when L was ...
        self._inflations = [0]  # ... this; both ascend
        self._latest = 0

    def score(self, block: Block, now: int) -> int:
        idle_ns = max(0, now - block.stamp)
        uses = 1 + block.uses >> min(idle_ns // HALF_LIFE_NS, USES.bit_length())
        value = (max(uses, 1) * self._facts.recompute(block) << _SHIFT) // self._facts.nbytes(block)
        inflation = self._inflations[max(0, bisect_right(self._times, block.stamp) - 1)]
        deepest = (1 << DEPTH_BITS) - 1
        return inflation + value << DEPTH_BITS | deepest - min(block.depth, deepest)

    def taken(self, score: int, now: int) -> None:
        self._latest = max(self._latest, score >> DEPTH_BITS)
        # What is remembered is not changed: no score changes because others are taken in the same search.
        if self._latest > self._inflations[-1] and now - self._times[-1] >= STEP_NS:
            self._times.append(now)
            self._inflations.append(self._latest)
            if len(self._times) > INFLATIONS:
                del self._times[0], self._inflations[0]
