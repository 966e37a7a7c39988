"""Shard to coordinator: the report stream and inventories (core/report_stream.py), and what is answered
(order_executor.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages.orders import NO_ORDERS, Order, OrderProgress
from kvcluster.core.miss import Loss
from kvcluster.core.page_key import PageKey
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import FASTEST, Tier, above


class PageEvent(NamedTuple):
    """A page became readable."""

    namespace: NamespaceId
    key: PageKey
    parent: BlockHash
    depth: int
    tier: Tier
    loss: Loss
    codec: Codec = Codec.RAW


class GoneEvent(NamedTuple):
    """A page is no longer given to readers. The same may still lie in another tier."""

    namespace: NamespaceId
    key: PageKey
    corrupt: bool
    tier: Tier = FASTEST


class PurgedEvent(NamedTuple):
    """All tombstones up to `number` are carried out: what this stream told before, and they name, is gone."""

    number: int


StreamEvent = PageEvent | GoneEvent | PurgedEvent


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What a Purge leaves behind, so that a shard that was cut off, or a coordinator that restarts, heeds it too.

    Numbers only grow, across restarts of the coordinator; a later one says nothing of an earlier.
    """

    number: int
    tenant: Tenant
    model: str | None = None
    weights: str | None = None
    adapter: str | None = None

    def names(self, tenant: Tenant, spec: KVSpec) -> bool:
        """Is this namespace meant?"""
        return (
            tenant == self.tenant
            and (self.model is None or self.model == spec.model)
            and (self.weights is None or self.weights == spec.weights)
            and (self.adapter is None or self.adapter == spec.adapter)
        )


class TierUse(NamedTuple):
    """One tier of a shard: how large it is, and what lies there. `wanted_bytes`: readers of what lies below wait for so
    much of it."""

    tier: Tier
    capacity_bytes: int
    free_bytes: int
    pages: int
    wanted_bytes: int = 0

    def room(self, low_free: float) -> int:
        """Bytes that may be filled until only that share is free; below 0 where less is."""
        return self.free_bytes - int(low_free * self.capacity_bytes)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard says of itself with each report. Bytes; counts are gauges, `counters` only grow.

    Capacity, free bytes and pages are those of its device tier; `below` tells of the tiers under it, the fastest first.
    `draining`: it has been told that it is to go, which a new coordinator learns from it. `trouble`: what its operator
    should know, such as why it runs without its disk tier.
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
    below: tuple[TierUse, ...] = ()
    trouble: str = ""

    def use(self, tier: Tier) -> TierUse:
        """Of that tier; of one that it does not have, nothing."""
        if tier is FASTEST:
            return TierUse(tier, self.capacity_bytes, self.free_bytes, self.pages)
        return next((use for use in self.below if use.tier is tier), TierUse(tier, 0, 0, 0))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All that it has, the fastest first. Out of the last nothing goes but by being evicted."""
        return (FASTEST, *(use.tier for use in self.below))

    def next_below(self, tier: Tier) -> TierUse:
        """Of the tier that pages are demoted into out of that one; of the last, nothing."""
        return next((use for use in self.below if use.tier > tier), TierUse(tier, 0, 0, 0))

    def above(self, tier: Tier) -> Tier | None:
        """The tier that pages are demoted from into that one."""
        return above(tier, self.tiers)


@dataclass(frozen=True, slots=True)
class Report:
    """News of a shard since the last acknowledged number; empty, it is a heartbeat. Answered by ReportAck.

    `events[i]` has number `first + i`. `coordinator` is the highest coordinator epoch that the shard knows, 0 for none;
    the numbers of events and of orders belong to it. `pressure_bytes` is what waiting reservations want and did not
    find. `orders` says how far the shard is with its orders. `samples`: what pages of a namespace have lost by q4, in
    millionths (Moved).
    """

    info: ShardInfo
    coordinator: Epoch
    first: int
    events: tuple[StreamEvent, ...] = ()
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    pressure_bytes: int = 0
    orders: OrderProgress = NO_ORDERS
    samples: tuple[tuple[NamespaceId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """One chunk of all that a shard holds, true up to stream number `upto`. Answered by ReportAck.

    `tombstones` are those that the shard has carried out before it looked. They ride on each chunk, so that a
    coordinator that has lost its own learns of them.
    """

    info: ShardInfo
    coordinator: Epoch
    upto: int
    chunk: int
    last: bool
    pages: tuple[PageEvent, ...]
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    tombstones: tuple[Tombstone, ...] = ()


class Farewell(Enum):
    """Why a shard incarnation is to go."""

    REPLACED = "replaced"  # a newer incarnation of it is known
    DRAINED = "drained"  # what was worth keeping is elsewhere, and nobody shall take its place


@dataclass(frozen=True, slots=True)
class ReportAck:
    """The coordinator has everything up to `acked`. `inventory` asks for all that the shard holds.

    `orders`, by ascending number, are all that this shard is not known to have accepted; `tombstones` all that it is
    not known to have carried out. `drain`: new writes go elsewhere. `leave`: the shard drops all and exits.
    """

    epoch: Epoch
    acked: int
    inventory: bool = False
    orders: tuple[Order, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    drain: bool = False
    leave: Farewell | None = None


@dataclass(frozen=True, slots=True)
class ReportAnswered:
    """The coordinator's answer to the report or inventory chunk that was sent last."""

    ack: ReportAck


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The report sent last did not arrive, or its answer did not."""
