"""ZMTP as a peer may send it: in any pieces, and no more of it is kept than a message."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.errors import KVClusterError, LimitError, ProtocolError
from kvcluster.wire import zmtp
from kvcluster.wire.zmtp import Bounds, Inbound, encode_frame, encode_message, encode_ready

BOUNDS = Bounds((b"SUB", b"DEALER"), frames=3, nbytes=1_000)
HELLO = zmtp.GREETING + encode_ready(b"SUB")
MORE, COMMAND = 1, 4


def received(data: bytes, piece: int = 4_096) -> list[list[bytes]]:
    """The messages in these bytes, fed in pieces."""
    inbound, found, at = Inbound(BOUNDS), [], 0
    while at < len(data):
        size = min(piece, inbound.room)
        assert size, "a peer that has something to say is listened to"
        inbound.feed(data[at : at + size])
        at += size
        while (frames := inbound.next()) is not None:
            found += [frames] if frames else []
    return found


messages = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=6)


@given(messages, st.integers(1, 400))
def test_messages_arrive_as_they_were_sent_in_whatever_pieces(sent: list[list[bytes]], piece: int) -> None:
    assert received(HELLO + b"".join(map(encode_message, sent)), piece) == sent


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not ZMTP"),
        (b"\xff" + bytes(9), "not ZMTP"),
        (zmtp.GREETING[:10] + b"\x02", "version before 3.0"),
        (zmtp.GREETING.replace(b"NULL", b"CURV"), "mechanism"),
        (zmtp.GREETING + encode_ready(b"PULL"), "socket of type"),
        (zmtp.GREETING + encode_frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x09SUB", COMMAND), "cut short"),
        (zmtp.GREETING + encode_frame(b"\x05READY\x0bSock", COMMAND), "cut short"),
        (zmtp.GREETING + encode_frame(b"\x01kv@"), "before READY"),
        (zmtp.GREETING + encode_frame(b"\x04PING\x00\x00", COMMAND), "before READY"),
        (HELLO + encode_ready(b"SUB"), "second READY"),
        (HELLO + encode_frame(b"\x05OTHER", COMMAND), "unknown command"),
        (HELLO + encode_frame(b"", COMMAND), "unknown command"),
        (HELLO + encode_frame(b"\x04PING" + bytes(19), COMMAND), "long context"),
        (HELLO + b"\x08\x00", "flags"),
    ],
)
def test_what_is_not_zmtp_is_refused(sent: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        received(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x02" + (2**63).to_bytes(8, "big"),
        b"\x03" + (1_001).to_bytes(8, "big"),
        b"\x06" + (1_025).to_bytes(8, "big"),
        b"\x01\x00" * 3,
        encode_frame(bytes(600), MORE) + b"\x02" + (401).to_bytes(8, "big"),
    ],
)
def test_a_header_that_claims_too_much_is_refused_before_its_bytes(sent: bytes) -> None:
    with pytest.raises(LimitError):
        received(HELLO + sent)


def test_a_peer_is_answered_its_last_ping_alone() -> None:
    inbound = Inbound(BOUNDS)
    inbound.feed(HELLO + b"".join(encode_frame(b"\x04PING\x00\x10" + bytes([n]), COMMAND) for n in range(50)))
    while inbound.next() is not None:
        pass
    assert inbound.answer == encode_frame(b"\x04PONG\x31", COMMAND)


@given(st.binary(max_size=200), st.integers(1, 64))
def test_whatever_a_peer_sends_no_more_than_a_message_is_kept(junk: bytes, piece: int) -> None:
    inbound = Inbound(BOUNDS)
    tracemalloc.start()
    try:
        for _ in range(200):
            data = (HELLO + junk * 5)[: min(piece, inbound.room)]
            inbound.feed(data)
            while inbound.next() is not None:
                pass
    except KVClusterError:
        pass
    finally:
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept < 64 * 1024
