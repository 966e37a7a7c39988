"""Holds: the blocks that running load tickets keep from eviction, and the bytes of each tenant among them.

A block that several tickets of a tenant hold counts once, in raw bytes, as long as one of them runs. A tenant may hold
its share of all addressable bytes (shares.py): of a chain that takes more, the first blocks are held and the others are
not. Those are loaded like any other if they are still there when their reader comes. A tenant without others has no
bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.shares import Shares


class _Held:
    """The held blocks of one namespace, each with the number of tickets that hold it."""

    __slots__ = ("block_bytes", "counts", "tenant")

    def __init__(self, tenant: Tenant, block_bytes: int) -> None:
        self.tenant = tenant
        self.block_bytes = block_bytes
        self.counts: dict[BlockHash, int] = {}


class HeldBlocks:
    """The held blocks of all tenants."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, _Held] = {}  # none without a block
        self._bytes = Shares(0)

    def held_bytes(self, tenant: Tenant) -> int:
        return self._bytes.held(tenant)

    def fitting(
        self,
        space: NamespaceId,
        tenant: Tenant,
        hashes: Sequence[BlockHash],
        *,
        block_bytes: int,
        capacity_bytes: int | None,
    ) -> int:
        """Returns how many of these blocks, from the first on, the tenant may hold. `capacity_bytes`: all bytes, None
        for no bound."""
        if capacity_bytes is None:
            return len(hashes)
        self._bytes.most = capacity_bytes
        room = self._bytes.room(tenant) // max(1, block_bytes)
        if len(hashes) <= room:
            return len(hashes)
        held = self._spaces.get(space)
        for at, block in enumerate(hashes):
            if held is None or block not in held.counts:
                if not room:
                    return at
                room -= 1
        return len(hashes)

    def add(self, space: NamespaceId, tenant: Tenant, hashes: Sequence[BlockHash], *, block_bytes: int) -> None:
        """Holds these blocks for one ticket more."""
        if not hashes:
            return
        held = self._spaces.get(space)
        if held is None:
            held = self._spaces[space] = _Held(tenant, block_bytes)
        counts, before = held.counts, len(held.counts)
        for block in hashes:
            counts[block] = counts.get(block, 0) + 1
        if len(counts) > before:
            self._bytes.add(tenant, (len(counts) - before) * held.block_bytes)

    def remove(self, space: NamespaceId, hashes: Sequence[BlockHash]) -> None:
        """Undoes `add`, for the end of a ticket."""
        if not hashes:
            return
        held = self._spaces[space]
        counts, before = held.counts, len(held.counts)
        for block in hashes:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        if len(counts) < before:
            self._bytes.remove(held.tenant, (before - len(counts)) * held.block_bytes)
        if not counts:
            del self._spaces[space]
