"""A gRPC server over a table of methods: authenticates every call, decodes it, asks a driver, encodes the reply.

It uses a thread for each call, because page streams block and the cores answer at once. A call is authenticated from
its metadata before it gets a thread or its message is read, and each tenant has threads of its own: a stranger's call
costs no thread that an honest one needs, and a tenant's calls wait for no other tenant's. A call that is wrong is
answered with a status that says whose fault it is: UNAUTHENTICATED, FAILED_PRECONDITION (a different protocol version),
INVALID_ARGUMENT.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Done, Reply
from kvcluster.errors import ConfigError, CredentialError, KVClusterError
from kvcluster.runtime.auth import Authenticator, Caller
from kvcluster.transport.base import Unavailable
from kvcluster.transport.rpc import SERVER_OPTIONS, host_and_port, identity, status_of
from kvcluster.wire.methods import Method

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Ask = Callable[[Callable[[Any], Any], float], Reply]
T = TypeVar("T")
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_LONGEST_S = 60.0
"""The longest deadline of a call, and that of a caller without one: no thread waits for ever."""

_SHARES = 4
"""How many tenants get the full number of threads each. More than these share so many threads evenly."""

_FEWEST_THREADS = 2
"""The threads of one tenant however many there are, so that one slow call does not stop all others of the tenant."""


class _Threads(ThreadPoolExecutor):
    """The threads of one tenant, and a bounded queue of calls that wait for one of them."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._most = threads + limits.CALLS_WAITING
        self._calls = 0
        self._counting = threading.Lock()

    @property
    def full(self) -> bool:
        return self._calls >= self._most

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._counting:
            self._calls += 1
        future = super().submit(call, *args, **kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        with self._counting:
            self._calls -= 1


class _Table(grpc.GenericRpcHandler):
    """Looks methods up by path, and authenticates the call. gRPC asks it before it reads a message or takes a thread.

    A refused call is answered on a thread that serves nothing else. As a stream it does not wait for its message.
    """

    def __init__(self, handlers: Mapping[str, Handler], gate: Gate, threads: int) -> None:
        self._handlers = handlers
        self._gate = gate
        self._share = max(_FEWEST_THREADS, min(threads, _SHARES * threads // gate.tenants))
        self._tenants: dict[Tenant, _Threads] = {}
        self._refusing = _Threads(1, "kvcluster-rpc-refuse")

    def service(self, details: grpc.HandlerCallDetails) -> Handler | None:
        handler = self._handlers.get(details.method)
        if handler is None:
            return None
        try:
            tenant = self._gate.caller_of(details.invocation_metadata).tenant
        except CredentialError as error:
            return self._refuse(grpc.StatusCode.UNAUTHENTICATED, str(error))
        # gRPC calls this from one thread only.
        threads = self._tenants.get(tenant)
        if threads is None:
            threads = self._tenants[tenant] = _Threads(self._share, "kvcluster-rpc")
        if threads.full:
            return self._refuse(grpc.StatusCode.UNAVAILABLE, "too many calls with this token's tenant are under way")
        return _on(handler, threads)

    def close(self) -> None:
        for threads in (*self._tenants.values(), self._refusing):
            threads.shutdown(wait=False)

    def _refuse(self, code: grpc.StatusCode, why: str) -> Handler | None:
        """Returns a handler that answers with this status. None, which gRPC answers without a thread, if too many
        refusals wait."""

        def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort(code, why)
            raise AssertionError("abort raises")

        if self._refusing.full:
            return None
        return _on(grpc.stream_stream_rpc_method_handler(refuse, identity, identity), self._refusing)


def _on(handler: Handler, threads: ThreadPoolExecutor) -> Handler:
    """Returns this handler on these threads. gRPC finds them as an attribute of the function that it calls."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind))
    behavior: Any = partial(getattr(handler, kind))
    behavior.experimental_thread_pool = threads
    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, identity, identity)


class GrpcServer:
    """Listens on `host:port` until `close`. Port 0 takes a free port; the attribute `port` is the actual one. `threads`
    are the most of one tenant: it gets fewer where there are many. Raises ConfigError if it cannot listen."""

    def __init__(self, handlers: Mapping[str, Handler], gate: Gate, host: str, port: int, threads: int) -> None:
        self._table = _Table(handlers, gate, threads)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-rpc-unused")
        self._server = grpc.server(self._pool, handlers=[self._table], options=SERVER_OPTIONS)
        self.host = host
        try:
            self.port = self._server.add_insecure_port(host_and_port(host, port))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            self._close_threads()
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
        self._close_threads()

    def _close_threads(self) -> None:
        self._table.close()
        self._pool.shutdown(wait=False)


class Gate:
    """Turns the metadata of a call into its caller."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    @property
    def tenants(self) -> int:
        """How many tenants have credentials; at least 1."""
        return self._authenticator.tenants

    def caller_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Returns the caller whom this metadata names. Raises CredentialError if the credential is not known."""
        token = None
        for key, value in metadata:
            if key == "authorization" and str(value).startswith("Bearer "):
                token = str(value)[len("Bearer ") :]
        return self._authenticator.caller(token)

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Returns the caller. Aborts the call if the credential is not known."""
        try:
            return self.caller_of(context.invocation_metadata())
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
