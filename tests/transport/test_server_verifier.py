"""What a gRPC client sends to a server with a certificate of its authority and of the right name: to one of another
role nothing, at its first connection as at each later one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvcluster.core.ids import Attempt, Epoch, Holder, NamespaceId
from kvcluster.core.messages import GetStatus, ReadRequest, WriteRequest
from kvcluster.core.miss import MissReason
from kvcluster.errors import ProtocolError, Unreachable
from kvcluster.transport.base import Cancelled, Deadline, Unavailable
from kvcluster.transport.certificates import COORDINATOR, SHARD
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR as METHODS
from tests.authority import Authority, Issued
from tests.ports import free_port
from tests.waiting import eventually

BOUND_S = 20.0


def soon() -> Deadline:
    return Deadline.after_ms(BOUND_S * 1e3)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


class Server:
    """A gRPC server that knows no method, and keeps the tokens that it is sent. It shows these certificates, each at
    one handshake and the last at all that follow."""

    def __init__(self, port: int, *shown: Issued) -> None:
        self.tokens: list[str] = []
        self.handshakes = 0
        self._shown = [_configured(issued) for issued in shown]
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([_Keeps(self.tokens)])
        credentials = grpc.dynamic_ssl_server_credentials(self._shown[0], self._next)
        assert self._server.add_secure_port(f"127.0.0.1:{port}", credentials) == port
        self._server.start()

    def show(self, issued: Issued) -> None:
        """Shows this one from now on."""
        self._shown = [_configured(issued)]

    def _next(self) -> Any:
        self.handshakes += 1
        return self._shown.pop(0) if len(self._shown) > 1 else self._shown[0]

    def close(self) -> None:
        self._server.stop(0).wait()


class _Keeps(grpc.GenericRpcHandler):
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self._tokens += [str(value) for key, value in details.invocation_metadata if key == "authorization"]


def _configured(issued: Issued) -> Any:
    key, cert = (Path(path).read_bytes() for path in (issued.files.key, issued.files.cert))
    return grpc.ssl_server_certificate_configuration([(key, cert)])


@pytest.fixture
def house() -> Iterator[ExitStack]:
    with ExitStack() as house:
        yield house


def connected(house: ExitStack, authority: Authority, port: int, token: str = "mine") -> Connection:
    connection = Connection(f"127.0.0.1:{port}", Credentials(token, authority.client()))
    return house.enter_context(closing(connection))


def ask(connection: Connection) -> None:
    """Raises ProtocolError if the question reaches the server, which knows no method."""
    connection.ask(METHODS["GetStatus"], GetStatus(), soon())


def read(pages: GrpcPages) -> None:
    """As `ask`, by a load."""
    request = ReadRequest(NamespaceId(bytes(32)), Attempt(Holder(bytes(16)), 1), Epoch(1), ())
    for _ in pages.read(request, None, soon()):  # type: ignore[arg-type]
        """No page comes."""


def write(pages: GrpcPages) -> None:
    """As `ask`, by a store."""
    request = WriteRequest(NamespaceId(bytes(32)), Attempt(Holder(bytes(16)), 1), Epoch(1), ())
    pages.write(request, None, soon())  # type: ignore[arg-type]


def reaches(connection: Connection) -> bool:
    """Whether a question reaches a server."""
    try:
        ask(connection)
    except ProtocolError:
        return True
    except Unavailable:
        return False
    raise AssertionError("the server knows no method")


@pytest.mark.parametrize("role", ["tenant/me", "tenant/coordinator", "shard", "operator"])
def test_a_server_of_another_role_is_sent_no_token(authority: Authority, house: ExitStack, role: str) -> None:
    port = free_port()
    squatter = house.enter_context(closing(Server(port, authority.issue("squatter", role))))
    connection = connected(house, authority, port)
    for _ in range(2):
        with pytest.raises(Unavailable, match="is not a coordinator's"):
            ask(connection)
    assert squatter.tokens == []


def test_one_that_takes_the_port_of_a_coordinator_is_sent_none_and_the_next_coordinator_is(
    authority: Authority, house: ExitStack
) -> None:
    port = free_port()
    connection = connected(house, authority, port)
    with closing(Server(port, authority.issue("first", COORDINATOR))) as coordinator:
        assert reaches(connection) and coordinator.tokens == ["Bearer mine"]
    with closing(Server(port, authority.issue("squatter", "tenant/me"))) as squatter:
        eventually(lambda: squatter.handshakes > 2 or reaches(connection))
        assert squatter.tokens == []
    coordinator = house.enter_context(closing(Server(port, authority.issue("second", COORDINATOR))))
    eventually(lambda: reaches(connection))
    assert coordinator.tokens == ["Bearer mine"]


def test_one_that_shows_another_certificate_to_grpc_than_before_is_sent_no_token(
    authority: Authority, house: ExitStack
) -> None:
    port = free_port()
    coordinator, tenant = authority.issue("coordinator", COORDINATOR), authority.issue("tenant", "tenant/me")
    squatter = house.enter_context(closing(Server(port, coordinator, tenant)))
    assert not reaches(connected(house, authority, port))
    assert squatter.handshakes > 1 and squatter.tokens == []


@pytest.mark.parametrize("exchange", [read, write], ids=["load", "store"])
def test_a_shard_is_verified_as_a_shard(
    authority: Authority, house: ExitStack, exchange: Callable[[GrpcPages], None]
) -> None:
    port = free_port()
    server = house.enter_context(closing(Server(port, authority.issue("squatter", "tenant/me", "coordinator"))))
    pages = GrpcPages(f"127.0.0.1:{port}", Credentials("mine", authority.client()))
    house.enter_context(closing(pages))
    with pytest.raises(Unavailable, match="is not a shard's"):
        exchange(pages)
    assert server.tokens == []
    server.show(authority.issue("shard", SHARD))
    with pytest.raises(ProtocolError):
        exchange(pages)
    assert server.tokens == ["Bearer mine"]


@pytest.mark.parametrize("exchange", [read, write], ids=["load", "store"])
def test_no_call_fails_when_a_server_has_closed_the_connection_and_shows_a_renewed_certificate(
    authority: Authority, house: ExitStack, exchange: Callable[[GrpcPages], None]
) -> None:
    port = free_port()
    connection = connected(house, authority, port)
    pages = house.enter_context(closing(GrpcPages(f"127.0.0.1:{port}", Credentials("mine", authority.client()))))
    for name in ("first", "second"):
        with closing(Server(port, authority.issue(name, COORDINATOR, SHARD))) as server:
            assert reaches(connection)
            with pytest.raises(ProtocolError):
                exchange(pages)
            assert server.tokens == ["Bearer mine"] * 2


def test_a_server_that_says_nothing_keeps_a_call_until_its_deadline_and_those_that_are_ended_no_longer(
    authority: Authority, house: ExitStack
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = connected(house, authority, listening.getsockname()[1])
        with pytest.raises(Unavailable) as late:
            connection.ask(METHODS["GetStatus"], GetStatus(), Deadline.after_ms(50))
        assert late.value.miss.reason is MissReason.DEADLINE
        for end, kind in ((connection.cut_off, Cancelled), (connection.close, Unavailable)):
            with ThreadPoolExecutor(1) as aside:
                asked = aside.submit(ask, connection)

                def ended(asked: Future[None] = asked, end: Callable[[], None] = end) -> bool:
                    end()
                    return asked.done()

                eventually(ended)
                assert type(asked.exception()) is kind


def test_waiting_for_a_server_goes_on_until_one_of_the_role_is_there(authority: Authority, house: ExitStack) -> None:
    port = free_port()
    connection = connected(house, authority, port)
    with pytest.raises(Unreachable):
        connection.wait_ready(Deadline.after_ms(50))
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(connection.wait_ready, soon())
        with closing(Server(port, authority.issue("squatter", "tenant/me"))) as squatter:
            eventually(lambda: squatter.handshakes > 1)
            assert not waiting.done()
        house.enter_context(closing(Server(port, authority.issue("coordinator", COORDINATOR))))
        waiting.result(BOUND_S)
