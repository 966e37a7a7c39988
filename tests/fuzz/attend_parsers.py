"""An Attend from its frame to its results, over pages that a shard has: each that is read is computed, or refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from kvcluster.attention import uses_fused
from kvcluster.attention.span_results import attend_spans, result_bytes
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, SpanId
from kvcluster.core.messages import AttendRequest, AttendRow, PageKey, PageSlot, SpanPages
from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, KVClusterError, LimitError, ProtocolError
from kvcluster.wire import socket_frames
from kvcluster.wire.shard import query_bytes
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, fields, message

_BLOCK, _HEADS, _DIM, _CUTS = 256, 1, 2, 4
_SPEC = KVSpec.uniform(
    model="m", weights="w", num_layers=1, num_kv_heads=_HEADS, head_dim=_DIM, dtype="float16", block_tokens=_BLOCK
)
_PART, _SPACE = _SPEC.whole(0), NamespaceId(bytes(HASH_BYTES))
_NBYTES = _SPEC.page_bytes(0, _PART)
_PAGE = memoryview(bytes(_NBYTES))
_ATTEMPT = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
_QUERY_BYTES = 16 * 1024
"""A query beyond it is read and not computed: this looks for what breaks, not for what takes long."""


def attend_parsers() -> Iterator[Parser]:
    """All of them. The memory is that of a query and of results, which are bounded apart from the frame."""
    frames = [socket_frames.encode_attend(request, 7) for request in _requests()]
    errors = (ProtocolError, CallerError, LimitError)
    yield Parser("attend over pages", _computed, lambda: trees(frames, _frame), errors, memory=4 * 2**20)


def _requests() -> list[AttendRequest]:
    first, last = (0, 0), (0, _CUTS - 1)
    rows = [
        AttendRow(CUT_TOKENS * _CUTS, 1, tuple(map(SpanId, range(_CUTS))), ((2, 0), first)),
        AttendRow(CUT_TOKENS + 5, 2, (SpanId(0), SpanId(1)), (first, (0, 1))),
        AttendRow(CUT_TOKENS * _CUTS, 3, (SpanId(_CUTS - 1),), (last,)),
        AttendRow(0, 1, (SpanId(1),), (first,)),
    ]

    def request(
        *of: AttendRow, heads: int = 1, dtype: str = "float32", softcap: float = 0.0, window: int = 0
    ) -> AttendRequest:
        return AttendRequest(_ATTEMPT, Epoch(3), 0, heads, _DIM, dtype, 0.5, of, softcap, window, 0, uses_fused())

    return [
        request(rows[0]),
        request(*rows[:3], heads=4),
        request(rows[1], dtype="bfloat16", softcap=3.0),
        request(rows[2], rows[3], window=700),
        request(*rows, dtype="float16", heads=2, window=1),
    ]


@functools.cache
def _spans() -> Mapping[SpanId, SpanPages]:
    """A span of each cut."""
    made = {}
    for cut in range(_CUTS):
        depth = cut * CUT_TOKENS // _BLOCK
        keys = [PageKey(BlockHash(bytes([cut, at]) * 16), 0, _PART) for at in range(CUT_TOKENS // _BLOCK)]
        slots = tuple(PageSlot(key, 0, _NBYTES, 1, Loss.EXACT) for key in keys)
        made[SpanId(cut)] = SpanPages(SpanId(cut), _SPACE, _SPEC, 0, _PART, depth, slots)
    return made


def _computed(data: bytes) -> tuple[AttendRequest, int]:
    """What a shard makes of a frame: its results, of exactly as many bytes as the request says."""
    request, _ = socket_frames.decode_attend(data)
    known, asked = _spans(), request.spans
    lacking = [span for span in asked if span not in known]
    if lacking or not asked or query_bytes(request) > _QUERY_BYTES:
        return request, 0
    spans = {span: known[span] for span in asked}
    query = memoryview(bytearray(query_bytes(request)))
    results = attend_spans(request, query, spans, lambda slot: _PAGE, between=lambda: None)
    expected = sum(len(row.subtrees) * result_bytes(row.tokens, request.heads, _DIM) for row in request.rows)
    if results.nbytes != expected:
        raise KVClusterError(f"{results.nbytes} bytes of results, and {expected} are due")
    return request, results.nbytes


def _frame(data: bytes) -> Node:
    return Node(Kind.MANY, children=[*fields(data, (8,)), message(data[8:])])
