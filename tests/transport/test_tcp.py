"""Pages over plain TCP: the claims of every transport, and failures that only a bare socket has."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Caller, Tenant
from kvcluster.core.messages import Refused, RefusedKind, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError
from kvcluster.memory import codec
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime.auth import Authenticator
from kvcluster.testing.conformance import NetworkClaims, TransportConformance, Wire, World, open_world
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    load,
    store,
)
from kvcluster.testing.conformance.wire import BadRequest, BadStore, CutStore, unserved
from kvcluster.testing.conformance.world import BOUND_S, ONE, soon
from kvcluster.testing.split_transport import SplitTransport
from kvcluster.transport.base import Deadline, PageHost, RefusedByShard, Unavailable
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire import shard, socket_frames
from kvcluster.wire.frames import Record
from kvcluster.wire.socket_frames import FrameKind
from tests.transport.peers import (
    NO_FRAMES,
    OTHER_KIND,
    OTHER_VERSION,
    TERABYTE,
    StreamPeer,
    authenticator,
    token,
)

HOST = "127.0.0.1"


class Served:
    """A server before a shard, on loopback, with a token for each tenant."""

    def __init__(self, host: PageHost) -> None:
        self.known = authenticator()
        self._host = host
        self._server = TcpServer(host, self.caller, HOST)
        self._server.start()
        self.address = self._server.address

    def caller(self, given: str | None) -> Caller:
        return self.known.caller(given)

    def open(self, tenant: Tenant) -> SplitTransport:
        return SplitTransport(
            MemoryTransport(self._host, Caller(tenant)), TcpPages(self.address, Credentials(token(tenant)))
        )

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestTcp(TransportConformance, NetworkClaims):
    """On the fixtures of this module."""


@pytest.fixture
def wire() -> Wire:
    return Wire(TcpPages, "host:port", token)


@pytest.fixture(params=["", "nowhere", "host:0", ":70", "host:99999"])
def bad_address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------- what a server does with what is no frame


class Raw(StreamPeer):
    """A peer of this server, which closes what it has refused."""

    def __init__(self, world: World, *, hello: bool = True) -> None:
        host, _, port = world.served.address.rpartition(":")
        super().__init__(socket.create_connection((host, int(port)), timeout=BOUND_S), hello=hello)

    def refusal(self) -> KVClusterError:
        said = super().refusal()
        assert self.is_closed()
        return said


TOO_MUCH = struct.pack("<HBBI", socket_frames.MAGIC, PROTOCOL_VERSION, FrameKind.HELLO, limits.TOKEN_BYTES + 1)


NO_REQUESTS = [
    *((hello, *frame) for hello in (True, False) for frame in (*NO_FRAMES, (TOO_MUCH, "exceeds the limit|expected"))),
    (False, socket_frames.encode_header(FrameKind.HELLO, 2) + b"\xff\xfe", "UTF-8"),
    *(
        (True, socket_frames.encode_header(kind, len(body)) + body, says)
        for kind in (FrameKind.READ, FrameKind.WRITE)
        for body, says in [
            (b"", "before its remaining time"),
            (bytes(8), "a namespace is 32 bytes"),
            (bytes(8) + b"\xff\xff", "of kvcluster"),
        ]
    ),
]
"""Whether a good token goes before it, bytes, and what the refusal says."""


@pytest.fixture(params=NO_REQUESTS)
def bad_request(request: pytest.FixtureRequest) -> BadRequest:
    hello, data, says = request.param

    def send(world: World) -> str:
        with Raw(world, hello=hello) as peer:
            peer.send_bytes(data)
            said = peer.refusal()
        assert isinstance(said, ProtocolError)
        return str(said)

    return send, says


def pages(item: int = 0, layer: int = 0, layers: int = 1, nbytes: int = 100, in_codec: int = codec.RAW) -> bytes:
    """A PAGES frame of one record, and its bytes."""
    data = memoryview(bytes(nbytes))
    body = socket_frames.encode_pages([Record(item, layer, in_codec, (0,) * layers, data)])
    return socket_frames.encode_header(FrameKind.PAGES, len(body)) + body + data


def claiming(nbytes: int) -> bytes:
    """A PAGES frame of one record that says of itself how large it is."""
    body = struct.pack("<IIHHHHQQ", 1, 0, 0, 1, codec.RAW, 0, nbytes, 0)
    return socket_frames.encode_header(FrameKind.PAGES, len(body)) + body


@pytest.fixture(
    params=[
        (b"nonsense", "another service"),
        (pages(item=3), "was not requested"),
        (pages(item=2), "was not requested"),
        (pages(nbytes=99), "layers of 100 bytes"),
        (pages(layer=1, layers=2, nbytes=200), "has 2 layers"),
        (pages(layer=0), "has 2 layers"),
        (pages(in_codec=0x7F01), "codec 0x7f01"),
        (claiming(2**40), "exceeds the limit"),
        (socket_frames.encode_header(FrameKind.PAGES, 2) + b"xx", "before its number of records"),
        (socket_frames.encode_header(FrameKind.PAGES, 4) + b"\xff\xff\xff\xff", "cannot hold"),
        (socket_frames.encode_header(FrameKind.TAIL, 0), "expected"),
        (socket_frames.encode_header(FrameKind.DONE, 0), "before page 0 was whole"),
    ],
    ids=lambda case: case[1],
)
def bad_store(request: pytest.FixtureRequest) -> BadStore:
    second, says = request.param

    def send(world: World, content: Content) -> str:
        with Raw(world) as peer:
            peer.send(FrameKind.WRITE, socket_frames.encode_write(content.write_request(), 10**10))
            assert peer.frame()[0] is FrameKind.HEAD
            peer.send_bytes(pages() + second)
            said = peer.refusal()
        assert isinstance(said, ProtocolError)
        return str(said)

    return send, says


@pytest.fixture(params=range(0, 300, 23))
def cut_store(request: pytest.FixtureRequest) -> CutStore:
    """Sends so many 300ths of the bytes of a store."""

    def send(world: World, content: Content) -> None:
        body = socket_frames.encode_write(content.write_request(), 10**10)
        everything = socket_frames.encode_header(FrameKind.WRITE, len(body)) + body + pages() + pages(layer=1)
        with Raw(world) as peer:
            peer.send_bytes(everything[: len(everything) * request.param // 300])
            peer.end()
            assert peer.is_closed()

    return send


def test_a_token_is_asked_for_when_a_connection_is_opened(world: World) -> None:
    for wrong in ("", "of another cluster", token(ONE)[:-1]):
        path = TcpPages(world.served.address, Credentials(wrong))
        with pytest.raises(CredentialError):
            path.connect(soon())
        path.close()


def test_a_connection_whose_token_is_revoked_serves_no_more(world: World) -> None:
    transport, content = world.open(), Content.of(world, 1, 1, 8)
    store(transport, content)
    assert load(transport, content) == [None]
    world.served.known = Authenticator({}, "internal")
    with pytest.raises(CredentialError, match="does not know this token"):
        load(transport, content)


# ---------------------------------------------------------------------------------------- one connection after another


def test_a_connection_is_used_again_and_one_that_the_shard_has_closed_is_not(world: World) -> None:
    content = Content.of(world, 2, 2, 1_000)
    transport = world.open()
    store(transport, content)
    assert load(transport, content) == [None] * 2
    (link,) = transport.path._links._idle  # type: ignore[attr-defined]
    link.shutdown()
    assert load(transport, content) == [None] * 2
    assert link not in transport.path._links._idle  # type: ignore[attr-defined]


def test_a_refusal_leaves_the_connection_open(world: World) -> None:
    transport, content = world.open(), Content.of(world, 1, 1, 8)
    for _ in range(2):
        with pytest.raises(RefusedByShard):
            load(transport, content)
    assert len(transport.path._links._idle) == 1  # type: ignore[attr-defined]


@pytest.fixture
def few_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAMS", 4)


def test_a_shard_keeps_so_many_connections_and_says_so_to_one_more(few_streams: None, world: World) -> None:
    with Raw(world), Raw(world), Raw(world, hello=False) as third:
        third.send(FrameKind.HELLO, token(ONE).encode())
        said = third.refusal()
    assert "2 connections of this tenant, which is its share" in str(said)


def test_connections_without_a_credential_shut_out_no_other_and_the_oldest_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAMS_UNKNOWN", 2)
    content = Content.of(world, 1, 1, 8)
    with Raw(world, hello=False) as oldest, Raw(world, hello=False), Raw(world, hello=False):
        assert oldest.is_closed()
        transport = world.open()
        store(transport, content)
        assert load(transport, content) == [None]


# --------------------------------------------------------------------------------------- what else may stand there


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Something that is perhaps no shard: it does that with everybody who comes."""
    with socket.create_server((HOST, 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                kept.append(peer)
                try:
                    answer(peer)
                except OSError:
                    """It has gone."""

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{HOST}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in kept:
                peer.close()


def use(address: str, deadline: Deadline) -> None:
    """Connects, and loads and stores something."""
    path, content = TcpPages(address, Credentials("x")), unserved(1, 1, 8)
    request, writing = content.read_request(), content.write_request()
    errors: list[KVClusterError] = []
    for call in (
        lambda: list(path.read(request, ContentSink(content, request), deadline)),
        lambda: path.write(writing, ContentSource(content, writing), deadline),
    ):
        try:
            call()
        except KVClusterError as error:
            errors.append(error)
    path.close()
    assert len(errors) == 2
    assert all(address in str(error) or isinstance(error, ProtocolError) for error in errors)
    raise errors[0]


def test_nothing_that_listens_is_trouble_at_once() -> None:
    with socket.create_server((HOST, 0)) as server:
        address = f"{HOST}:{server.getsockname()[1]}"
    with pytest.raises(Unavailable) as trouble:
        use(address, soon())
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64), OTHER_VERSION, OTHER_KIND, TERABYTE])
def test_another_service_is_a_protocol_error(words: bytes) -> None:
    with answering(lambda peer: peer.sendall(words)) as address, pytest.raises(ProtocolError):
        use(address, soon())


def frame(kind: FrameKind, body: bytes = b"") -> bytes:
    return socket_frames.encode_header(kind, len(body)) + body


WELCOME = frame(FrameKind.WELCOME)
HEAD_OF_TWO = frame(FrameKind.HEAD, shard.encode_read_head([None, None]))


def piece(item: int, layer: int, layers: int = 1) -> bytes:
    return pages(item, layer, layers, nbytes=8 * layers)


@contextmanager
def client_of(answer: bytes) -> Iterator[TcpPages]:
    """A client of a server that greets it and answers whatever it asks with these bytes."""
    with answering(lambda peer: peer.sendall(WELCOME + answer)) as address:
        path = TcpPages(address, ANONYMOUS)
        yield path
        path.close()


@pytest.fixture(
    params=[
        (frame(FrameKind.HEAD, shard.encode_read_head([None])), 0),
        (frame(FrameKind.HEAD, shard.encode_read_head([None] * 3)), 0),
        (frame(FrameKind.TAIL, shard.encode_write_tail([Written.COMMITTED] * 2)), 0),
        (b"nonsense", 0),
        (HEAD_OF_TWO + b"nonsense", 0),
        (HEAD_OF_TWO + piece(2, 0), 0),
        (HEAD_OF_TWO + piece(0, 1), 0),
        (HEAD_OF_TWO + piece(0, 0) + piece(0, 0), 1),
        (HEAD_OF_TWO + piece(0, 0, layers=3), 0),
        (HEAD_OF_TWO + piece(1, 0, layers=2) + piece(1, 2), 2),
        (HEAD_OF_TWO + claiming(2**40), 0),
        (frame(FrameKind.HEAD, shard.encode_read_head([None, Miss(MissReason.EVICTED)])) + piece(1, 0), 0),
    ]
)
def bad_load_answer(request: pytest.FixtureRequest) -> Iterator[tuple[TcpPages, int]]:
    answer, layers_before = request.param
    with client_of(answer) as path:
        yield path, layers_before


@pytest.fixture(
    params=[
        frame(FrameKind.HEAD, shard.encode_write_head([None])),
        frame(FrameKind.HEAD, shard.encode_write_head([None] * 3)),
        frame(FrameKind.HEAD, shard.encode_write_head([None] * 2)) + frame(FrameKind.TAIL, shard.encode_write_tail([])),
        frame(FrameKind.HEAD, shard.encode_write_head([None] * 2)) * 2,
        frame(FrameKind.TAIL, shard.encode_write_tail([Written.COMMITTED] * 2)),
        b"nonsense",
    ]
)
def bad_store_answer(request: pytest.FixtureRequest) -> Iterator[TcpPages]:
    with client_of(request.param) as path:
        yield path


@pytest.fixture
def refusing() -> Iterator[tuple[TcpPages, Refused]]:
    refused = Refused(RefusedKind.LIMIT, "too much")
    with client_of(frame(FrameKind.REFUSED, socket_frames.encode_refused(refused))) as path:
        yield path, refused


@pytest.fixture
def silent() -> Iterator[tuple[TcpPages, str]]:
    with answering(lambda peer: None) as address:
        path = TcpPages(address, ANONYMOUS)
        yield path, address
        path.close()


def test_a_server_that_cannot_listen_says_where(world: World) -> None:
    port = int(world.served.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{port}"):
        TcpServer(world.host, lambda given: Caller(ONE), HOST, port)
