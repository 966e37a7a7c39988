"""Pages over plain TCP: what every transport holds, and what only a bare socket can do to one."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Refused, RefusedKind, Written
from kvcluster.core.pool import PageState
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError
from kvcluster.pages import codec
from kvcluster.testing.conformance import TransportConformance, World, open_world
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    load,
    read,
    read_begun,
    store,
    write,
)
from kvcluster.testing.conformance.world import BOUND_S, ONE, Pause, soon
from kvcluster.testing.over import Over
from kvcluster.transport.memory import MemoryTransport
from kvcluster.transport.seam import Deadline, PageHost, RefusedByShard, Trouble
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire import shard, streams
from kvcluster.wire.frames import Record
from kvcluster.wire.streams import Kind
from tests.transport.peers import (
    NO_FRAMES,
    OTHER_KIND,
    OTHER_VERSION,
    TERABYTE,
    StreamPeer,
    authenticator,
    token,
    unserved,
)

HOST = "127.0.0.1"


class Served:
    """A server before a shard, on loopback, with a token for each tenant."""

    def __init__(self, host: PageHost) -> None:
        known = authenticator()
        self._host = host
        self._server = TcpServer(host, lambda given: known.caller(given).tenant, HOST)
        self._server.start()
        self.address = self._server.address

    def open(self, tenant: Tenant) -> Over:
        return Over(MemoryTransport(self._host, tenant), TcpPages(self.address, token(tenant)))

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class TestTcp(TransportConformance):
    """On the fixture of this module."""


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


TOO_MUCH = streams.encode_header(Kind.HELLO, limits.TOKEN_BYTES + 1)


@pytest.mark.parametrize("hello", [True, False])
@pytest.mark.parametrize(("first", "says"), [*NO_FRAMES, (TOO_MUCH, "may be|belongs")])
def test_what_is_no_frame_is_refused_in_words_and_closed(world: World, hello: bool, first: bytes, says: str) -> None:
    with Raw(world, hello=hello) as peer:
        peer.send_bytes(first)
        with pytest.raises(ProtocolError, match=says):
            raise peer.refusal()


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
@pytest.mark.parametrize(
    ("body", "says"),
    [(b"", "how long"), (bytes(8), "a namespace is 32 bytes"), (bytes(8) + b"\xff\xff", "of kvcluster")],
)
def test_a_request_that_makes_no_sense_is_refused_in_words(world: World, kind: Kind, body: bytes, says: str) -> None:
    with Raw(world) as peer:
        peer.send(kind, body)
        assert says in str(peer.refusal())


def pages(item: int = 0, layer: int = 0, layers: int = 1, nbytes: int = 100, in_codec: int = codec.RAW) -> bytes:
    """A PAGES frame of one record, and its bytes."""
    data = memoryview(bytes(nbytes))
    body = streams.encode_pages([Record(item, layer, in_codec, (0,) * layers, data)])
    return streams.encode_header(Kind.PAGES, len(body)) + body + data


def claiming(nbytes: int) -> bytes:
    """A PAGES frame of one record that says of itself how large it is."""
    body = struct.pack("<IIHHHHQQ", 1, 0, 0, 1, codec.RAW, 0, nbytes, 0)
    return streams.encode_header(Kind.PAGES, len(body)) + body


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (b"nonsense", "another service"),
        (pages(item=3), "was not to be sent"),
        (pages(item=2), "was not to be sent"),
        (pages(nbytes=99), "layers of 100 bytes"),
        (pages(layer=1, layers=2, nbytes=200), "has 2 layers"),
        (pages(layer=0), "has 2 layers"),
        (pages(in_codec=0x7F01), "codec 0x7f01"),
        (claiming(2**40), "larger than may be"),
        (streams.encode_header(Kind.PAGES, 2) + b"xx", "how many records"),
        (streams.encode_header(Kind.PAGES, 4) + b"\xff\xff\xff\xff", "cannot hold"),
        (streams.encode_header(Kind.TAIL, 0), "belongs"),
        (streams.encode_header(Kind.DONE, 0), "before page 0 was whole"),
    ],
)
def test_nonsense_in_the_middle_of_a_store_ends_it_in_words(world: World, second: bytes, says: str) -> None:
    content = Content.of(world, 3, 2, 100)
    transport = world.open()
    transport.attach(content.spec, soon())
    request = content.write_request(keys=content.keys[2:])
    assert transport.write(request, ContentSource(content, request), soon()) == [Written.COMMITTED]
    with Raw(world) as peer:
        peer.send(Kind.WRITE, streams.encode_write(content.write_request(), 10**10))
        assert peer.frame()[0] is Kind.HEAD
        peer.send_bytes(pages() + second)
        said = peer.refusal()
    assert isinstance(said, ProtocolError)
    assert says in str(said)
    world.wait_until_unleased()
    assert load(transport, content) == [MissReason.EVICTED, MissReason.EVICTED, None]


@pytest.mark.parametrize("cut", range(0, 300, 23))
def test_a_peer_that_ends_at_any_byte_leaves_nothing_behind(world: World, cut: int) -> None:
    content = Content.of(world, 1, 2, 100)
    transport = world.open()
    transport.attach(content.spec, soon())
    request = content.write_request()
    body = streams.encode_write(request, 10**10)
    everything = streams.encode_header(Kind.WRITE, len(body)) + body + pages() + pages(layer=1)
    with Raw(world) as peer:
        peer.send_bytes(everything[: len(everything) * cut // 300])
        peer.end()
        assert peer.is_closed()
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0


def test_a_token_comes_first_and_has_to_be_known(world: World) -> None:
    content = Content.of(world, 1, 1, 8)
    for wrong in ("", "of somebody else", token(ONE)[:-1]):
        path = TcpPages(world.served.address, wrong)
        for call in (
            lambda path=path: path.connect(soon()),
            lambda path=path: list(
                path.read(content.read_request(), ContentSink(content, content.read_request()), soon())
            ),
        ):
            with pytest.raises(CredentialError):
                call()
        path.close()
    with Raw(world, hello=False) as peer:
        peer.send(Kind.HELLO, b"\xff\xfe")
        assert "UTF-8" in str(peer.refusal())


# ------------------------------------------------------------------------- a worker that does nothing any more


def test_a_writer_that_stands_still_loses_its_pages_when_its_lease_ends(world: World) -> None:
    content = Content.of(world, 2, 2, limits.FRAME_BYTES // 2)
    transport, pause = world.open(), Pause(at=2)
    under_way = world.meanwhile(lambda: write(transport, content, pause))
    pause.wait_reached()
    world.expire_leases()
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0
    pause.release()
    with pytest.raises(Trouble):
        under_way.result(BOUND_S)


def test_a_reader_that_stands_still_loses_its_pins_when_its_lease_ends(world: World) -> None:
    content = Content.big(world)
    transport = world.open()
    store(transport, content)
    reading = read_begun(transport, content)
    world.expire_leases()
    world.wait_until_unleased()
    with pytest.raises(Trouble):
        reading.finish()


# ---------------------------------------------------------------------------------------- one connection after another


def test_a_connection_is_used_again_and_one_that_the_shard_has_closed_is_not(world: World) -> None:
    content = Content.of(world, 2, 2, 1_000)
    transport = world.open()
    store(transport, content)
    assert load(transport, content) == [None] * 2
    (link,) = transport.path._links._idle  # type: ignore[attr-defined]
    link.shut()
    assert load(transport, content) == [None] * 2
    assert link not in transport.path._links._idle  # type: ignore[attr-defined]


def test_a_refusal_leaves_the_connection_to_the_next_call(world: World) -> None:
    transport, content = world.open(), Content.of(world, 1, 1, 8)
    for _ in range(2):
        with pytest.raises(RefusedByShard) as refused:
            load(transport, content)
        assert refused.value.refused.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert len(transport.path._links._idle) == 1  # type: ignore[attr-defined]
    store(transport, content)


def test_a_shard_keeps_so_many_connections_and_says_so_to_one_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAMS", 2)
    with Raw(world), Raw(world), Raw(world, hello=False) as third:
        said = third.refusal()
    assert "2 connections already" in str(said)


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
    path, content = TcpPages(address, "x"), unserved(1, 1, 8)
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
    with pytest.raises(Trouble) as trouble:
        use(address, soon())
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_silence_is_trouble_by_the_deadline() -> None:
    with answering(lambda peer: None) as address, pytest.raises(Trouble) as trouble:
        use(address, Deadline.after_ms(50))
    assert trouble.value.miss.reason is MissReason.DEADLINE


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64), OTHER_VERSION, OTHER_KIND, TERABYTE])
def test_another_service_is_a_protocol_error(words: bytes) -> None:
    with answering(lambda peer: peer.sendall(words)) as address, pytest.raises(ProtocolError):
        use(address, soon())


@pytest.mark.parametrize("address", ["", "nowhere", "host:0", ":70", "host:99999"])
def test_an_address_that_is_none_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        TcpPages(address, None)


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return streams.encode_header(kind, len(body)) + body


WELCOME = frame(Kind.WELCOME)
HEAD_OF_TWO = frame(Kind.HEAD, shard.encode_read_head([None, None]))


def piece(item: int, layer: int, layers: int = 1) -> bytes:
    return pages(item, layer, layers, nbytes=8 * layers)


@pytest.mark.parametrize(
    "answer",
    [
        frame(Kind.HEAD, shard.encode_read_head([None])),
        frame(Kind.HEAD, shard.encode_read_head([None] * 3)),
        frame(Kind.TAIL, shard.encode_write_tail([Written.COMMITTED] * 2)),
        b"nonsense",
        HEAD_OF_TWO + b"nonsense",
        HEAD_OF_TWO + piece(2, 0),
        HEAD_OF_TWO + piece(0, 1),
        HEAD_OF_TWO + piece(0, 0) + piece(0, 0),
        HEAD_OF_TWO + piece(0, 0, layers=3),
        HEAD_OF_TWO + piece(1, 0, layers=2) + piece(1, 2),
        HEAD_OF_TWO + claiming(2**40),
        frame(Kind.HEAD, shard.encode_read_head([None, Miss(MissReason.EVICTED)])) + piece(1, 0),
    ],
)
def test_a_shard_that_answers_a_load_wrongly_is_a_protocol_error(answer: bytes) -> None:
    content = unserved(2, 3, 8)
    wants = [want._replace(layer_stop=2) for want in content.wants()]
    with answering(lambda peer: peer.sendall(WELCOME + answer)) as address:
        path = TcpPages(address, None)
        with pytest.raises(ProtocolError):
            read(Over(MemoryTransport(None, ONE), path), content, wants).finish()  # type: ignore[arg-type]
        path.close()


@pytest.mark.parametrize(
    "answer",
    [
        frame(Kind.HEAD, shard.encode_write_head([None])),
        frame(Kind.HEAD, shard.encode_write_head([None] * 3)),
        frame(Kind.HEAD, shard.encode_write_head([None] * 2)) + frame(Kind.TAIL, shard.encode_write_tail([])),
        frame(Kind.HEAD, shard.encode_write_head([None] * 2)) * 2,
        frame(Kind.TAIL, shard.encode_write_tail([Written.COMMITTED] * 2)),
        b"nonsense",
    ],
)
def test_a_shard_that_answers_a_store_wrongly_is_a_protocol_error(answer: bytes) -> None:
    content = unserved(2, 3, 8)
    request = content.write_request()
    with answering(lambda peer: peer.sendall(WELCOME + answer)) as address:
        path = TcpPages(address, None)
        with pytest.raises(ProtocolError):
            path.write(request, ContentSource(content, request), soon())
        path.close()


def test_a_refusal_is_heard_wherever_it_comes() -> None:
    refused = Refused(RefusedKind.LIMIT, "too much")
    content = unserved(1, 1, 8)
    request = content.write_request()
    with answering(lambda p: p.sendall(WELCOME + frame(Kind.REFUSED, streams.encode_refused(refused)))) as address:
        path = TcpPages(address, None)
        with pytest.raises(RefusedByShard) as heard:
            path.write(request, ContentSource(content, request), soon())
        assert heard.value.refused == refused
        path.close()


def test_a_server_that_cannot_listen_says_where(world: World) -> None:
    port = int(world.served.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{port}"):
        TcpServer(world.host, lambda given: ONE, HOST, port)


# ------------------------------------------------------------------------------------- a worker that is killed


def begin_a_store(address: str, epoch: str) -> None:
    """What the worker that is killed runs: of three pages of two layers it sends one and a half."""
    content = unserved(3, 2, limits.FRAME_BYTES, epoch=int(epoch))
    path = TcpPages(address, token(ONE))
    request = content.write_request()

    def then_nothing() -> None:
        if len(source.sent) == 3:
            print("half-way", flush=True)
            threading.Event().wait(BOUND_S)

    source = ContentSource(content, request, then_nothing)
    path.write(request, source, soon())


def test_a_worker_killed_half_way_leaves_nothing_that_could_be_read(world: World) -> None:
    content = Content.of(world, 3, 2, limits.FRAME_BYTES)
    transport = world.open()
    transport.attach(content.spec, soon())
    script = f"from {__name__} import begin_a_store; begin_a_store({world.served.address!r}, '{world.epoch}')"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "half-way\n"
        states = world.host.inspect(lambda: [page.state for page in world.host.core.pool.everything()])
        assert states == [PageState.WRITING] * 3
        assert load(transport, content) == [MissReason.PENDING] * 3
        worker.kill()
    world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0
    assert load(transport, content) == [MissReason.EVICTED] * 3
    store(transport, content)
    assert load(transport, content) == [None] * 3
