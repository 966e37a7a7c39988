"""Questions of workers to a shard and its replies, and the first and last messages of a stream of pages.

They include those of remote attention: the registration of spans, and the messages of one Attend
(core/messages/sequences_and_spans.py), whose query and results follow the messages as bytes. frames.py frames the
messages of a stream; copies/ knows the bytes of pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvcluster.core import limits
from kvcluster.core.groups import DTYPE_BYTES, Part
from kvcluster.core.ids import BlockHash, SpanId
from kvcluster.core.messages import (
    AttachedShard,
    AttendAnswer,
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    DeclineReason,
    Flush,
    GetOffers,
    Offer,
    Offers,
    PageWant,
    PageWants,
    ReadRequest,
    RegisterSpans,
    SpanBlocks,
    SpanMiss,
    SpansLacking,
    Suspect,
    WantKind,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Loss
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import agree, at_most, must, numbers
from kvcluster.wire.common import (
    ATTEMPT,
    DONE,
    EPOCH,
    HASHES,
    HOLDER,
    INDEX_MAX,
    KEYS,
    LOSS,
    MISSES,
    NAMESPACE,
    NEW_PAGES,
    NS,
    PLACE_TABLE,
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
    Ragged,
    Rows,
    Scalar,
    Struct,
    Values,
    amount,
    amounts,
    each,
    in_bytes,
    words,
)
from kvcluster.wire.v1 import common_pb2, coordinator_pb2
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


QUERY_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which a query travels. It is widened to float32, which changes no value."""

_LEVELS = 63
_TIME_US = 1 << 40  # twelve days
_SPAN_IDS: Values[SpanId] = amounts("a span")  # type: ignore[assignment] # ids are numbers
_MISS: EnumField[SpanMiss] = EnumField(SpanMiss, pb.SpanMiss, "SPAN_MISS_")
_REASON: EnumField[DeclineReason] = EnumField(DeclineReason, pb.DeclineReason, "DECLINE_REASON_")


def _capped(items: Column[V], most: int) -> Values[V]:
    """A column of at most `most` items, whatever limit its decoder is given."""
    return Values(items.encode, lambda wire, said, what: items.decode(wire, min(said, most), what))


def _split(blocks: SpanBlocks) -> tuple[SpanId, tuple[int, Part], int, tuple[BlockHash, ...], Loss]:
    return blocks.span, (blocks.group, blocks.part), blocks.depth, blocks.hashes, blocks.accept


def _span_blocks(
    span: SpanId, place: tuple[int, Part], depth: int, hashes: tuple[BlockHash, ...], accept: Loss
) -> SpanBlocks:
    must(hashes, f"span {span} has no blocks")
    return SpanBlocks(span, *place, depth, hashes, accept)


_SPANS: Columns[SpanBlocks] = Columns(
    pb.SpanList,
    _span_blocks,
    split=_split,
    span=_SPAN_IDS,
    place=PLACE_TABLE,
    depth=amounts("a depth", limits.TOKENS_PER_SEQUENCE),
    hashes=Ragged(
        coordinator_pb2.HashLists,
        _capped(HASHES, limits.SPAN_BLOCKS_PER_CALL),
        limits.BLOCKS_PER_CALL,
        "block hashes in a span",
    ),
    accept=LOSS.column,
)
REGISTER_SPANS = Struct(
    pb.RegisterSpansRequest,
    RegisterSpans,
    holder=HOLDER,
    epoch=EPOCH,
    spans=Rows(_SPANS, limits.SPANS_PER_CALL, "spans in a message"),
    ended=Rows(_SPAN_IDS, limits.SPANS_PER_CALL, "spans ended in a message"),
)

# --------------------------------------------------------------------------------------------- Attend

_SUBTREES: Columns[tuple[int, int]] = Columns(
    pb.SubtreeList, None, level=amounts("a level of the tree", _LEVELS), index=NUMBERS
)
_ROWS: Columns[AttendRow] = Columns(
    pb.AttendRows,
    AttendRow,
    position=amounts("a position", limits.TOKENS_PER_SEQUENCE),
    tokens=amounts("query tokens", limits.ATTEND_TOKENS),
    spans=Ragged(pb.NumberLists, _capped(_SPAN_IDS, limits.ATTEND_NAMES), limits.SPANS_PER_CALL, "spans of a row"),
    subtrees=Ragged(
        pb.SubtreeLists, _capped(_SUBTREES, limits.ATTEND_SUBTREES), limits.ATTEND_SUBTREES, "results of a row"
    ),
)


def query_bytes(request: AttendRequest) -> int:
    """Returns the bytes of the query that follows a request."""
    return request.tokens * request.heads * request.dim * DTYPE_BYTES[request.dtype]


def result_bytes(request: AttendRequest) -> int:
    """Returns the bytes of the results of a request if values have as many channels as the query or fewer."""
    width = 4 * request.heads * ((request.latent_values or request.dim) + 1)
    return sum(row.tokens * len(row.subtrees) for row in request.rows) * width


def _check_attend(request: AttendRequest) -> None:
    if request.dtype not in QUERY_DTYPES:
        raise ProtocolError(f"a query of dtype {request.dtype!r} is not known here; send {' or '.join(QUERY_DTYPES)}")
    must(math.isfinite(request.scale) and math.isfinite(request.softcap), "scale and softcap must be finite")
    must(request.softcap >= 0, "a softcap is not negative")
    at_most(request.tokens, limits.ATTEND_TOKENS, "query tokens in a message")
    at_most(query_bytes(request), limits.ATTEND_BYTES, "bytes of a query")
    at_most(len(request.spans), limits.SPANS_PER_CALL, "spans in a message")


_ENCODED = Struct(
    pb.AttendRequest,
    AttendRequest,
    _check_attend,
    attempt=ATTEMPT,
    epoch=EPOCH,
    layer=amount("a layer", INDEX_MAX),
    heads=amount("query heads", INDEX_MAX),
    dim=amount("channels of a query", INDEX_MAX),
    dtype=words("a dtype"),
    scale=PLAIN,
    softcap=PLAIN,
    window=PLAIN,
    latent_values=amount("channels of a value", INDEX_MAX),
    fused=PLAIN,
    rows=Rows(_ROWS, limits.ATTEND_ROWS, "rows in a message"),
)
encode_attend_request, decode_attend_request = in_bytes(pb.AttendRequest, _ENCODED)

_LACKING: Columns[tuple[SpanId, SpanMiss]] = Columns(pb.LackingList, None, span=_SPAN_IDS, why=_MISS.column)
_REPLY = OneOf(
    pb.AttendReply,
    "the answer to an Attend",
    attended=Struct(
        pb.Attended,
        Attended,
        nbytes=amount("bytes of results", limits.ATTEND_BYTES),
        loss=LOSS,
        time_us=amount("microseconds", _TIME_US),
    ),
    lacking=Struct(
        pb.SpansLacking, SpansLacking, spans=Rows(_LACKING, limits.SPANS_PER_CALL, "spans that are lacking")
    ),
    declined=Struct(pb.AttendDeclined, AttendDeclined, reason=_REASON, detail=words("a reason")),
)
_encode_answer, _decode_answer = in_bytes(pb.AttendReply, _REPLY)


def encode_attend_answer(answer: AttendAnswer) -> bytes:
    """Encodes the answer to an Attend. The results of Attended follow it."""
    return _encode_answer(answer)


def decode_attend_answer(body: bytes) -> AttendAnswer:
    """The inverse."""
    answer: AttendAnswer = _decode_answer(body)
    return answer
