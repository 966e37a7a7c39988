"""The readers of plain sockets: the header of a frame, requests, the headers of pages, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcluster.core.messages import ReadRequest, WriteRequest
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, CredentialError, KVClusterError, LimitError, ProtocolError, SpecError
from kvcluster.memory import codec
from kvcluster.wire import shard, socket_frames
from kvcluster.wire.frames import Record, RecordHead
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, fields, message
from tests.fuzz.wire_parsers import drawn
from tests.wire import strategies as of

_ERRORS = (ProtocolError, LimitError, SpecError)
_HEAD = (4, 2, 2, 2, 2, 8)
_SHAPES = [[], [(1, 0)], [(1, 8)], [(2, 6)], [(1, 4), (3, 3)], [(2, 4)] * 5]
"""PAGES frames by their records, each of so many layers and bytes."""


def stream_parsers() -> Iterator[Parser]:
    """All of them."""
    yield Parser(
        "stream header", socket_frames.decode_header, _headers, _ERRORS, lambda read: socket_frames.encode_header(*read)
    )
    yield Parser(
        "stream read",
        socket_frames.decode_read,
        lambda: trees([socket_frames.encode_read(request, 7) for request in drawn(of.read_requests)], _request),
        _ERRORS,
        _write_request,
    )
    yield Parser(
        "stream write",
        socket_frames.decode_write,
        lambda: trees([socket_frames.encode_write(request, 7) for request in drawn(of.write_requests)], _request),
        _ERRORS,
        _write_request,
    )
    yield Parser(
        "stream attend",
        socket_frames.decode_attend,
        lambda: trees([socket_frames.encode_attend(request, 7) for request in drawn(of.attend_requests)], _request),
        _ERRORS,
        lambda read: socket_frames.encode_attend(*read),
    )
    yield Parser(
        "stream partials",
        shard.decode_attend_answer,
        lambda: trees([shard.encode_attend_answer(answer) for answer in drawn(of.attend_answers)], message),
        _ERRORS,
        shard.encode_attend_answer,
    )
    yield Parser("stream pages", socket_frames.decode_pages, lambda: trees(_bodies(), _pages), _ERRORS, _write_pages)
    yield Parser("stream failure", _read_failure, lambda: trees(_failures(), _failure), _ERRORS)


def _headers() -> list[Any]:
    return trees(
        [socket_frames.encode_header(kind, 0) for kind in socket_frames.FrameKind],
        lambda data: Node(Kind.MANY, children=fields(data, (2, 1, 1, 4))),
    )


def _request(data: bytes) -> Node:
    return Node(Kind.MANY, children=[*fields(data, (8,)), message(data[8:])])


def _write_request(read: tuple[ReadRequest | WriteRequest, int]) -> bytes:
    request, remaining_ns = read
    if isinstance(request, ReadRequest):
        return socket_frames.encode_read(request, remaining_ns)
    return socket_frames.encode_write(request, remaining_ns)


def _bodies() -> list[bytes]:
    return [
        socket_frames.encode_pages(
            [
                Record(item, item, codec.RAW, tuple(range(layers)), memoryview(bytes(nbytes)))
                for item, (layers, nbytes) in enumerate(shape)
            ]
        )
        for shape in _SHAPES
    ]


def _pages(data: bytes) -> Node:
    nodes = fields(data, (4,))
    at = 4
    for _ in range(int.from_bytes(data[:4], "little")):
        layers = int.from_bytes(data[at + 6 : at + 8], "little")
        nodes.append(Node(Kind.MANY, children=fields(data[at:], _HEAD + (8,) * layers)))
        at += 20 + 8 * layers
    return Node(Kind.MANY, children=nodes)


def _write_pages(heads: list[RecordHead]) -> bytes:
    """With views of no bytes where the heads speak of very many: an encoder looks at their length alone."""
    return socket_frames.encode_pages([Record(*head[:4], _Length(head.nbytes)) for head in heads])  # type: ignore[arg-type]


class _Length:
    """All that an encoder of heads asks of a record's bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def _failures() -> list[bytes]:
    errors: list[KVClusterError] = [
        kind("what was wrong") for kind in (ProtocolError, CallerError, LimitError, CredentialError)
    ]
    lost = [socket_frames.PeerFailed(Miss(reason, "words")) for reason in (MissReason.DEADLINE, MissReason.SHARD_LOST)]
    return [socket_frames.encode_failure(error) for error in [*errors, *lost]]


def _failure(data: bytes) -> Node:
    return Node(Kind.MANY, children=[*fields(data, (1,)), Node(Kind.BYTES, data[1:])])


def _read_failure(data: bytes) -> tuple[str, str]:
    error = socket_frames.decode_failure(data)
    return type(error).__name__, str(error)
