"""Whatever arrives, reading it ends in a message or in an error of our own tree, never in anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvcluster.core.ids import CallId, Tenant
from kvcluster.errors import KVClusterError
from kvcluster.wire import common, frames
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.wire import strategies as of

Decode = Callable[[bytes], object]
Encode = Callable[[Any], bytes]
bounded = settings(max_examples=min(100, settings.default.max_examples if settings.default else 100))
"""There are a hundred readers here: more examples of each would take minutes."""

_FRAME = {kind: frames._HEADER.pack(frames.MAGIC, frames.FRAME_VERSION, kind, 0) for kind in (1, 2, 3, 4)}


def _asked(method: Method) -> Decode:
    return lambda data: method.decode_request(data, CallId(0), Tenant("t"))


_TABLES = (
    ("coordinator", COORDINATOR, of.COORDINATOR_REQUESTS, of.COORDINATOR_REPLIES),
    ("shard", SHARD, of.SHARD_REQUESTS, of.SHARD_REPLIES),
)
READERS: dict[str, tuple[Decode, SearchStrategy[bytes]]] = {
    f"{service} {name} {half}": (decode, strategy)
    for service, table, questions, answers in _TABLES
    for name, method in table.items()
    for half, decode, strategy in (
        ("request", _asked(method), questions[name].map(method.encode_request)),
        ("reply", method.decode_reply, answers[name].map(method.encode_reply)),
    )
}
READERS |= {
    "read request": (frames.decode_read_request, of.read_requests.map(frames.encode_read_request)),
    "read head": (frames.decode_read_head, of.read_heads.map(frames.encode_read_head)),
    "write request": (frames.decode_write_request, of.write_requests.map(frames.encode_write_request)),
    "write head": (frames.decode_write_head, of.write_heads.map(frames.encode_write_head)),
    "write tail": (frames.decode_write_tail, of.write_tails.map(frames.encode_write_tail)),
    "pages": (frames.parse, st.just(frames.pack([frames.Record(1, 2, 1, (3, 4), memoryview(b"abcd"))] * 2))),
    "ticket": (frames.decode_ticket, of.tickets().map(frames.encode_ticket)),
    "spec": (common.decode_spec, of.specs().map(common.encode_spec)),
}


@pytest.mark.parametrize("reader", READERS)
@bounded
@given(data=st.binary(max_size=200), framed=st.none() | st.sampled_from(sorted(_FRAME)))
def test_any_bytes_are_read_or_refused(reader: str, data: bytes, framed: int | None) -> None:
    decode, _ = READERS[reader]
    with contextlib.suppress(KVClusterError):
        decode(data if framed is None else _FRAME[framed] + data)


@pytest.mark.parametrize("reader", READERS)
@bounded
@given(data=st.data())
def test_spoiled_messages_are_read_or_refused(reader: str, data: st.DataObject) -> None:
    decode, valid = READERS[reader]
    message = bytearray(data.draw(valid))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message)))
        message[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(KVClusterError):
        decode(bytes(message))


# Bytes at random seldom get past protobuf. So here every field is something that protobuf passes, and nobody meant.

_NUMBERS = st.sampled_from([*range(8), *range(8), 1_023, 1_024, 65_535, 65_536, 2**32 - 1])
_QUANTITIES = st.sampled_from([*range(8), *range(8), *range(8), 2**62, 2**64 - 1])
_INDICES = st.sampled_from([0, 0, 0, 1, 1, 2, 2**32 - 1])
_WORDS = st.sampled_from(["", "a", "b", "prefix", "window", "last", "float32", "float32", "opaque"])
_LENGTHS = {"namespace": 32, "parent": 32, "run": 32, "holder": 16}
_PART = st.tuples(st.integers(0, 3), *[st.integers(0, 3), st.integers(2, 9)] * 2)


def _rarely(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 19)) == 19


def _scalar(field: Any) -> SearchStrategy[Any]:
    if field.type == field.TYPE_BYTES:
        if field.name in ("spec", "specs"):
            return of.specs().map(common.encode_spec)
        return st.sampled_from([0, 1, 16, 31, 32, 64]).map(bytes)
    if field.type == field.TYPE_STRING:
        return _WORDS
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.type == field.TYPE_ENUM:
        return st.integers(0, 4)
    if field.type == field.TYPE_UINT64:
        return _QUANTITIES
    return _INDICES if field.name.endswith("_of") else _NUMBERS


@st.composite
def _wild(draw: st.DrawFn, kind: type[Any]) -> Any:
    """A message with any values in its fields, lists of like lengths, and `protocol_version` right."""
    message = kind()
    count = draw(st.integers(0, 3))
    fields = list(kind.DESCRIPTOR.fields)
    for field in [draw(st.sampled_from(fields))] if kind.DESCRIPTOR.oneofs else fields:
        value = getattr(message, field.name)
        many = hasattr(value, "extend")
        if _rarely(draw):
            continue
        if field.message_type is not None:
            inner = type(value.add()) if many else type(value)
            if many:
                del value[:]
                value.extend([draw(_wild(inner)) for _ in range(count)])
            else:
                value.CopyFrom(draw(_wild(inner)))
        elif many and field.name in ("part", "parts"):
            wanted = 1 if field.name == "part" else count
            value.extend([number for _ in range(wanted) for number in draw(_PART)])
        elif many:
            value.extend([draw(_scalar(field)) for _ in range(count)])
        elif field.name == "protocol_version":
            message.protocol_version = 1
        elif field.type == field.TYPE_BYTES and field.name in ("hashes", "namespaces", "parents"):
            setattr(message, field.name, bytes(32 * count))
        elif field.name in _LENGTHS and not _rarely(draw):
            setattr(message, field.name, bytes(_LENGTHS[field.name]))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


_WILD: dict[str, tuple[Decode, type[Any], bytes]] = {
    **{
        f"{service} {kind.DESCRIPTOR.name}": (_asked(table[name]), kind, b"")
        for service, table, module in (
            ("coordinator", COORDINATOR, coordinator_pb2),
            ("shard", SHARD, shard_pb2),
        )
        for name in table
        if (kind := getattr(module, f"{name}Request", None)) is not None and name != "Ping"
    },
    "coordinator reply": (COORDINATOR["PrepareLoad"].decode_reply, coordinator_pb2.CoordinatorReply, b""),
    "shard reply": (SHARD["Attach"].decode_reply, shard_pb2.ShardReply, b""),
    "read request": (frames.decode_read_request, shard_pb2.ReadRequest, _FRAME[frames.HEAD]),
    "read head": (frames.decode_read_head, shard_pb2.ReadHead, _FRAME[frames.HEAD]),
    "write request": (frames.decode_write_request, shard_pb2.WriteRequest, _FRAME[frames.HEAD]),
    "write head": (frames.decode_write_head, shard_pb2.WriteHead, _FRAME[frames.HEAD]),
    "write tail": (frames.decode_write_tail, shard_pb2.WriteTail, _FRAME[frames.TAIL]),
    "refusal": (frames.decode_read_head, common_pb2.Refused, _FRAME[frames.REFUSED]),
    "ticket": (frames.decode_ticket, common_pb2.TicketBody, b"\x01"),
    "spec": (common.decode_spec, common_pb2.Spec, b""),
}


@pytest.mark.parametrize("reader", _WILD)
@bounded
@given(data=st.data())
def test_wild_messages_are_read_or_refused(reader: str, data: st.DataObject) -> None:
    decode, kind, prefix = _WILD[reader]
    with contextlib.suppress(KVClusterError):
        decode(prefix + data.draw(_wild(kind)).SerializeToString())
