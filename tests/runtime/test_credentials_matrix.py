"""Every RPC at every port by every kind of credential: who is let through to the core, and in whose name. The rows
come from the tables of methods, so that a new one is among them at once.

That a tenant's question about another tenant's namespace is refused is tested in tests/core; here each credential is
held to its own tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from kvcluster.actors import coordinator as coordinator_actor
from kvcluster.actors import shard as shard_actor
from kvcluster.core.ids import CLUSTER, Caller, CallId, Tenant
from kvcluster.core.messages import Done, Reply, Request
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.transport.grpc_pages import READ, WRITE
from kvcluster.transport.rpc import RpcHandler, identity
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.versions import METADATA

BOUND_S = 20.0
SECRET = "between the actors"
ME, YOU = Tenant("me"), Tenant("you")
KNOWN = {digest("mine"): ME, digest("yours"): YOU, digest("operator's"): ME}
CREDENTIALS = {
    "nothing": None,
    "an empty token": "",
    "garbage": "gar bage",
    "almost": "min",
    "revoked": "my last one",
    "a digest": digest("mine"),
    "right": "mine",
    "of another tenant": "yours",
    "operator": "operator's",
    "cluster": SECRET,
}
WHO = {"right": ME, "of another tenant": YOU, "operator": ME, "cluster": CLUSTER}
METHODS = [*COORDINATOR.values(), *SHARD.values()]
PORTS = ("workers", "reports", "shard")
REPORTS = coordinator_actor._REPORTS


class Passed:
    """What got through to the cores: method and tenant."""

    def __init__(self) -> None:
        self.tenants: list[Tenant] = []

    def ask(self, build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        self.tenants.append(build(CallId(1)).tenant)
        return Done()

    def stream(self, caller: Caller, request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.tenants.append(caller.tenant)
        yield b""


@contextmanager
def serving(passed: Passed) -> Iterator[dict[str, grpc.Channel]]:
    """The three gRPC servers of a cluster, with the methods that the actors give them; a channel to each."""
    for_workers, for_shards = coordinator_actor.handlers_of(passed.ask)
    shard = unary_handlers(SHARD, passed.ask, shared=shard_actor._ALSO_FOR_SHARDS)
    shard |= {READ: RpcHandler("unary_stream", passed.stream), WRITE: RpcHandler("unary_stream", passed.stream)}
    auth = Authenticator(KNOWN, SECRET, frozenset({digest("operator's")}))
    with ExitStack() as house:
        channels: dict[str, grpc.Channel] = {}
        for port, handlers in zip(PORTS, (for_workers, for_shards, shard), strict=True):
            server = GrpcServer(handlers, auth, "127.0.0.1", 0, 2)
            server.start()
            house.callback(server.close, grace_s=0)
            channels[port] = house.enter_context(grpc.insecure_channel(server.address))
        yield channels


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
    return "reports" if method.name in REPORTS else "workers"


def may(method: Method, credential: str) -> bool:
    """Whether this credential may call the method."""
    if credential not in WHO:
        return False
    of_coordinator = COORDINATOR.get(method.name) is method
    for_shards = of_coordinator and method.name in REPORTS
    if credential == "cluster":
        return for_shards or (not of_coordinator and method.name in shard_actor._ALSO_FOR_SHARDS)
    if of_coordinator and method.name in coordinator_actor._FOR_OPERATORS:
        return credential == "operator"
    return not for_shards


@pytest.mark.parametrize("credential", CREDENTIALS)
def test_each_method_lets_through_whom_it_is_for_and_no_other(credential: str) -> None:
    passed = Passed()
    with serving(passed) as channels:
        for method in METHODS:
            said = code(channels[port_of(method)], method.path, CREDENTIALS[credential])
            refused = said is grpc.StatusCode.UNAUTHENTICATED
            assert refused == (not may(method, credential)), f"{method.path}: {said}"
            for port in set(PORTS) - {port_of(method)}:
                said = code(channels[port], method.path, CREDENTIALS[credential])
                assert said is grpc.StatusCode.UNIMPLEMENTED, f"{method.path} at the port of {port}: {said}"
    assert set(passed.tenants) <= {WHO.get(credential)}, "in no other name"


@pytest.mark.parametrize("credential", CREDENTIALS)
@pytest.mark.parametrize("path", [READ, WRITE])
def test_page_streams_let_through_whom_the_file_names_and_the_cluster(path: str, credential: str) -> None:
    passed = Passed()
    with serving(passed) as channels:
        said = code(channels["shard"], path, CREDENTIALS[credential], streams=True)
    assert passed.tenants == ([WHO[credential]] if credential in WHO else [])
    assert said is (grpc.StatusCode.OK if credential in WHO else grpc.StatusCode.UNAUTHENTICATED)


def test_the_methods_for_shards_and_operators_exist() -> None:
    assert set(COORDINATOR) >= REPORTS | coordinator_actor._FOR_OPERATORS
    assert set(SHARD) >= shard_actor._ALSO_FOR_SHARDS
