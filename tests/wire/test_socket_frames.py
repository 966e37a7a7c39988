"""Frames on a plain socket: what is written is read back, and a frame that claims too much is refused at once."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, SpanId
from kvcluster.core.messages import (
    AttendRequest,
    AttendRow,
    PageWants,
    ReadRequest,
    Refused,
    WantKind,
    WriteRequest,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import (
    CallerError,
    ConfigError,
    CredentialError,
    KVClusterError,
    LimitError,
    ProtocolError,
    SpecError,
)
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import socket_frames
from kvcluster.wire.frames import Record
from kvcluster.wire.socket_frames import FrameKind, PeerFailed
from tests.wire import strategies as of


@pytest.mark.parametrize("kind", FrameKind)
def test_a_header_says_what_follows_and_how_much(kind: FrameKind) -> None:
    data = socket_frames.encode_header(kind, 0)
    assert len(data) == 8
    assert socket_frames.decode_header(data) == (kind, 0)


@pytest.mark.parametrize("kind", sorted({*FrameKind} - {FrameKind.GRANT}))
def test_no_frame_to_a_shard_claims_more_than_a_few_mib(kind: FrameKind) -> None:
    """A shard refuses a GRANT, which only a worker gets, before it looks at its size."""
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        socket_frames.decode_header(struct.pack("<HBBI", socket_frames.MAGIC, NOW, kind, 4 * 2**20 + 1))
    with pytest.raises(LimitError, match="exceeds the limit"):
        socket_frames.encode_header(kind, 4 * 2**20 + 1)


def test_the_largest_requests_fit_their_frames() -> None:
    attempt, namespace, hashes = Attempt(Holder(b"\xff" * 16), 2**62), NamespaceId(b"n" * 32), [b"h" * 32] * 2**16
    part, most = Part(64_999, 65_000, 31, 32), limits.PAGES_PER_CALL
    wants = PageWants([BlockHash(each) for each in hashes], [0] * most, [WantKind(3, part, 0, 1)])
    read = ReadRequest(namespace, attempt, Epoch(2**62), wants, Loss.EXACT)
    spans, subtrees = tuple(map(SpanId, range(2**62, 2**62 + 64))), ((63, 2**32 - 1),) * 64
    rows = (AttendRow(2**20, 4, spans, subtrees),) * limits.ATTEND_ROWS
    attend = AttendRequest(attempt, Epoch(2**62), 80, 32, 128, "float32", 0.1, rows)
    for kind, body in (
        (FrameKind.READ, socket_frames.encode_read(read, 2**62)),
        (FrameKind.ATTEND, socket_frames.encode_attend(attend, 2**62)),
        (FrameKind.WRITTEN, bytes(8 + limits.WRITE_PAGES * (4 + 8 * 200))),  # 200 layers
    ):
        assert socket_frames.decode_header(socket_frames.encode_header(kind, len(body))) == (kind, len(body))


def test_the_layout_is_the_one_that_is_documented() -> None:
    assert socket_frames.encode_header(FrameKind.PAGES, 0x00020304) == bytes.fromhex(
        f"4b53 {PROTOCOL_VERSION:02x} 08 04030200"
    )
    body = socket_frames.encode_pages([Record(7, 3, 0x0102, (2**64 - 1, 0), memoryview(b"abcd"))])
    assert body == bytes.fromhex("01000000 07000000 0300 0200 0201 0000 0400000000000000") + b"\xff" * 8 + bytes(8)
    assert socket_frames.encode_failure(LimitError("no")) == b"\x02no"


NOW = PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HT", "another service"),
        (struct.pack("<HBBI", socket_frames.MAGIC, NOW - 1, 1, 0), "upgrade the other side"),
        (struct.pack("<HBBI", socket_frames.MAGIC, NOW, 0, 0), "kind 0"),
        (struct.pack("<HBBI", socket_frames.MAGIC, NOW, FrameKind.DONE, 1), "exceeds the limit"),
        (
            struct.pack("<HBBI", socket_frames.MAGIC, NOW, FrameKind.HELLO, limits.TOKEN_BYTES + 1),
            "exceeds the limit",
        ),
        (
            struct.pack("<HBBI", socket_frames.MAGIC, NOW, FrameKind.READ, limits.MESSAGE_BYTES + 1),
            "exceeds the limit",
        ),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_in_words(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        socket_frames.decode_header(data)


@given(of.read_requests, st.integers(0, 2**62))
def test_a_load_goes_with_the_time_that_its_caller_has(request: ReadRequest, remaining_ns: int) -> None:
    assert socket_frames.decode_read(socket_frames.encode_read(request, remaining_ns)) == (request, remaining_ns)


@given(of.write_requests, st.integers(0, 2**62))
def test_a_store_goes_with_the_time_that_its_caller_has(request: WriteRequest, remaining_ns: int) -> None:
    assert socket_frames.decode_write(socket_frames.encode_write(request, remaining_ns)) == (request, remaining_ns)


@given(of.refusals)
def test_a_refusal_arrives_as_it_was(refused: Refused) -> None:
    assert socket_frames.decode_refused(socket_frames.encode_refused(refused)) == refused


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 16)), max_size=5))
def test_pages_are_announced_as_they_will_come(shape: list[tuple[int, int, int]]) -> None:
    sent = [Record(i, i, 1, tuple(range(n)), memoryview(bytes(n * size))) for i, n, size in shape]
    heads = socket_frames.decode_pages(socket_frames.encode_pages(sent))
    assert [(*head[:4], head.nbytes) for head in heads] == [(*record[:4], record.data.nbytes) for record in sent]


@given(st.binary(max_size=64))
def test_any_other_bytes_are_a_protocol_error_and_nothing_else(data: bytes) -> None:
    for decode in (
        socket_frames.decode_pages,
        socket_frames.decode_read,
        socket_frames.decode_write,
        socket_frames.decode_refused,
    ):
        try:
            decode(data)
        except (ProtocolError, LimitError, SpecError):
            """As documented."""


@pytest.mark.parametrize("kind", [ProtocolError, CallerError, LimitError, CredentialError])
def test_an_error_is_raised_again_as_what_it_was(kind: type[KVClusterError]) -> None:
    error = socket_frames.decode_failure(socket_frames.encode_failure(kind("because")))
    assert type(error) is kind
    assert str(error) == "because"


@pytest.mark.parametrize("reason", [MissReason.DEADLINE, MissReason.SHARD_LOST])
def test_trouble_is_told_as_the_miss_that_it_amounts_to(reason: MissReason) -> None:
    error = socket_frames.decode_failure(socket_frames.encode_failure(PeerFailed(Miss(reason, "because"))))
    assert isinstance(error, PeerFailed)
    assert error.miss == Miss(reason, "because")


def test_an_error_of_another_kind_keeps_its_words_and_no_frame_of_words_is_too_long() -> None:
    error = socket_frames.decode_failure(socket_frames.encode_failure(ConfigError("strange")))
    assert isinstance(error, ProtocolError)
    assert "strange" in str(error)
    assert len(socket_frames.encode_failure(ConfigError("x" * 10**6))) <= limits.WORDS_BYTES
    with pytest.raises(ProtocolError, match="empty"):
        socket_frames.decode_failure(b"")
