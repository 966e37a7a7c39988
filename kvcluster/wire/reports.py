"""Messages of shards to the coordinator: reports and inventories. Its answers are in orders.py.

A message carries thousands of events, so they are parallel lists: the kind of each; hash, namespace and part of each
that is about a page; parent, depth, tier, loss and codec of each page that became readable. Their order is kept,
because a page may come and go within one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    GoneEvent,
    Inventory,
    OrderProgress,
    PageEvent,
    PageKey,
    PurgedEvent,
    Report,
    ShardInfo,
    StreamEvent,
    TierUse,
    Tombstone,
)
from kvcluster.core.spec import KVSpec, Part
from kvcluster.core.tiers import FASTEST
from kvcluster.errors import ProtocolError
from kvcluster.wire import common
from kvcluster.wire.common import Interned, agree, at_most, numbers, pick, quantity, reference, text
from kvcluster.wire.v1 import coordinator_pb2 as pb

COUNTERS = 256
"""Limit of the counters of one process; there are some twenty."""

# ------------------------------------------------------------------------------------------ requests


def encode_report(report: Report) -> bytes:
    """Encodes a report of a shard."""
    return pb.ReportRequest(
        info=encode_info(report.info),
        coordinator=report.coordinator,
        first=report.first,
        events=_encode_events(report.events),
        specs=_encode_specs(report.specs),
        pressure_bytes=report.pressure_bytes,
        orders=pb.OrderProgress(accepted=report.orders.accepted, running=report.orders.running),
        sampled_namespaces=b"".join([namespace for namespace, _ in report.samples]),
        sampled_errors=[error for _, error in report.samples],
    ).SerializeToString()


def decode_report(data: bytes) -> Report:
    """The inverse."""
    m = common.parse(pb.ReportRequest, data)
    return Report(
        info=decode_info(m.info),
        coordinator=common.epoch(m.coordinator),
        first=quantity(m.first, "stream number"),
        events=_decode_events(m.events, limits.REPORTS_PER_MESSAGE),
        specs=_decode_specs(m.specs),
        pressure_bytes=quantity(m.pressure_bytes, "bytes wanted"),
        orders=_decode_progress(m.orders),
        samples=decode_errors(m.sampled_namespaces, m.sampled_errors, limits.SAMPLES),
    )


def _decode_progress(m: pb.OrderProgress) -> OrderProgress:
    accepted = quantity(m.accepted, "order number")
    running = tuple(numbers(m.running, limits.ORDERS_IN_FLIGHT, "running orders"))
    ascending(running)
    if max(running, default=0) > accepted:
        raise ProtocolError("a running order was not accepted")
    return OrderProgress(accepted, running)


def ascending(order_numbers: Iterable[int]) -> None:
    """Raises ProtocolError unless the order numbers are strictly ascending and the first is at least 1."""
    before = 0
    for number in order_numbers:
        if number <= before:
            raise ProtocolError("order numbers must be ascending, from 1 on")
        before = number


def decode_errors(namespaces: bytes, errors: Sequence[int], most: int) -> tuple[tuple[NamespaceId, int], ...]:
    """Decodes the codec errors of namespaces, in millionths."""
    known = common.decode_namespaces(namespaces, most)
    agree("errors", known, errors)
    return tuple(zip(known, [quantity(error, "millionths") for error in errors], strict=True))


def encode_inventory(inventory: Inventory) -> bytes:
    """Encodes a chunk of a shard's inventory."""
    return pb.InventoryRequest(
        info=encode_info(inventory.info),
        coordinator=inventory.coordinator,
        upto=inventory.upto,
        chunk=inventory.chunk,
        last=inventory.last,
        pages=_encode_events(inventory.pages),
        specs=_encode_specs(inventory.specs),
        tombstones=encode_tombstones(inventory.tombstones),
    ).SerializeToString()


def decode_inventory(data: bytes) -> Inventory:
    """The inverse."""
    m = common.parse(pb.InventoryRequest, data)
    pages = _decode_events(m.pages, limits.INVENTORY_CHUNK)
    if not all(isinstance(page, PageEvent) for page in pages):
        raise ProtocolError("an inventory may list only pages that exist")
    return Inventory(
        info=decode_info(m.info),
        coordinator=common.epoch(m.coordinator),
        upto=quantity(m.upto, "stream number"),
        chunk=m.chunk,
        last=m.last,
        pages=cast("tuple[PageEvent, ...]", pages),
        specs=_decode_specs(m.specs),
        tombstones=decode_tombstones(m.tombstones),
    )


# -------------------------------------------------------------------------------------------- events


def _encode_events(events: Iterable[StreamEvent]) -> pb.Events:
    namespaces: Interned[NamespaceId] = Interned()
    parts: Interned[tuple[int, Part]] = Interned()
    kinds: list[pb.EventKind] = []
    hashes: list[BlockHash] = []
    namespace_of: list[int] = []
    part_of: list[int] = []
    ready: list[PageEvent] = []
    gone: list[GoneEvent] = []
    purges: list[int] = []
    for event in events:
        if isinstance(event, PurgedEvent):
            kinds.append(pb.EVENT_KIND_PURGED)
            purges.append(event.number)
            continue
        key = event.key
        hashes.append(key.hash)
        namespace_of.append(namespaces[event.namespace])
        part_of.append(parts[key.group, key.part])
        if isinstance(event, PageEvent):
            kinds.append(pb.EVENT_KIND_PAGE)
            ready.append(event)
        else:
            kinds.append(pb.EVENT_KIND_CORRUPT if event.corrupt else pb.EVENT_KIND_GONE)
            gone.append(event)
    return pb.Events(
        namespaces=b"".join(namespaces),
        parts=common.encode_parts(parts),
        kinds=kinds,
        hashes=b"".join(hashes),
        namespace_of=namespace_of,
        part_of=part_of,
        parents=b"".join([page.parent for page in ready]),
        depths=[page.depth for page in ready],
        tiers=[common.TIER.encode[page.tier] for page in ready],
        losses=[common.LOSS.encode[page.loss] for page in ready],
        purges=purges,
        codecs=[page.codec for page in ready],
        gone_tiers=[common.TIER.encode[page.tier] for page in gone],
    )


def _decode_events(m: pb.Events, most: int) -> tuple[StreamEvent, ...]:
    kinds = numbers(m.kinds, most, "events in a message")
    unknown = next((kind for kind in kinds if not pb.EVENT_KIND_PAGE <= kind <= pb.EVENT_KIND_PURGED), None)
    if unknown is not None:
        raise ProtocolError(f"event kind {unknown} is not known here; a newer kvcluster sent it: upgrade this side")
    hashes = common.decode_hashes(m.hashes, most, "events in a message")
    parents = common.decode_hashes(m.parents, most, "parents in a message")
    agree("events", [kind for kind in kinds if kind != pb.EVENT_KIND_PURGED], hashes, m.namespace_of, m.part_of)
    ready_kinds = [kind for kind in kinds if kind == pb.EVENT_KIND_PAGE]
    agree("pages", ready_kinds, parents, m.depths, m.tiers, m.losses, m.codecs)
    gone_kinds = [kind for kind in kinds if kind in (pb.EVENT_KIND_GONE, pb.EVENT_KIND_CORRUPT)]
    agree("pages that are gone", gone_kinds, m.gone_tiers)
    agree("purges", [kind for kind in kinds if kind == pb.EVENT_KIND_PURGED], m.purges)
    namespaces = pick(common.decode_namespaces(m.namespaces, most), m.namespace_of, "a namespace")
    parts = pick(common.decode_parts(m.parts, most), m.part_of, "a part")
    tiers = common.TIER.decode_all(m.tiers)
    losses = common.LOSS.decode_all(m.losses)
    at_most(max(m.depths, default=0), limits.TOKENS_PER_SEQUENCE, "depth")
    keys = map(_event_key, namespaces, hashes, parts)
    ready = zip(parents, m.depths, tiers, losses, common.decode_codecs(m.codecs), strict=True)
    gone_tiers = iter(common.TIER.decode_all(m.gone_tiers))
    purges = iter(m.purges)
    # The length of each list has been checked against the kinds, so none runs out.
    events: list[StreamEvent] = []
    for kind in kinds:
        if kind == pb.EVENT_KIND_PAGE:
            namespace, key = next(keys)
            events.append(PageEvent(namespace, key, *next(ready)))
        elif kind == pb.EVENT_KIND_PURGED:
            events.append(PurgedEvent(_stone_number(next(purges))))
        else:
            events.append(GoneEvent(*next(keys), kind == pb.EVENT_KIND_CORRUPT, next(gone_tiers)))
    return tuple(events)


def _event_key(namespace: NamespaceId, block: BlockHash, place: tuple[int, Part]) -> tuple[NamespaceId, PageKey]:
    return namespace, PageKey(block, *place)


def _encode_specs(specs: Iterable[tuple[Tenant, KVSpec]]) -> pb.Specs:
    pairs = list(specs)
    return pb.Specs(tenants=[tenant for tenant, _ in pairs], specs=[common.encode_spec(spec) for _, spec in pairs])


def _decode_specs(m: pb.Specs) -> tuple[tuple[Tenant, KVSpec], ...]:
    agree("specs", m.tenants, m.specs)
    return tuple(
        [
            (Tenant(text(tenant, "a tenant's name")), common.decode_spec(spec))
            for tenant, spec in zip(m.tenants, m.specs, strict=True)
        ]
    )


# ---------------------------------------------------------------------------------------- tombstones


def encode_tombstones(stones: Iterable[Tombstone]) -> pb.Tombstones:
    """Encodes tombstones of purges."""
    texts: Interned[str] = Interned()
    m = pb.Tombstones()
    for stone in stones:
        m.numbers.append(stone.number)
        m.tenant_of.append(texts[stone.tenant])
        m.model_of.append(reference(texts, stone.model))
        m.weights_of.append(reference(texts, stone.weights))
        m.adapter_of.append(reference(texts, stone.adapter))
    m.texts.extend(texts)
    return m


def decode_tombstones(m: pb.Tombstones) -> tuple[Tombstone, ...]:
    """The inverse."""
    indices = (m.tenant_of, m.model_of, m.weights_of, m.adapter_of)
    at_most(agree("tombstones", m.numbers, *indices), limits.TOMBSTONES, "tombstones in a message")
    at_most(len(m.texts), 4 * limits.TOMBSTONES, "texts of tombstones")
    at_most(max(map(len, m.texts), default=0), limits.SPEC_BYTES, "characters of a tombstone's text")
    values = [None, *m.texts]
    return tuple(
        map(
            Tombstone,
            map(_stone_number, m.numbers),
            [Tenant(text(tenant, "a tenant's name")) for tenant in pick(m.texts, m.tenant_of, "a tenant")],
            pick(values, m.model_of, "a model"),
            pick(values, m.weights_of, "weights"),
            pick(values, m.adapter_of, "an adapter"),
        )
    )


def _stone_number(value: int) -> int:
    return quantity(value, "tombstone number")


# ---------------------------------------------------------------------------------- infos and answers


def encode_info(info: ShardInfo) -> pb.ShardInfo:
    """Encodes the state of a shard."""
    return pb.ShardInfo(
        shard=info.shard,
        epoch=info.epoch,
        address=info.address,
        host=info.host,
        capacity_bytes=info.capacity_bytes,
        free_bytes=info.free_bytes,
        pages=info.pages,
        leases=info.leases,
        counters=encode_counters(info.counters),
        draining=info.draining,
        below=[common.TIER.encode[use.tier] for use in info.below],
        below_capacity_bytes=[use.capacity_bytes for use in info.below],
        below_free_bytes=[use.free_bytes for use in info.below],
        below_pages=[use.pages for use in info.below],
        below_wanted_bytes=[use.wanted_bytes for use in info.below],
        trouble=info.trouble[: common.TEXT_CHARS],
    )


def decode_info(m: pb.ShardInfo) -> ShardInfo:
    """The inverse."""
    return ShardInfo(
        shard=ShardId(text(m.shard, "a shard's name")),
        epoch=common.epoch(m.epoch),
        address=text(m.address, "an address"),
        host=text(m.host, "a host"),
        capacity_bytes=quantity(m.capacity_bytes, "bytes of capacity"),
        free_bytes=quantity(m.free_bytes, "free bytes"),
        pages=quantity(m.pages, "pages"),
        leases=quantity(m.leases, "leases"),
        counters=decode_counters(m.counters),
        draining=m.draining,
        below=_decode_below(m),
        trouble=text(m.trouble, "a shard's trouble"),
    )


def _decode_below(m: pb.ShardInfo) -> tuple[TierUse, ...]:
    agree("tiers", m.below, m.below_capacity_bytes, m.below_free_bytes, m.below_pages, m.below_wanted_bytes)
    tiers = common.TIER.decode_all(m.below)
    if any(lower <= upper for upper, lower in zip([FASTEST, *tiers], tiers, strict=False)):
        raise ProtocolError("each tier below the device tier must be listed once, the fastest first")
    capacities = [quantity(value, "bytes of capacity") for value in m.below_capacity_bytes]
    free = [quantity(value, "free bytes") for value in m.below_free_bytes]
    counts = [quantity(value, "pages") for value in m.below_pages]
    wanted = [quantity(value, "wanted bytes") for value in m.below_wanted_bytes]
    return tuple(map(TierUse, tiers, capacities, free, counts, wanted))


def encode_counters(counters: tuple[tuple[str, int], ...]) -> pb.Counters:
    """Encodes counters, which only grow, by name."""
    return pb.Counters(names=[name for name, _ in counters], values=[value for _, value in counters])


def decode_counters(m: pb.Counters) -> tuple[tuple[str, int], ...]:
    """The inverse."""
    at_most(agree("counters", m.names, m.values), COUNTERS, "counters")
    return tuple(zip([text(name, "a counter's name") for name in m.names], m.values, strict=True))
