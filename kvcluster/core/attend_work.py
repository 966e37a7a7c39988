"""How much work an Attend is. Worker and shard compute the same number, so that a worker never sends more than a shard
computes.

To score a query token with a key takes a product, which costs a multiplication a channel, and an exponential, which
costs as much as some channels. Keys are read a whole cut of positions at a time.
"""

from __future__ import annotations

from kvcluster.core.position_tree import CUT_TOKENS

_LEAST_CHANNELS = 64
"""The least number of channels, of a key and its value, that a score is counted as: this covers the cost of its
exponential, and the padding of rows of few channels."""


def attend_work(tokens: int, cuts: int, *, heads: int, channels: int) -> int:
    """Returns the multiplications of so many query tokens with all keys of so many cuts. `channels`: those of a key and
    its value together."""
    return tokens * cuts * CUT_TOKENS * heads * max(channels, _LEAST_CHANNELS)
