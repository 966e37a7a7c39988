"""What outsiders are told of blocks: what the index learnt in a step, as KV events in the order in which it learnt it.

The index says of each block in which tiers it was and is (`changed`), whoever steps takes what came together (`take`).
An event is one of a tier of the whole cluster: a second copy is no news, and neither is losing it. Token ids, which no
report of a shard carries, are those that a worker told with its store; a bounded memory keeps them until its commit
comes.

Who begins to listen late, or has missed too much, is told all blocks again, some in each tick (`retell`, `tell_some`),
since an index of millions is not told in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Tier
from kvcluster.core.messages.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventStream,
    KVEvent,
    Publish,
)
from kvcluster.core.spec import KVSpec

RETOLD_BLOCKS = 4_096
"""Blocks told again in one tick: as long a step as sweeping as many (report_handler.py)."""


class Told(Protocol):
    """A block that may be told again: a record of the index."""

    hash: BlockHash
    parent: BlockHash
    depth: int

    @property
    def tiers(self) -> int: ...


@dataclass(slots=True)
class _Run:
    """Blocks that one event tells of. `stored` or else removed; `parent` and `tokens` as of BlocksStored."""

    stored: bool
    tier: Tier
    parent: BlockHash | None
    hashes: list[BlockHash]
    tokens: list[int]

    def takes(self, stored: bool, parent: BlockHash | None, tokens: Sequence[int]) -> bool:
        """Does one more block belong to it? Stored ones go on a chain, and their tokens are known or they are not."""
        if stored != self.stored or len(self.hashes) >= limits.BLOCKS_PER_CALL:
            return False
        return not stored or (parent == self.hashes[-1] and bool(tokens) == bool(self.tokens))

    def event(self) -> KVEvent:
        if self.stored:
            return BlocksStored(self.tier, self.parent, tuple(self.hashes), tuple(self.tokens))
        return BlocksRemoved(self.tier, tuple(self.hashes))


class _Pending:
    """What became of one namespace's blocks in this step, for each tier in order; what belongs together is one event,
    whatever was said of other tiers meanwhile: blocks that go down a tier are stored below and removed above in turns.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._is_cleared = False
        self._runs: list[_Run] = []
        self._last: dict[Tier, _Run] = {}

    def stored(self, tier: Tier, record: Told, tokens: Sequence[int]) -> None:
        self._add(True, tier, record.parent if record.depth else None, record.hash, tokens)

    def removed(self, tier: Tier, record: Told) -> None:
        self._add(False, tier, None, record.hash, ())

    def cleared(self) -> None:
        self._is_cleared = True
        self._runs, self._last = [], {}

    def publish(self) -> Publish:
        first = (AllBlocksCleared(),) if self._is_cleared else ()
        return Publish(self._stream, (*first, *(run.event() for run in self._runs)))

    def _add(self, stored: bool, tier: Tier, parent: BlockHash | None, block: BlockHash, tokens: Sequence[int]) -> None:
        last = self._last.get(tier)
        if last is not None and last.takes(stored, parent, tokens):
            last.hashes.append(block)
            last.tokens += tokens
        else:
            self._last[tier] = _Run(stored, tier, parent, [block], list(tokens))
            self._runs.append(self._last[tier])


class EventEmitter:
    """Collects the news of a step. One coordinator has one, where anybody is to be told."""

    def __init__(self) -> None:
        self._streams: dict[NamespaceId, EventStream] = {}
        self._pending: dict[NamespaceId, _Pending] = {}
        self._tokens: dict[BlockHash, tuple[int, ...]] = {}
        self._retelling: list[tuple[NamespaceId, Iterator[Told]]] = []

    @property
    def retelling(self) -> bool:
        """Is there more to tell again?"""
        return bool(self._retelling)

    def opened(self, space: NamespaceId, spec: KVSpec) -> None:
        """There is a namespace, and nothing is known in it."""
        self._streams[space] = EventStream(space, spec.model, spec.adapter, spec.block_tokens)

    def closed(self, space: NamespaceId) -> None:
        """It is forgotten, and was empty."""
        self._streams.pop(space, None)
        self._pending.pop(space, None)

    def remember(self, hashes: Sequence[BlockHash], tokens: Sequence[int], block_tokens: int) -> None:
        """The token ids of blocks that are to be stored; those told first are forgotten first."""
        for at, block in enumerate(hashes):
            self._tokens.setdefault(block, tuple(tokens[at * block_tokens : (at + 1) * block_tokens]))
        while len(self._tokens) > limits.TOKEN_BLOCKS_REMEMBERED:
            del self._tokens[next(iter(self._tokens))]

    def changed(self, space: NamespaceId, record: Told, before: int) -> None:
        """A block is in other tiers than `before`: both are sets of bits, one a tier."""
        pending = self._of(space)
        for tier in Tier:
            bit = 1 << tier
            if record.tiers & bit and not before & bit:
                pending.stored(tier, record, self._tokens.pop(record.hash, ()))
            elif before & bit and not record.tiers & bit:
                pending.removed(tier, record)

    def cleared(self, space: NamespaceId) -> None:
        """Nothing is left of a namespace."""
        self._of(space).cleared()

    def retell(self, blocks: Iterable[tuple[NamespaceId, Iterator[Told]]]) -> None:
        """Begins to tell all blocks again, unless it does already."""
        if not self._retelling:
            self._retelling = list(blocks)

    def tell_some(self) -> None:
        """Tells some of them. What has changed since is told as it is."""
        for _ in range(RETOLD_BLOCKS):
            if not self._retelling:
                return
            space, records = self._retelling[-1]
            record = next(records, None)
            if record is None or space not in self._streams:
                self._retelling.pop()
                continue
            for tier in Tier:
                if record.tiers & 1 << tier:
                    self._of(space).stored(tier, record, ())

    def take(self) -> list[Publish]:
        """The news since it was last asked, by namespace."""
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
