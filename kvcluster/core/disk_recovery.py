"""What a shard finds in the store of a durable tier when it starts: pages that the last shard on that machine has left
there.

Its shell has read the files' own words (wire/page_files.py) and believes of them what their checksums bear out; whether
a page's bytes are still right is found out when somebody wants them. What was purged is gone, as far as `tombstones`
say; of later ones the coordinator tells every shard that begins.
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
        """As a page will be found that is moved to a store so."""
        to = move.target
        named = (move.namespace, to.key, move.parent, move.depth)
        return cls(*named, to.loss, to.codec, to.nbytes, move.source.sums, to.offset)


@dataclass(frozen=True, slots=True)
class RecoveredPages:
    """All of one store. `specs` name the namespaces of `pages`. `capacity_bytes` and `file_bytes` make the tier's
    allocator (tiers.py); where the store cannot be used they are 0, and `why_none` says why: the shard runs without
    that tier then."""

    capacity_bytes: int = 0
    file_bytes: int = 0
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    pages: tuple[RecoveredPage, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    why_none: str = ""

    def by_namespace(self) -> dict[NamespaceId, list[RecoveredPage]]:
        """The pages of each."""
        pages: dict[NamespaceId, list[RecoveredPage]] = {}
        for page in self.pages:
            pages.setdefault(page.namespace, []).append(page)
        return pages


NO_STORE = RecoveredPages()
"""Of a tier that is not configured."""


def carried_out(found: Iterable[RecoveredPages]) -> tuple[Tombstone, ...]:
    """The tombstones that every one of these stores has carried out, as far as they could be opened: of any other the
    shard is told again."""
    opened = [there.tombstones for there in found if there.capacity_bytes]
    return tuple(stone for stone in (opened or [()])[0] if all(stone in stones for stones in opened))
