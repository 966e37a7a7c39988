"""Remote attention: the registration of spans, and the messages of one Attend (core/messages/spans.py).

The query and the results are not in these messages: they follow them as bytes.
"""

from __future__ import annotations

import math
from typing import TypeVar

from kvcluster.core import limits
from kvcluster.core.groups import DTYPE_BYTES, Part
from kvcluster.core.ids import BlockHash, SpanId
from kvcluster.core.messages import (
    AttendAnswer,
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    DeclineReason,
    RegisterSpans,
    SpanBlocks,
    SpanMiss,
    SpansLacking,
)
from kvcluster.core.miss import Loss
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import at_most, must
from kvcluster.wire.common import ATTEMPT, EPOCH, HASHES, HOLDER, INDEX_MAX, LOSS, PLACE_TABLE
from kvcluster.wire.fields import (
    NUMBERS,
    PLAIN,
    Column,
    Columns,
    EnumField,
    OneOf,
    Ragged,
    Rows,
    Struct,
    Values,
    amount,
    amounts,
    in_bytes,
    words,
)
from kvcluster.wire.v1 import coordinator_pb2
from kvcluster.wire.v1 import shard_pb2 as pb

V = TypeVar("V")

QUERY_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which a query travels. It is widened to float32, which changes no value."""

_LEVELS = 63
_TIME_US = 1 << 40  # twelve days
_SPAN_IDS: Values[SpanId] = amounts("a span")  # type: ignore[assignment] # ids are numbers
_MISS: EnumField[SpanMiss] = EnumField(SpanMiss, pb.SpanMiss, "SPAN_MISS_")
_REASON: EnumField[DeclineReason] = EnumField(DeclineReason, pb.DeclineReason, "DECLINE_REASON_")


def _capped(items: Column[V], most: int) -> Values[V]:
    """A column of at most `most` items, however many its lists are said to have."""
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
