"""The coordinator's answer to a report: the events that it has received, and the orders for the shard.

To add a kind of order: a Struct, and an alternative of the protocol's `Order`.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.messages import EvictOrder, LeaveReason, Move, MoveOrder, ProbeOrder, PullOrder, ReportAck
from kvcluster.core.tiers import Takes
from kvcluster.wire.checks import must
from kvcluster.wire.common import (
    ADDRESS,
    CODEC,
    CODECS,
    EPOCH,
    HASHES,
    NAMESPACES,
    NEW_PAGES,
    SPEC,
    TENANT,
    TIER,
)
from kvcluster.wire.fields import NUMBERS, PLAIN, Columns, EnumField, Maybe, OneOf, Rows, Struct, amount, each
from kvcluster.wire.reports import NAMED_BLOCKS, TOMBSTONES, check_ascending
from kvcluster.wire.v1 import coordinator_pb2 as pb

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
