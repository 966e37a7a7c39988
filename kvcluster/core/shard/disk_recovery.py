"""Recovery of the pages that an earlier shard left in the store of a durable tier: what a shard finds when it starts.

The shell has read the heads and records of the files (wire/page_files.py) and kept those whose checksums match. The
bytes of a page are verified only when a reader asks for it. Pages purged by `tombstones` have been erased; the
coordinator sends every shard that starts the tombstones of later purges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import PageKey, PageMove, Tombstone
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec


class RecoveredPage(NamedTuple):
    """One page as its record has it, and where its bytes lie (file_allocator.py)."""

    namespace: NamespaceId
    key: PageKey
    parent: BlockHash
    depth: int
    loss: Loss
    codec: Codec
    nbytes: int
    sums: bytes
    offset: int

    @classmethod
    def of(cls, move: PageMove) -> RecoveredPage:
        """Returns what recovery will find of the page that this move writes to a store."""
        to = move.target
        named = (move.namespace, to.key, move.parent, move.depth)
        return cls(*named, to.loss, to.codec, to.nbytes, move.source.sums, to.offset)


@dataclass(frozen=True, slots=True)
class RecoveredPages:
    """Everything found in one store. `specs` name the namespaces of `pages`. `capacity_bytes` and `file_bytes` make the
    tier's allocator (tiers.py). If the store cannot be used, they are 0, and the shard runs without that tier.
    `trouble`: why, or why the store is smaller than configured."""

    capacity_bytes: int = 0
    file_bytes: int = 0
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    pages: tuple[RecoveredPage, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    trouble: str = ""

    def by_namespace(self) -> dict[NamespaceId, list[RecoveredPage]]:
        """Returns the pages of each namespace."""
        pages: dict[NamespaceId, list[RecoveredPage]] = {}
        for page in self.pages:
            pages.setdefault(page.namespace, []).append(page)
        return pages


NO_STORE = RecoveredPages()
"""For a tier that is not configured."""


def applied_tombstones(found: Iterable[RecoveredPages]) -> tuple[Tombstone, ...]:
    """Returns the tombstones that every store which could be opened has carried out. The coordinator sends the shard
    all others again."""
    opened = [there.tombstones for there in found if there.capacity_bytes]
    return tuple(stone for stone in (opened or [()])[0] if all(stone in stones for stones in opened))
