"""The readers of the wire: every method's request and reply, frames, tickets and specs.

Valid inputs come from the strategies of the wire's own tests, so a new field or method is fuzzed once those know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from kvcluster.core.ids import Caller, CallId, Tenant
from kvcluster.core.messages import Refused
from kvcluster.errors import LimitError, ProtocolError, SpecError
from kvcluster.memory import codec
from kvcluster.wire import common, frames
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, fields, message
from tests.wire import strategies as of
from tests.wire.records import records_of

Read = Callable[[bytes], object]
Write = Callable[[Any], bytes]
Dissect = Callable[[bytes], Node]
PageRecord = tuple[int, int, int, tuple[int, ...], bytes, str | None]

ERRORS = (ProtocolError, LimitError, SpecError)
EXAMPLES = 24
"""Valid inputs of each kind; the first are the smallest there are."""

_HEADER = (2, 1, 1, 4)
_RECORD = (4, 2, 2, 2, 2, 8)
_PAGE_SHAPES = [[], [(1, 0)], [(1, 8)], [(2, 6)], [(1, 4), (3, 3)], [(2, 4)] * 5, [(40, 40), (1, 1_024)]]
"""Frames by their records, each of so many layers and bytes."""


def wire_parsers() -> Iterator[Parser]:
    """All of them."""
    yield from _methods("coordinator", COORDINATOR.values(), of.COORDINATOR_REQUESTS, of.COORDINATOR_REPLIES)
    yield from _methods("shard", SHARD.values(), of.SHARD_REQUESTS, of.SHARD_REPLIES)
    yield _parser("read request", frames.decode_read_request, frames.encode_read_request, of.read_requests, framed)
    yield _parser("write request", frames.decode_write_request, frames.encode_write_request, of.write_requests, framed)
    yield _answer("read head", frames.decode_read_head, frames.encode_read_head, of.read_heads)
    yield _answer("write head", frames.decode_write_head, frames.encode_write_head, of.write_heads)
    yield _answer("write tail", frames.decode_write_tail, frames.encode_write_tail, of.write_tails)
    yield Parser("pages", _read_pages, lambda: trees(_page_frames(), _pages), ERRORS, _write_pages)
    yield _parser("ticket", frames.decode_ticket, frames.encode_ticket, of.tickets(), _ticket)
    yield _parser("spec", common.decode_spec, common.encode_spec, of.specs(), message)


def drawn(strategy: SearchStrategy[Any]) -> list[Any]:
    """The same examples of a strategy every time."""
    found: list[Any] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found


def _parser(name: str, read: Read, write: Write, strategy: SearchStrategy[Any], dissect: Dissect) -> Parser:
    return Parser(name, read, lambda: trees([write(value) for value in drawn(strategy)], dissect), ERRORS, write)


# ------------------------------------------------------------------------------------------------ methods


def _methods(
    service: str,
    methods: Iterable[Method],
    questions: Mapping[str, SearchStrategy[Any]],
    answers: Mapping[str, SearchStrategy[Any]],
) -> Iterator[Parser]:
    for method in methods:
        name = f"{service} {method.name}"
        yield _parser(f"{name} request", _asked(method), _asking(method), questions[method.name], message)
        reply = answers[method.name] | of.refusals
        yield _parser(f"{name} reply", method.decode_reply, method.encode_reply, reply, message)


def _asked(method: Method) -> Read:
    return lambda data: method.decode_request(data, CallId(0), Caller(Tenant("t")))


def _asking(method: Method) -> Write:
    return lambda request: method.encode_request(request.question, request.namespace)


# ------------------------------------------------------------------------------------------------- frames


def _answer(name: str, read: Read, write: Write, strategy: SearchStrategy[Any]) -> Parser:
    """What a shard says first or last, in whose place it may refuse."""

    def write_either(value: Any) -> bytes:
        return frames.encode_refused(value) if isinstance(value, Refused) else write(value)

    return _parser(name, read, write_either, strategy | of.refusals, framed)


def framed(data: bytes) -> Node:
    """A frame that holds a message."""
    return Node(Kind.MANY, children=[*fields(data, _HEADER), message(data[8:])])


def _ticket(data: bytes) -> Node:
    """A version and a message."""
    return Node(Kind.MANY, children=[*fields(data, (1,)), message(data[1:])])


def _pages(data: bytes) -> Node:
    """A header, the headers and sums of records, and all their payloads."""
    nodes = fields(data, _HEADER)
    at = 8
    for _ in range(int.from_bytes(data[4:8], "little")):
        layers = int.from_bytes(data[at + 6 : at + 8], "little")
        nodes.append(Node(Kind.MANY, children=fields(data[at:], _RECORD + (8,) * layers)))
        at += 20 + 8 * layers
    return Node(Kind.MANY, children=[*nodes, Node(Kind.BYTES, data[at:])])


def _page_frames() -> list[bytes]:
    return [
        frames.pack(
            [
                frames.Record(item, item, codec.RAW + item, tuple(range(layers)), memoryview(bytes(nbytes)))
                for item, (layers, nbytes) in enumerate(shape)
            ]
        )
        for shape in _PAGE_SHAPES
    ]


def _read_pages(data: bytes) -> list[PageRecord]:
    """As a receiver does: all of every record is looked at."""
    return [
        (record.item, record.layer, record.codec, record.sums, bytes(record.data), codec.check_codec(record.codec))
        for record in records_of(data)
    ]


def _write_pages(records: list[PageRecord]) -> bytes:
    return frames.pack([frames.Record(*record[:4], memoryview(record[4])) for record in records])
