"""Frames on a plain socket, for the transports that do not use gRPC.

A frame is a header and a body whose length it gives. The bodies of READ, WRITE, HEAD and TAIL are protobuf, as in a
gRPC stream (frames.py). PAGES holds the headers of records; their bytes follow the frame, so that they can be sent
from, and received into, their final memory. Little-endian:

    header    magic u16 = 0x534b, version u8, kind u8, body bytes u32
    HELLO     the token, UTF-8                  the client's first frame
    WELCOME   depends on the transport          the answer
    READ      remaining time in ns u64, ReadRequest        WRITE the same, with a WriteRequest
    HEAD, TAIL, REFUSED                         as in frames.py: what wire/shard.py encodes
    PAGES     records u32, a header for each; the bytes of all records follow
    ATTEND    remaining time in ns u64, AttendRequest; the query follows         only in tcp and shm
    PARTIALS  AttendReply; the results follow
    DONE      empty: the last frame of a side in this exchange
    FAILED    code u8, message in UTF-8         instead of any answer; the connection is closed then
    GRANT, WRITTEN, RENEW, POOL                 only in shm (shm_frames.py)
    ABORT     empty: in shm, a worker has stopped writing, and its pages are to be discarded

The version is that of the protocol (versions.py): the client's HELLO has the one that it has agreed on with the shard
over gRPC, and all later frames of the connection have the same. A FAILED frame that refuses the version of a HELLO has
that version, so that its sender can read why: its form is the same in every version.

Every decoder raises ProtocolError or LimitError for malformed input.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, CredentialError, KVClusterError, LimitError, ProtocolError, Unreachable
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import shard
from kvcluster.wire.checks import check_magic, must, quantity
from kvcluster.wire.common import REFUSED
from kvcluster.wire.fields import in_bytes
from kvcluster.wire.frames import Record, RecordHead, decode_heads, encode_head
from kvcluster.wire.v1 import common_pb2 as pb
from kvcluster.wire.versions import check_version

T = TypeVar("T")

MAGIC = 0x534B
HEADER = struct.Struct("<HBBI")
_COUNT = struct.Struct("<I")
_TIME = struct.Struct("<Q")


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    WELCOME = 2
    READ = 3
    WRITE = 4
    HEAD = 5
    TAIL = 6
    REFUSED = 7
    PAGES = 8
    DONE = 9
    FAILED = 10
    GRANT = 11
    WRITTEN = 12
    RENEW = 13
    ABORT = 14
    ATTEND = 15
    PARTIALS = 16
    POOL = 17


_MOST = {
    FrameKind.HELLO: limits.TOKEN_BYTES,
    FrameKind.WELCOME: limits.TOKEN_BYTES,
    FrameKind.READ: limits.BODY_BYTES,
    FrameKind.WRITE: limits.BODY_BYTES,
    FrameKind.HEAD: limits.BODY_BYTES,
    FrameKind.TAIL: limits.BODY_BYTES,
    FrameKind.REFUSED: limits.SMALL_BODY_BYTES,
    FrameKind.PAGES: limits.BODY_BYTES,
    FrameKind.DONE: 0,
    FrameKind.FAILED: limits.WORDS_BYTES,
    FrameKind.GRANT: limits.MESSAGE_BYTES,  # only a worker accepts it: the checksums of all layers of all its pages
    FrameKind.WRITTEN: limits.BODY_BYTES,
    FrameKind.RENEW: 1,
    FrameKind.ABORT: 0,
    FrameKind.ATTEND: limits.BODY_BYTES,
    FrameKind.POOL: 8,
    FrameKind.PARTIALS: limits.SMALL_BODY_BYTES * 4,  # SPANS_PER_CALL spans that are lacking
}
"""The most bytes of a body, by its kind: every kind has its bound here."""


def encode_header(kind: FrameKind, nbytes: int, version: int = PROTOCOL_VERSION) -> bytes:
    """Encodes the header of a frame whose body has `nbytes` bytes. Raises LimitError if its kind allows fewer."""
    if nbytes > _MOST[kind]:
        raise LimitError(f"a {kind.name} frame of {nbytes} bytes exceeds the limit of {_MOST[kind]}")
    return HEADER.pack(MAGIC, version, kind, nbytes)


def version_of(header: bytes) -> int:
    """Returns the version in a header. Raises ProtocolError if it is not one of kvcluster's."""
    must(len(header) == HEADER.size, f"the header of a frame has {HEADER.size} bytes, not {len(header)}")
    magic, version, _, _ = HEADER.unpack(header)
    check_magic(magic, MAGIC)
    return int(version)


def decode_header(data: bytes, version: int = PROTOCOL_VERSION) -> tuple[FrameKind, int]:
    """Returns the kind and the body bytes, on a connection of that version. Raises ProtocolError, before anything is
    allocated, if the body is larger than its kind allows, and VersionError for a frame of another version."""
    must(len(data) == HEADER.size, f"the header of a frame has {HEADER.size} bytes, not {len(data)}")
    magic, theirs, kind, nbytes = HEADER.unpack(data)
    check_magic(magic, MAGIC)
    check_version(theirs, oldest=version, newest=version, of="a frame")
    try:
        known = FrameKind(kind)
    except ValueError:
        raise ProtocolError(f"a frame of kind {kind} is not known here") from None
    must(nbytes <= _MOST[known], f"a {known.name} frame of {nbytes} bytes exceeds the limit")
    return known, nbytes


# ------------------------------------------------------------------------------------------ requests


def _timed(
    encode: Callable[[T], bytes], decode: Callable[[bytes], T]
) -> tuple[Callable[[T, int], bytes], Callable[[bytes], tuple[T, int]]]:
    """Returns encoder and decoder of a request with the nanoseconds that remain for it, from those of the request."""

    def decode_timed(body: bytes) -> tuple[T, int]:
        must(len(body) >= _TIME.size, "a request ends before its remaining time")
        remaining_ns = quantity(_TIME.unpack_from(body)[0], "nanoseconds")
        return decode(body[_TIME.size :]), remaining_ns

    return lambda request, remaining_ns: _TIME.pack(remaining_ns) + encode(request), decode_timed


encode_read, decode_read = _timed(shard.encode_read_request, shard.decode_read_request)
"""The request of a load."""

encode_write, decode_write = _timed(shard.encode_write_request, shard.decode_write_request)
"""The request of a store."""

encode_attend, decode_attend = _timed(shard.encode_attend_request, shard.decode_attend_request)
"""The request of an Attend."""

encode_refused, decode_refused = in_bytes(pb.Refused, REFUSED)
"""A refusal, which is sent instead of a head or tail."""

# ---------------------------------------------------------------------------------------------- pages


def encode_pages(records: Sequence[Record]) -> bytes:
    """Encodes the body of a PAGES frame. The bytes of the records follow it."""
    return b"".join([_COUNT.pack(len(records)), *map(encode_head, records)])


def decode_pages(body: bytes) -> list[RecordHead]:
    """The inverse."""
    must(len(body) >= _COUNT.size, "a PAGES frame ends before its number of records")
    heads, end = decode_heads(body, _COUNT.size, _COUNT.unpack_from(body)[0])
    must(end == len(body), f"a PAGES frame of {len(body)} bytes was announced as one of {end}")
    return heads


# ------------------------------------------------------------------------------------------- failures

_CODES: list[type[KVClusterError]] = [ProtocolError, CallerError, LimitError, CredentialError]
_DEADLINE, _LOST = 16, 17
"""The codes of errors that have a Miss: the deadline has passed, or the shard is lost."""


class PeerFailed(Unreachable):
    """An error with a Miss that the other side has sent, raised again here."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


def encode_failure(error: KVClusterError) -> bytes:
    """Encodes an error of errors.py. For an error with a `miss` (Unavailable of transport/base.py), the code states
    whether the deadline has passed or the shard is lost."""
    miss = getattr(error, "miss", None)
    if isinstance(miss, Miss):
        code, words = (_DEADLINE if miss.reason is MissReason.DEADLINE else _LOST), miss.detail
    else:
        code = max((at for at, kind in enumerate(_CODES) if isinstance(error, kind)), default=0)
        words = str(error)
    return bytes([code]) + words.encode("utf-8", "replace")[: limits.WORDS_BYTES - 1]


def decode_failure(body: bytes) -> KVClusterError:
    """The inverse. Returns the error to raise: PeerFailed for an error with a `miss`."""
    must(body, "a FAILED frame is empty")
    words = body[1:].decode("utf-8", "replace")
    if body[0] == _DEADLINE:
        return PeerFailed(Miss(MissReason.DEADLINE, words))
    if body[0] == _LOST:
        return PeerFailed(Miss(MissReason.SHARD_LOST, words))
    return _CODES[body[0]](words) if body[0] < len(_CODES) else ProtocolError(words)
