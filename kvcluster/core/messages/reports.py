"""Shard to coordinator: the report stream and inventories (core/stream.py), and the orders that come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.ids import BlockHash, CallId, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages.common import PageKey, Tier
from kvcluster.core.reasons import Loss
from kvcluster.core.spec import KVSpec


class PageEvent(NamedTuple):
    """A page became readable."""

    namespace: NamespaceId
    key: PageKey
    parent: BlockHash
    depth: int
    tier: Tier
    loss: Loss


class GoneEvent(NamedTuple):
    """A page is no longer given to readers."""

    namespace: NamespaceId
    key: PageKey
    corrupt: bool


StreamEvent = PageEvent | GoneEvent


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard says of itself with each report. Bytes; counts are gauges, `counters` only grow."""

    shard: ShardId
    epoch: Epoch
    address: str
    host: str
    capacity_bytes: int
    free_bytes: int
    pages: int
    leases: int
    counters: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """News of a shard since the last acknowledged number; empty, it is a heartbeat. Answered by ReportAck.

    `events[i]` has number `first + i`. `coordinator` is the highest coordinator epoch that the shard knows, 0
    for none; the numbers belong to it. `pressure_bytes` is what waiting reservations want and did not find.
    `order` is the number of the last order carried out.
    """

    call: CallId
    info: ShardInfo
    coordinator: Epoch
    first: int
    events: tuple[StreamEvent, ...] = ()
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()
    pressure_bytes: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """One chunk of all that a shard holds, true up to stream number `upto`. Answered by ReportAck."""

    call: CallId
    info: ShardInfo
    coordinator: Epoch
    upto: int
    chunk: int
    last: bool
    pages: tuple[PageEvent, ...]
    specs: tuple[tuple[Tenant, KVSpec], ...] = ()


@dataclass(frozen=True, slots=True)
class EvictOrder:
    """Condemn every page of these blocks. Repeated until a report says that its number was carried out."""

    number: int
    blocks: tuple[tuple[NamespaceId, BlockHash], ...]


@dataclass(frozen=True, slots=True)
class ReportAck:
    """The coordinator has everything up to `acked`. `inventory` asks for all that the shard holds.

    `leave` tells a shard that a newer incarnation of itself is known: it drops all and exits.
    """

    epoch: Epoch
    acked: int
    inventory: bool = False
    order: EvictOrder | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class ReportAnswered:
    """The coordinator's answer to the report or inventory chunk that was sent last."""

    ack: ReportAck


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The report sent last did not arrive, or its answer did not."""
