"""Servers and clients beside peers of other versions of the protocol: each method, path and direction.

A peer is made of bytes alone: what it puts into the metadata of a call or the trailers of an answer, and the version in
its messages and frames. One of version 1 has neither metadata nor trailers, and refuses by words alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest

from kvcluster.core.ids import Attempt, Caller, Epoch, Holder, NamespaceId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    Done,
    Flush,
    GetOffers,
    GetStatus,
    Offer,
    Offers,
    ReadRequest,
    Refused,
    Reply,
    Status,
)
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError, VersionError
from kvcluster.release import OLDEST_VERSION, PROTOCOL_VERSION, __version__
from kvcluster.runtime.auth import DEFAULT_TENANT, Authenticator
from kvcluster.runtime.metric_samples import CallMetrics, Sample
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.base import DataPath, RefusedByShard, run_to_completion
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.grpc_pages import READ, WRITE, GrpcPages, page_handlers
from kvcluster.transport.path_selector import DiscardSink, offer_of
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.rpc import Connection, RpcHandler, identity
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire import frames, socket_frames
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.socket_frames import HEADER, FrameKind
from kvcluster.wire.versions import FIRST, OURS, VERSIONS_KEY, Versions, encode_versions
from tests.runtime.hosts import BOUND_S, Coordinator, soon
from tests.runtime.hosts import shard as hosted
from tests.transport.peers import SECRET, of_a_shard

HOST = "127.0.0.1"
REFUSALS = ("kvcluster_refused_calls_total", "kvcluster_refused_connections_total")
SPEC = KVSpec.uniform(model="m", weights="sha256:0", num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16")
NAMESPACE = NamespaceId(bytes(32))
METHODS = [*COORDINATOR.values(), *SHARD.values()]
QUESTIONS: Mapping[Method, Any] = {
    COORDINATOR["Attach"]: Attach(SPEC),
    COORDINATOR["GetStatus"]: GetStatus(),
    SHARD["Attach"]: AttachShard(SPEC),
    SHARD["GetOffers"]: GetOffers(),
    SHARD["Flush"]: Flush(1),
    SHARD["Ping"]: None,
}
"""What a client asks here, and of each kind of method one."""

ANSWERS: Mapping[Method, Reply] = {
    COORDINATOR["Attach"]: Attached(NAMESPACE, Epoch(1), 1, 1),
    COORDINATOR["GetStatus"]: Status(Epoch(1), "serving", 1, 1, 1, 1, (), ()),
    SHARD["Attach"]: AttachedShard(NAMESPACE, Epoch(1), 1),
    SHARD["GetOffers"]: Offers(Epoch(1), (Offer("tcp", "127.0.0.1:1"),)),
    SHARD["Flush"]: Done(),
    SHARD["Ping"]: Done(),
}


def release(newest: int) -> Versions:
    """What a release says whose newest version is this one."""
    return FIRST if newest == 1 else Versions(newest - 1, newest, f"{newest}.0")


SPOKEN = [release(PROTOCOL_VERSION - 1), release(PROTOCOL_VERSION), release(PROTOCOL_VERSION + 1)]
FOREIGN = [release(newest) for newest in (PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2, 999_999) if newest > 0]


def metadata_of(peer: Versions) -> tuple[tuple[str, str], ...]:
    return () if peer == FIRST else ((VERSIONS_KEY, encode_versions(peer)),)


# ------------------------------------------------------------------------- clients of all releases, our servers


@dataclass
class Site:
    """A real shard and its servers; `refused` counts what they refused because of its version."""

    address: str
    paths: Mapping[str, str]
    calls: CallMetrics
    host: ShardHost

    @property
    def refused(self) -> int:
        counted = [one for one in (*self.calls.samples(), *self.host.samples()) if isinstance(one, Sample)]
        return int(sum(one.value for one in counted if one.name in REFUSALS and one.labels[-1] == "version"))


@contextmanager
def site() -> Iterator[Site]:
    calls = CallMetrics({method.name for method in METHODS})
    auth = Authenticator(None, "", epoch_of=of_a_shard)

    def answer(method: Method, build: Callable[[Any], Any], wait_s: float, tenant: Tenant) -> Reply:
        build(1)
        return ANSWERS.get(method, Done())

    with ExitStack() as house:
        host = house.enter_context(hosted(Coordinator()))
        handlers: dict[str, RpcHandler] = dict(page_handlers(host))
        for method in METHODS:
            handlers |= unary_handlers({method.name: method}, partial(answer, method), metrics=calls)
        server = GrpcServer(handlers, auth, HOST, 0, 4, metrics=calls)
        server.start()
        house.callback(server.close, grace_s=0)
        caller_of = lambda token: Caller(DEFAULT_TENANT)  # noqa: E731
        servers = {"tcp": TcpServer(host, caller_of, HOST), "shm": ShmServer(host, caller_of)}
        for path in servers.values():
            path.start()
            house.callback(path.close)
        yield Site(server.address, {name: path.address for name, path in servers.items()}, calls, host)


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patched, site() as made:
        patched.setattr("kvcluster.runtime.server._REFUSALS", 10**6)  # all of these tests come in a few seconds
        yield made


@contextmanager
def raw(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def call(channel: grpc.Channel, method: Method, peer: Versions, data: bytes) -> tuple[bytes, Versions]:
    """Calls as a client of this release; what it is answered, and what the server says about itself."""
    ask = channel.unary_unary(method.path, request_serializer=identity, response_deserializer=identity)
    answer, ended = ask.with_call(data, timeout=BOUND_S, metadata=metadata_of(peer))
    (said,) = [value for key, value in ended.trailing_metadata() if key == VERSIONS_KEY]
    assert said == encode_versions(OURS)
    return answer, OURS


@pytest.mark.parametrize("peer", SPOKEN, ids=str)
@pytest.mark.parametrize("method", QUESTIONS, ids=lambda method: method.path)
def test_a_client_of_a_neighbouring_release_is_answered_in_the_version_that_both_speak(
    served: Site, method: Method, peer: Versions
) -> None:
    agreed = min(peer.newest, PROTOCOL_VERSION)
    before = served.refused
    with raw(served.address) as channel:
        for version in {peer.oldest, agreed}:
            data = method.encode_request(QUESTIONS[method], version=version)
            answer, _ = call(channel, method, peer, data)
            expected = ANSWERS[method]
            if isinstance(expected, Offers):
                expected = Offers(expected.epoch, expected.offers, protocol_version=agreed)
            assert method.decode_reply(answer, agreed) == expected
    assert served.refused == before


@pytest.mark.parametrize("peer", FOREIGN, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_a_client_of_a_release_further_away_is_refused_by_name_and_counted(
    served: Site, method: Method, peer: Versions
) -> None:
    before = served.refused
    with raw(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        call(channel, method, peer, b"")
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    older = "caller" if peer.newest < PROTOCOL_VERSION else "server"
    for words in (f"the server is {OURS}", f"the caller is {peer}", __version__, f"upgrade the {older}"):
        assert words in error.value.details()
    assert (VERSIONS_KEY, encode_versions(OURS)) in [tuple(one) for one in error.value.trailing_metadata()]
    assert served.refused == before + 1


@pytest.mark.parametrize("path", [READ, WRITE])
@pytest.mark.parametrize("peer", FOREIGN, ids=str)
def test_a_page_stream_of_a_release_further_away_is_refused_and_counted(
    served: Site, path: str, peer: Versions
) -> None:
    before = served.refused
    with raw(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        stream = channel.stream_stream(path, request_serializer=identity, response_deserializer=identity)
        list(stream(iter([frames.encode_read_request(NOTHING)]), timeout=BOUND_S, metadata=metadata_of(peer)))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert served.refused == before + 1


@pytest.mark.parametrize("said", ["", "2", "2 1 x", "0 0 x", "1 2", "9" * 200, "1 2 \u00e9", "-1 2 x"])
def test_versions_that_make_no_sense_are_refused_and_let_no_call_through(served: Site, said: str) -> None:
    before = served.refused
    with raw(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        ask = channel.unary_unary(SHARD["Ping"].path, request_serializer=identity, response_deserializer=identity)
        ask(b"", timeout=BOUND_S, metadata=((VERSIONS_KEY, said.encode("ascii", "replace").decode()),))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert served.refused == before, "that is a malformed call"


@pytest.mark.parametrize("credential", ["", "wrong", SECRET])
def test_no_version_lets_a_caller_skip_its_credential(credential: str) -> None:
    asked: list[Caller] = []

    def ask(build: Callable[[Any], Any], wait_s: float, tenant: Tenant) -> Reply:
        asked.append(build(1))
        return Done()

    auth = Authenticator({}, "", epoch_of=of_a_shard)
    handlers = unary_handlers({"Drain": COORDINATOR["Drain"]}, ask, operators=frozenset({"Drain"}))
    server = GrpcServer(handlers, auth, HOST, 0, 2)
    server.start()
    try:
        for peer in [*SPOKEN, *FOREIGN]:
            with raw(server.address) as channel, pytest.raises(grpc.RpcError) as error:
                drain = channel.unary_unary(COORDINATOR["Drain"].path, identity, identity)
                bearer = (("authorization", f"Bearer {credential}"),) if credential else ()
                drain(b"", timeout=BOUND_S, metadata=(*bearer, *metadata_of(peer)))
            foreign = peer in FOREIGN and credential == SECRET
            expected = grpc.StatusCode.FAILED_PRECONDITION if foreign else grpc.StatusCode.UNAUTHENTICATED
            assert error.value.code() is expected
    finally:
        server.close(grace_s=0)
    assert not asked


# -------------------------------------------------------------------------------- our client, servers of all releases

OLD_WORDS = (
    "this side speaks version 1 of kvcluster's protocol, the other side version 2: install the same release of "
    "kvcluster in the engine and in the cluster"
)
"""What a server of version 1 refuses with."""


class OldServer:
    """A server of any release: it answers from `ANSWERS`, with the trailers of that release. Like one of version 1 it
    compares the version in an Attach."""

    def __init__(self, peer: Versions) -> None:
        self.peer = peer
        self.asked: list[tuple[str, int]] = []
        """The methods, with the newest version that the caller said it speaks."""

        class Table(grpc.GenericRpcHandler):
            def service(_, details: grpc.HandlerCallDetails) -> Any:  # noqa: N805
                (method,) = [one for one in METHODS if one.path == details.method]
                return grpc.unary_unary_rpc_method_handler(partial(self.answer, method), identity, identity)

        self._threads = ThreadPoolExecutor(2)
        self._server = grpc.server(self._threads, handlers=[Table()])
        self.address = f"{HOST}:{self._server.add_insecure_port(f'{HOST}:0')}"

    def __enter__(self) -> OldServer:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait()
        self._threads.shutdown()

    def answer(self, method: Method, data: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(metadata_of(self.peer))
        said = [value for key, value in context.invocation_metadata() if key == VERSIONS_KEY]
        assert said == [encode_versions(OURS)]
        agreed = min(self.peer.newest, PROTOCOL_VERSION)
        if method.name == "Attach":
            try:
                method.decode_question(data, agreed)
            except VersionError:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, OLD_WORDS)
        self.asked.append((method.name, agreed))
        return method.encode_reply(ANSWERS[method], agreed)


@pytest.mark.parametrize("peer", SPOKEN, ids=str)
def test_a_server_of_a_neighbouring_release_is_asked_and_understood_without_a_failed_try(peer: Versions) -> None:
    agreed = min(peer.newest, PROTOCOL_VERSION)
    with OldServer(peer) as server, closing(Connection(server.address)) as connection:
        assert connection.version is None
        for method, question in QUESTIONS.items():
            answer = connection.ask(method, question, soon())
            assert type(answer) is type(ANSWERS[method])
            assert connection.version == agreed
        assert len(server.asked) == len(QUESTIONS)


@pytest.mark.parametrize("peer", FOREIGN, ids=str)
@pytest.mark.parametrize("method", QUESTIONS, ids=lambda method: method.path)
def test_a_server_of_a_release_further_away_is_named_whatever_was_asked(method: Method, peer: Versions) -> None:
    with OldServer(peer) as server, closing(Connection(server.address)) as connection:
        for _ in range(2):
            with pytest.raises(VersionError) as told:
                connection.ask(method, QUESTIONS[method], soon())
            older = "server" if peer.newest < PROTOCOL_VERSION else "caller"
            for words in (f"the server is {peer}", f"the caller is {OURS}", f"upgrade the {older}"):
                assert words in str(told.value)


def test_a_server_that_is_replaced_by_another_release_is_understood_from_its_next_answer_on() -> None:
    with OldServer(release(PROTOCOL_VERSION - 1)) as server, closing(Connection(server.address)) as connection:
        for newest in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
            server.peer = release(newest)
            connection.ask(SHARD["Ping"], None, soon())
            assert connection.version == min(newest, PROTOCOL_VERSION)
        server.peer = release(PROTOCOL_VERSION + 2)
        with pytest.raises(VersionError, match="upgrade the caller"):
            connection.ask(SHARD["Ping"], None, soon())


def test_an_answer_that_contradicts_its_trailers_is_refused() -> None:
    with OldServer(OURS) as server, closing(Connection(server.address)) as connection:
        server.answer = lambda method, data, context: (
            context.set_trailing_metadata(metadata_of(OURS))
            or (  # type: ignore[method-assign,func-returns-value]
                method.encode_reply(ANSWERS[method], OLDEST_VERSION)
            )
        )
        with pytest.raises(VersionError, match=f"an answer .GetOffers. of version {OLDEST_VERSION}"):
            connection.ask(SHARD["GetOffers"], GetOffers(), soon())


# ------------------------------------------------------------------------------------------------- frames

NOTHING = ReadRequest(NAMESPACE, Attempt(Holder(bytes(16)), 1), Epoch(5), ())
PATHS: Mapping[str, Callable[[str, int], DataPath]] = {
    "tcp": lambda address, version: TcpPages(address, ANONYMOUS, version),
    "shm": lambda address, version: ShmPages(address, ANONYMOUS, version),
}


def _dialled(site: Site, path: str) -> socket.socket:
    address = site.paths[path]
    if path == "shm":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect("\0" + address[1:])
    else:
        connected = socket.create_connection((HOST, int(address.rpartition(":")[2])))
    connected.settimeout(BOUND_S)
    return connected


def _frame(connected: socket.socket) -> tuple[int, FrameKind, bytes]:
    """The next frame: its version, its kind and its body."""

    def exactly(nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            got = connected.recv(nbytes - len(data))
            assert got, "the connection ended within a frame"
            data += got
        return data

    _, version, kind, nbytes = HEADER.unpack(exactly(HEADER.size))
    return version, FrameKind(kind), exactly(nbytes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("version", [OLDEST_VERSION, PROTOCOL_VERSION])
def test_a_connection_of_either_version_works_and_stays_in_it(served: Site, path: str, version: int) -> None:
    before = served.refused
    with _dialled(served, path) as connected:
        connected.sendall(socket_frames.encode_header(FrameKind.HELLO, 0, version))
        assert _frame(connected)[:2] == (version, FrameKind.WELCOME)
        body = socket_frames.encode_read(NOTHING, 10**9)
        connected.sendall(socket_frames.encode_header(FrameKind.READ, len(body), version) + body)
        assert _frame(connected)[:2] == (version, FrameKind.REFUSED), "the namespace is not known"
    with closing(PATHS[path](served.paths[path], version)) as ours, pytest.raises(RefusedByShard):
        run_to_completion(ours.read(NOTHING, DiscardSink(), soon()))
    assert served.refused == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1, 255])
def test_a_connection_of_another_version_is_refused_in_its_own_version_and_counted(
    served: Site, path: str, version: int
) -> None:
    before = served.refused
    with _dialled(served, path) as connected:
        connected.sendall(socket_frames.encode_header(FrameKind.HELLO, 0, version))
        said, kind, body = _frame(connected)
        assert kind is FrameKind.FAILED and said == (version or PROTOCOL_VERSION)
        error = socket_frames.decode_failure(body)
        assert isinstance(error, ProtocolError)
        older = "the other side" if version < OLDEST_VERSION else "this side"
        assert f"of version {version} came" in str(error) and f"upgrade {older}" in str(error)
        assert __version__ in str(error)
        with suppress(ConnectionResetError):
            assert connected.recv(1) == b"", "and it is closed"
    assert served.refused == before + 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("later", [OLDEST_VERSION, PROTOCOL_VERSION + 1, 0])
def test_a_version_that_changes_within_a_connection_ends_it(served: Site, path: str, later: int) -> None:
    with _dialled(served, path) as connected:
        connected.sendall(socket_frames.encode_header(FrameKind.HELLO, 0, PROTOCOL_VERSION))
        assert _frame(connected)[1] is FrameKind.WELCOME
        body = socket_frames.encode_read(NOTHING, 10**9)
        connected.sendall(socket_frames.encode_header(FrameKind.READ, len(body), later) + body)
        version, kind, words = _frame(connected)
        assert (version, kind) == (PROTOCOL_VERSION, FrameKind.FAILED)
        assert f"a frame of version {later} came" in str(socket_frames.decode_failure(words))


@pytest.mark.parametrize("peer", SPOKEN, ids=str)
def test_a_page_stream_over_grpc_is_answered_in_the_version_that_both_speak(served: Site, peer: Versions) -> None:
    agreed = min(peer.newest, PROTOCOL_VERSION)
    for first in {peer.oldest, agreed}:
        with raw(served.address) as channel:
            stream = channel.unary_stream(READ, request_serializer=identity, response_deserializer=identity)
            sent = frames.encode_read_request(NOTHING, first)
            (answer,) = stream(sent, timeout=BOUND_S, metadata=metadata_of(peer))
            assert isinstance(frames.decode_read_head(answer, agreed), Refused), "the namespace is not known"


def test_a_stream_may_be_the_first_call_of_a_connection(served: Site) -> None:
    with closing(GrpcPages(served.address)) as pages, pytest.raises(RefusedByShard):
        assert pages._connection.version is None
        run_to_completion(pages.read(NOTHING, DiscardSink(), soon()))


@pytest.mark.parametrize("path", [READ, WRITE])
@pytest.mark.parametrize(
    ("peer", "version"),
    [(OURS, 0), (OURS, PROTOCOL_VERSION + 1), (OURS, 255), (release(OLDEST_VERSION), PROTOCOL_VERSION)],
)
def test_a_frame_of_a_version_that_its_caller_does_not_speak_is_refused(
    served: Site, path: str, peer: Versions, version: int
) -> None:
    with raw(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        stream = channel.stream_stream(path, request_serializer=identity, response_deserializer=identity)
        sent = frames.encode_read_request(NOTHING, version)
        list(stream(iter([sent]), timeout=BOUND_S, metadata=metadata_of(peer)))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"a frame of version {version} came" in error.value.details()


def test_a_path_is_opened_in_the_version_of_the_offers() -> None:
    for version in (OLDEST_VERSION, PROTOCOL_VERSION):
        offers = Offers(Epoch(1), (Offer("tcp", "127.0.0.1:1"),), protocol_version=version)
        assert offer_of("tcp", offers, ProcessLocation("here")).protocol_version == version
