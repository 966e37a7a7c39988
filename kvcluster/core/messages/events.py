"""What outsiders are told of blocks: routers and indexers that keep a picture of their own of what is cached.

An effect of the coordinator, for whoever publishes (runtime/event_publisher.py); its words on the wire are vLLM's
(wire/kv_events.py). Events are hints, as every answer of a coordinator is: who acts on one and finds otherwise has
lost a moment, never a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class EventStream:
    """Whose events: those of one namespace, in an order of their own. `adapter`: the content hash of a LoRA, or ""."""

    namespace: NamespaceId
    model: str
    adapter: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one chain, each the parent of the next, can be read from this tier somewhere in the cluster.

    `parent` is the block before the first; None at the beginning of a sequence. `tokens` are the token ids of all of
    them, `block_tokens` each, where a worker told them; else empty. A block may be told again.
    """

    tier: Tier
    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """No shard has these blocks in this tier any more; they may be in another."""

    tier: Tier
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Whatever was told of this stream before is void."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell outsiders what became of blocks of one namespace, in this order."""

    stream: EventStream
    events: tuple[KVEvent, ...]
