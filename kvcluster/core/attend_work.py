"""How much work an Attend is: what worker and shard count alike, so that a worker never sends more than a shard
computes.

A query token is scored with each key by a product, which costs a multiplication a channel, and by an exponential, which
costs as much as some channels do. Keys are read a whole cut of positions at a time.
"""

from __future__ import annotations

from kvcluster.core.position_tree import CUT_TOKENS

_LEAST_CHANNELS = 64
"""The channels of a key and its value that a score counts as at least: what its exponential costs, and rows of few
channels that are padded."""


def attend_work(tokens: int, cuts: int, *, heads: int, channels: int) -> int:
    """Returns the multiplications of so many query tokens with all keys of so many cuts. `channels`: those of a key and
    its value together."""
    return tokens * cuts * CUT_TOKENS * heads * max(channels, _LEAST_CHANNELS)
