"""Every RPC at every port by every kind of credential, in the clear and within TLS: who is let through to the core, and
in whose name. The rows come from the tables of methods, so that a new one is among them at once.

That a tenant's question about another tenant's namespace is refused is tested in tests/core; here each credential is
held to its own tenant. All ports, those of gRPC among them, are in test_port_matrix.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from kvcluster.actors import coordinator as coordinator_actor
from kvcluster.actors import shard as shard_actor
from kvcluster.core.ids import CLUSTER, Caller, CallId, Epoch, Tenant
from kvcluster.core.messages import Done, Reply, Request
from kvcluster.core.messages.reports import IssueCredential, IssuedCredential
from kvcluster.errors import CredentialError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime.auth import COMMANDS, NO_TENANT, Authenticator, Tokens, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_credentials import CredentialIssuer
from kvcluster.transport.grpc_pages import READ, WRITE
from kvcluster.transport.rpc import RpcHandler, identity
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.versions import METADATA, VERSIONS_KEY
from tests.authority import Authority, Issued
from tests.transport.peers import SECRET

BOUND_S = 20.0
EPOCH = Epoch(0)
"""That of an empty report."""

BOOTSTRAP = "of the cluster"
ME, YOU = Tenant("me"), Tenant("you")
KNOWN = {digest("mine"): ME, digest("yours"): YOU, digest("operator's"): ME, digest("no tenant's"): NO_TENANT}
OPERATORS = frozenset({digest("operator's"), digest("no tenant's")})
TOKENS = {
    "nothing": None,
    "an empty token": "",
    "garbage": "gar bage",
    "almost": "min",
    "revoked": "my last one",
    "a digest": digest("mine"),
    "a shard's that was made up": "shard.1.0.0000",
    "right": "mine",
    "of another tenant": "yours",
    "operator": "operator's",
    "operator of no tenant": "no tenant's",
    "shard": SECRET,
    "cluster": BOOTSTRAP,
}
WHO = {
    "right": ME,
    "of another tenant": YOU,
    "operator": ME,
    "operator of no tenant": NO_TENANT,
    "shard": CLUSTER,
    "cluster": CLUSTER,
}
METHODS = [*COORDINATOR.values(), *SHARD.values()]
PORTS = ("workers", "reports", "shard")
REPORTS, ISSUING = coordinator_actor._REPORTS, coordinator_actor._ISSUING


class Passed:
    """What got through to the cores: by which tenant."""

    def __init__(self) -> None:
        self.tenants: list[Tenant] = []

    def ask(self, build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        self.tenants.append(build(CallId(1)).tenant)
        return Done()

    def stream(self, caller: Caller, request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.tenants.append(caller.tenant)
        yield b""


class Issuer(CredentialIssuer):
    """Notes that it was asked."""

    def __init__(self, passed: Passed) -> None:
        super().__init__()
        self._passed = passed

    def issue(self, question: IssueCredential) -> IssuedCredential:
        raise AssertionError("an empty message has no proof")


@contextmanager
def serving(
    passed: Passed, issued: Issued | None = None, *, client_certificates: bool = False, revoked: str = ""
) -> Iterator[dict[str, str]]:
    """The three gRPC servers of a cluster, with the methods that the actors give them; the address of each."""
    for_workers, for_shards = coordinator_actor.handlers_of(passed.ask, Issuer(passed))
    shard = unary_handlers(SHARD, passed.ask, shared=shard_actor._ALSO_FOR_SHARDS)
    shard |= {READ: RpcHandler("unary_stream", passed.stream), WRITE: RpcHandler("unary_stream", passed.stream)}
    auth = Authenticator(None, "" if issued else BOOTSTRAP, epoch_of=lambda token: EPOCH if token == SECRET else None)
    auth._fixed = Tokens(KNOWN, OPERATORS, frozenset({revoked}))
    with ExitStack() as house:
        addresses: dict[str, str] = {}
        for port, handlers in zip(PORTS, (for_workers, for_shards, shard), strict=True):
            tls = {}
            if issued is not None:
                tls["client_certificates"] = client_certificates or port == "reports"
                tls["certificates"] = issued.certificates()
            server = GrpcServer(handlers, auth, "127.0.0.1", 0, 2, **tls)
            server.start()
            house.callback(server.close, grace_s=0)
            addresses[port] = server.address
        yield addresses


@contextmanager
def channels(addresses: dict[str, str], shows: grpc.ChannelCredentials | None = None) -> Iterator[dict[str, Any]]:
    """A channel to each server, within TLS if it shows something."""
    with ExitStack() as house:
        yield {
            port: house.enter_context(
                grpc.insecure_channel(address) if shows is None else grpc.secure_channel(address, shows)
            )
            for port, address in addresses.items()
        }


def shown_by(issued: Issued, ca: Path | str = "") -> grpc.ChannelCredentials:
    """What a client with this certificate shows, which trusts its authority or `ca`."""
    files = issued.files
    return grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (ca or files.ca, files.key, files.cert)))


def code(channel: grpc.Channel, path: str, token: str | None, *, streams: bool = False) -> grpc.StatusCode:
    """The status of a call with this token and an empty message, which few methods take."""
    metadata = (*METADATA, ("authorization", f"Bearer {token}")) if token is not None else METADATA
    if streams:
        replies = channel.unary_stream(path, request_serializer=identity, response_deserializer=identity)
        try:
            list(replies(b"", timeout=BOUND_S, metadata=metadata))
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK
    ask = channel.unary_unary(path, request_serializer=identity, response_deserializer=identity)
    try:
        ask(b"", timeout=BOUND_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def port_of(method: Method) -> str:
    """The only port at which the method is served."""
    if COORDINATOR.get(method.name) is not method:
        return "shard"
    return "reports" if method.name in REPORTS | ISSUING else "workers"


def may(method: Method, credential: str) -> bool:
    """Whether this credential may call the method."""
    if credential not in WHO:
        return False
    of_coordinator = COORDINATOR.get(method.name) is method
    if credential == "cluster":
        return of_coordinator and method.name in ISSUING
    for_shards = of_coordinator and method.name in REPORTS | ISSUING
    if credential == "shard":
        return for_shards or (not of_coordinator and method.name in shard_actor._ALSO_FOR_SHARDS)
    if credential == "operator of no tenant":
        return of_coordinator and method.name in COMMANDS
    if of_coordinator and method.name in coordinator_actor._FOR_OPERATORS:
        return credential == "operator"
    return not for_shards


def check(reached: dict[str, Any], token: str | None, credential: str) -> None:
    """Calls every method at every port, and compares who is refused."""
    for method in METHODS:
        said = code(reached[port_of(method)], method.path, token)
        refused = said is grpc.StatusCode.UNAUTHENTICATED
        assert refused == (not may(method, credential)), f"{method.path}: {said}"
        for port in set(PORTS) - {port_of(method)}:
            said = code(reached[port], method.path, token)
            assert said is grpc.StatusCode.UNIMPLEMENTED, f"{method.path} at the port of {port}: {said}"


@pytest.mark.parametrize("credential", TOKENS)
def test_each_method_lets_through_whom_it_is_for_and_no_other(credential: str) -> None:
    passed = Passed()
    with serving(passed) as addresses, channels(addresses) as reached:
        check(reached, TOKENS[credential], credential)
    assert set(passed.tenants) <= {WHO.get(credential)}, "in no other name"


@pytest.mark.parametrize("credential", TOKENS)
@pytest.mark.parametrize("path", [READ, WRITE])
def test_page_streams_let_through_whom_the_file_names_and_the_shards(path: str, credential: str) -> None:
    passed = Passed()
    with serving(passed) as addresses, channels(addresses) as reached:
        said = code(reached["shard"], path, TOKENS[credential], streams=True)
    allowed = credential in WHO and credential not in ("cluster", "operator of no tenant")
    assert passed.tenants == ([WHO[credential]] if allowed else [])
    assert said is (grpc.StatusCode.OK if allowed else grpc.StatusCode.UNAUTHENTICATED)


# ------------------------------------------------------------------------------------------------ within TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def servers(authority: Authority) -> Issued:
    return authority.issue("server", "coordinator", "shard")


@pytest.mark.parametrize("credential", [name for name in TOKENS if name != "cluster"])
def test_within_tls_tokens_count_as_they_do_in_the_clear(
    credential: str, authority: Authority, servers: Issued
) -> None:
    """At the port for shards, which asks for a certificate, with one that says nothing."""
    passed = Passed()
    shows = shown_by(authority.issue(f"plain-{credential}", names=("client.example",)))
    with serving(passed, servers) as addresses, channels(addresses, shows) as reached:
        check(reached, TOKENS[credential], credential)
    assert set(passed.tenants) <= {WHO.get(credential)}


def test_within_tls_the_secret_of_the_cluster_is_worth_nothing(authority: Authority, servers: Issued) -> None:
    passed = Passed()
    shows = shown_by(authority.issue("plain", names=("client.example",)))
    with serving(passed, servers) as addresses, channels(addresses, shows) as reached:
        check(reached, BOOTSTRAP, "garbage")
    assert not passed.tenants


class Shown(NamedTuple):
    """A client certificate, and as whom it counts: a name of WHO, or "" for nobody."""

    roles: tuple[str, ...]
    counts_as: str
    cluster: str = "kvcluster"


CERTIFICATES = {
    "right": Shown(("tenant/me",), "right"),
    "of another tenant": Shown(("tenant/you",), "of another tenant"),
    "operator": Shown(("tenant/me", "operator"), "operator"),
    "operator of no tenant": Shown(("operator",), "operator of no tenant"),
    "shard": Shown(("shard",), "cluster"),
    "wrong role": Shown(("coordinator",), ""),
    "no role": Shown((), ""),
    "two tenants": Shown(("tenant/me", "tenant/you"), ""),
    "no name of a tenant": Shown(("tenant/-",), ""),
    "of another cluster": Shown(("tenant/me", "operator", "shard"), "", "other"),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_certificate_counts_as_the_role_that_it_names(name: str, authority: Authority, servers: Issued) -> None:
    passed, shown = Passed(), CERTIFICATES[name]
    mine = authority.issue(f"c-{name}".replace(" ", "-"), *shown.roles, names=("c.example",), cluster=shown.cluster)
    with (
        serving(passed, servers, client_certificates=True) as addresses,
        channels(addresses, shown_by(mine)) as reached,
    ):
        check(reached, None, shown.counts_as)
        said = code(reached["shard"], READ, None, streams=True)
    pages = shown.counts_as in ("right", "of another tenant", "operator")
    assert said is (grpc.StatusCode.OK if pages else grpc.StatusCode.UNAUTHENTICATED)
    assert set(passed.tenants) <= {WHO.get(shown.counts_as)}


def test_a_certificate_that_was_revoked_counts_as_nobodys(authority: Authority, servers: Issued) -> None:
    passed = Passed()
    mine = authority.issue("lost", "tenant/me", "operator", "shard", names=("c.example",))
    with (
        serving(passed, servers, client_certificates=True, revoked=mine.fingerprint) as addresses,
        channels(addresses, shown_by(mine)) as reached,
    ):
        check(reached, None, "")
    assert not passed.tenants


def test_without_a_token_file_a_token_beside_a_certificate_makes_nobody_of_it(
    authority: Authority, servers: Issued
) -> None:
    """It was an operator once, whatever it said."""
    passed, auth = Passed(), Authenticator(None, "", certified=True)
    for token in ("anything", "mine"):
        with pytest.raises(CredentialError, match="knows no tokens"):
            auth.caller(token)
    with pytest.raises(CredentialError):
        auth.worker(None)
    assert not auth.one_tenant, "so shared memory is not offered"
    assert not passed.tenants


@pytest.mark.parametrize("role", ["tenant/me", "shard"])
def test_no_certificate_holds_a_thread_of_others_by_a_message_that_does_not_come(
    role: str, authority: Authority, servers: Issued
) -> None:
    """Those of another cluster and, at the port for shards, those of tenants hold none at all."""
    ends, metadata = threading.Event(), METADATA

    def silence() -> Iterator[bytes]:
        ends.wait(BOUND_S)
        yield from ()

    foreign = authority.issue("foreign", "shard", "tenant/me", names=("c.example",), cluster="other")
    tenant = authority.issue("holder", "tenant/you", names=("c.example",))
    honest = authority.issue("honest", role, names=("c.example",))
    passed = Passed()
    with serving(passed, servers, client_certificates=True) as addresses, ExitStack() as house:
        for holder, port, path in (
            (foreign, "workers", COORDINATOR["GetStatus"].path),
            (foreign, "reports", COORDINATOR["IssueCredential"].path),
            (tenant, "reports", COORDINATOR["IssueCredential"].path),
        ):
            reached = house.enter_context(channels(addresses, shown_by(holder)))[port]
            call = reached.stream_unary(path, request_serializer=identity, response_deserializer=identity)
            held = [call.future(silence(), metadata=metadata) for _ in range(40)]
            for one in held:
                assert one.exception(BOUND_S).code() is grpc.StatusCode.UNAUTHENTICATED
        with channels(addresses, shown_by(honest)) as reached:
            check(reached, None, "right" if role == "tenant/me" else "cluster")
        ends.set()


def test_a_certificate_of_a_shard_reports_nothing_in_an_older_version_either(
    authority: Authority, servers: Issued
) -> None:
    passed = Passed()
    shard = authority.issue("old-shard", "shard", names=("c.example",))
    older = ((VERSIONS_KEY, f"{PROTOCOL_VERSION - 1} {PROTOCOL_VERSION - 1} 0.2.0"),)
    with serving(passed, servers) as addresses, channels(addresses, shown_by(shard)) as reached:
        for name in REPORTS:
            path = COORDINATOR[name].path
            ask = reached["reports"].unary_unary(path, request_serializer=identity, response_deserializer=identity)
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=BOUND_S, metadata=older)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not passed.tenants


def refused_connections(addresses: dict[str, str], shows: grpc.ChannelCredentials | None) -> None:
    """No method of any port is answered."""
    with channels(addresses, shows) as reached:
        for method in METHODS:
            said = code(reached[port_of(method)], method.path, "mine")
            assert said is grpc.StatusCode.UNAVAILABLE, f"{method.path}: {said}"


@pytest.mark.parametrize("how", ["in the clear", "no certificate", "another authority's", "expired"])
def test_who_cannot_show_a_certificate_that_holds_makes_no_connection(
    how: str, authority: Authority, servers: Issued, tmp_path: Path
) -> None:
    passed = Passed()
    other = Authority(tmp_path / "other", "other").issue("me", "tenant/me", "operator")
    shows = {
        "in the clear": lambda: None,
        "no certificate": lambda: grpc.ssl_channel_credentials(authority.ca.read_bytes()),
        "another authority's": lambda: shown_by(other, authority.ca),
        "expired": lambda: shown_by(authority.issue("old", "tenant/me", "operator", days=-0.5)),
    }[how]()
    with serving(passed, servers, client_certificates=True) as addresses:
        refused_connections(addresses, shows)
    assert not passed.tenants


@pytest.mark.parametrize("how", ["another authority's", "another name", "expired"])
def test_who_connects_sends_nothing_to_a_server_whose_certificate_does_not_hold(
    how: str, authority: Authority, tmp_path: Path
) -> None:
    passed = Passed()
    issued = {
        "another authority's": lambda: Authority(tmp_path / "other", "other").issue("s", "coordinator", "shard"),
        "another name": lambda: authority.issue("s", "coordinator", "shard", names=("127.0.0.2", "a.example")),
        "expired": lambda: None,
    }[how]()
    shows = shown_by(authority.issue("honest", "tenant/me"), authority.ca)
    if issued is None:  # it has expired while it was in use
        issued = authority.issue("s", "coordinator", "shard", days=1)
        certificates = issued.certificates()
        loaded, expired = certificates.now(), authority.issue("s", "coordinator", "shard", days=-0.5)
        loaded.cert, loaded.key = (Path(path).read_bytes() for path in (expired.files.cert, expired.files.key))
        server = GrpcServer(
            {}, Authenticator({}, ""), "127.0.0.1", 0, 2, certificates=certificates, client_certificates=False
        )
        server.start()
        try:
            refused_connections(dict.fromkeys(PORTS, server.address), shows)
        finally:
            server.close(grace_s=0)
        return
    with serving(passed, issued) as addresses:
        refused_connections(addresses, shows)
    assert not passed.tenants


def test_the_methods_for_shards_and_operators_exist() -> None:
    assert set(COORDINATOR) >= REPORTS | ISSUING | coordinator_actor._FOR_OPERATORS
    assert set(SHARD) >= shard_actor._ALSO_FOR_SHARDS
