"""The readers of KV events: batches as maps and as arrays, messages, answers and requests of a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.wire import kv_events, zmtp
from kvcluster.wire.kv_events import Batch, ReplayRequest
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node

ERRORS = (ProtocolError, LimitError)

_STREAM = EventStream(NamespaceId(bytes(32)), "llama", "sha256:lora", 2)
_A, _B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
_BATCHES = (
    kv_events.encode(_STREAM, [], 0.0),
    kv_events.encode(_STREAM, [AllBlocksCleared(), BlocksRemoved(Tier.DISK, (_A, _B))], 1.5),
    kv_events.encode(_STREAM, [BlocksStored(Tier.HOST, _A, (_B,), (1, 70_000)), BlocksRemoved(Tier.HOST, (_B,))], 1e9),
    # As arrays: a hash of bytes, one of an integer, no medium; then what is not looked at.
    b"\x93\x00\x92\x98\xabBlockStored\x92\xc4\x02ab\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0\x92\x01\x02\x01\xc0\xa3cpu\xc0"
    b"\x92\xacBlockRemoved\x91\x05\x91\x81\xa1x\x90",
)
_HELLO = zmtp.GREETING + zmtp.encode_ready(b"SUB")
_SPOKEN = (
    _HELLO
    + zmtp.encode_frame(b"\x01kv@")
    + zmtp.encode_frame(b"\x04PING\x00\x00abc", 4)
    + zmtp.encode_frame(b"\x00kv@"),
    _HELLO + zmtp.encode_message([b"", bytes(8), b"t" * 300]),
)
_MESSAGES = (Batch("kv@0000000000000000@llama", 1, b"payload"), Batch("", 2**64 - 2, b""))


def event_parsers() -> Iterator[Parser]:
    """All of them."""
    yield Parser("kv events", kv_events.decode, lambda: trees(_BATCHES, _pieces), ERRORS)
    yield Parser("zmtp", _read_zmtp, lambda: trees(_SPOKEN, _pieces), ERRORS)
    yield _framed("kv event message", kv_events.decode_batch, [kv_events.encode_batch(one) for one in _MESSAGES])
    answers = [kv_events.encode_answer(one) for one in (*_MESSAGES, None)]
    yield _framed("kv event answer", kv_events.decode_answer, answers)
    requests = [kv_events.encode_request(ReplayRequest(5, topic)) for topic in (None, "kv@0000000000000000@llama")]
    yield _framed("kv event request", kv_events.decode_request, requests)


def _read_zmtp(data: bytes) -> object:
    """What a peer of the publisher says, in pieces as large as it may send."""
    inbound = zmtp.Inbound(zmtp.Bounds((b"SUB",), frames=3, nbytes=1_000))
    found, at = [], 0
    while at < len(data) and inbound.room:
        size = inbound.room
        inbound.feed(data[at : at + size])
        at += size
        while (frames := inbound.next()) is not None:
            found.append(frames)
    return found


def _pieces(data: bytes) -> Node:
    """Some bytes each, so that what is changed is a number, a length or a name."""
    return Node(Kind.MANY, children=[Node(Kind.BYTES, data[at : at + 3]) for at in range(0, len(data), 3)])


def _framed(name: str, read: Callable[[Sequence[bytes]], object], messages: list[list[bytes]]) -> Parser:
    """Frames come apart from one another; here each has a byte for its length before it."""

    def split(data: bytes) -> object:
        frames, at = [], 0
        while at < len(data):
            frames.append(data[at + 1 : at + 1 + data[at]])
            at += 1 + data[at]
        return read(frames)

    def pieces(data: bytes) -> Node:
        nodes, at = [], 0
        while at < len(data):
            nodes.append(Node(Kind.BYTES, data[at + 1 : at + 1 + data[at]], sized=True))
            at += 1 + data[at]
        return Node(Kind.MANY, children=nodes)

    joined = [b"".join(bytes([len(frame)]) + frame for frame in frames) for frames in messages]
    return Parser(name, split, lambda: trees(joined, pieces), ERRORS)
