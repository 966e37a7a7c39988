"""Streams: frames on a plain socket, for the transports that do without gRPC.

A frame is a header and a body whose length it gives. What the bodies of READ, WRITE, HEAD and TAIL hold is protobuf, as
in a gRPC stream (frames.py); PAGES holds the headers of records, and their bytes follow the frame, so that they are
sent out of, and received into, the memory where they lie. Little-endian:

    header    magic u16 = 0x534b, version u8 = 1, kind u8, body bytes u32
    HELLO     the token, UTF-8                  the first frame of whoever connects
    WELCOME   what that transport has to tell   the answer
    READ      remaining time in ns u64, ReadRequest        WRITE likewise, with a WriteRequest
    HEAD, TAIL, REFUSED                         as in frames.py: what wire/shard.py encodes
    PAGES     records u32, a header for each; the bytes of all records follow
    DONE      nothing: the last frame of a side that has no more to say in this exchange
    FAILED    code u8, words in UTF-8           instead of any answer; the connection is closed then
    GRANT, WRITTEN, RENEW                       of shm alone (shm_frames.py)
    ABORT     nothing: in shm, a worker has stopped writing, and what it wrote is not to be kept

Everything here raises ProtocolError or LimitError for what is not as it should be.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from kvcluster.core import limits
from kvcluster.core.messages import ReadRequest, Refused, WriteRequest
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, CredentialError, KVClusterError, LimitError, ProtocolError, Unreachable
from kvcluster.wire import common, shard
from kvcluster.wire.frames import Record, RecordHead, decode_heads, encode_head
from kvcluster.wire.v1 import common_pb2 as pb

MAGIC = 0x534B
STREAM_VERSION = 1
HEADER = struct.Struct("<HBBI")
_COUNT = struct.Struct("<I")
_TIME = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is."""

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


_MOST = {Kind.HELLO: limits.TOKEN_BYTES, Kind.FAILED: limits.WORDS_BYTES, Kind.DONE: 0, Kind.RENEW: 1, Kind.ABORT: 0}


def encode_header(kind: Kind, nbytes: int) -> bytes:
    """The header of a frame whose body has so many bytes."""
    return HEADER.pack(MAGIC, STREAM_VERSION, kind, nbytes)


def decode_header(data: bytes) -> tuple[Kind, int]:
    """Kind and body bytes. What claims more than its kind may have is refused before anything is made room for."""
    if len(data) != HEADER.size:
        raise ProtocolError(f"the header of a frame has {HEADER.size} bytes, not {len(data)}")
    magic, version, kind, nbytes = HEADER.unpack(data)
    common.check_opening(magic, version, own=(MAGIC, STREAM_VERSION), of="streams")
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"a frame of kind {kind} is not known here") from None
    if nbytes > _MOST.get(known, limits.MESSAGE_BYTES):
        raise ProtocolError(f"a {known.name} frame of {nbytes} bytes is larger than may be")
    return known, nbytes


# ------------------------------------------------------------------------------------------ requests


def encode_read(request: ReadRequest, remaining_ns: int) -> bytes:
    """What opens a load."""
    return _TIME.pack(remaining_ns) + shard.encode_read_request(request)


def decode_read(body: bytes) -> tuple[ReadRequest, int]:
    """The inverse."""
    remaining_ns = _remaining_ns(body)
    return shard.decode_read_request(body[_TIME.size :]), remaining_ns


def encode_write(request: WriteRequest, remaining_ns: int) -> bytes:
    """What opens a store."""
    return _TIME.pack(remaining_ns) + shard.encode_write_request(request)


def decode_write(body: bytes) -> tuple[WriteRequest, int]:
    """The inverse."""
    remaining_ns = _remaining_ns(body)
    return shard.decode_write_request(body[_TIME.size :]), remaining_ns


def _remaining_ns(body: bytes) -> int:
    if len(body) < _TIME.size:
        raise ProtocolError("a request ends before it says how long its caller waits")
    remaining: int = _TIME.unpack_from(body)[0]
    return common.quantity(remaining, "nanoseconds")


# ------------------------------------------------------------------------------------------- refusals


def encode_refused(refused: Refused) -> bytes:
    """In place of a head or tail."""
    return common.encode_refusal(refused).SerializeToString()


def decode_refused(body: bytes) -> Refused:
    """The inverse."""
    return common.decode_refusal(common.parse(pb.Refused, body))


# ---------------------------------------------------------------------------------------------- pages


def encode_pages(records: Sequence[Record]) -> bytes:
    """The body of a PAGES frame. The bytes of the records follow it."""
    return b"".join([_COUNT.pack(len(records)), *map(encode_head, records)])


def decode_pages(body: bytes) -> list[RecordHead]:
    """The inverse."""
    if len(body) < _COUNT.size:
        raise ProtocolError("a PAGES frame ends before it says how many records it has")
    heads, end = decode_heads(body, _COUNT.size, _COUNT.unpack_from(body)[0])
    if end != len(body):
        raise ProtocolError(f"a PAGES frame of {len(body)} bytes was announced as one of {end}")
    return heads


# ------------------------------------------------------------------------------------------- failures

_CODES: list[type[KVClusterError]] = [ProtocolError, CallerError, LimitError, CredentialError]
_DEADLINE, _LOST = 16, 17
"""Trouble, which is the transport's own: codes of its two kinds."""


class Broken(Unreachable):
    """The other side had trouble: as a miss."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


def encode_failure(error: KVClusterError) -> bytes:
    """An error of our own tree. One that has a `miss` is trouble, of which the deadline is one kind."""
    miss = getattr(error, "miss", None)
    if isinstance(miss, Miss):
        code, words = (_DEADLINE if miss.reason is MissReason.DEADLINE else _LOST), miss.detail
    else:
        code = max((at for at, kind in enumerate(_CODES) if isinstance(error, kind)), default=0)
        words = str(error)
    return bytes([code]) + words.encode("utf-8", "replace")[: limits.WORDS_BYTES - 1]


def decode_failure(body: bytes) -> KVClusterError:
    """The inverse: an error to raise, `Broken` for trouble."""
    if not body:
        raise ProtocolError("a FAILED frame is empty")
    words = body[1:].decode("utf-8", "replace")
    if body[0] == _DEADLINE:
        return Broken(Miss(MissReason.DEADLINE, words))
    if body[0] == _LOST:
        return Broken(Miss(MissReason.SHARD_LOST, words))
    return _CODES[body[0]](words) if body[0] < len(_CODES) else ProtocolError(words)
