"""The token ids of blocks that are being stored, from the worker's prepare until the commit that publishes them.

Bounded in bytes, of which each tenant may take its share (shares.py): a block costs its token ids, four bytes each, and
BLOCK_BYTES for its names. A tenant that takes more loses its own oldest blocks, never those of others. What no commit
asks for is forgotten after TOKENS_KEPT_NS: its store has failed, or found the blocks stored already.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.shares import Shares

BLOCK_BYTES = 448
"""What a block costs besides its token ids: its hash, its key, its place in the order, and the headers of all."""

_LOOK_EVERY_NS = 1_000_000_000
"""The least time between two searches for what is too old."""

_Blocks = OrderedDict[tuple[NamespaceId, BlockHash], tuple[int, bytes]]
"""The blocks of one tenant, the oldest first: when each was added, and its token ids as machine words."""


class TokenMemory:
    """`add` for a store, `take` for a commit, `forget_old` in every step."""

    def __init__(self) -> None:
        self._shares = Shares(limits.TOKEN_MEMORY_BYTES)
        self._kept: dict[Tenant, _Blocks] = {}
        self._look_at = 0

    @property
    def nbytes(self) -> int:
        """The bytes that all tenants are charged for."""
        return self._shares.total

    def add(
        self,
        tenant: Tenant,
        space: NamespaceId,
        hashes: Sequence[BlockHash],
        tokens: Sequence[int],
        block_tokens: int,
        now: int,
    ) -> None:
        """Remembers `block_tokens` token ids for each of these blocks, except for those that are known already."""
        data = array("I", tokens).tobytes()
        step = 4 * block_tokens
        kept = self._kept.setdefault(tenant, OrderedDict())
        for at, block in enumerate(hashes):
            if (space, block) in kept:
                continue
            while kept and self._shares.full(tenant, BLOCK_BYTES + step):
                self._forget_oldest(tenant, kept)
            if not self._shares.full(tenant, BLOCK_BYTES + step):
                kept[space, block] = now, data[at * step : (at + 1) * step]
                self._shares.add(tenant, BLOCK_BYTES + step)
        if not kept:
            del self._kept[tenant]

    def take(self, tenant: Tenant, space: NamespaceId, block: BlockHash) -> bytes:
        """Returns the token ids of a block as machine words, and forgets them; b"" if there are none."""
        kept = self._kept.get(tenant)
        found = kept.pop((space, block), None) if kept is not None else None
        if kept is None or found is None:
            return b""
        self._forgotten(tenant, kept, found[1])
        return found[1]

    def forget_old(self, now: int) -> None:
        """Forgets what no commit has asked for in TOKENS_KEPT_NS, of each tenant as many blocks as one store has."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_NS
        for tenant, kept in list(self._kept.items()):
            for _ in range(limits.BLOCKS_PER_CALL):
                if not kept or next(iter(kept.values()))[0] + limits.TOKENS_KEPT_NS > now:
                    break
                self._forget_oldest(tenant, kept)

    def _forget_oldest(self, tenant: Tenant, kept: _Blocks) -> None:
        _, (_, data) = kept.popitem(last=False)
        self._forgotten(tenant, kept, data)

    def _forgotten(self, tenant: Tenant, kept: _Blocks, data: bytes) -> None:
        self._shares.remove(tenant, BLOCK_BYTES + len(data))
        if not kept:
            self._kept.pop(tenant, None)
