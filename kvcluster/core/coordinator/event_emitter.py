"""KV events for external subscribers: the changes that the index makes in a step, in the order in which it makes them.

The index reports for each block the tiers that it was in and is in (`changed`); the coordinator takes the events of
each step (`take`). An event is about one tier of the whole cluster: a second copy causes no event, and neither does its
loss. For a subscriber that starts late or has missed too much, all blocks are published again, some in each tick
(`republish`, `republish_some`), since an index of millions is not published in one step.

Reports of shards carry no token ids. A worker sends them when it prepares a store, and TokenMemory keeps them until the
commit that publishes the blocks. It is bounded in bytes, of which each tenant may take its share (tenant_shares.py): a
block costs its token ids, four bytes each, and BLOCK_BYTES for its names. A tenant that takes more loses its own oldest
blocks, never those of others. Token ids that no commit asks for are forgotten after TOKENS_KEPT_NS: their store has
failed, or found the blocks stored already.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventStream,
    KVEvent,
    Publish,
)
from kvcluster.core.spec import KVSpec
from kvcluster.core.tenant_shares import Shares

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


REPUBLISHED_BLOCKS = 4_096
"""Blocks published again in one tick, which takes as long as sweeping the same number (report_handler.py)."""


class IndexedBlock(Protocol):
    """A block as the index records it."""

    hash: BlockHash
    parent: BlockHash
    depth: int

    @property
    def tiers(self) -> int: ...


@dataclass(slots=True)
class _Run:
    """Blocks of one event: stored if `stored`, otherwise removed. `parent` and `tokens` as in BlocksStored."""

    stored: bool
    tier: Tier
    parent: BlockHash | None
    hashes: list[BlockHash]
    tokens: array[int]

    def takes(self, stored: bool, parent: BlockHash | None, tokens: bytes) -> bool:
        """Whether one more block fits this event. Stored ones must continue the chain, and all or none have tokens."""
        if stored != self.stored or len(self.hashes) >= limits.BLOCKS_PER_CALL:
            return False
        return not stored or (parent == self.hashes[-1] and bool(tokens) == bool(self.tokens))

    def event(self) -> KVEvent:
        if self.stored:
            return BlocksStored(self.tier, self.parent, tuple(self.hashes), self.tokens or ())
        return BlocksRemoved(self.tier, tuple(self.hashes))


class _Pending:
    """The changes of one namespace in this step, in order for each tier. Adjacent changes of a tier form one event,
    whatever happens in other tiers in between: blocks that are demoted are stored below and removed above in turns."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._is_cleared = False
        self._runs: list[_Run] = []
        self._last: dict[Tier, _Run] = {}

    def stored(self, tier: Tier, record: IndexedBlock, tokens: bytes) -> None:
        self._add(True, tier, record.parent if record.depth else None, record.hash, tokens)

    def removed(self, tier: Tier, record: IndexedBlock) -> None:
        self._add(False, tier, None, record.hash, b"")

    def cleared(self) -> None:
        self._is_cleared = True
        self._runs, self._last = [], {}

    def publish(self) -> Publish:
        first = (AllBlocksCleared(),) if self._is_cleared else ()
        return Publish(self._stream, (*first, *(run.event() for run in self._runs)))

    def _add(self, stored: bool, tier: Tier, parent: BlockHash | None, block: BlockHash, tokens: bytes) -> None:
        last = self._last.get(tier)
        if last is not None and last.takes(stored, parent, tokens):
            last.hashes.append(block)
            last.tokens.frombytes(tokens)
        else:
            self._last[tier] = _Run(stored, tier, parent, [block], array("I", tokens))
            self._runs.append(self._last[tier])


class EventEmitter:
    """Collects the events of a step. A coordinator has one only if it publishes events."""

    def __init__(self) -> None:
        self._streams: dict[NamespaceId, EventStream] = {}
        self._tenants: dict[NamespaceId, Tenant] = {}
        self._pending: dict[NamespaceId, _Pending] = {}
        self._tokens = TokenMemory()
        self._to_republish: list[tuple[NamespaceId, Iterator[IndexedBlock]]] = []

    @property
    def republishing(self) -> bool:
        """Whether there are more blocks to publish again."""
        return bool(self._to_republish)

    @property
    def remembered_bytes(self) -> int:
        """What the token ids of blocks being stored are charged at."""
        return self._tokens.nbytes

    def opened(self, space: NamespaceId, tenant: Tenant, spec: KVSpec) -> None:
        """Records a new, empty namespace."""
        self._tenants[space] = tenant
        self._streams[space] = EventStream(space, spec.model, spec.adapter, spec.block_tokens)

    def closed(self, space: NamespaceId) -> None:
        """Forgets a namespace, which was empty."""
        self._streams.pop(space, None)
        self._tenants.pop(space, None)
        self._pending.pop(space, None)

    def remember(
        self, space: NamespaceId, hashes: Sequence[BlockHash], tokens: Sequence[int], block_tokens: int, now: int
    ) -> None:
        """Remembers the token ids of blocks that are about to be stored."""
        self._tokens.add(self._tenants[space], space, hashes, tokens, block_tokens, now)

    def changed(self, space: NamespaceId, record: IndexedBlock, before: int) -> None:
        """Records that a block is in other tiers than `before`. Both are bit masks of tiers."""
        pending = self._of(space)
        for tier in Tier:
            bit = 1 << tier
            if record.tiers & bit and not before & bit:
                pending.stored(tier, record, self._tokens.take(self._tenants[space], space, record.hash))
            elif before & bit and not record.tiers & bit:
                pending.removed(tier, record)

    def cleared(self, space: NamespaceId) -> None:
        """Records that all blocks of a namespace are removed."""
        self._of(space).cleared()

    def republish(self, blocks: Iterable[tuple[NamespaceId, Iterator[IndexedBlock]]]) -> None:
        """Starts to publish all blocks again, unless it is doing so already."""
        if not self._to_republish:
            self._to_republish = list(blocks)

    def republish_some(self) -> None:
        """Publishes some of these blocks, each in the tiers that it is in now."""
        for _ in range(REPUBLISHED_BLOCKS):
            if not self._to_republish:
                return
            space, records = self._to_republish[-1]
            record = next(records, None)
            if record is None or space not in self._streams:
                self._to_republish.pop()
                continue
            for tier in Tier:
                if record.tiers & 1 << tier:
                    self._of(space).stored(tier, record, b"")

    def take(self, now: int) -> list[Publish]:
        """Returns the events since the last call, by namespace."""
        self._tokens.forget_old(now)
        if not self._pending:
            return []
        news = [pending.publish() for pending in self._pending.values()]
        self._pending = {}
        return news

    def _of(self, space: NamespaceId) -> _Pending:
        pending = self._pending.get(space)
        if pending is None:
            pending = self._pending[space] = _Pending(self._streams[space])
        return pending
