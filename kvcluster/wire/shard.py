"""Questions of workers to a shard and its replies, and the first and last messages of a stream of pages.

frames.py frames those messages; pages/ knows the bytes of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.messages import (
    AttachedShard,
    Flush,
    GetOffers,
    Offer,
    Offers,
    PageWant,
    PageWants,
    ReadRequest,
    Suspect,
    WantKind,
    WriteRequest,
    Written,
)
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import agree, at_most, numbers
from kvcluster.wire.common import (
    ATTEMPT,
    DONE,
    EPOCH,
    KEYS,
    LOSS,
    MISSES,
    NAMESPACE,
    NEW_PAGES,
    NS,
    REFUSED,
    decode_keys,
    encode_keys,
    pairs,
)
from kvcluster.wire.fields import (
    NUMBERS,
    PLAIN,
    Column,
    Columns,
    EnumField,
    Interned,
    OneOf,
    Rows,
    Scalar,
    Struct,
    each,
    in_bytes,
    words,
)
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import shard_pb2 as pb

V = TypeVar("V")

WRITTEN: EnumField[Written] = EnumField(Written, pb.Written, "WRITTEN_")
_WRITTEN_OR_NONE: EnumField[Written | None] = EnumField(Written, pb.Written, "WRITTEN_", unspecified=True)

# ------------------------------------------------------------------------------ questions and replies

FLUSH = Struct(pb.FlushRequest, Flush, wait_ns=NS)
GET_OFFERS = Struct(pb.GetOffersRequest, GetOffers)
SUSPECT = Struct(
    pb.SuspectRequest, Suspect, epoch=EPOCH, keys=Rows(KEYS, limits.SUSPECTS_PER_CALL, "pages suspected at once")
)


def _details(details: bytes) -> bytes:
    at_most(len(details), limits.OFFER_BYTES, "bytes of an offer's details")
    return details


def _check_offers(reply: Offers) -> None:
    at_most(len(reply.offers) + len(reply.refused), limits.TRANSPORTS, "transports of a shard")


_NAME = "a transport's name"
_OFFERS = Columns(
    pb.OfferList,
    Offer,
    transport=each(words(_NAME)),
    address=each(words("an offer")),
    version=NUMBERS,
    details=each(Scalar(bytes, _details)),
)
REPLY = OneOf(
    pb.ShardReply,
    "the shard's answer",
    refused=REFUSED,
    done=DONE,
    attached=Struct(pb.AttachedShard, AttachedShard, namespace=NAMESPACE, epoch=EPOCH, lease_ttl_ns=NS),
    offers=Struct(
        pb.Offers,
        Offers,
        _check_offers,
        protocol_version=PLAIN,
        epoch=EPOCH,
        offers=Rows(_OFFERS, limits.TRANSPORTS, "transports of a shard"),
        refused=Rows(pairs(_NAME, "an offer"), limits.TRANSPORTS, "transports of a shard"),
    ),
)
"""Any reply of a shard to a question. Grants to a transport are not encoded: they stay in the process."""

# ------------------------------------------------------------------------------------ reading and writing


def _encode_wants(wants: Sequence[PageWant]) -> Message | None:
    if not wants:
        return None
    columns = PageWants.of(wants)
    groups, parts, starts, stops = zip(*columns.kinds, strict=True)
    places = list(zip(groups, parts, strict=True))
    key = encode_keys(columns.hashes, [places[number] for number in columns.kind_of])
    layer_start, layer_stop = ([of_kind[number] for number in columns.kind_of] for of_kind in (starts, stops))
    return pb.PageWants(key=key, layer_start=layer_start, layer_stop=layer_stop)


def _decode_wants(m: pb.PageWants) -> PageWants:
    what = "pages in a load"
    hashes, places = decode_keys(m.key, limits.READ_PAGES, what)
    starts, stops = (numbers(column, limits.READ_PAGES, what) for column in (m.layer_start, m.layer_stop))
    agree(what, hashes, places, starts, stops)
    kinds: dict[tuple[tuple[int, Part], int, int], int] = {}
    kind_of = [kinds.setdefault(kind, len(kinds)) for kind in zip(places, starts, stops, strict=True)]
    for (_, part), start, stop in kinds:
        if not start < stop <= part.layers:
            raise ProtocolError(f"layers {start}:{stop} were asked for of a page that has {part.layers}")
    return PageWants(hashes, kind_of, [WantKind(*place, start, stop) for place, start, stop in kinds])


_WANTS = Scalar(_encode_wants, _decode_wants)
"""The wants of a request: columns on both sides, since there are thousands."""

encode_read_request, decode_read_request = in_bytes(
    pb.ReadRequest,
    Struct(
        pb.ReadRequest,
        ReadRequest,
        namespace=NAMESPACE,
        attempt=ATTEMPT,
        epoch=EPOCH,
        wants=_WANTS,
        accept=LOSS,
        on_device=PLAIN,
    ),
)
encode_write_request, decode_write_request = in_bytes(
    pb.WriteRequest,
    Struct(
        pb.WriteRequest,
        WriteRequest,
        namespace=NAMESPACE,
        attempt=ATTEMPT,
        epoch=EPOCH,
        wait_ns=NS,
        pages=Rows(NEW_PAGES, limits.WRITE_PAGES, "pages in a store"),
    ),
)


def _outcomes(
    message: type[Message], column: Column[V]
) -> tuple[Callable[[Sequence[V]], bytes], Callable[[bytes], list[V]]]:
    """Returns encoder and decoder of one outcome for each page of a call."""
    outcomes: Scalar[Any] = Scalar(column.encode, lambda m: column.decode(m, limits.PAGES_PER_CALL, "pages in a call"))
    return in_bytes(message, outcomes)


_WRITE_OUTCOMES: Interned[Written | None] = Interned(pb.WrittenTable, _WRITTEN_OR_NONE.column, "an outcome")
_WRITTEN_OUTCOMES: Interned[Written] = Interned(pb.WrittenTable, WRITTEN.column, "an outcome")
encode_read_head, decode_read_head = _outcomes(common_pb2.MissTable, MISSES)
"""For each wanted page None if it is sent, otherwise its miss."""

encode_write_head, decode_write_head = _outcomes(pb.WrittenTable, _WRITE_OUTCOMES)
"""For each page None if it is to be sent, otherwise its outcome."""

encode_write_tail, decode_write_tail = _outcomes(pb.WrittenTable, _WRITTEN_OUTCOMES)
"""The outcome of each page."""
