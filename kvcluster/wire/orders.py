"""The coordinator's answer to a report: the events that it has received, and the orders for the shard.

To add a kind of order: a row of `_KINDS`, and an alternative of the protocol's `Order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import EvictOrder, LeaveReason, Move, MoveOrder, Order, PullOrder, ReportAck
from kvcluster.core.tiers import Takes
from kvcluster.errors import ProtocolError
from kvcluster.wire import common, pages
from kvcluster.wire.common import EnumCodec, Interned, agree, at_most, pick, quantity, text
from kvcluster.wire.reports import ascending, decode_tombstones, encode_tombstones
from kvcluster.wire.v1 import coordinator_pb2 as pb

LEAVE_REASON: EnumCodec[LeaveReason, pb.LeaveReason] = EnumCodec(LeaveReason, pb.LeaveReason, "LEAVE_REASON_")


def encode_ack(ack: ReportAck) -> pb.ReportAck:
    """Encodes the answer to a report."""
    return pb.ReportAck(
        epoch=ack.epoch,
        acked=ack.acked,
        inventory=ack.inventory,
        orders=[_encode_order(order) for order in ack.orders],
        tombstones=encode_tombstones(ack.tombstones),
        drain=ack.drain,
        leave=pb.LEAVE_REASON_UNSPECIFIED if ack.leave is None else LEAVE_REASON.encode[ack.leave],
    )


def decode_ack(m: pb.ReportAck) -> ReportAck:
    """The inverse."""
    return ReportAck(
        epoch=common.epoch(m.epoch),
        acked=quantity(m.acked, "stream number"),
        inventory=m.inventory,
        orders=_decode_orders(m.orders),
        tombstones=decode_tombstones(m.tombstones),
        drain=m.drain,
        leave=None if m.leave == pb.LEAVE_REASON_UNSPECIFIED else LEAVE_REASON.decode(m.leave),
    )


def _encode_order(order: Order) -> pb.Order:
    kind = next(kind for kind in _KINDS if isinstance(order, kind.message))
    m = pb.Order(number=order.number)
    getattr(m, kind.field).CopyFrom(kind.encode(order))
    return m


def _decode_orders(orders: Sequence[pb.Order]) -> tuple[Order, ...]:
    at_most(len(orders), limits.ORDERS_IN_FLIGHT, "orders in an answer")
    decoded = tuple(map(_decode_order, orders))
    ascending(order.number for order in decoded)
    return decoded


def _decode_order(m: pb.Order) -> Order:
    kind = next((kind for kind in _KINDS if kind.field == m.WhichOneof("kind")), None)
    if kind is None:
        raise ProtocolError("this kind of order is not known here; a newer kvcluster sent it: upgrade this side")
    return kind.decode(quantity(m.number, "order number"), getattr(m, kind.field))


def _encode_evict(order: EvictOrder) -> pb.EvictOrder:
    namespaces: Interned[NamespaceId] = Interned()
    return pb.EvictOrder(
        namespace_of=[namespaces[namespace] for namespace, _ in order.blocks],
        hashes=b"".join([block for _, block in order.blocks]),
        namespaces=b"".join(namespaces),
        tier=common.TIER.encode[order.tier],
    )


def _decode_evict(number: int, m: pb.EvictOrder) -> EvictOrder:
    hashes = common.decode_hashes(m.hashes, limits.EVICTIONS_PER_ORDER, "blocks in an order")
    agree("an order", hashes, m.namespace_of)
    blocks = tuple(zip(_owners(m.namespaces, m.namespace_of), hashes, strict=True))
    return EvictOrder(number, blocks, common.TIER.decode(m.tier))


def _encode_move(order: MoveOrder) -> pb.MoveOrder:
    namespaces: Interned[NamespaceId] = Interned()
    return pb.MoveOrder(
        namespace_of=[namespaces[move.namespace] for move in order.moves],
        hashes=b"".join([move.hash for move in order.moves]),
        to=[common.TIER.encode[move.to] for move in order.moves],
        codecs=[move.codec for move in order.moves],
        namespaces=b"".join(namespaces),
    )


def _decode_move(number: int, m: pb.MoveOrder) -> MoveOrder:
    hashes: Sequence[BlockHash] = common.decode_hashes(m.hashes, limits.MOVES_PER_ORDER, "blocks in an order")
    agree("an order", hashes, m.namespace_of, m.to, m.codecs)
    owners, tiers = _owners(m.namespaces, m.namespace_of), common.TIER.decode_all(m.to)
    moves = tuple(map(Move, owners, hashes, tiers, common.decode_codecs(m.codecs)))
    return MoveOrder(number, moves)


def _owners(namespaces: bytes, namespace_of: Sequence[int]) -> list[NamespaceId]:
    return pick(common.decode_namespaces(namespaces, limits.MOVES_PER_ORDER), namespace_of, "a namespace")


def _encode_pull(pull: PullOrder) -> pb.PullOrder:
    return pb.PullOrder(
        source=common.encode_address(pull.source),
        tenant=pull.tenant,
        spec=common.encode_spec(pull.spec),
        pages=pages.encode_new_pages(pull.pages),
        codec=pull.codec,
        into=common.TIER.encode[pull.into],
    )


def _decode_pull(number: int, m: pb.PullOrder) -> PullOrder:
    into = common.TIER.decode(m.into)
    if common.decode_codec(m.codec) is not Codec.RAW and into.spec.takes is Takes.RAW:
        raise ProtocolError(f"encoded pages cannot be pulled into the {into.name.lower()} tier")
    if not into.spec.addressable:
        raise ProtocolError(f"pages cannot be pulled into the {into.name.lower()} tier, only demoted into it")
    return PullOrder(
        number=number,
        source=common.decode_address(m.source),
        tenant=Tenant(text(m.tenant, "a tenant's name")),
        spec=common.decode_spec(m.spec),
        pages=pages.decode_new_pages(m.pages, limits.PULL_PAGES, "pages in an order"),
        codec=common.decode_codec(m.codec),
        into=into,
    )


class _OrderCodec(NamedTuple):
    """The codec of one kind of order: its class, its field in the protocol's `Order`, its encoder and its decoder."""

    message: type[Order]
    field: str
    encode: Callable[[Any], Any]
    decode: Callable[[int, Any], Order]


_KINDS = (
    _OrderCodec(EvictOrder, "evict", _encode_evict, _decode_evict),
    _OrderCodec(MoveOrder, "move", _encode_move, _decode_move),
    _OrderCodec(PullOrder, "pull", _encode_pull, _decode_pull),
)
