"""Frames: the messages of Read and Write; and tickets, which travel outside gRPC.

A frame is a header and either one protobuf message or whole layers of pages (shard.proto draws it to the byte).
The bytes of pages never pass through protobuf, which would copy them once more on each side: `pack` joins buffers
of any owner in one copy, `parse` gives views of the message that arrived. This module knows sizes, not content:
the receiver verifies each layer against its checksum.

All frames of a stream are of the version that client and server agree on (versions.py), except the first frame of a
client that has not received an answer yet: it is of the client's oldest version.

Every decoder raises ProtocolError or LimitError for malformed input. Where a shard may refuse, the decoder returns the
Refused itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import SUM_BYTES
from kvcluster.core.messages import Refused, TicketBody
from kvcluster.errors import ProtocolError
from kvcluster.release import OLDEST_VERSION, PROTOCOL_VERSION
from kvcluster.wire import common, plans, shard
from kvcluster.wire.checks import at_most, check_magic, must
from kvcluster.wire.fields import Struct, in_bytes
from kvcluster.wire.v1 import common_pb2 as pb
from kvcluster.wire.versions import check_version

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

MAGIC = 0x564B
TICKET_VERSION = 1
HEAD, DATA, TAIL, REFUSED = 1, 2, 3, 4
_NAMES = {HEAD: "head", DATA: "pages", TAIL: "tail", REFUSED: "refusal"}

_CUTS_SINCE = 3

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


def pack(records: Sequence[Record], version: int = PROTOCOL_VERSION) -> bytes:
    """Returns a frame of pages. The payloads are copied once, into the frame."""
    heads = [encode_head(record) for record in records]
    pieces: list[bytes | memoryview] = [_HEADER.pack(MAGIC, version, DATA, len(records)), *heads]
    pieces += [record.data for record in records]
    frame = b"".join(pieces)
    assert len(frame) <= limits.MESSAGE_BYTES, "a frame that exceeds MESSAGE_BYTES"
    return frame


def cut(frame: bytes, version: int) -> Iterator[bytes]:
    """Yields the messages in which a client sends a frame of pages: the frame itself, or since version 3 its pieces, if
    it has more than CUT_BYTES. The headers of its records are in the first."""
    if len(frame) <= limits.CUT_BYTES or version < _CUTS_SINCE:
        yield frame
        return
    for at in range(0, len(frame), limits.CUT_BYTES):
        yield frame[at : at + limits.CUT_BYTES]


def parse_heads(data: bytes, version: int = PROTOCOL_VERSION, *, whole: bool = True) -> tuple[list[RecordHead], int]:
    """Returns the headers of the records of a frame of pages, and the offset of the bytes of the first; those of the
    others follow without gaps. `whole`: the frame is one message; otherwise its bytes may end in later ones."""
    heads, at = decode_heads(data, _HEADER.size, _records(data, DATA, version))
    end = at + sum(head.nbytes for head in heads)
    goes_on = not whole and len(data) < end and version >= _CUTS_SINCE
    must(end == len(data) or goes_on, f"a frame of {len(data)} bytes was announced as one of {end}")
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


class _Encode(Protocol[T_contra]):
    def __call__(self, value: T_contra, version: int = PROTOCOL_VERSION) -> bytes: ...


class _Decode(Protocol[T_co]):
    def __call__(self, data: bytes, version: int = PROTOCOL_VERSION) -> T_co: ...


def _framed(kind: int, message: tuple[Callable[[T], bytes], Callable[[bytes], T]]) -> tuple[_Encode[T], _Decode[T]]:
    """Returns encoder and decoder of a message in a frame of that kind, from those of the message. The version is that
    of the stream."""
    encode_body, decode_body = message

    def encode(value: T, version: int = PROTOCOL_VERSION) -> bytes:
        return _HEADER.pack(MAGIC, version, kind, 0) + encode_body(value)

    def decode(data: bytes, version: int = PROTOCOL_VERSION) -> T:
        return decode_body(_body(data, kind, version))

    return encode, decode


def _or_refused(decode: _Decode[T]) -> _Decode[T | Refused]:
    def decode_either(data: bytes, version: int = PROTOCOL_VERSION) -> T | Refused:
        return decode_refused(data, version) if _kind(data, version) == REFUSED else decode(data, version)

    return decode_either


def version_of(data: bytes, *, oldest: int = OLDEST_VERSION, newest: int = PROTOCOL_VERSION) -> int:
    """Returns the version of the first frame of a stream in one direction, which must be from `oldest` to `newest`.
    Raises ProtocolError if it is malformed, VersionError if its version is not."""
    version = _header(data)[1]
    check_version(version, oldest=oldest, newest=newest, of="a frame")
    return version


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
    plans.check_cover(ticket.runs, len(ticket.hashes))
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
        hashes=common.BLOCKS_OF_TICKET,
        need=common.NEED,
        runs=plans.RUNS_OF_TICKET,
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


def _body(data: bytes, kind: int, version: int) -> bytes:
    """Returns the protobuf message in a frame. Raises ProtocolError unless the frame is of this kind, and LimitError if
    it is longer than the body of a socket's frame may be."""
    must(not _records(data, kind, version), f"a frame of kind {_NAMES[kind]} has no records")
    at_most(len(data) - _HEADER.size, limits.BODY_BYTES, f"bytes of a frame of kind {_NAMES[kind]}")
    return data[_HEADER.size :]


def _records(data: bytes, expected: int, version: int) -> int:
    """Returns the number of records that a frame announces. Raises ProtocolError unless it is of the expected kind."""
    kind = _kind(data, version)
    if kind != expected:
        raise ProtocolError(
            f"a frame of kind {_NAMES.get(kind, kind)} came where one of kind {_NAMES[expected]} belongs"
        )
    records: int = _HEADER.unpack_from(data)[3]
    return records


def _kind(data: bytes, version: int) -> int:
    """Returns the kind of a frame of a stream of that version. Raises ProtocolError unless its size, magic and version
    are right."""
    _, theirs, kind, _ = _header(data)
    check_version(theirs, oldest=version, newest=version, of="a frame")
    return kind


def _header(data: bytes) -> tuple[int, int, int, int]:
    """Returns magic, version, kind and records. Raises ProtocolError unless the size and the magic are right."""
    if not _HEADER.size <= len(data) <= limits.MESSAGE_BYTES:
        raise ProtocolError(f"a frame has {len(data)} bytes; {_HEADER.size} to {limits.MESSAGE_BYTES} are valid")
    magic, version, kind, records = _HEADER.unpack_from(data)
    check_magic(magic, MAGIC)
    return magic, version, kind, records
