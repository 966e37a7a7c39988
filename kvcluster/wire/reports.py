"""Messages of shards to the coordinator (reports and inventories), and its answer to them: the events that it has
received, and the orders for the shard.

A message carries thousands of events, in parallel lists for each kind of event. The list of kinds keeps their order,
because a page may be committed and removed within one message.

To add a kind of order: a Struct, and an alternative of the protocol's `Order`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import (
    EvictOrder,
    Findings,
    Inventory,
    IssueCredential,
    IssuedCredential,
    LeaveReason,
    Link,
    ListeningPort,
    Move,
    MoveOrder,
    OrderProgress,
    PageEvent,
    ProbeOrder,
    ProcessFacts,
    PullOrder,
    PurgedEvent,
    RemovedEvent,
    Report,
    ReportAck,
    ShardInfo,
    TierUse,
    Tombstone,
)
from kvcluster.core.messages.reports import PROOF_BYTES
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST, Takes, Tier
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import TEXT_CHARS, must, numbers, text
from kvcluster.wire.common import (
    ADDRESS,
    CODEC,
    CODECS,
    DEPTHS,
    EPOCH,
    HASHES,
    KEYS,
    LOSS,
    NAMESPACES,
    NEW_PAGES,
    NS,
    SHARD,
    SPEC,
    TENANT,
    TIER,
    exactly,
)
from kvcluster.wire.fields import (
    NUMBERS,
    PLAIN,
    Columns,
    EnumField,
    Interned,
    Maybe,
    OneOf,
    Rows,
    Scalar,
    Struct,
    Values,
    amount,
    amounts,
    each,
    words,
)
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as pb

COUNTERS_PER_PROCESS = 256
"""Limit of the counters of one process; there are some twenty."""

RELEASE_CHARS = 64
CONFIG_HASH_CHARS = 16
PROTOCOL_MAX = 999_999
_PORT_CHARS = 64
WHY_CHARS = 512
"""The most characters of the reason why a shard cannot reach another one."""

# -------------------------------------------------------------------------------------------- events

_PAGES: Columns[PageEvent] = Columns(
    pb.PageEvents,
    PageEvent,
    namespace=NAMESPACES,
    key=KEYS,
    parent=HASHES,
    depth=DEPTHS,
    tier=TIER.column,
    loss=LOSS.column,
    codec=CODECS,
)
_GONE: Columns[RemovedEvent] = Columns(
    pb.GoneEvents, RemovedEvent, namespace=NAMESPACES, key=KEYS, corrupt=NUMBERS, tier=TIER.column
)
NAMED_BLOCKS: Columns[tuple[NamespaceId, BlockHash]] = Columns(
    pb.NamespacedHashes, None, namespace=NAMESPACES, hash=HASHES
)
_STONE_NUMBERS = amounts("tombstone number")


def _purged(numbers: Collection[int], most: int, what: str) -> list[PurgedEvent]:
    return list(map(PurgedEvent, _STONE_NUMBERS.decode(numbers, most, what)))


_PURGES: Values[PurgedEvent] = Values(lambda events: [event.number for event in events], _purged)
_KINDS: dict[type[Any], tuple[int, str, Any]] = {
    PageEvent: (pb.EVENT_KIND_PAGE, "pages", _PAGES),
    RemovedEvent: (pb.EVENT_KIND_GONE, "gone", _GONE),
    PurgedEvent: (pb.EVENT_KIND_PURGED, "purges", _PURGES),
}
"""The kind of each event, and the field and column of all events of that kind."""


def _encode_events(events: Sequence[Any]) -> pb.Events:
    types = list(map(type, events))
    kinds = dict.fromkeys(types)
    of_kind = {kind: events if len(kinds) == 1 else [one for one in events if type(one) is kind] for kind in kinds}
    columns: dict[str, Any] = {_KINDS[kind][1]: _KINDS[kind][2].encode(found) for kind, found in of_kind.items()}
    codes: dict[type[Any], Any] = {kind: code for kind, (code, _, _) in _KINDS.items()}
    return pb.Events(kinds=[codes[one] for one in types], **columns)


def _decode_events(m: pb.Events, most: int, what: str) -> list[Any]:
    kinds = numbers(m.kinds, most, what)
    found = {kind: column.decode(getattr(m, field), most, field) for kind, field, column in _KINDS.values()}
    unknown = next((kind for kind in kinds if kind not in found), None)
    if unknown is not None:
        raise ProtocolError(f"event kind {unknown} is not known here; a newer kvcluster sent it: upgrade this side")
    lengths_agree = all(kinds.count(kind) == len(events) for kind, events in found.items())
    must(lengths_agree, f"the lists of {what} must be as long as their kinds say")
    following = {kind: iter(events) for kind, events in found.items()}
    return [next(following[kind]) for kind in kinds]


_EVENTS: Values[Any] = Values(_encode_events, _decode_events)

# ------------------------------------------------------------------------- tombstones, infos and samples


def _filter(noun: str) -> Interned[str | None]:
    return Interned(common_pb2.TextTable, each(words("a tombstone's text", limits.SPEC_BYTES)), noun, absent=True)


TOMBSTONES = Rows(
    Columns(
        pb.Tombstones,
        Tombstone,
        number=_STONE_NUMBERS,
        tenant=Interned(common_pb2.TextTable, each(TENANT), "a tenant"),
        model=_filter("a model"),
        weights=_filter("weights"),
        adapter=_filter("an adapter"),
    ),
    limits.TOMBSTONES,
    "tombstones in a message",
)

COUNTERS: Rows[tuple[str, int]] = Rows(
    Columns(pb.Counters, None, name=each(words("a counter's name")), value=NUMBERS), COUNTERS_PER_PROCESS, "counters"
)
"""Counters, which only grow, by name."""


def codec_errors(most: int) -> Rows[tuple[NamespaceId, int]]:
    """The codec errors of at most so many namespaces, in millionths."""
    return Rows(Columns(pb.CodecErrors, None, namespace=HASHES, error=amounts("millionths")), most, "errors")


_TIERS = Columns(
    pb.TierUses,
    TierUse,
    tier=TIER.column,
    capacity_bytes=amounts("bytes of capacity"),
    free_bytes=amounts("free bytes"),
    pages=amounts("pages"),
    wanted_bytes=amounts("wanted bytes"),
    writing_bytes=amounts("bytes of pages"),
)


def _check_tiers(info: ShardInfo) -> None:
    tiers = [use.tier for use in info.others]
    if INGEST in tiers or any(lower <= upper for upper, lower in pairwise(tiers)):
        raise ProtocolError("each tier but the RAM tier must be listed once, the fastest first")


def _config_hash(value: str) -> str:
    shown = text(value, "a hash of a configuration", CONFIG_HASH_CHARS)
    must(not set(shown) - set("0123456789abcdef"), f"{shown!r} is not a hash of a configuration")
    return shown


NODE = words("a node")
RELEASE = words("a release", RELEASE_CHARS)
CONFIG_HASH: Scalar[str] = Scalar(str, _config_hash)
PROTOCOL = amount("version of the protocol", PROTOCOL_MAX)
"""What each process reports about itself."""

_TROUBLE = words("a shard's trouble")
INFO = Struct(
    pb.ShardInfo,
    ShardInfo,
    _check_tiers,
    shard=SHARD,
    epoch=EPOCH,
    address=words("an address"),
    host=words("a host"),
    capacity_bytes=amount("bytes of capacity"),
    free_bytes=amount("free bytes"),
    pages=amount("pages"),
    leases=amount("leases"),
    counters=COUNTERS,
    draining=PLAIN,
    others=Rows(_TIERS, len(Tier), "tiers"),
    trouble=Scalar(lambda trouble: trouble[:TEXT_CHARS], _TROUBLE.decode),
    writing_bytes=amount("bytes of pages"),
    node=NODE,
    release=RELEASE,
    config_hash=CONFIG_HASH,
    protocol=PROTOCOL,
    stopping=PLAIN,
    server_name=words("a server's name"),
)

# ------------------------------------------------------------------------------------------ requests


def check_ascending(order_numbers: Iterable[int]) -> None:
    """Raises ProtocolError unless the order numbers are strictly ascending and the first is at least 1."""
    before = 0
    for number in order_numbers:
        must(number > before, "order numbers must be ascending, from 1 on")
        before = number


def _check_progress(progress: OrderProgress) -> None:
    check_ascending(progress.running)
    must(max(progress.running, default=0) <= progress.accepted, "a running order was not accepted")


_PORTS: Columns[ListeningPort] = Columns(
    pb.ListeningPorts,
    ListeningPort,
    use=each(words("a use of a port", _PORT_CHARS)),
    port=amounts("a port", 65_535),
    allowed=each(words("a range of ports", _PORT_CHARS)),
)
FACTS = Struct(
    pb.ProcessFacts,
    ProcessFacts,
    pool_bytes=amount("bytes of pools"),
    limit_bytes=amount("bytes of memory"),
    ports=Rows(_PORTS, limits.TRANSPORTS, "ports of a process"),
)
_LINKS: Columns[Link] = Columns(
    pb.Links,
    Link,
    shard=each(SHARD),
    transport=each(words("a transport")),
    trip_ns=amounts("nanoseconds"),
    why=each(words("why a link fails", WHY_CHARS)),
)
FINDINGS = Struct(
    pb.Findings,
    Findings,
    number=amount("number of a probe"),
    facts=FACTS,
    clock_ns=PLAIN,
    clock_error_ns=amount("nanoseconds"),
    links=Rows(_LINKS, limits.PROBE_LINKS, "links in a message"),
)
_PROGRESS = Struct(
    pb.OrderProgress,
    OrderProgress,
    _check_progress,
    accepted=amount("order number"),
    running=Rows(NUMBERS, limits.ORDERS_IN_FLIGHT, "running orders"),
)
_SPECS: Rows[tuple[Tenant, KVSpec]] = Rows(
    Columns(pb.Specs, None, tenant=each(TENANT), spec=each(SPEC)), limits.NAMESPACES, "specs"
)
_PRESSURE: Rows[tuple[Tenant, int]] = Rows(
    Columns(pb.Pressure, None, tenant=each(TENANT), nbytes=amounts("bytes wanted")), limits.WAITING_WRITES, "tenants"
)
ISSUE_CREDENTIAL = Struct(
    pb.IssueCredentialRequest,
    IssueCredential,
    epoch=EPOCH,
    proof=Scalar(bytes, exactly(PROOF_BYTES, "the proof of a shard")),
    generation=amount("generation"),
    audience=EPOCH,
)
ISSUED_CREDENTIAL = Struct(
    pb.IssuedCredential,
    IssuedCredential,
    token=words("a token", limits.TOKEN_BYTES),
    valid_ns=NS,
)

REPORT = Struct(
    pb.ReportRequest,
    Report,
    info=INFO,
    coordinator=EPOCH,
    first=amount("stream number"),
    events=Rows(_EVENTS, limits.REPORTS_PER_MESSAGE, "events in a message"),
    specs=_SPECS,
    pressure=_PRESSURE,
    orders=_PROGRESS,
    samples=codec_errors(limits.SAMPLES),
    findings=Maybe(FINDINGS),
    wanted_on_device=Rows(NAMED_BLOCKS, limits.WANTED_ON_DEVICE, "blocks for a device"),
)
INVENTORY = Struct(
    pb.InventoryRequest,
    Inventory,
    info=INFO,
    coordinator=EPOCH,
    upto=amount("stream number"),
    chunk=PLAIN,
    last=PLAIN,
    pages=Rows(_PAGES, limits.INVENTORY_CHUNK, "pages in a message"),
    specs=_SPECS,
    tombstones=TOMBSTONES,
)


LEAVE_REASON: EnumField[LeaveReason | None] = EnumField(LeaveReason, pb.LeaveReason, "LEAVE_REASON_", unspecified=True)
_NUMBER = amount("order number")


def _check_pull(order: PullOrder) -> None:
    tier = f"the {order.into.name.lower()} tier"
    fits = order.codec is Codec.RAW or order.into.spec.takes is not Takes.RAW
    must(fits, f"encoded pages cannot be pulled into {tier}")
    must(order.into.spec.addressable, f"pages cannot be pulled into {tier}, only demoted into it")


_MOVES = Columns(
    pb.Moves,
    Move,
    later={"up": False},
    namespace=NAMESPACES,
    hash=HASHES,
    to=TIER.column,
    codec=CODECS,
    keeps=NUMBERS,
    up=NUMBERS,
)
_ORDER = OneOf(
    pb.Order,
    "an order",
    evict=Struct(
        pb.EvictOrder,
        EvictOrder,
        number=_NUMBER,
        blocks=Rows(NAMED_BLOCKS, limits.EVICTIONS_PER_ORDER, "blocks in an order"),
        tier=TIER,
    ),
    move=Struct(
        pb.MoveOrder, MoveOrder, number=_NUMBER, moves=Rows(_MOVES, limits.MOVES_PER_ORDER, "blocks in an order")
    ),
    pull=Struct(
        pb.PullOrder,
        PullOrder,
        _check_pull,
        number=_NUMBER,
        source=ADDRESS,
        tenant=TENANT,
        spec=SPEC,
        pages=Rows(NEW_PAGES, limits.PULL_PAGES, "pages in an order"),
        codec=CODEC,
        into=TIER,
    ),
)
ACK = Struct(
    pb.ReportAck,
    ReportAck,
    lambda ack: check_ascending(order.number for order in ack.orders),
    epoch=EPOCH,
    acked=amount("stream number"),
    inventory=PLAIN,
    orders=Rows(each(_ORDER), limits.ORDERS_IN_FLIGHT, "orders in an answer"),
    tombstones=TOMBSTONES,
    drain=PLAIN,
    leave=LEAVE_REASON,
    probe=Maybe(
        Struct(
            pb.ProbeOrder,
            ProbeOrder,
            number=amount("number of a probe"),
            peers=Rows(each(ADDRESS), limits.PROBED_SHARDS, "shards to try"),
        )
    ),
)
