"""Frames: the messages of Read and Write; and tickets, which travel outside gRPC.

A frame is a header and either one protobuf message or whole layers of pages (shard.proto draws it to the byte).
The bytes of pages never pass through protobuf, which would copy them once more on each side: `pack` joins buffers
of any owner in one copy, `parse` gives views of the message that arrived. This module knows sizes, not content:
the receiver verifies each layer against its checksum.

Every decoder raises ProtocolError or LimitError for malformed input. Where a shard may refuse, it returns the Refused
itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import SUM_BYTES
from kvcluster.core.messages import Refused, TicketBody
from kvcluster.errors import ProtocolError
from kvcluster.wire import common, shard
from kvcluster.wire.checks import check_opening, must
from kvcluster.wire.fields import Struct, in_bytes
from kvcluster.wire.v1 import common_pb2 as pb

T = TypeVar("T")

MAGIC = 0x564B
FRAME_VERSION = 1
TICKET_VERSION = 1
HEAD, DATA, TAIL, REFUSED = 1, 2, 3, 4
_NAMES = {HEAD: "head", DATA: "pages", TAIL: "tail", REFUSED: "refusal"}

_HEADER = struct.Struct("<HBBI")
_RECORD = struct.Struct("<IHHHHQ")


class Record(NamedTuple):
    """`len(sums)` whole layers of page `item`, from its own layer `layer` on, in `codec`. `data` is any flat buffer."""

    item: int
    layer: int
    codec: int
    sums: tuple[int, ...]
    data: memoryview


# ---------------------------------------------------------------------------------------------- pages


def pack(records: Sequence[Record]) -> bytes:
    """Returns a frame of pages. The payloads are copied once, into the frame."""
    heads = [encode_head(record) for record in records]
    pieces: list[bytes | memoryview] = [_HEADER.pack(MAGIC, FRAME_VERSION, DATA, len(records)), *heads]
    pieces += [record.data for record in records]
    frame = b"".join(pieces)
    assert len(frame) <= limits.MESSAGE_BYTES, "a frame that exceeds MESSAGE_BYTES"
    return frame


def parse(data: bytes) -> list[Record]:
    """Returns the records of a frame of pages. Their `data` are views of this message: nothing is copied."""
    heads, at = parse_heads(data)
    view = memoryview(data)
    records = []
    for item, layer, codec, sums, nbytes in heads:
        records.append(Record(item, layer, codec, sums, view[at : at + nbytes]))
        at += nbytes
    return records


def parse_heads(data: bytes) -> tuple[list[RecordHead], int]:
    """Returns the headers of the records of a frame of pages, and the offset of the bytes of the first; those of the
    others follow without gaps."""
    heads, at = decode_heads(data, _HEADER.size, _records(data, DATA))
    end = at + sum(head.nbytes for head in heads)
    must(end == len(data), f"a frame of {len(data)} bytes was announced as one of {end}")
    return heads, at


class RecordHead(NamedTuple):
    """The header of a record, which precedes its `nbytes` bytes."""

    item: int
    layer: int
    codec: int
    sums: tuple[int, ...]
    nbytes: int


def encode_head(record: Record) -> bytes:
    """Encodes the header of a record."""
    item, layer, codec, sums, data = record
    layers, nbytes = len(sums), data.nbytes
    assert layers > 0 and nbytes % layers == 0, "whole layers only"
    return struct.pack(f"<IHHHHQ{layers}Q", item, layer, layers, codec, 0, nbytes, *sums)


def decode_heads(data: bytes, at: int, count: int) -> tuple[list[RecordHead], int]:
    """Returns the `count` record headers that begin at `at`, and the offset at which they end."""
    size = len(data)
    # The minimum size of each, so that a false count is detected before it costs anything.
    must(count * (_RECORD.size + SUM_BYTES) <= size - at, f"a frame of {size} bytes cannot hold {count} records")
    heads = []
    for _ in range(count):
        if at + _RECORD.size > size:
            raise ProtocolError("a frame ends within the header of a record")
        item, layer, layers, codec, reserved, nbytes = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if reserved or not layers or layer + layers > common.INDEX_MAX or nbytes % layers:
            raise ProtocolError(f"a record of {nbytes} bytes for {layers} layers from {layer} on is invalid")
        if nbytes > limits.LAYER_BYTES * layers or at + SUM_BYTES * layers > size:
            raise ProtocolError(f"a record of {nbytes} bytes for {layers} layers exceeds the limit")
        heads.append(RecordHead(item, layer, codec, struct.unpack_from(f"<{layers}Q", data, at), nbytes))
        at += SUM_BYTES * layers
    return heads, at


# ----------------------------------------------------------------------------------- heads and tails


def _framed(
    kind: int, message: tuple[Callable[[T], bytes], Callable[[bytes], T]]
) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    """Returns encoder and decoder of a message in a frame of that kind, from those of the message."""
    encode, decode = message
    return lambda value: _frame(kind, encode(value)), lambda data: decode(_body(data, kind))


def _or_refused(decode: Callable[[bytes], T]) -> Callable[[bytes], T | Refused]:
    return lambda data: decode_refused(data) if _kind(data) == REFUSED else decode(data)


encode_read_request, decode_read_request = _framed(HEAD, (shard.encode_read_request, shard.decode_read_request))
"""The first message of a client in a Read."""

encode_write_request, decode_write_request = _framed(HEAD, (shard.encode_write_request, shard.decode_write_request))
"""The first message of a client in a Write."""

encode_refused, decode_refused = _framed(REFUSED, in_bytes(pb.Refused, common.REFUSED))
"""A refusal, which a shard sends instead of a head or tail to end the stream."""

encode_read_head, _decode_read_head = _framed(HEAD, (shard.encode_read_head, shard.decode_read_head))
decode_read_head = _or_refused(_decode_read_head)
"""A shard's first message in a Read: for each want None if its layers follow, otherwise the miss."""

encode_write_head, _decode_write_head = _framed(HEAD, (shard.encode_write_head, shard.decode_write_head))
decode_write_head = _or_refused(_decode_write_head)
"""A shard's first message in a Write: for each page None if it is to be sent, otherwise its outcome."""

encode_write_tail, _decode_write_tail = _framed(TAIL, (shard.encode_write_tail, shard.decode_write_tail))
decode_write_tail = _or_refused(_decode_write_tail)
"""A shard's last message in a Write: the outcome of each page."""

# -------------------------------------------------------------------------------------------- tickets


def _check_ticket(ticket: TicketBody) -> None:
    common.check_cover(ticket.runs, len(ticket.hashes))
    groups = len(ticket.need.parts)
    must(all(len(run.plan) == groups for run in ticket.runs), "each run of a ticket must have a plan for each group")


_encode_ticket, _decode_ticket = in_bytes(
    pb.TicketBody,
    Struct(
        pb.TicketBody,
        TicketBody,
        _check_ticket,
        namespace=common.NAMESPACE,
        attempt=common.ATTEMPT,
        hashes=common.BLOCKS,
        need=common.NEED,
        runs=common.RUNS,
    ),
)


def encode_ticket(ticket: TicketBody) -> bytes:
    """Encodes a ticket as self-contained bytes, for another process with the same credential."""
    return bytes([TICKET_VERSION]) + _encode_ticket(ticket)


def decode_ticket(data: bytes) -> TicketBody:
    """The inverse."""
    if not data or data[0] != TICKET_VERSION:
        found = f"of version {data[0]}" if data else "empty"
        raise ProtocolError(
            f"this ticket is {found}, but this side reads version {TICKET_VERSION}: pass bytes(ticket) on unchanged, "
            "and install the same release of kvcluster in both processes"
        )
    return _decode_ticket(data[1:])


# -------------------------------------------------------------------------------------------- headers


def _frame(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(MAGIC, FRAME_VERSION, kind, 0) + body


def _body(data: bytes, kind: int) -> bytes:
    """Returns the protobuf message in a frame. Raises ProtocolError unless the frame is of this kind."""
    must(not _records(data, kind), f"a frame of kind {_NAMES[kind]} has no records")
    return data[_HEADER.size :]


def _records(data: bytes, expected: int) -> int:
    """Returns the number of records that a frame announces. Raises ProtocolError unless it is of the expected kind."""
    kind = _kind(data)
    if kind != expected:
        raise ProtocolError(
            f"a frame of kind {_NAMES.get(kind, kind)} came where one of kind {_NAMES[expected]} belongs"
        )
    records: int = _HEADER.unpack_from(data)[3]
    return records


def _kind(data: bytes) -> int:
    """Returns the kind of a frame. Raises ProtocolError unless its size, magic and version are right."""
    if not _HEADER.size <= len(data) <= limits.MESSAGE_BYTES:
        raise ProtocolError(f"a frame has {len(data)} bytes; {_HEADER.size} to {limits.MESSAGE_BYTES} are valid")
    magic, version, kind, _ = _HEADER.unpack_from(data)
    check_opening(magic, version, own=(MAGIC, FRAME_VERSION), of="frames")
    return int(kind)
