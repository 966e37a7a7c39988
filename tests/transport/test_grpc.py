"""Pages over gRPC: the claims of every transport, and failures that only a network has."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Caller, Tenant
from kvcluster.core.messages import Refused, RefusedKind, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CredentialError, LimitError, ProtocolError, Unreachable
from kvcluster.memory import codec
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.testing.conformance import NetworkClaims, TransportConformance, Wire, World, open_world
from kvcluster.testing.conformance.content import (
    Content,
    ContentSource,
    every_call,
    load,
    read_begun,
    store,
    write,
)
from kvcluster.testing.conformance.moving import fill
from kvcluster.testing.conformance.wire import BadRequest, BadStore, CutStore, unserved
from kvcluster.testing.conformance.world import BOUND_S, ONE, soon
from kvcluster.transport import listener
from kvcluster.transport.base import Deadline, PageHost, RefusedByShard, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import READ, WRITE, GrpcPages, page_handlers
from kvcluster.transport.rpc import Connection, RpcHandler, identity
from kvcluster.wire import frames
from kvcluster.wire.frames import Record
from kvcluster.wire.methods import SHARD
from kvcluster.wire.versions import METADATA
from tests.transport.peers import SECRET, altered, authenticator, of_a_shard, token

HOST = "127.0.0.1"


class Served:
    """A server before a shard, on loopback, with a token for each tenant."""

    def __init__(self, host: PageHost) -> None:
        auth = authenticator()
        handlers = unary_handlers(SHARD, host.ask) | page_handlers(host)
        self._server = GrpcServer(handlers, auth, HOST, 0, threads=8)
        self._server.start()
        self.address = self._server.address

    def open(self, tenant: Tenant) -> GrpcPages:
        return GrpcPages(self.address, Credentials(token(tenant)))

    def close(self) -> None:
        self._server.close(grace_s=0)


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestGrpc(TransportConformance, NetworkClaims):
    """On the fixtures of this module."""


@pytest.fixture
def wire() -> Wire:
    return Wire(GrpcPages, "host:port", token)


@pytest.fixture(params=["", "7070", "localhost", ":7070", "localhost:", "localhost:0", "h:65536", "h:-1"])
def bad_address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------- what a server does with what is no message


class Raw:
    """A peer that sends whatever bytes it likes, with a good token."""

    def __init__(self, world: World) -> None:
        options = [("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(world.served.address, options=options)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def refusal(self, path: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
        """Sends these; the status that the call ends with."""
        kind = self._channel.unary_stream if path == READ else self._channel.stream_stream
        call = kind(path, request_serializer=identity, response_deserializer=identity)
        argument = messages[0] if path == READ else iter(messages)
        metadata = (*METADATA, ("authorization", f"Bearer {token(ONE)}"))
        with pytest.raises(grpc.RpcError) as error:
            list(call(argument, timeout=BOUND_S, metadata=metadata))
        return error.value.code(), error.value.details()


def failed_precondition(world: World, path: str, *messages: bytes) -> str:
    """Sends these; the words of the status, which is FAILED_PRECONDITION."""
    with Raw(world) as peer:
        code, words = peer.refusal(path, *messages)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    return words


EMPTY_HEAD = frames.encode_read_head([])
OTHER_VERSION = EMPTY_HEAD[:2] + bytes([PROTOCOL_VERSION + 1]) + EMPTY_HEAD[3:]
NOT_A_HEAD = frames.pack([Record(0, 0, codec.RAW, (0,), memoryview(b"x"))])


NO_REQUESTS = [
    *((first, "frame") for first in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)))),
    *((first, "frame") for first in (OTHER_VERSION, OTHER_VERSION[:-1], NOT_A_HEAD)),
    (EMPTY_HEAD, "a namespace is 32 bytes"),
    (EMPTY_HEAD + b"\xff\xff", "of kvcluster"),
]


@pytest.fixture(params=[(path, *first) for path in (READ, WRITE) for first in NO_REQUESTS])
def bad_request(request: pytest.FixtureRequest) -> BadRequest:
    path, first, says = request.param
    return lambda world: failed_precondition(world, path, first), says


@pytest.mark.parametrize("path", [READ, WRITE])
def test_a_message_that_is_too_large_is_refused(world: World, path: str) -> None:
    with Raw(world) as peer:
        code, words = peer.refusal(path, bytes(limits.BODY_BYTES + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limits.BODY_BYTES) in words


def record(item: int = 0, layer: int = 0, layers: int = 1, nbytes: int = 100, in_codec: int = codec.RAW) -> bytes:
    return frames.pack([Record(item, layer, in_codec, (0,) * layers, memoryview(bytes(nbytes)))])


NONSENSE = [
    (b"", "frame"),
    (os.urandom(1_000), "frame"),
    (record(layer=1)[:-1], "ends within a layer"),
    (record() + b"x", "announced"),
    (record(item=3), "was not requested"),
    (record(item=2), "was not requested"),
    (record(nbytes=99), "layers of 100 bytes"),
    (record(layer=1, layers=2, nbytes=200), "has 2 layers"),
    (record(layer=65_535), "is invalid"),
    (record(in_codec=0x7F01), "codec 0x7f01"),
    (frames.encode_write_tail([Written.COMMITTED]), "tail"),
]


def whole_page(content: Content, item: int) -> bytes:
    """A message with all layers of a page, as its writer sends it."""
    key, page = content.keys[item], bytearray(content.spec.page_bytes(0, content.keys[item].part))
    layers, data = key.part.layers, memoryview(page)
    sums = ContentSource(content, content.write_request()).copy(item, 0, layers, data)
    return frames.pack([Record(item, 0, codec.RAW, tuple(sums), data)])


@pytest.fixture(params=[*NONSENSE, (None, "before page 1 was whole")], ids=lambda case: case[1])
def bad_store(request: pytest.FixtureRequest) -> BadStore:
    second, says = request.param

    def send(world: World, content: Content) -> str:
        pages = [whole_page(content, 0)] if second is None else [record(), second]
        return failed_precondition(world, WRITE, frames.encode_write_request(content.write_request()), *pages)

    return send, says


@pytest.fixture(params=[1, 2])
def cut_store(request: pytest.FixtureRequest) -> CutStore:
    """Sends so many of the three messages of a store."""

    def send(world: World, content: Content) -> None:
        messages = [frames.encode_write_request(content.write_request()), record(), record(layer=1)]
        failed_precondition(world, WRITE, *messages[: request.param])

    return send


def test_what_this_side_cannot_send_is_a_limit_error(world: World) -> None:
    connection = Connection(world.served.address, Credentials(token(ONE)))
    huge = altered(SHARD["Flush"], encode_request=lambda *_: bytes(limits.MESSAGE_BYTES + 1))
    with pytest.raises(LimitError, match="exceeds a size limit"):
        connection.ask(huge, None, soon())
    connection.close()


# --------------------------------------------------------------------------- a worker that does nothing any more


def test_a_store_given_up_while_it_waits_for_room_waits_no_longer(world: World) -> None:
    transport, new = world.open(), Content.of(world, 1, 2, limits.FRAME_BYTES // 2, first=100)
    reading = read_begun(world.open(), fill(world, transport))
    with suppress(Unavailable):  # or it is told in time that the shard is full
        write(transport, new, wait_ns=int(BOUND_S * 1e9), deadline=Deadline.after_ms(50))
    world.watched.wait_until(lambda: not world.host.core.state.queue, "the request for room ends with its caller")
    assert world.leased(reading.request.attempt), "long before the lease in the way expires"
    reading.pieces.close()


def test_a_store_that_is_refused_leaves_no_thread_behind(world: World) -> None:
    transport, content = world.open(), Content.of(world, 1, 1, 8)
    before = threading.enumerate()
    for _ in range(3):
        request = content.write_request()
        with pytest.raises(RefusedByShard):
            transport.write(request, ContentSource(content, request), soon())
    for thread in set(threading.enumerate()) - set(before):
        if "rpc" not in thread.name:  # the server's own, which stay with it
            thread.join(BOUND_S)
            assert not thread.is_alive()


def test_no_exchange_outlasts_its_time_whatever_its_caller_allows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = world.open()
    content = fill(world, transport)
    monkeypatch.setattr(listener, "LONGEST_NS", 0)
    with pytest.raises(Unavailable) as late:
        read_begun(transport, content).finish()
    assert late.value.miss.reason is MissReason.DEADLINE


# ------------------------------------------------------------------------------------------------ credentials


@pytest.mark.parametrize("wrong", [None, "", "a guess", token(ONE) + " ", digest(token(ONE))])
def test_without_a_token_that_it_knows_a_shard_answers_no_question_either(world: World, wrong: str | None) -> None:
    content = Content.of(world, 1, 1, 100)
    store(world.open(), content)
    stranger = GrpcPages(world.served.address, Credentials(wrong))
    for call in every_call(stranger, content):
        with pytest.raises(CredentialError, match="token"):
            call()
    stranger.close()


def test_the_secret_of_the_actors_reads_for_every_tenant_and_names_no_spec(world: World) -> None:
    content = Content.of(world, 1, 1, 100)
    store(world.open(), content)
    insider = GrpcPages(world.served.address, Credentials(SECRET))
    with pytest.raises(CredentialError):
        insider.attach(content.spec, soon())
    assert load(insider, content) == [None], "a shard that fetches a replica"
    insider.close()


@pytest.mark.parametrize("unsendable", ["secret\n", "se\0cret", "sécret", "\ud800secret"])
def test_a_token_that_cannot_be_sent_is_a_credential_error_that_keeps_it_secret(unsendable: str) -> None:
    with pytest.raises(CredentialError) as error:
        GrpcPages(f"{HOST}:7070", Credentials(unsendable))
    assert "cret" not in str(error.value)


# ---------------------------------------------------------------------------------- what else may stand there


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A server of another protocol: it sends `answer` to each connection, or nothing."""
    with socket.create_server((HOST, 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                kept.append(peer)
                if answer is not None:
                    peer.sendall(answer)
                    peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{HOST}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in kept:
                peer.close()


@pytest.mark.parametrize(
    "answer", [None, b"", b"\0" * 64, bytes(range(256)) * 16, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"]
)
def test_something_else_that_listens_there_is_trouble_by_the_deadline(answer: bytes | None) -> None:
    with listening(answer) as address:
        transport = GrpcPages(address)
        for call in every_call(transport, unserved(1, 1, 8), deadline=lambda: Deadline.after_ms(100)):
            with pytest.raises(Unavailable) as trouble:
                call()
            assert trouble.value.miss.reason in (MissReason.DEADLINE, MissReason.SHARD_LOST)
            assert address in str(trouble.value), "a person can tell which address is meant"
        transport.close()
        connection = Connection(address)
        with pytest.raises(Unreachable, match=f"no server answers at {address}"):
            connection.wait_ready(Deadline.after_ms(100))
        connection.close()


def test_a_server_that_is_slow_to_shake_hands_is_waited_for() -> None:
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        transport = GrpcPages(f"{HOST}:{server.getsockname()[1]}")
        asked = pool.submit(transport.flush, soon())
        peer, _ = server.accept()
        with peer:
            peer.settimeout(0.5)
            with pytest.raises(TimeoutError):
                while peer.recv(4096):
                    """What a client says first; then it waits, and does not hang up."""
        transport.close()
        with pytest.raises(Unavailable):
            asked.result(BOUND_S)


def test_a_foreign_grpc_server_is_recognised() -> None:
    with serving({}) as transport, pytest.raises(ProtocolError, match="is no kvcluster server"):
        transport.flush(soon())


@contextmanager
def serving(streams: dict[str, list[bytes]]) -> Iterator[GrpcPages]:
    """A server that answers Read and Write with these messages, whatever is asked."""

    def handler(path: str) -> RpcHandler:
        def answer(caller: Caller, request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            for number, message in enumerate(streams[path]):
                if path == WRITE and number == 0:
                    next(request)  # type: ignore[call-overload]
                yield message

        return RpcHandler("unary_stream" if path == READ else "stream_stream", answer)

    server = GrpcServer(
        {path: handler(path) for path in streams}, Authenticator(None, "", epoch_of=of_a_shard), HOST, 0, threads=2
    )
    server.start()
    transport = GrpcPages(server.address)
    transport._connection.version = PROTOCOL_VERSION  # as after the first answer
    try:
        yield transport
    finally:
        transport.close()
        server.close(grace_s=0)


def piece(item: int, layer: int, layers: int = 1) -> bytes:
    return record(item, layer, layers, nbytes=8 * layers)


HEAD_OF_TWO = frames.encode_read_head([None, None])


@pytest.fixture(
    params=[
        ([], 0),
        ([frames.encode_read_head([None])], 0),
        ([frames.encode_read_head([None] * 3)], 0),
        ([frames.encode_write_tail([Written.COMMITTED] * 2)], 0),
        ([b"nonsense"], 0),
        ([HEAD_OF_TWO, b"nonsense"], 0),
        ([HEAD_OF_TWO, piece(2, 0)], 0),
        ([HEAD_OF_TWO, piece(0, 1)], 0),
        ([HEAD_OF_TWO, piece(0, 0), piece(0, 0)], 1),
        ([HEAD_OF_TWO, piece(0, 0, layers=3)], 0),
        ([HEAD_OF_TWO, piece(1, 0, layers=2), piece(1, 2)], 2),
        ([frames.encode_read_head([None, Miss(MissReason.EVICTED)]), piece(1, 0)], 0),
    ]
)
def bad_load_answer(request: pytest.FixtureRequest) -> Iterator[tuple[GrpcPages, int]]:
    stream, layers_before = request.param
    with serving({READ: stream}) as transport:
        yield transport, layers_before


@pytest.fixture(
    params=[
        [],
        [frames.encode_write_head([None])],
        [frames.encode_write_head([None, None, None])],
        [frames.encode_write_head([None, None])],
        [frames.encode_write_head([None, None]), frames.encode_write_tail([Written.COMMITTED])],
        [frames.encode_write_head([None, None]), frames.encode_write_tail([Written.COMMITTED] * 3)],
        [frames.encode_write_head([None, None]), frames.encode_write_head([None, None])],
        [frames.encode_write_tail([Written.COMMITTED] * 2)],
        [b"nonsense"],
        [frames.encode_write_head([None, None]), b"nonsense"],
    ]
)
def bad_store_answer(request: pytest.FixtureRequest) -> Iterator[GrpcPages]:
    with serving({WRITE: request.param}) as transport:
        yield transport


@pytest.fixture(params=[[], [frames.encode_write_head([None])]], ids=["at once", "after the head"])
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[GrpcPages, Refused]]:
    refused = Refused(RefusedKind.LIMIT, "too much")
    with serving({WRITE: [*request.param, frames.encode_refused(refused)]}) as transport:
        yield transport, refused


@pytest.fixture
def silent() -> Iterator[tuple[GrpcPages, str]]:
    with listening(None) as address:
        transport = GrpcPages(address)
        yield transport, address
        transport.close()


# ------------------------------------------------------------------------------------ frames of several messages

LARGE = 2 * limits.CUT_BYTES + 1_000


def test_a_layer_that_is_longer_than_a_message_is_stored_and_loaded(world: World) -> None:
    transport, content = world.open(), Content.of(world, 2, 2, LARGE)
    store(transport, content)
    assert load(transport, content) == [None, None]


def test_a_client_cuts_a_frame_only_where_a_server_takes_its_pieces() -> None:
    frame = bytes(LARGE)
    assert list(frames.cut(frame, 2)) == [frame]
    pieces = list(frames.cut(frame, 3))
    assert b"".join(pieces) == frame
    assert max(map(len, pieces)) == limits.CUT_BYTES


def large_page(content: Content) -> list[bytes]:
    return list(frames.cut(whole_page(content, 0), PROTOCOL_VERSION))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pieces: pieces[:-1], "ends within a layer"),
        (lambda pieces: [*pieces[:-1], b""], "ends within a layer"),
        (lambda pieces: [*pieces[:-1], pieces[-1] + b"x"], "more than it announced"),
        (lambda pieces: [*pieces, b"x"], "a frame has 1 bytes"),
        (lambda pieces: [pieces[0], *pieces, b"x" * 100], "more than it announced"),
    ],
)
def test_pieces_that_are_not_those_of_the_frame_end_the_store(
    world: World, spoil: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    content = Content.of(world, 1, 1, LARGE)
    world.open().attach(content.spec, soon())
    opening = frames.encode_write_request(content.write_request())
    assert says in failed_precondition(world, WRITE, opening, *spoil(large_page(content)))
    world.wait_until_unleased()
