"""Messages of a shard to the coordinator (the report stream and inventories, core/streams.py), the answer to them,
which carries orders (orders.py), and KV events.

KV events are changes of cached blocks, for routers and indexers that keep their own view of the cache. They are an
effect of the coordinator for the publisher (runtime/event_publisher.py); on the wire they have vLLM's format
(wire/kv_events.py). They are hints, as all answers of a coordinator are: a subscriber that acts on an outdated one
loses time, never a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import PageKey
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages.common import ShardAddress
from kvcluster.core.messages.orders import NO_ORDERS, Findings, Order, OrderProgress, ProbeOrder
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST, Tier, above


class PageEvent(NamedTuple):
    """A page became readable."""

    namespace: NamespaceId
    key: PageKey
    parent: BlockHash
    depth: int
    tier: Tier
    loss: Loss
    codec: Codec = Codec.RAW


class RemovedEvent(NamedTuple):
    """A page can no longer be read from that tier. Another tier may still hold it."""

    namespace: NamespaceId
    key: PageKey
    corrupt: bool
    tier: Tier = INGEST


class PurgedEvent(NamedTuple):
    """The shard has carried out all tombstones up to `number`: pages that it reported before and that these name are
    removed."""

    number: int


StreamEvent = PageEvent | RemovedEvent | PurgedEvent


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What a Purge leaves behind, so that a shard that was cut off, or a coordinator that restarts, obeys it too.

    Numbers only grow, across restarts of the coordinator; a later one does not imply an earlier.
    """

    number: int
    tenant: Tenant
    model: str | None = None
    weights: str | None = None
    adapter: str | None = None

    def names(self, tenant: Tenant, spec: KVSpec) -> bool:
        """Whether this tombstone names the namespace of that tenant and spec."""
        return (
            tenant == self.tenant
            and (self.model is None or self.model == spec.model)
            and (self.weights is None or self.weights == spec.weights)
            and (self.adapter is None or self.adapter == spec.adapter)
        )


class TierUse(NamedTuple):
    """The size and use of one tier of a shard. `wanted_bytes`: room in it for which readers of lower tiers are
    waiting. `writing_bytes`: what pages take of it that no tenant is charged for: those that are WRITING, and those
    that were evicted or purged and are still read."""

    tier: Tier
    capacity_bytes: int
    free_bytes: int
    pages: int
    wanted_bytes: int = 0
    writing_bytes: int = 0

    def room(self, low_free: float) -> int:
        """Returns the bytes that can be filled until only the share `low_free` is free; negative if less is free."""
        return self.free_bytes - int(low_free * self.capacity_bytes)


class ProcessInfo(NamedTuple):
    """What a process of the cluster reports about itself: its machine, release of kvcluster, and hash of its
    configuration (config_hash.py). "" is unknown."""

    node: str = ""
    release: str = ""
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard reports about itself each time. Sizes in bytes; counts are gauges, `counters` only grow.

    Capacity, free and writing bytes and pages are those of the tier that workers write into; `others` has its other
    tiers, the fastest first. `draining`: it has been ordered to drain, which a new coordinator learns from it.
    `trouble`: what its operator should know, such as why it runs without its disk tier. `node`: the machine that it
    runs on; `release` and `config_hash`: of its process. `protocol`: the newest version of the protocol that it speaks,
    0 from a shard of a version before 3. `stopping`: it saves its pages and ends soon, so that nothing new should be
    placed on it. `server_name`: as in ShardAddress.
    """

    shard: ShardId
    epoch: Epoch
    address: str
    host: str
    capacity_bytes: int
    free_bytes: int
    pages: int
    leases: int
    counters: tuple[tuple[str, int], ...] = ()
    draining: bool = False
    others: tuple[TierUse, ...] = ()
    trouble: str = ""
    writing_bytes: int = 0
    node: str = ""
    release: str = ""
    config_hash: str = ""
    protocol: int = 0
    stopping: bool = False
    server_name: str = ""

    @property
    def at(self) -> ShardAddress:
        """Where this incarnation is reached."""
        return ShardAddress(self.shard, self.epoch, self.address, self.host, self.server_name)

    def without_use(self) -> ShardInfo:
        """Returns what every tenant may know: how large it is and where, and not what others have stored."""
        known = (self.shard, self.epoch, self.address, self.host, self.capacity_bytes)
        return ShardInfo(
            *(*known, 0, 0, 0),
            node=self.node,
            release=self.release,
            protocol=self.protocol,
            server_name=self.server_name,
        )

    def use(self, tier: Tier) -> TierUse:
        """Returns the use of that tier; of zero size if the shard does not have it."""
        if tier is INGEST:
            return TierUse(tier, self.capacity_bytes, self.free_bytes, self.pages, writing_bytes=self.writing_bytes)
        return next((use for use in self.others if use.tier is tier), TierUse(tier, 0, 0, 0))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers of the shard, the fastest first. Blocks leave the last one only by eviction."""
        return tuple(sorted((INGEST, *(use.tier for use in self.others))))

    @property
    def fastest(self) -> Tier:
        """The tier that blocks are promoted into."""
        return self.tiers[0]

    def next_below(self, tier: Tier) -> TierUse:
        """Returns the use of the tier into which pages of `tier` are demoted; of zero size for the last tier."""
        return next((self.use(below) for below in self.tiers if below > tier), TierUse(tier, 0, 0, 0))

    def above(self, tier: Tier) -> Tier | None:
        """Returns the tier from which pages are demoted into `tier`; None for the first."""
        return above(tier, self.tiers)


@dataclass(frozen=True, slots=True)
class Report:
    """The events of a shard since the last acknowledged number; without events it is a heartbeat. Answered by
    ReportAck.

    `events[i]` has number `first + i`. `coordinator` is the highest coordinator epoch that the shard knows, 0 for none;
    the numbers of events and of orders belong to it. `pressure` is the bytes that each tenant's waiting
    reservations lack.
    `orders`: its progress with its orders. `samples`: the loss of sampled pages of a namespace by q4, in millionths
    (Moved). `findings`: of the last probe, until an answer no longer orders that probe. `wanted_on_device`: blocks that
    were read in INGEST, because they are not in the shard's pool on a device, by readers that read this pool in place.
    """

    info: ShardInfo
    coordinator: Epoch
    first: int
    events: tuple[StreamEvent, ...] = ()
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    pressure: tuple[tuple[Tenant, int], ...] = ()
    orders: OrderProgress = NO_ORDERS
    samples: tuple[tuple[NamespaceId, int], ...] = ()
    findings: Findings | None = None
    wanted_on_device: tuple[tuple[NamespaceId, BlockHash], ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """One chunk of all that a shard holds, valid up to stream number `upto`. Answered by ReportAck.

    `tombstones` are those that the shard had carried out before it made the inventory. Each chunk has them, so that a
    coordinator that has lost its own learns them.
    """

    info: ShardInfo
    coordinator: Epoch
    upto: int
    chunk: int
    last: bool
    pages: tuple[PageEvent, ...]
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    tombstones: tuple[Tombstone, ...] = ()


PROOF_BYTES = 32
TO_COORDINATOR = Epoch(0)
"""As the audience of a credential."""


@dataclass(frozen=True, slots=True)
class IssueCredential:
    """Asks the coordinator's process for a credential of this incarnation of a shard; no core sees it. Answered by
    IssuedCredential.

    `proof`: PROOF_BYTES random bytes that the incarnation has made once. `generation`: how often it has been issued a
    credential for the coordinator, with this one. `audience`: the incarnation of the shard that is to accept the
    credential, or TO_COORDINATOR."""

    epoch: Epoch
    proof: bytes
    generation: int
    audience: Epoch = TO_COORDINATOR


@dataclass(frozen=True, slots=True)
class IssuedCredential:
    """A token that its audience accepts for `valid_ns`."""

    token: str
    valid_ns: int


class LeaveReason(Enum):
    """Why a shard incarnation has to leave."""

    REPLACED = "replaced"  # a newer incarnation of it is known
    DRAINED = "drained"  # what was worth keeping is elsewhere; do not start another one


@dataclass(frozen=True, slots=True)
class ReportAck:
    """The coordinator has everything up to `acked`. `inventory` asks for all that the shard holds.

    `orders`, by ascending number, are all that this shard is not known to have accepted; `tombstones` all that it is
    not known to have carried out. `drain`: new writes go elsewhere. `leave`: the shard drops all and exits. `probe` is
    repeated until a report contains its findings.
    """

    epoch: Epoch
    acked: int
    inventory: bool = False
    orders: tuple[Order, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    drain: bool = False
    leave: LeaveReason | None = None
    probe: ProbeOrder | None = None


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
