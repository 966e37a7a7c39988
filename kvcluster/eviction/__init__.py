"""Eviction policies: which cached block is worth least.

A policy is arithmetic: it scores a block and moves nothing. It lives below the configuration, which chooses one by name
(`coordinator.eviction_policy`), and above nothing: it knows blocks by the Protocols of policy.py. That a block never
goes before the blocks that follow it is no policy's business: core/eviction_queue.py sees to it.

To add one: a file here with a class that is an EvictionPolicy, and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcluster.eviction.gdsf import GDSF
from kvcluster.eviction.lru import LRU
from kvcluster.eviction.policy import USES, Block, EvictionPolicy, Facts


class PolicySpec(NamedTuple):
    """A policy: each queue makes one for itself. `counts_uses`: it looks at Block.uses, which lookups count only then,
    since that is a twentieth of what a lookup of many blocks costs."""

    make: Callable[[Facts], EvictionPolicy]
    counts_uses: bool = False


POLICIES: dict[str, PolicySpec] = {
    "lru": PolicySpec(LRU),
    "gdsf": PolicySpec(GDSF, counts_uses=True),
}
"""By the name that the configuration gives."""

__all__ = ["POLICIES", "USES", "Block", "EvictionPolicy", "Facts", "PolicySpec"]
