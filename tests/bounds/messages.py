"""Every message that can be sent to a cluster from outside, with its bound, and the worst of each.

What there is comes from the code: the tables of methods, the kinds of frames. `MESSAGES` must have a row for each, or
a test is red; docs/bounds.md has the same rows with what was measured.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from kvcluster.core import limits
from kvcluster.core.ids import (
    HASH_BYTES,
    HOLDER_BYTES,
    BlockHash,
    Epoch,
    Holder,
    NamespaceId,
    SequenceId,
    SpanId,
)
from kvcluster.core.messages import (
    Attach,
    AttachShard,
    AttendRequest,
    AttendRow,
    Drain,
    EndTicket,
    EngineInfo,
    Explain,
    Flush,
    GetEngines,
    GetNamespaces,
    GetOffers,
    GetPins,
    GetStatus,
    Need,
    NewPage,
    PageKey,
    PageWant,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Probe,
    Purge,
    ReadRequest,
    RegisterEngine,
    RegisterSpans,
    RenewTicket,
    SetPolicy,
    SetWeights,
    Siblings,
    SpanBlocks,
    Suspect,
    SyncTables,
    TableChange,
    UnpinBlocks,
    WriteRequest,
)
from kvcluster.core.spec import KVSpec
from kvcluster.runtime import metrics_server
from kvcluster.transport.grpc_pages import READ, WRITE
from kvcluster.transport.rpc import CHANNEL_OPTIONS
from kvcluster.wire import frames, shard, socket_frames, zmtp
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.socket_frames import FrameKind
from kvcluster.wire.versions import METADATA
from tests.attacks.attackers import new_attempt, random_hash
from tests.attacks.reach import dialled
from tests.attacks.setting import TINY
from tests.bounds.filler import fills

PATIENCE_S = 60.0
_TOKEN_IDS = 2**21 - 1  # the largest of three bytes on the wire

Send = Callable[[], str]
"""Sends one message, reads its answer, and returns how it was answered: a gRPC status, the kind of a frame, a line."""


@dataclass(frozen=True)
class Place:
    """A server that takes messages, and what an attacker knows of it: addresses, a token, and what servers answered."""

    coordinator: str
    shard: str
    shard_socket: str
    events: str
    metrics: str
    token: str
    namespace: NamespaceId
    shard_namespace: NamespaceId
    epoch: Epoch
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def channel(self, address: str) -> grpc.Channel:
        if address not in self.channels:
            options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            self.channels[address] = grpc.insecure_channel(address, options)
        return self.channels[address]

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


@dataclass(frozen=True)
class Message:
    """One kind of message. `sender`: the least credential that has it read. `nbytes`: the longest that is read. `held`:
    what bounds what is kept of it, and the work that it makes, in the names of core/limits.py. `worst` yields the ways
    to make it as expensive as can be."""

    sender: str
    nbytes: int
    held: str
    worst: Callable[[Place], Iterator[tuple[str, Send]]]
    at: str = "shard"


# ------------------------------------------------------------------------------------------ unary calls


def _call(place: Place, method: Method, data: Callable[[], bytes]) -> Send:
    address = place.coordinator if COORDINATOR.get(method.name) is method else place.shard
    ask: Any = place.channel(address).unary_unary(method.path)

    def send() -> str:
        try:
            ask(data(), timeout=PATIENCE_S, metadata=(*METADATA, ("authorization", f"Bearer {place.token}")))
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    return send


def _unary(method: Method, question: Callable[[], Any]) -> Callable[[Place], Iterator[tuple[str, Send]]]:
    """The longest valid question, made anew for each call, and one filled for each field."""

    def worst(place: Place) -> Iterator[tuple[str, Send]]:
        namespace = place.namespace if COORDINATOR.get(method.name) is method else place.shard_namespace
        about = namespace if method._in_namespace else None
        yield "valid", _call(place, method, lambda: method.encode_request(question(), about))
        for path, data in fills(_form(method._asked.message), method.most_bytes):
            yield f"full of {path}", _call(place, method, lambda data=data: data)  # type: ignore[misc]

    return worst


def _form(message: Any) -> Any:
    return message.DESCRIPTOR


def _hashes(count: int = limits.BLOCKS_PER_CALL) -> tuple[BlockHash, ...]:
    data = os.urandom(count * HASH_BYTES)
    return tuple(BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES))


def _new_spec() -> KVSpec:
    """A namespace that no other call has named, as long as a spec may be."""
    extra = {f"{number:02}": os.urandom(400).hex() for number in range(9)}
    return KVSpec.uniform(
        model="m", weights="sha256:0", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", extra=extra
    )


def _store() -> PrepareStore:
    """Of blocks of 64 tokens with the longest ids that fit."""
    tokens = (_TOKEN_IDS,) * (limits.BLOCKS_PER_CALL * TINY.block_tokens)
    first = random_hash()
    return PrepareStore(
        new_attempt(), 0, random_hash(), first, (first, *_hashes()[1:]), ((0, TINY.whole(0)),), tokens=tokens
    )


def _engine() -> EngineInfo:
    facts = tuple(
        (f"{number:02}" + "\U0001f600" * 1_000, "\U0001f600" * 1_024) for number in range(limits.ENGINE_FACTS)
    )
    return EngineInfo(os.urandom(8).hex(), "e", "m", "sha256:0", facts)


def _tables() -> SyncTables:
    changes = tuple(
        TableChange(SequenceId(os.urandom(HASH_BYTES)[:16]), 0, (block,), 1)
        for block in _hashes(limits.SEQUENCES_PER_HOLDER)
    )
    return SyncTables(Holder(os.urandom(HOLDER_BYTES)), 1, changes)


def _suspects(place: Place) -> Suspect:
    return Suspect(
        place.epoch, tuple(PageKey(random_hash(), 0, TINY.whole(0)) for _ in range(limits.SUSPECTS_PER_CALL))
    )


def _spans(place: Place) -> RegisterSpans:
    blocks = limits.SPAN_BLOCKS_PER_CALL // 8
    cuts = tuple(SpanBlocks(SpanId(number), 0, TINY.whole(0), 0, _hashes(blocks)) for number in range(8))
    return RegisterSpans(Holder(os.urandom(HOLDER_BYTES)), place.epoch, cuts)


def _needed() -> Need:
    return Need((TINY.whole(0),))


_QUESTIONS: Mapping[str, tuple[Callable[[Place], Any], str]] = {
    "Attach": (lambda _: Attach(_new_spec()), "NAMESPACES_PER_TENANT"),
    "PrepareLoad": (
        lambda _: PrepareLoad(new_attempt(), _hashes(), _needed()),
        "BLOCKS_PER_CALL, COVER_WORK; a ticket: TICKETS, TICKET_PAGES",
    ),
    "PrepareStore": (lambda _: _store(), "BLOCKS_PER_CALL; a ticket: TICKETS, TICKET_PAGES; token ids for events"),
    "RenewTicket": (lambda _: RenewTicket(new_attempt()), "nothing is kept"),
    "EndTicket": (lambda _: EndTicket(new_attempt()), "nothing is kept"),
    "Explain": (lambda _: Explain(_hashes(), _needed()), "BLOCKS_PER_CALL, COVER_WORK; nothing is kept"),
    "Siblings": (lambda _: Siblings(), "NAMESPACES_PER_TENANT; nothing is kept"),
    "GetNamespaces": (lambda _: GetNamespaces(), "LISTED_NAMESPACES; nothing is kept"),
    "RegisterEngine": (lambda _: RegisterEngine(_engine()), "ENGINES, ENGINE_FACTS"),
    "GetEngines": (lambda _: GetEngines(), "LISTED_ENGINES; nothing is kept"),
    "SetWeights": (lambda _: SetWeights("m", "sha256:" + "0" * 64), "ENGINES; nothing is kept"),
    "SyncTables": (lambda _: _tables(), "BLOCKS_PER_CALL; SEQUENCES, SEQUENCES_PER_HOLDER, TABLE_BLOCKS"),
    "PinBlocks": (lambda _: PinBlocks(_hashes(), 10**12), "BLOCKS_PER_CALL; known blocks only, `pinned_share`"),
    "UnpinBlocks": (lambda _: UnpinBlocks(_hashes()), "BLOCKS_PER_CALL; nothing is kept"),
    "GetPins": (lambda _: GetPins(), "BLOCKS_PER_CALL, LISTED_NAMESPACES; nothing is kept"),
    "Purge": (lambda _: Purge(os.urandom(400).hex()), "TOMBSTONES_PER_TENANT, TOMBSTONES"),
    "Drain": (lambda _: Drain("nosuch"), "PAST_SHARDS"),  # type: ignore[arg-type]
    "SetPolicy": (lambda _: SetPolicy((("nosuch", "1"),) * limits.POLICIES), "POLICIES; nothing is kept"),
    "Probe": (lambda _: Probe(), "one run at a time; PROBED_SHARDS"),
    "GetStatus": (lambda _: GetStatus(), "what the coordinator knows of shards; nothing is kept"),
    "Ping": (lambda _: None, "nothing is kept"),
    "Shard.Attach": (lambda _: AttachShard(_new_spec()), "NAMESPACES_PER_TENANT"),
    "Shard.GetOffers": (lambda _: GetOffers(), "TRANSPORTS; nothing is kept"),
    "Shard.Flush": (lambda _: Flush(1), "FLUSHES"),
    "Shard.Suspect": (_suspects, "SUSPECTS_PER_CALL, SUSPECTS"),
    "Shard.RegisterSpans": (_spans, "SPANS_PER_CALL, SPAN_BLOCKS_PER_CALL; SPANS_PER_HOLDER, SPAN_BLOCKS"),
    "Shard.Ping": (lambda _: None, "nothing is kept"),
}
FOR_OPERATORS = frozenset({"Drain", "SetPolicy", "Probe"})
FOR_SHARDS = frozenset({"IssueCredential", "Report", "Inventory"})


def _unary_rows() -> Iterator[tuple[str, Message]]:
    for service, methods in (("", COORDINATOR), ("Shard.", SHARD)):
        for method in methods.values():
            name = service + method.name
            if name in FOR_SHARDS:
                continue
            question, held = _QUESTIONS[name]

            def worst(place: Place, method: Method = method, question: Any = question) -> Iterator[tuple[str, Send]]:
                return _unary(method, partial(question, place))(place)

            sender = "operator" if name in FOR_OPERATORS else "tenant"
            yield name, Message(sender, method.most_bytes, held, worst, "shard" if service else "coordinator")


# ------------------------------------------------------------------------------------------ frames


class _Socket:
    """A connection of the tcp transport, past its HELLO."""

    def __init__(self, place: Place) -> None:
        self._socket = dialled(place.shard_socket, PATIENCE_S)
        self.send(FrameKind.HELLO, place.token.encode())
        assert self.answer() == "WELCOME"

    def __enter__(self) -> _Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, kind: FrameKind, *data: bytes) -> None:
        self._socket.sendall(socket_frames.encode_header(kind, len(data[0])))
        for each in data:
            self._socket.sendall(each)

    def answer(self) -> str:
        """Returns the kind of the next frame, whose body is read; "closed" if there is none."""
        header = self._read(socket_frames.HEADER.size)
        if header is None:
            return "closed"
        kind, nbytes = socket_frames.decode_header(header)
        self._read(nbytes)
        return kind.name

    def _read(self, nbytes: int) -> bytes | None:
        data = bytearray()
        while len(data) < nbytes:
            try:
                more = self._socket.recv(min(1 << 20, nbytes - len(data)))
            except OSError:
                more = b""
            if not more:
                return None
            data += more
        return bytes(data)


def _exchange(place: Place, *sent: tuple[FrameKind, tuple[bytes, ...]]) -> str:
    with _Socket(place) as link:
        answers = []
        for kind, data in sent:
            try:
                link.send(kind, *data)
            except OSError:  # it was closed in the middle, and says why
                answers.append(link.answer())
                break
            answers.append(link.answer())
    return " ".join(answers)


def _body(kind: FrameKind) -> int:
    return socket_frames._MOST[kind]


def _hello(place: Place) -> Iterator[tuple[str, Send]]:
    def send() -> str:
        link = dialled(place.shard_socket, PATIENCE_S)
        with link:
            link.sendall(socket_frames.encode_header(FrameKind.HELLO, _body(FrameKind.HELLO)))
            link.sendall(b"x" * _body(FrameKind.HELLO))
            return "closed" if not link.recv(1) else "FAILED"

    yield "valid", send


def _wants(place: Place, count: int) -> ReadRequest:
    wants = tuple(PageWant(PageKey(block, 0, TINY.whole(0)), 0, 1) for block in _hashes(count))
    return ReadRequest(place.shard_namespace, new_attempt(), place.epoch, wants)


def _new_pages(place: Place) -> WriteRequest:
    new = tuple(NewPage(PageKey(block, 0, TINY.whole(0)), random_hash(), 0) for block in _hashes(limits.WRITE_PAGES))
    return WriteRequest(place.shard_namespace, new_attempt(), place.epoch, new, 0)


def _read_frame(place: Place) -> Iterator[tuple[str, Send]]:
    kind = FrameKind.READ
    yield (
        "valid",
        lambda: _exchange(place, (kind, (socket_frames.encode_read(_wants(place, limits.PAGES_PER_CALL), 10**10),))),
    )
    for path, data in fills(_message_of("ReadRequest"), _body(kind) - 8):
        yield f"full of {path}", lambda data=data: _exchange(place, (kind, (_TIME + data,)))  # type: ignore[misc]


def _write_frame(place: Place) -> Iterator[tuple[str, Send]]:
    kind = FrameKind.WRITE
    yield "valid", lambda: _exchange(place, (kind, (socket_frames.encode_write(_new_pages(place), 10**10),)))
    for path, data in fills(_message_of("WriteRequest"), _body(kind) - 8):
        yield f"full of {path}", lambda data=data: _exchange(place, (kind, (_TIME + data,)))  # type: ignore[misc]


def _pages_frame(place: Place) -> Iterator[tuple[str, Send]]:
    """Headers of records without layers, as many as a frame may have, within a store."""
    head = b"\x00" * 20  # of a record: no layers, no bytes
    count = (_body(FrameKind.PAGES) - 4) // len(head)

    def send() -> str:
        opening = socket_frames.encode_write(_new_pages(place), 10**10)
        body = struct.pack("<I", count) + head * count
        return _exchange(place, (FrameKind.WRITE, (opening,)), (FrameKind.PAGES, (body,)))

    yield "records", send


def _attend_frame(place: Place) -> Iterator[tuple[str, Send]]:
    """The longest query, for spans that are not registered."""
    heads, dim = limits.ATTEND_BYTES // limits.ATTEND_TOKENS // 4 // 128, 128
    rows = tuple(
        AttendRow(0, limits.ATTEND_TOKENS // 8, tuple(SpanId(at) for at in range(limits.SPANS_PER_CALL)), ((0, 0),))
        for _ in range(8)
    )

    def send() -> str:
        request = AttendRequest(new_attempt(), place.epoch, 0, heads, dim, "float32", 1.0, rows)
        query = bytes(shard.query_bytes(request))
        return _exchange(place, (FrameKind.ATTEND, (socket_frames.encode_attend(request, 10**10), query)))

    yield "valid", send
    for path, data in fills(_message_of("AttendRequest"), _body(FrameKind.ATTEND) - 8):
        yield f"full of {path}", lambda data=data: _exchange(place, (FrameKind.ATTEND, (_TIME + data,)))  # type: ignore[misc]


def _message_of(name: str) -> Any:
    from kvcluster.wire.v1 import shard_pb2

    return getattr(shard_pb2, name).DESCRIPTOR


_TIME = struct.pack("<Q", 10**10)

_FRAMES: Mapping[FrameKind, Message] = {
    FrameKind.HELLO: Message("stranger", _body(FrameKind.HELLO), "STREAMS_UNKNOWN, STREAMS", _hello),
    FrameKind.READ: Message("tenant", _body(FrameKind.READ), "PAGES_PER_CALL; LEASES, REQUESTS_BYTES", _read_frame),
    FrameKind.WRITE: Message("tenant", _body(FrameKind.WRITE), "WRITE_PAGES; LEASES, REQUESTS_BYTES", _write_frame),
    FrameKind.PAGES: Message(
        "tenant", _body(FrameKind.PAGES), "the pages that were granted; BODIES_BYTES", _pages_frame
    ),
    FrameKind.ATTEND: Message(
        "tenant",
        _body(FrameKind.ATTEND),
        "ATTEND_BYTES of query follow, ATTEND_ROWS, ATTEND_NAMES, ATTEND_WORK; REQUESTS_BYTES, ATTENDS_WAITING",
        _attend_frame,
    ),
}
"""Those that a worker sends over tcp, and that have a body. The others of shm go with the account of its user."""

FRAMES_WITHOUT_A_ROW = {
    FrameKind.WELCOME: "a shard sends it",
    FrameKind.HEAD: "a shard sends it",
    FrameKind.TAIL: "a shard sends it",
    FrameKind.REFUSED: "a shard sends it",
    FrameKind.GRANT: "a shard sends it",
    FrameKind.PARTIALS: "a shard sends it",
    FrameKind.DONE: "it has no body",
    FrameKind.ABORT: "it has no body",
    FrameKind.FAILED: "4 KiB, the last frame of a connection",
    FrameKind.RENEW: "one byte",
    FrameKind.POOL: "no body, and only over shm",
    FrameKind.WRITTEN: "only over shm, from a process of the shard's own user",
}


# -------------------------------------------------------------------------------- streams of gRPC, and the others


def _stream(path: str, first: Callable[[Place], bytes]) -> Callable[[Place], Iterator[tuple[str, Send]]]:
    def worst(place: Place) -> Iterator[tuple[str, Send]]:
        def send(data: bytes | None = None) -> str:
            opening = first(place) if data is None else data
            channel, metadata = place.channel(place.shard), (*METADATA, ("authorization", f"Bearer {place.token}"))
            begin: Any = channel.unary_stream(path) if path == READ else channel.stream_stream(path)
            if path == READ:
                call = begin(opening, timeout=PATIENCE_S, metadata=metadata)
            else:
                call = begin(iter([opening]), timeout=PATIENCE_S, metadata=metadata)
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        yield "valid", send
        yield "of zeros", partial(send, bytes(limits.BODY_BYTES - 1_024))
        kind = "ReadRequest" if path == READ else "WriteRequest"
        head = first(place)[:8]
        for field_path, data in fills(_message_of(kind), limits.BODY_BYTES - 1_024):
            yield f"full of {field_path}", partial(send, head + data)

    return worst


def _subscription(place: Place) -> Iterator[tuple[str, Send]]:
    """ZMTP 3: a greeting, READY, and topics of the longest kind that is read."""

    def send() -> str:
        with dialled(place.events.removeprefix("tcp://"), PATIENCE_S) as link:
            link.sendall(zmtp.GREETING + zmtp.encode_ready(b"SUB"))
            for _ in range(100):
                try:
                    link.sendall(zmtp.encode_frame(b"\x01" + os.urandom(2_000).hex().encode()))
                except OSError:
                    return "closed"
            try:
                return "read" if link.recv(1) else "closed"
            except OSError:
                return "closed"

    yield "a hundred topics", send


def _http(place: Place) -> Iterator[tuple[str, Send]]:
    def send(data: bytes) -> str:
        with dialled(place.metrics, PATIENCE_S) as link:
            link.sendall(data)
            return link.recv(64).partition(b"\r\n")[0].decode() or "closed"

    head = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    yield "a scrape", partial(send, head + b"\r\n")
    filler = b"a: " + b"b" * (metrics_server.HEAD_BYTES - len(head) - 16) + b"\r\n\r\n"
    yield "the longest head", partial(send, head + filler)


MESSAGES: Mapping[str, Message] = {
    **dict(_unary_rows()),
    "Shard.Read": Message(
        "tenant",
        limits.BODY_BYTES,
        "PAGES_PER_CALL; LEASES",
        _stream(READ, lambda place: frames.encode_read_request(_wants(place, limits.PAGES_PER_CALL))),
    ),
    "Shard.Write": Message(
        "tenant",
        limits.BODY_BYTES,
        "WRITE_PAGES; LEASES; a larger layer of a page comes in several",
        _stream(WRITE, lambda place: frames.encode_write_request(_new_pages(place))),
    ),
    **{f"frame {kind.name}": message for kind, message in _FRAMES.items()},
    "subscription to KV events": Message("subscriber", 4_096, "known topics", _subscription, "coordinator"),
    "GET of metrics": Message(
        "reader of metrics", metrics_server.HEAD_BYTES, "64 connections, four scrapes at a time", _http, "coordinator"
    ),
}
