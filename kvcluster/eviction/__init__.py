"""Eviction policies: which cached block is worth least.

A policy is arithmetic: it scores a block and moves nothing. It lives below the configuration, which chooses one by name
(`coordinator.eviction_policy`), and above nothing: it knows blocks by the Protocols of policy.py. That a block never
goes before the blocks that follow it is no policy's business: core/eviction_queue.py sees to it.

To add one: a file here with a class that is an EvictionPolicy, and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.eviction.gdsf import GDSF
from kvcluster.eviction.lru import LRU
from kvcluster.eviction.policy import USES, Block, EvictionPolicy, Facts

POLICIES: dict[str, Callable[[Facts], EvictionPolicy]] = {
    "lru": LRU,
    "gdsf": GDSF,
}
"""By the name that the configuration gives. Each queue makes one for itself."""

__all__ = ["POLICIES", "USES", "Block", "EvictionPolicy", "Facts"]
