"""A gRPC server over a table of methods: authenticates every call, decodes it, asks a driver, encodes the reply.

It uses a thread for each call, because page streams block and the cores answer at once. A call that is wrong is
answered with a status that says whose fault it is: UNAUTHENTICATED, FAILED_PRECONDITION (a different protocol version),
INVALID_ARGUMENT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

from kvcluster.core.messages import Done, Reply
from kvcluster.errors import ConfigError, CredentialError, KVClusterError
from kvcluster.runtime.auth import Authenticator, Caller
from kvcluster.transport.base import Unavailable
from kvcluster.transport.rpc import SERVER_OPTIONS, host_and_port, identity, status_of
from kvcluster.wire.methods import Method

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Ask = Callable[[Callable[[Any], Any], float], Reply]
_LONGEST_S = 60.0
"""The longest deadline of a call, and that of a caller without one: no thread waits for ever."""


class _Table(grpc.GenericRpcHandler):
    """Looks methods up by path."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    def service(self, details: grpc.HandlerCallDetails) -> Handler | None:
        return self._handlers.get(details.method)


class GrpcServer:
    """Listens on `host:port` until `close`. Port 0 takes a free port; the attribute `port` is the actual one. Raises
    ConfigError if it cannot listen."""

    def __init__(self, handlers: Mapping[str, Handler], host: str, port: int, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvcluster-rpc")
        self._server = grpc.server(self._pool, handlers=[_Table(handlers)], options=SERVER_OPTIONS)
        self.host = host
        try:
            self.port = self._server.add_insecure_port(host_and_port(host, port))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            self._pool.shutdown()
            raise ConfigError(
                f"cannot listen on {host}:{port}: the port is in use, or the address is not this machine's. "
                "Choose another port with --port (0 takes a free one)"
            )

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.port)

    def start(self) -> None:
        self._server.start()

    def close(self, grace_s: float = 0.5) -> None:
        """Refuses new calls and ends running ones after the grace period. May be called repeatedly.

        A thread that still waits for an answer ends when its driver is closed, which the caller does next.
        """
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=False)


class Gate:
    """Turns the metadata of a call into its caller."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Returns the caller. Aborts the call if the credential is not known."""
        token = None
        for key, value in context.invocation_metadata():
            if key == "authorization" and str(value).startswith("Bearer "):
                token = str(value)[len("Bearer ") :]
        try:
            return self._authenticator.caller(token)
        except CredentialError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise  # abort has raised already; a type checker does not know that


def unary_handlers(
    methods: Mapping[str, Method],
    gate: Gate,
    ask: Ask,
    internal: frozenset[str] = frozenset(),
    *,
    operators: frozenset[str] = frozenset(),
    shared: frozenset[str] = frozenset(),
) -> dict[str, Handler]:
    """Returns a handler for each method, by its path.

    Only shards of the cluster may call the methods named in `internal`; shards and workers those in `shared`; workers
    with an operator's credential those in `operators`; and any worker all others.
    """

    def why_not(name: str, caller: Caller) -> str | None:
        if caller.internal != (name in internal) and not (caller.internal and name in shared):
            return f"{name} is not for this credential"
        if name in operators and not caller.operator:
            return (
                f"{name} is for operators, and this token is not an operator's: its line in the token file must end in "
                "the word operator (`kvcluster token --tenant NAME --operator` makes one)"
            )
        return None

    return {
        method.path: grpc.unary_unary_rpc_method_handler(_unary(method, gate, ask, why_not), identity, identity)
        for method in methods.values()
    }


def _unary(
    method: Method, gate: Gate, ask: Ask, why_not: Callable[[str, Caller], str | None]
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def handle(data: bytes, context: grpc.ServicerContext) -> bytes:
        caller = gate.caller(context)
        refusal = why_not(method.name, caller)
        if refusal is not None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        wait_s = min(context.time_remaining(), _LONGEST_S)
        try:
            if method.name == "Ping":
                method.decode_question(data)
                return method.encode_reply(Done())
            # Decoded once, before the core: malformed input never reaches it.
            reply = ask(lambda call: method.decode_request(data, call, caller.tenant), wait_s)
            return method.encode_reply(reply)
        except (Unavailable, KVClusterError) as error:
            context.abort(status_of(error), str(error))
        raise AssertionError("abort raises")

    return handle
