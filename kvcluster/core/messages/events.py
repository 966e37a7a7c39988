"""KV events: changes of cached blocks, for routers and indexers that keep their own view of the cache.

An effect of the coordinator for the publisher (runtime/event_publisher.py); on the wire it has vLLM's format
(wire/kv_events.py). Events are hints, as all answers of a coordinator are: a subscriber that acts on an outdated one
loses time, never a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class EventStream:
    """The events of one namespace, which have an order of their own. `adapter`: the content hash of a LoRA, or ""."""

    namespace: NamespaceId
    model: str
    adapter: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one chain, each the parent of the next, can be read from this tier somewhere in the cluster.

    `parent` is the block before the first; None at the beginning of a sequence. `tokens` are the token ids of all of
    them, `block_tokens` each, if a worker has sent them; otherwise empty. A block may be published again.
    """

    tier: Tier
    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """No shard has these blocks in this tier any more; they may be in another."""

    tier: Tier
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All earlier events of this stream are void."""


KVEvent: TypeAlias = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish these changes of the blocks of one namespace, in this order."""

    stream: EventStream
    events: tuple[KVEvent, ...]
