"""A server over a table of methods: which caller may ask what, and how each kind of error reaches the caller."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Attempt, Caller, CallId, Epoch, Holder, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    Done,
    Drain,
    EndTicket,
    Flush,
    GetStatus,
    Refused,
    RefusedKind,
    Reply,
    Report,
    ReportAck,
    Request,
    ShardInfo,
    Suspect,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import (
    CallerError,
    ConfigError,
    CredentialError,
    KVClusterError,
    LimitError,
    ProtocolError,
    SpecError,
    Unreachable,
)
from kvcluster.runtime import server
from kvcluster.runtime.auth import COMMANDS, NO_TENANT, Authenticator, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection, RpcHandler, identity
from kvcluster.wire import methods
from kvcluster.wire.checks import parse
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.versions import METADATA
from tests.transport.peers import SECRET, altered, of_a_shard

HOST = "127.0.0.1"
BOUND_S = 20.0
OPEN = Authenticator(None, "", epoch_of=of_a_shard)
"""Admits all callers as operators of one tenant."""
CALL = CallId(7)
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=1
)
TENANTS = {digest("mine"): Tenant("me"), digest("yours"): Tenant("you")}
INFO = ShardInfo(ShardId("shard-0"), Epoch(1), "", "", 0, 0, 0, 0)
REPORT = Report(INFO, Epoch(0), first=1)
FLUSH = Flush(wait_ns=1)
DRAIN = Drain(ShardId("shard-0"))
TICKET_END = EndTicket(Attempt(Holder(b"h" * 16), 1))
SUSPECT, SPACE = Suspect(Epoch(1), ()), NamespaceId(b"n" * 32)

Ask = Callable[[Callable[[CallId], Request[Any]], float], Reply]


def soon() -> Deadline:
    return Deadline.after_ms(BOUND_S * 1e3)


@contextmanager
def connected(
    handlers: dict[str, RpcHandler], token: str | None = None, auth: Authenticator = OPEN, **options: int
) -> Iterator[Connection]:
    server = GrpcServer(handlers, auth, HOST, 0, threads=4, **options)
    server.start()
    connection = Connection(server.address, Credentials(token))
    try:
        yield connection
    finally:
        connection.close()
        server.close(grace_s=0)


def shard_methods(ask: Ask) -> dict[str, RpcHandler]:
    return unary_handlers(SHARD, ask)


def fails(error: BaseException) -> Ask:
    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        raise error

    return ask


# ------------------------------------------------------------------------------------------- questions and answers


def test_a_question_is_asked_in_the_name_of_its_credential() -> None:
    asked = []

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        asked.append(build(CALL))
        return AttachedShard(NamespaceId(b"n" * 32), Epoch(5), 9)

    with connected(shard_methods(ask), "mine", Authenticator(TENANTS, "", epoch_of=of_a_shard)) as connection:
        answer = connection.ask(SHARD["Attach"], AttachShard(SPEC), soon())
    assert asked == [Request(CALL, Tenant("me"), None, AttachShard(SPEC))]
    assert answer == AttachedShard(NamespaceId(b"n" * 32), Epoch(5), 9)


def test_a_refusal_is_an_answer() -> None:
    refused = Refused(RefusedKind.LIMIT, "too many")
    with connected(shard_methods(lambda build, wait_s, tenant: refused)) as connection:
        assert connection.ask(SHARD["Flush"], FLUSH, soon()) == refused


def test_a_question_waits_no_longer_than_its_asker() -> None:
    waits = []

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        waits.append(wait_s)
        return Done()

    with connected(shard_methods(ask)) as connection:
        connection.ask(SHARD["Flush"], FLUSH, Deadline.after_ms(5_000))
        connection.ask(SHARD["Flush"], FLUSH, Deadline.after_ms(1e9))
    assert 0 < waits[0] < 6.0, "the asker's own"
    assert 59.0 < waits[1] <= 60.0, "no thread waits for ever"


def test_a_ping_is_answered_without_asking_the_core() -> None:
    with connected(shard_methods(fails(AssertionError("not the core")))) as connection:
        assert connection.ask(SHARD["Ping"], None, soon()) == Done()
        fat = altered(SHARD["Ping"], encode_request=lambda *_: b"?")
        with pytest.raises(ProtocolError, match="not a valid PingRequest"):
            connection.ask(fat, None, soon())


# -------------------------------------------------------------------------------------- which callers may ask


@pytest.mark.parametrize("token", [None, "another", SECRET])
def test_strangers_and_actors_are_no_tenants(token: str | None) -> None:
    with (
        connected(
            shard_methods(fails(AssertionError())), token, Authenticator(TENANTS, "", epoch_of=of_a_shard)
        ) as connection,
        pytest.raises(CredentialError),
    ):
        connection.ask(SHARD["Flush"], FLUSH, soon())


def test_reports_are_for_the_shards_of_the_cluster_alone() -> None:
    handlers = unary_handlers(COORDINATOR, lambda build, wait_s, tenant: ReportAck(Epoch(1), 0), frozenset({"Report"}))
    with connected(handlers, SECRET) as shard:
        assert shard.ask(COORDINATOR["Report"], REPORT, soon()) == ReportAck(Epoch(1), 0)
        with pytest.raises(CredentialError, match="GetStatus"):
            shard.ask(COORDINATOR["GetStatus"], GetStatus(), soon())
    with connected(handlers) as worker, pytest.raises(CredentialError, match="Report"):
        worker.ask(COORDINATOR["Report"], REPORT, soon())


def test_an_operator_without_a_tenant_runs_commands_and_reaches_no_page() -> None:
    auth = Authenticator({digest("ops"): NO_TENANT}, "", frozenset({digest("ops")}), epoch_of=of_a_shard)
    asked: list[str] = []

    def serve(name: str) -> RpcHandler:
        def call(caller: Caller, data: bytes, context: grpc.ServicerContext) -> bytes:
            asked.append(name)
            return b""

        return RpcHandler("unary_unary", call)

    handlers = {method.path: serve(method.path) for table in (COORDINATOR, SHARD) for method in table.values()}
    with connected(handlers, "ops", auth) as operator:
        for path in handlers:
            call = operator._channel.unary_unary(path, identity, identity)
            metadata = [("authorization", "Bearer ops"), *METADATA]
            if path in {COORDINATOR[name].path for name in COMMANDS}:
                assert call(b"", metadata=metadata, timeout=BOUND_S) == b""
                continue
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", metadata=metadata, timeout=BOUND_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "stands for no tenant" in refused.value.details()
    assert len(asked) == len(COMMANDS) < len(handlers)


def test_what_touches_every_tenant_is_for_operators_alone() -> None:
    tenants = {digest("mine"): Tenant("me"), digest("my boss's"): Tenant("me")}
    auth = Authenticator(tenants, "", frozenset({digest("my boss's")}), epoch_of=of_a_shard)
    asked = []

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        asked.append(build(CALL).question)
        return Done()

    handlers = unary_handlers(COORDINATOR, ask, operators=frozenset({"Drain"}))
    with connected(handlers, "mine", auth) as worker:
        with pytest.raises(
            CredentialError, match=r"draining a shard is for operators.*kvcluster token --tenant NAME --operator"
        ):
            worker.ask(COORDINATOR["Drain"], DRAIN, soon())
        assert worker.ask(COORDINATOR["EndTicket"], TICKET_END, soon()) == Done(), "all else is for every worker"
    with connected(handlers, SECRET, auth) as shard, pytest.raises(CredentialError, match="Drain is not for this"):
        shard.ask(COORDINATOR["Drain"], DRAIN, soon())
    assert asked == [TICKET_END]
    with connected(handlers, "my boss's", auth) as operator:
        assert operator.ask(COORDINATOR["Drain"], DRAIN, soon()) == Done()
        assert operator.ask(COORDINATOR["EndTicket"], TICKET_END, soon()) == Done()
    assert asked == [TICKET_END, DRAIN, TICKET_END]


def test_without_a_token_file_every_client_is_an_operator() -> None:
    handlers = unary_handlers(COORDINATOR, lambda build, wait_s, tenant: Done(), operators=frozenset({"Drain"}))
    with connected(handlers) as client:
        assert client.ask(COORDINATOR["Drain"], DRAIN, soon()) == Done()


def test_what_is_shared_is_asked_by_workers_and_by_shards_which_speak_for_all() -> None:
    asked = []

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        asked.append(build(CALL))
        return Done()

    auth = Authenticator({digest("a token"): Tenant("me")}, "", epoch_of=of_a_shard)
    handlers = unary_handlers(SHARD, ask, shared=frozenset({"Suspect"}))
    with connected(handlers, "a token", auth) as worker:
        worker.ask(SHARD["Suspect"], SUSPECT, soon(), SPACE)
    with connected(handlers, SECRET, auth) as shard:
        shard.ask(SHARD["Suspect"], SUSPECT, soon(), SPACE)
        with pytest.raises(CredentialError, match="Flush is not for this"):
            shard.ask(SHARD["Flush"], FLUSH, soon())
    assert asked == [Request(CALL, tenant, SPACE, SUSPECT) for tenant in (Tenant("me"), CLUSTER)]


# ------------------------------------------------------------------------------------------- how trouble is told


@pytest.mark.parametrize(
    ("raised", "heard", "says"),
    [
        (SpecError("no such part"), CallerError, "no such part"),
        (LimitError("too many"), CallerError, "too many"),
        (ProtocolError("version 9"), ProtocolError, "version 9"),
        (CredentialError("who?"), CredentialError, "who?"),
        (ConfigError("no port"), ProtocolError, "no port"),
        (Unavailable(Miss(MissReason.SHARD_LOST, "is ending")), Unavailable, "is ending"),
        (Unavailable(Miss(MissReason.DEADLINE)), Unavailable, "deadline"),
        (RuntimeError("a mistake of ours"), Unavailable, "shard_lost"),
    ],
)
def test_what_is_raised_there_is_raised_here(
    raised: BaseException, heard: type[KVClusterError | Unavailable], says: str
) -> None:
    with connected(shard_methods(fails(raised))) as connection, pytest.raises(heard, match=says):
        connection.ask(SHARD["Flush"], FLUSH, soon())


def test_a_question_that_is_malformed_never_comes_near_the_core() -> None:
    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        build(CALL)
        raise AssertionError("nothing was built")

    malformed = altered(SHARD["Attach"], encode_request=lambda *_: b"\xff\xff\xff")
    with connected(shard_methods(ask)) as connection, pytest.raises(ProtocolError, match="not a valid AttachRequest"):
        connection.ask(malformed, None, soon())


def test_an_answer_that_is_malformed_is_a_protocol_error() -> None:
    method = altered(SHARD["Flush"], encode_reply=lambda *_: b"\xff\xff\xff")
    handlers = unary_handlers({"Flush": method}, lambda build, wait_s, tenant: Done())
    with connected(handlers) as connection, pytest.raises(ProtocolError):
        connection.ask(SHARD["Flush"], FLUSH, soon())


def test_an_answer_of_another_kind_is_a_protocol_error() -> None:
    method = altered(SHARD["Flush"], encode_reply=lambda *_: SHARD["Attach"].encode_reply(attached))
    attached = AttachedShard(NamespaceId(b"n" * 32), Epoch(5), 9)
    handlers = unary_handlers({"Flush": method}, lambda build, wait_s, tenant: attached)
    with connected(handlers) as connection, pytest.raises(ProtocolError, match="AttachedShard"):
        connection.ask(SHARD["Flush"], FLUSH, soon())


def test_a_method_that_the_server_does_not_have_is_a_protocol_error() -> None:
    with (
        connected(shard_methods(fails(AssertionError()))) as connection,
        pytest.raises(ProtocolError, match="is no kvcluster server"),
    ):
        connection.ask(COORDINATOR["GetStatus"], GetStatus(), soon())


def test_a_message_that_is_too_large_is_refused_by_the_server_that_gets_it() -> None:
    huge = altered(SHARD["Flush"], encode_request=lambda *_: bytes(limits.MESSAGE_BYTES + 1))
    with connected(shard_methods(fails(AssertionError()))) as connection, pytest.raises(LimitError):
        connection.ask(huge, None, soon())


def test_a_question_that_is_longer_than_its_method_allows_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it is valid: fields that no release knows are passed over."""
    parsed = []
    monkeypatch.setattr(methods, "parse", lambda kind, *given: parsed.append(kind) or parse(kind, *given))
    unknown = b"\xfa\x3f"  # field 1023, which follows with its length
    for name, most in (("Flush", limits.SMALL_QUESTION_BYTES), ("RegisterSpans", limits.QUESTION_BYTES)):
        method, head = SHARD[name], len(unknown) + 4
        nbytes = most + 1 - head
        body = unknown + bytes([nbytes & 127 | 128, nbytes >> 7 & 127 | 128, nbytes >> 14 & 127 | 128, nbytes >> 21])
        long = altered(method, encode_request=lambda *_, body=body, nbytes=nbytes: body + bytes(nbytes))
        with connected(shard_methods(fails(AssertionError()))) as connection:
            with pytest.raises(LimitError, match=f"{name} of {most + 1} bytes.*in several calls"):
                connection.ask(long, None, soon())
            assert not parsed
            with pytest.raises(LimitError):
                method.decode_question(bytes(most + 1), 3)
        parsed.clear()


def test_who_is_asked_has_the_question_decoded_and_is_told_of_whom_it_is() -> None:
    """Each once: a sound one and another."""
    asked: list[Tenant] = []

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        asked.append(tenant)
        assert build(CALL).question == FLUSH
        return Done()

    handlers = unary_handlers(SHARD, ask)
    with connected(handlers, "mine", Authenticator(TENANTS, "", epoch_of=of_a_shard)) as connection:
        connection.ask(SHARD["Flush"], FLUSH, soon())
        with pytest.raises(ProtocolError):
            connection.ask(altered(SHARD["Flush"], encode_request=lambda *_: b"\xff\xff"), None, soon())
    assert asked == [Tenant("me"), Tenant("me")]


def test_a_server_may_accept_shorter_messages_than_others() -> None:
    long, longer = (altered(SHARD["Ping"], encode_request=lambda *_, n=n: b"?" * n) for n in (1_000, 1_001))
    with connected(shard_methods(fails(AssertionError())), message_bytes=1_000) as connection:
        with pytest.raises(ProtocolError, match="not a valid PingRequest"):
            connection.ask(long, None, soon())
        with pytest.raises(LimitError, match="exceeds a size limit"):
            connection.ask(longer, None, soon())


# ------------------------------------------------------------------------------------------ listening and closing


def test_a_port_where_something_listens_is_a_config_error() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{port}.*another port \\(server.report_port\\)"):
            GrpcServer({}, OPEN, HOST, port, threads=2, setting="server.report_port")


def test_two_servers_never_share_a_port() -> None:
    first = GrpcServer({}, OPEN, HOST, 0, threads=2)
    first.start()
    with pytest.raises(ConfigError, match=str(first.port)):
        GrpcServer({}, OPEN, HOST, first.port, threads=2)
    first.close()
    again = GrpcServer({}, OPEN, HOST, first.port, threads=2)
    assert again.port == first.port, "the port is free when its server has closed"
    again.close()


@pytest.mark.parametrize("host", ["192.0.2.1", ""])
def test_an_address_that_is_not_of_this_machine_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        GrpcServer({}, OPEN, host, 0, threads=2)


def test_a_server_that_was_closed_is_gone() -> None:
    server = GrpcServer(shard_methods(lambda build, wait_s, tenant: Done()), OPEN, HOST, 0, threads=2)
    server.start()
    connection = Connection(server.address)
    connection.wait_ready(soon())
    server.close(grace_s=0)
    server.close(grace_s=0)
    with pytest.raises(Unavailable, match="shard_lost"):
        connection.ask(SHARD["Ping"], None, soon())
    with pytest.raises(Unreachable, match=server.address):
        connection.wait_ready(Deadline.after_ms(50))
    connection.close()


def test_closing_does_not_wait_for_questions_without_an_answer() -> None:
    asked, answer = threading.Event(), threading.Event()

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        asked.set()
        assert answer.wait(BOUND_S)
        return Done()

    troubles: list[Unavailable] = []

    def worker() -> None:
        try:
            connection.ask(SHARD["Flush"], FLUSH, soon())
        except Unavailable as trouble:
            troubles.append(trouble)

    server = GrpcServer(shard_methods(ask), OPEN, HOST, 0, threads=2)
    server.start()
    connection = Connection(server.address)
    thread = threading.Thread(target=worker)
    thread.start()
    assert asked.wait(BOUND_S)
    server.close(grace_s=0)
    assert not answer.is_set(), "closed while the question was still open"
    thread.join(BOUND_S)
    assert [trouble.miss.reason for trouble in troubles] == [MissReason.SHARD_LOST]
    answer.set()
    connection.close()


def test_a_connection_that_was_closed_is_trouble_and_no_crash() -> None:
    with connected(shard_methods(lambda build, wait_s, tenant: Done())) as connection:
        connection.close()
        with pytest.raises(Unavailable, match="closed"):
            connection.ask(SHARD["Ping"], None, soon())


# ---------------------------------------------------------------------------------------- strangers and tenants


@contextmanager
def headers_only(address: str, token: str | None, count: int) -> Iterator[None]:
    """Calls of a unary method whose message is never sent."""
    with grpc.insecure_channel(address) as channel:
        flush = channel.stream_unary(SHARD["Flush"].path, request_serializer=identity, response_deserializer=identity)
        metadata = (*METADATA, ("authorization", f"Bearer {token}")) if token else METADATA
        stop = threading.Event()

        def messages() -> Iterator[bytes]:
            stop.wait(BOUND_S)
            yield from ()

        calls = [flush.future(messages(), metadata=metadata, timeout=BOUND_S) for _ in range(count)]
        try:
            yield
        finally:
            stop.set()
            for call in calls:
                call.cancel()


def test_a_server_says_why_it_refuses_to_a_bounded_number_of_calls_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(server, "_REFUSALS", 2)
    auth = Authenticator(TENANTS, "", epoch_of=of_a_shard)
    with connected(shard_methods(fails(AssertionError())), "unknown", auth) as stranger:
        for _ in range(2):
            with pytest.raises(CredentialError, match="does not know this token"):
                stranger.ask(SHARD["Flush"], FLUSH, soon())
        with pytest.raises(ProtocolError, match="has refused too many calls in this second to say why"):
            stranger.ask(SHARD["Flush"], FLUSH, soon())
        now[0] = 8.0
        with pytest.raises(CredentialError):
            stranger.ask(SHARD["Flush"], FLUSH, soon())


@pytest.mark.parametrize("token", [None, "unknown", "yours"])
def test_calls_without_a_message_take_no_thread_from_another_tenant(token: str | None) -> None:
    auth = Authenticator(TENANTS, "", epoch_of=of_a_shard)
    handlers = unary_handlers(SHARD, lambda build, wait_s, tenant: Done())
    with connected(handlers, "mine", auth) as mine, headers_only(mine.address, token, 64):
        for _ in range(16):
            assert mine.ask(SHARD["Flush"], FLUSH, soon()) == Done()


def test_a_stranger_is_refused_before_its_message_is_read() -> None:
    auth = Authenticator(TENANTS, "", epoch_of=of_a_shard)
    with connected({SHARD["Flush"].path: unread()}, None, auth) as stranger, pytest.raises(CredentialError):
        stranger.ask(SHARD["Flush"], FLUSH, soon())


def unread() -> RpcHandler:
    def handle(caller: Caller, data: bytes, context: object) -> bytes:
        raise AssertionError("the message was read")

    return RpcHandler("unary_unary", handle)


def test_a_tenant_with_too_many_calls_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CALLS_WAITING", 0)
    auth = Authenticator(TENANTS, "", epoch_of=of_a_shard)
    began, go = threading.Semaphore(0), threading.Event()

    def ask(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        if build(CALL).tenant == "you":
            began.release()
            go.wait(BOUND_S)
        return Done()

    handlers = unary_handlers(SHARD, ask)
    with connected(handlers, "yours", auth) as yours, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(yours.ask, SHARD["Flush"], FLUSH, soon()) for _ in range(4)]
        for _ in running:
            assert began.acquire(timeout=BOUND_S)
        with pytest.raises(Unavailable, match="too many calls"):
            yours.ask(SHARD["Flush"], FLUSH, soon())
        mine = Connection(yours.address, Credentials("mine"))
        assert mine.ask(SHARD["Flush"], FLUSH, soon()) == Done()
        mine.close()
        go.set()
        assert [call.result() for call in running] == [Done()] * 4


def test_the_cluster_s_own_calls_do_not_wait_for_a_tenant_s() -> None:
    auth = Authenticator(TENANTS, "", epoch_of=of_a_shard)
    handlers = unary_handlers(SHARD, lambda build, wait_s, tenant: Done(), shared=frozenset({"Flush"}))
    with connected(handlers, SECRET, auth) as shard, headers_only(shard.address, "yours", 64):
        assert shard.ask(SHARD["Flush"], FLUSH, soon()) == Done()


def sockets(address: str, count: int) -> list[socket.socket]:
    host, port = address.rsplit(":", 1)
    return [socket.create_connection((host, int(port)), timeout=BOUND_S) for _ in range(count)]


def test_connections_beyond_the_limit_are_closed_and_those_before_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 4)
    with connected(shard_methods(lambda build, wait_s, tenant: Done())) as connection:
        connection.wait_ready(soon())
        opened = sockets(connection.address, 8)
        try:
            refused = [one for one in opened if not one.recv(1)]  # an accepted one is greeted
            assert len(refused) == 5, "one connection is the client's"
            assert connection.ask(SHARD["Ping"], None, soon()) == Done()
        finally:
            for one in opened:
                one.close()
