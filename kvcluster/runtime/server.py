"""A gRPC server over a table of methods: authenticates every call, decodes it, asks a driver, encodes the reply.

It uses a thread for each call, because page streams block and the cores answer at once. A call is authenticated from
its metadata before it gets a thread or its message is read, and each tenant has threads of its own: a stranger's call
costs no thread that an honest one needs, and a tenant's calls wait for no other tenant's. Its version of the protocol
is compared then, too, and each answer names the versions that this server speaks (wire/versions.py). The status that
answers a wrong call names whose fault it is: UNAUTHENTICATED, FAILED_PRECONDITION (no version in common, or a malformed
message), INVALID_ARGUMENT.

A call without a token, where clients show certificates, is authenticated by that of its connection, which gRPC tells
only on a thread: these calls have threads of their own, which tenants share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc

from kvcluster.core import limits
from kvcluster.core.ids import Caller, CallId, Tenant
from kvcluster.core.messages import Done, Inventory, Reply, Report, Request
from kvcluster.core.tenant_shares import Shares
from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError, VersionError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime.audit_log import audited
from kvcluster.runtime.auth import COMMANDS, NO_TENANT, NOT_A_TENANT, ONLY_TO_ISSUE, Authenticator
from kvcluster.runtime.json_log import decided
from kvcluster.runtime.metric_samples import CallMetrics, OperatorFile, Refusal
from kvcluster.transport.addresses import host_and_port
from kvcluster.transport.base import TOO_MANY_CALLS, Unavailable
from kvcluster.transport.certificates import CertificateNames, Certificates, names_in_pem
from kvcluster.transport.rpc import RpcHandler, identity, server_options, status_of
from kvcluster.wire.methods import COORDINATOR, Method
from kvcluster.wire.versions import CLOCK_KEY, METADATA, OURS, agreed_version, versions_in

log = logging.getLogger(__name__)

_GrpcHandler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Ask = Callable[[Callable[[CallId], Any], float, Tenant], Reply]
"""As Driver.ask, of a message that is decoded."""

T = TypeVar("T")
_NO_CALL = CallId(0)
"""The call of a Ping, which no driver numbers."""

_LONGEST_S = 60.0
"""The longest deadline of a call, and that of a caller without one: no thread waits for ever."""

_SHARES = 4
"""How many tenants get the full number of threads each. More than these share so many threads evenly."""

_WITH_CLOCK = ("Ping", "Report")
"""Methods whose answers carry this machine's clock (Connection.clock), for `kvcluster doctor`."""

_IN_WORDS = {
    "Drain": "draining a shard",
    "SetPolicy": "changing the policy, or turning the cache off or on,",
    "Probe": "having the shards try one another",
}
"""What methods for operators do, in the words of those who run the commands."""

_COMMANDS = frozenset(COORDINATOR[name].path for name in COMMANDS)

_ISSUE = COORDINATOR["IssueCredential"].path
_RATE = f"{TOO_MANY_CALLS}: it is served again later"
_TOO_MANY = "too many calls with this token's tenant are under way"
_BOUND = 4_096
"""Handlers that are kept, each of one method for one caller."""

_REFUSALS = 64
"""Calls that a server refuses within a second with the reason why. Further ones get gRPC's own answer, that there is no
such method: it costs a fraction, and so many come from strangers."""

_FEWEST_THREADS = 2
"""The threads of one tenant however many there are, so that one slow call does not stop all others of the tenant."""


class _Threads(ThreadPoolExecutor):
    """The threads of one tenant, and a bounded queue of calls that wait for one of them. `calls`: how many calls are
    served or wait."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._most = threads + limits.CALLS_WAITING
        self.calls = 0
        self._counting = threading.Lock()

    @property
    def full(self) -> bool:
        return self.calls >= self._most

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._counting:
            self.calls += 1
        future = super().submit(call, *args, **kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        with self._counting:
            self.calls -= 1


class CallRates(Protocol):
    """How many calls of each tenant are served (tenant_rates.py)."""

    def admits(self, caller: Caller, method: str) -> bool:
        """Whether a call of the method of that name may be served now."""


class _Table(grpc.GenericRpcHandler):
    """Looks methods up by path, and authenticates the call. gRPC asks it, from one thread, before it reads a message or
    takes a thread.

    A refused call is answered on a thread that serves nothing else. As a stream it does not wait for its message.
    `certified`: clients show certificates.
    """

    def __init__(
        self,
        handlers: Mapping[str, RpcHandler],
        authenticator: Authenticator,
        threads: int,
        metrics: CallMetrics,
        rates: CallRates | None,
        *,
        certified: bool,
    ) -> None:
        self._metrics = metrics
        self._rates = rates
        self.refusing = _Threads(1, "kvcluster-rpc-refuse")
        self._certified = _Threads(_SHARES * threads, "kvcluster-rpc-certified") if certified else None
        self._certified_calls = Shares(_SHARES * threads)
        self._counting = threading.Lock()
        self._handlers = handlers
        self._authenticator = authenticator
        self._most = threads
        self._second = self._refused = 0
        self._threads: dict[Tenant, _Threads] = {}
        self._bound: dict[tuple[str, Caller], _GrpcHandler] = {}
        metrics.watch_file(OperatorFile.TOKENS, authenticator.trouble)
        metrics.watch(lambda: sum(threads.calls for threads in list(self._threads.values())))

    def service(self, details: grpc.HandlerCallDetails) -> _GrpcHandler | None:
        handler = self._handlers.get(details.method)
        if handler is None:
            self._metrics.refused(Refusal.METHOD)
            decided("call_refused", reason=Refusal.METHOD.value, method=details.method)
            return None
        try:
            version = agreed_version(caller=versions_in(details.invocation_metadata), server=OURS)
            version_error = None
        except ProtocolError as error:
            version, version_error = 0, error
        token = _token(details.invocation_metadata)
        if not token and self._certified is not None and version_error is None:
            return self._by_certificate(self._certified, handler, details.method, version)
        try:
            caller = _checked(self._authenticator.caller(token), details.method, version)
        except CredentialError as error:
            decided("call_refused", reason=Refusal.CREDENTIAL.value, method=details.method, why=str(error))
            return self._refuse(Refusal.CREDENTIAL, grpc.StatusCode.UNAUTHENTICATED, str(error))
        if version_error is not None:
            kind = Refusal.VERSION if isinstance(version_error, VersionError) else Refusal.PROTOCOL
            return self._refuse(kind, grpc.StatusCode.FAILED_PRECONDITION, str(version_error))
        threads = self._threads_of(caller.tenant)
        if threads.full:
            decided("call_refused", reason=Refusal.BUSY.value, method=details.method, tenant=caller.tenant)
            return self._refuse(Refusal.BUSY, grpc.StatusCode.UNAVAILABLE, _TOO_MANY)
        if self._beyond_rate(caller, details.method):
            # On the tenant's own threads, so that it always learns why: a worker must not take this for a fault.
            return _on(threads, "stream_stream", _abort(grpc.StatusCode.UNAVAILABLE, _RATE))
        name = details.method, caller
        bound = self._bound.get(name)
        if bound is None:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            shows_both = caller.internal and self._certified is not None
            serve = self._unless_revoked(handler, details.method) if shows_both else handler.serve
            bound = self._bound[name] = _on(threads, handler.kind, partial(serve, caller))
        return bound

    def _beyond_rate(self, caller: Caller, method: str) -> bool:
        """Whether this call is beyond the rate of its tenant; counts it if it is."""
        if self._rates is None or self._rates.admits(caller, method.rpartition("/")[2]):
            return False
        decided("call_refused", reason=Refusal.RATE.value, method=method, tenant=caller.tenant)
        self._metrics.refused(Refusal.RATE)
        return True

    def close(self) -> None:
        certified = () if self._certified is None else (self._certified,)
        for threads in (*self._threads.values(), *certified, self.refusing):
            threads.shutdown(wait=False)

    def _certified_caller(
        self, handler: RpcHandler, method: str, version: int, context: grpc.ServicerContext
    ) -> Caller:
        """Returns the caller, whose call is counted. Aborts a call that is refused."""
        try:
            caller = self._authenticator.by_certificate(_certificate(context))
            caller = _checked(caller, method, version, certified=True)
            if (why := handler.why_not(caller)) is not None:
                raise CredentialError(why)
        except CredentialError as error:
            self._abort_refused(error, method, context)
        if self._beyond_rate(caller, method):
            context.abort(grpc.StatusCode.UNAVAILABLE, _RATE)
        with self._counting:
            if not self._certified_calls.full(caller.tenant):
                self._certified_calls.add(caller.tenant)
                return caller
        self._metrics.refused(Refusal.BUSY)
        context.abort(grpc.StatusCode.UNAVAILABLE, _TOO_MANY)
        raise AssertionError("abort raises")

    def _unless_revoked(self, handler: RpcHandler, method: str) -> Callable[..., Any]:
        """Returns what serves a shard that shows a token besides its certificate: it aborts the call if the certificate
        was revoked. No line of the token file revokes a token that the coordinator has issued."""

        def serve(caller: Caller, request: Any, context: grpc.ServicerContext) -> Any:
            try:
                self._authenticator.check_certificate(_certificate(context))
            except CredentialError as error:
                self._abort_refused(error, method, context)
            return handler.serve(caller, request, context)

        return serve

    def _abort_refused(self, error: CredentialError, method: str, context: grpc.ServicerContext) -> NoReturn:
        """Aborts a call that is refused once its certificate is known."""
        self._metrics.refused(Refusal.CREDENTIAL)
        decided("call_refused", reason=Refusal.CREDENTIAL.value, method=method, why=str(error))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        raise AssertionError("abort raises")

    def _by_certificate(self, threads: _Threads, handler: RpcHandler, method: str, version: int) -> _GrpcHandler | None:
        """Returns a handler for a call whose caller is known by the certificate of its connection."""
        if threads.full:
            return self._refuse(Refusal.BUSY, grpc.StatusCode.UNAVAILABLE, _TOO_MANY)

        caller_of = partial(self._certified_caller, handler, method, version)

        def ended(caller: Caller) -> None:
            with self._counting:
                self._certified_calls.remove(caller.tenant)

        asks, answers = handler.kind.split("_")

        def message(messages: Iterator[bytes]) -> Any:
            return messages if asks == "stream" else next(messages)

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            caller = caller_of(context)
            try:
                return handler.serve(caller, message(messages), context)
            finally:
                ended(caller)

        def serve_stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            caller = caller_of(context)
            try:
                yield from handler.serve(caller, message(messages), context)
            finally:
                ended(caller)

        # As a stream: for the one message of others gRPC would wait on the thread, before it is known who calls.
        return _on(threads, f"stream_{answers}", serve_stream if answers == "stream" else serve)

    def _threads_of(self, tenant: Tenant) -> _Threads:
        threads = self._threads.get(tenant)
        if threads is None:
            share = max(_FEWEST_THREADS, min(self._most, _SHARES * self._most // self._authenticator.tenants))
            threads = self._threads[tenant] = _Threads(share, "kvcluster-rpc")
        return threads

    def _refuse(self, kind: Refusal, code: grpc.StatusCode, why: str) -> _GrpcHandler | None:
        """Returns a handler that answers with this status. After _REFUSALS in a second returns None instead, which gRPC
        answers without a thread."""
        self._metrics.refused(kind)
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        if self._refused > _REFUSALS or self.refusing.full:
            return None
        return _on(self.refusing, "stream_stream", _abort(code, why))


def _abort(code: grpc.StatusCode, why: str) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    """Returns what serves a call by this status, without its message."""

    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(code, why)
        raise AssertionError("abort raises")

    return refuse


def _on(threads: ThreadPoolExecutor, kind: str, serve: Callable[..., Any]) -> _GrpcHandler:
    """Returns gRPC's handler that serves on these threads. It finds them as an attribute of the function it calls."""

    def behavior(request: Any, context: grpc.ServicerContext) -> Any:
        context.set_trailing_metadata(METADATA)
        return serve(request, context)

    behavior.experimental_thread_pool = threads  # type: ignore[attr-defined]
    make: Callable[..., _GrpcHandler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, identity, identity)


def _checked(caller: Caller, method: str, version: int, *, certified: bool = False) -> Caller:
    """Returns the caller, who speaks that version. `certified`: it was a certificate that said who calls. Raises
    CredentialError if the method is not for those like him at all."""
    if caller.tenant == NO_TENANT and method not in _COMMANDS:
        raise CredentialError(NOT_A_TENANT)
    # A shard of the release before has nothing else to show (docs/adr/0100).
    before = version < PROTOCOL_VERSION and not certified
    if caller.internal and caller.epoch is None and method != _ISSUE and not before:
        raise CredentialError(ONLY_TO_ISSUE)
    return caller if version == caller.version else replace(caller, version=version)


def _certificate(context: grpc.ServicerContext) -> CertificateNames:
    """Returns the certificate of a call's connection, which gRPC has verified. Raises CredentialError if there is
    none."""
    shown: Mapping[str, Any] = context.auth_context()
    try:
        (pem,) = shown["x509_pem_cert"]
        return names_in_pem(list(shown.get("peer_uri", ())), pem)
    except (KeyError, ValueError):
        raise CredentialError("this server asks for a token, or for a certificate that names a tenant") from None


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    token = None
    for key, value in metadata:
        if key == "authorization" and str(value).startswith("Bearer "):
            token = str(value)[len("Bearer ") :]
    return token


class GrpcServer:
    """Listens on `host:port` until `close`. Port 0 takes a free port; `port` is the actual one. `handlers`
    may be filled until `start`. `threads` are the most of one tenant: it gets fewer where there are many. Longer
    messages than `message_bytes` are refused unread, and so are calls that `rates` does not admit. Raises ConfigError,
    which names `setting`, if it cannot listen."""

    def __init__(
        self,
        handlers: Mapping[str, RpcHandler],
        authenticator: Authenticator,
        host: str,
        port: int,
        threads: int,
        message_bytes: int = limits.BODY_BYTES,
        metrics: CallMetrics | None = None,
        *,
        setting: str = "server.port",
        certificates: Certificates | None = None,
        client_certificates: bool = False,
        rates: CallRates | None = None,
    ) -> None:
        """`certificates`: those by which it serves TLS; None to serve in the clear. `client_certificates`: only those
        connect who show one of their own."""
        certified = certificates is not None and client_certificates
        self._table = _Table(
            *(handlers, authenticator, threads, metrics or CallMetrics(()), rates), certified=certified
        )
        # The pool that is given to gRPC serves only handlers that name no other: there are none.
        options = server_options(message_bytes)
        self._server = grpc.server(self._table.refusing, handlers=[self._table], options=options)
        self.host = host
        at = host_and_port(host, port)
        try:
            if certificates is None:
                self.port = self._server.add_insecure_port(at)
            else:
                secure = certificates.server(client_certificates=client_certificates)
                self.port = self._server.add_secure_port(at, secure)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            self._table.close()
            raise ConfigError(
                f"cannot listen on {host}:{port}: the port is in use, or the address is not this machine's. "
                f"Choose another port ({setting}), or stop what listens there"
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
        self._table.close()


def unary_handlers(
    methods: Mapping[str, Method],
    ask: Ask,
    internal: frozenset[str] = frozenset(),
    *,
    operators: frozenset[str] = frozenset(),
    shared: frozenset[str] = frozenset(),
    metrics: CallMetrics | None = None,
) -> dict[str, RpcHandler]:
    """Returns a handler for each method, by its path. What calls take is added to `metrics`, which knows the methods.
    `ask` has each message decoded, after its size was checked.

    Only shards of the cluster may call the methods named in `internal`; shards and workers those in `shared`; workers
    with an operator's credential those in `operators`; and any worker all others.
    """

    def why_not(name: str, caller: Caller) -> str | None:
        if caller.internal != (name in internal) and not (caller.internal and name in shared):
            return f"{name} is not for this credential"
        if name in operators and not caller.operator:
            return (
                f"{_IN_WORDS.get(name, name)} is for operators, and this token is not an operator's: its line in the "
                "token file must end in the word operator (`kvcluster token --tenant NAME --operator` makes one)"
            )
        return None

    metrics = metrics or CallMetrics(methods)
    return {
        method.path: RpcHandler(
            "unary_unary", _unary(method, ask, why_not, metrics), why_not=partial(why_not, method.name)
        )
        for method in methods.values()
    }


def _unary(
    method: Method,
    ask: Ask,
    why_not: Callable[[str, Caller], str | None],
    metrics: CallMetrics,
) -> Callable[[Caller, bytes, grpc.ServicerContext], bytes]:
    def handle(caller: Caller, data: bytes, context: grpc.ServicerContext) -> bytes:
        refusal = why_not(method.name, caller)
        if refusal is not None:
            metrics.refused(Refusal.CREDENTIAL)
            decided("call_refused", reason=Refusal.CREDENTIAL.value, method=method.name, tenant=caller.tenant)
            if method.name in _IN_WORDS:
                audited(method.name, caller.tenant, operator=caller.operator, outcome=f"refused: {refusal}")
            context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
        if len(data) > method.most_bytes:
            too_long = (
                f"{method.name} of {len(data)} bytes exceeds the limit of {method.most_bytes}: name fewer at a time"
            )
            metrics.refused(Refusal.PROTOCOL)
            decided("call_refused", reason=Refusal.PROTOCOL.value, method=method.name, tenant=caller.tenant)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{too_long}, in several calls")
        if method.name in _WITH_CLOCK:
            context.set_trailing_metadata((*METADATA, (CLOCK_KEY, str(time.time_ns()))))
        began = time.monotonic()
        wait_s = min(context.time_remaining(), _LONGEST_S)
        try:
            reply: Reply = Done()
            if method.asks:  # malformed input never reaches the core
                reply = ask(lambda call: _own(method.decode_request(data, call, caller), caller), wait_s, caller.tenant)
            else:
                method.decode_request(data, _NO_CALL, caller)
            return method.encode_reply(reply, caller.version)
        except (Unavailable, KVClusterError) as error:
            if isinstance(error, ProtocolError):
                metrics.refused(Refusal.of(error))
                why = {"reason": Refusal.of(error).value, "why": str(error)}
                decided("call_refused", method=method.name, tenant=caller.tenant, **why)
            context.abort(status_of(error), str(error))
        finally:
            metrics.took(method.name, time.monotonic() - began)
        raise AssertionError("abort raises")

    return handle


def _own(request: Request[T], caller: Caller) -> Request[T]:
    """Returns the request. Raises CredentialError if a shard reports in the name of another incarnation than its own
    credential is of."""
    question = request.question
    if caller.epoch is not None and isinstance(question, (Report, Inventory)) and question.info.epoch != caller.epoch:
        raise CredentialError(f"this credential is of incarnation {caller.epoch}, not {question.info.epoch}")
    return request
