"""Frames carry whole layers, exactly to the byte; tickets are complete in themselves."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId
from kvcluster.core.messages import (
    PageKey,
    PageWant,
    ReadRequest,
    Refused,
    RefusedKind,
    TicketBody,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import frames
from kvcluster.wire.frames import Record
from kvcluster.wire.v1 import common_pb2
from tests.wire import strategies as of
from tests.wire.records import records_of

HEADER, RECORD = struct.Struct("<HBBI"), struct.Struct("<IHHHHQ")
SUMS = (2**64 - 1, 0)


@st.composite
def records(draw: st.DrawFn) -> Record:
    sums = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4).map(tuple))
    size = draw(st.integers(0, 16)) * len(sums)
    return Record(
        item=draw(st.integers(0, 2**32 - 1)),
        layer=draw(st.integers(0, 65_535 - len(sums))),
        codec=draw(st.integers(0, 65_535)),
        sums=sums,
        data=memoryview(draw(st.binary(min_size=size, max_size=size))),
    )


def _frame(*described: tuple[Any, ...], payload: bytes = b"", count: int | None = None) -> bytes:
    """A frame of records (item, layer, layers, codec, reserved, nbytes, *sums), however wrong."""
    out = HEADER.pack(0x564B, PROTOCOL_VERSION, 2, len(described) if count is None else count)
    for record in described:
        out += RECORD.pack(*record[:6]) + struct.pack(f"<{len(record) - 6}Q", *record[6:])
    return out + payload


# ---------------------------------------------------------------------------------------------- pages


@given(sent=st.lists(records(), max_size=5))
def test_records_arrive_as_they_were_sent(sent: list[Record]) -> None:
    message = frames.pack(sent)
    received = records_of(message)
    assert received == sent
    assert all(type(record) is Record for record in received)
    assert len(message) == 8 + sum(20 + 8 * len(r.sums) + r.data.nbytes for r in sent)


def test_a_frame_is_what_the_protocol_draws() -> None:
    page = bytes(range(8))
    drawn = _frame((7, 3, 2, 0x0102, 0, 8, *SUMS), payload=page)
    assert frames.pack([Record(7, 3, 0x0102, SUMS, memoryview(page))]) == drawn


def test_parsed_data_are_views_of_the_message() -> None:
    message = frames.pack([Record(0, 0, 1, (1,), memoryview(b"abcd"))])
    (record,) = records_of(message)
    assert record.data.obj is message and record.data.readonly


@pytest.mark.parametrize("buffer", [b"abcdefgh", bytearray(b"abcdefgh"), array("H", b"abcdefgh")])
def test_payloads_may_lie_in_any_buffer(buffer: Any) -> None:
    (record,) = records_of(frames.pack([Record(0, 0, 1, SUMS, memoryview(buffer))]))
    assert bytes(record.data) == b"abcdefgh"


def test_a_request_is_no_longer_than_on_a_socket() -> None:
    """Though a frame of pages may be: it is parsed, and pages are not."""
    head = HEADER.pack(0x564B, PROTOCOL_VERSION, 1, 0)
    for decode in (frames.decode_read_request, frames.decode_write_request):
        with pytest.raises(LimitError, match=f"{limits.BODY_BYTES + 1} exceeds the limit of {limits.BODY_BYTES}"):
            decode(head + bytes(limits.BODY_BYTES + 1))


def test_a_frame_cut_or_grown_anywhere_is_refused() -> None:
    message = frames.pack([Record(i, 0, 1, SUMS, memoryview(b"abcd")) for i in range(3)])
    for end in range(len(message)):
        with pytest.raises(ProtocolError):
            records_of(message[:end])
    with pytest.raises(ProtocolError, match=f"a frame of {len(message) + 1} bytes was announced as one of"):
        records_of(message + b"\0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (_frame((0, 0, 0, 1, 0, 0), payload=bytes(8)), "0 bytes for 0 layers"),
        (_frame((0, 0, 2, 1, 0, 3, *SUMS), payload=b"abc"), "3 bytes for 2 layers from 0 on is invalid"),
        (_frame((0, 0, 1, 1, 1, 1, 0), payload=b"a"), "is invalid"),
        (_frame((0, 65_534, 2, 1, 0, 2, *SUMS), payload=b"ab"), "2 layers from 65534 on is invalid"),
        (_frame((0, 0, 1, 1, 0, limits.LAYER_BYTES + 1, 0)), "exceeds the limit"),
        (_frame((0, 0, 1, 1, 0, 2**64 - 1, 0)), "exceeds the limit"),
        (_frame((0, 0, 65_535, 1, 0, 65_535, 0)), "exceeds the limit"),
        (_frame((0, 0, 2, 1, 0, 4, *SUMS), payload=b"abc"), "was announced as one of"),
        (_frame((0, 0, 1, 1, 0, 1, 0), payload=b"a", count=2), "cannot hold 2 records"),
        (_frame((0, 0, 4, 1, 0, 4, *SUMS, *SUMS), payload=b"abcd", count=2), "within the header of a record"),
        (_frame(count=2**32 - 1), "cannot hold 4294967295 records"),
        (b"", "a frame has 0 bytes"),
        (b"GET / HTTP/1.1\r\n", "a frame begins with 0x4547"),
        (
            HEADER.pack(0x564B, PROTOCOL_VERSION + 1, 2, 0),
            "a frame of version .* upgrade this side",
        ),
        (HEADER.pack(0x564B, PROTOCOL_VERSION, 1, 0), "a frame of kind head came where one of kind pages belongs"),
        (HEADER.pack(0x564B, PROTOCOL_VERSION, 9, 0), "a frame of kind 9 came"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_in_words(message: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        records_of(message)


def test_a_frame_is_measured_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    message = frames.pack([Record(0, 0, 1, (1,), memoryview(b"abcd"))])
    monkeypatch.setattr(limits, "MESSAGE_BYTES", len(message) - 1)
    with pytest.raises(ProtocolError, match="; 8 to"):
        records_of(message)
    with pytest.raises(AssertionError, match="exceeds MESSAGE_BYTES"):
        frames.pack([Record(0, 0, 1, (1,), memoryview(b"abcd"))])


@pytest.mark.parametrize("sums", [(), SUMS])
def test_only_whole_layers_are_packed(sums: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="whole layers only"):
        frames.pack([Record(0, 0, 1, sums, memoryview(b"abc"))])


def test_the_largest_layer_travels_in_one_frame() -> None:
    layer = memoryview(bytearray(limits.LAYER_BYTES))
    (record,) = records_of(frames.pack([Record(0, 0, 1, (1,), layer)]))
    assert record.data.nbytes == limits.LAYER_BYTES


# ----------------------------------------------------------------------------------- heads and tails


@given(request=of.read_requests)
def test_a_read_request_arrives(request: ReadRequest) -> None:
    received = frames.decode_read_request(frames.encode_read_request(request))
    assert received == request and repr(received) == repr(request)


@given(request=of.write_requests)
def test_a_write_request_arrives(request: WriteRequest) -> None:
    received = frames.decode_write_request(frames.encode_write_request(request))
    assert received == request and repr(received) == repr(request)


@given(outcome=of.read_heads)
def test_a_read_head_arrives(outcome: list[Miss | None]) -> None:
    assert frames.decode_read_head(frames.encode_read_head(outcome)) == outcome


@given(outcome=of.write_heads)
def test_a_write_head_arrives(outcome: list[Written | None]) -> None:
    assert frames.decode_write_head(frames.encode_write_head(outcome)) == outcome


@given(outcome=of.write_tails)
def test_a_write_tail_arrives(outcome: list[Written]) -> None:
    assert frames.decode_write_tail(frames.encode_write_tail(outcome)) == outcome


@given(refused=of.refusals)
def test_a_shard_may_refuse_in_place_of_any_head_or_tail(refused: Refused) -> None:
    message = frames.encode_refused(refused)
    for decode in (frames.decode_read_head, frames.decode_write_head, frames.decode_write_tail):
        assert decode(message) == refused


def test_a_worker_may_not_refuse_and_a_refusal_is_no_page() -> None:
    message = frames.encode_refused(Refused(RefusedKind.STALE, "epoch 1 is over"))
    for decode in (frames.decode_read_request, frames.decode_write_request, records_of):
        with pytest.raises(ProtocolError, match="a frame of kind refusal came"):
            decode(message)


def test_a_head_is_no_tail() -> None:
    with pytest.raises(ProtocolError, match="a frame of kind head came where one of kind tail belongs"):
        frames.decode_write_tail(frames.encode_write_head([None]))


def test_a_head_has_no_records() -> None:
    with pytest.raises(ProtocolError, match="a frame of kind head has no records"):
        frames.decode_read_head(HEADER.pack(0x564B, PROTOCOL_VERSION, 1, 1))


def test_a_block_that_many_wants_share_travels_once() -> None:
    keys = [
        PageKey(BlockHash(bytes([block]) * 32), group, Part(0, 4, 0, 1)) for block in range(64) for group in range(8)
    ]
    attempt = Attempt(Holder(bytes(16)), 1)
    request = ReadRequest(NamespaceId(bytes(32)), attempt, Epoch(1), tuple(PageWant(key, 0, 4) for key in keys))
    assert len(frames.encode_read_request(request)) < 64 * 32 + 64 * 8 * 4 + 256


# -------------------------------------------------------------------------------------------- tickets


@given(ticket=of.tickets())
def test_a_ticket_is_redeemed_as_it_was_granted(ticket: TicketBody) -> None:
    received = frames.decode_ticket(frames.encode_ticket(ticket))
    assert received == ticket and repr(received) == repr(ticket)


@given(ticket=of.tickets())
def test_a_ticket_begins_with_its_version(ticket: TicketBody) -> None:
    data = frames.encode_ticket(ticket)
    with pytest.raises(ProtocolError, match=r"of version 2, but this side reads version 1.*install the same release"):
        frames.decode_ticket(bytes([data[0] + 1]) + data[1:])
    with pytest.raises(ProtocolError, match="this ticket is empty"):
        frames.decode_ticket(b"")


@given(ticket=of.tickets())
def test_a_ticket_whose_runs_do_not_cover_its_blocks_is_refused(ticket: TicketBody) -> None:
    data = frames.encode_ticket(ticket)
    body = common_pb2.TicketBody.FromString(data[1:])
    body.hashes += bytes(32)
    with pytest.raises(ProtocolError, match="runs cover"):
        frames.decode_ticket(data[:1] + body.SerializeToString())


def test_a_ticket_of_too_many_blocks_is_refused() -> None:
    body = common_pb2.TicketBody(
        namespace=bytes(32), attempt=bytes(24), hashes=bytes(32 * (limits.BLOCKS_PER_PROMPT + 1))
    )
    with pytest.raises(LimitError, match=f"block hashes in a ticket: {limits.BLOCKS_PER_PROMPT + 1}"):
        frames.decode_ticket(b"\x01" + body.SerializeToString())
