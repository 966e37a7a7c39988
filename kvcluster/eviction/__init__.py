"""Eviction policies: which cached block is worth least.

A policy is arithmetic: it scores a block and moves nothing. This package lies below the configuration, which selects a
policy by name (`coordinator.eviction_policy`), and imports nothing above: it sees blocks through the Protocols of
policy.py. Policies need not ensure that a block is never evicted before the blocks that follow it:
core/coordinator/eviction_queue.py does.

To add one: a file here with a class that is an EvictionPolicy, and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcluster.eviction.gdsf import GDSF
from kvcluster.eviction.lru import LRU
from kvcluster.eviction.policy import USES, Block, EvictionPolicy, Facts


class PolicySpec(NamedTuple):
    """A policy: each queue makes an instance of its own. `counts_uses`: it reads Block.uses. Lookups count uses only if
    it does, since counting is a twentieth of the cost of a lookup of many blocks."""

    make: Callable[[Facts], EvictionPolicy]
    counts_uses: bool = False


POLICIES: dict[str, PolicySpec] = {
    "lru": PolicySpec(LRU),
    "gdsf": PolicySpec(GDSF, counts_uses=True),
}
"""Policies by their name in the configuration."""

__all__ = ["POLICIES", "USES", "Block", "EvictionPolicy", "Facts", "PolicySpec"]
