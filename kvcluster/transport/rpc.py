"""gRPC as this project uses it: raw bytes, our own codecs, errors of our own tree.

wire/ encodes messages before gRPC gets them (identity serialisers), so only one place knows protobuf. The channel
ignores proxies set in the environment: a cache must be on the same network to be useful.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import grpc

from kvcluster.core import limits
from kvcluster.core.ids import Caller, NamespaceId
from kvcluster.core.messages import Reply
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import (
    CallerError,
    CredentialError,
    KVClusterError,
    LimitError,
    ProtocolError,
    Unreachable,
)
from kvcluster.release import OLDEST_VERSION
from kvcluster.transport.addresses import check_address
from kvcluster.transport.base import TOO_MANY_CALLS, Cancelled, Deadline, RateLimited, ServerChanged, Unavailable
from kvcluster.transport.certificates import COORDINATOR
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.forks import FORKS
from kvcluster.transport.listener import Descriptors
from kvcluster.transport.server_verifier import ServerVerifier, VerifiedServer
from kvcluster.wire.methods import Method, Question
from kvcluster.wire.versions import METADATA, OURS, agreed_version, clock_in, versions_in

_OPTIONS = [
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # in fact the limit for one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A connection whose peer acknowledges nothing for 10 s is given up, and made anew when the link is back: TCP itself
    # would try for a quarter of an hour, after pauses that double. gRPC sets that limit only with keepalive on, whose
    # own pings, once in 24 days, are as good as none.
    ("grpc.keepalive_time_ms", 2**31 - 2),
    ("grpc.keepalive_timeout_ms", 10_000),
]
_IDLE_MS = 60_000
_HANDSHAKE_MS = 5_000

_PAUSE_S = 0.1
"""The pause between two attempts to verify a server that is waited for."""

_OTHER_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
"""In what gRPC says of a server that shows another certificate than the verified one."""

_CUT_OFF = Miss(MissReason.SHARD_LOST, "this client is closed")


def server_options(message_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of a server that accepts messages of at most `message_bytes`.

    It accepts at most limits.CONNECTIONS connections, and its part of the descriptors (listener.py). It ends
    connections that have not begun HTTP/2 in time, and those without a call for a minute: clients connect again with
    their next call."""
    return [
        *_OPTIONS,
        ("grpc.max_receive_message_length", message_bytes),
        # Otherwise it receives up to 16 MiB of each message before anything has asked for it, refused ones included.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", limits.CALLS_PER_CONNECTION),
        ("grpc.so_reuseport", 0),  # otherwise a second server silently binds the same port and takes half the calls
        ("grpc.max_allowed_incoming_connections", Descriptors.CALLS.bound(limits.CONNECTIONS)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


def identity(data: bytes) -> bytes:
    """The serialiser of messages that are bytes already."""
    return data


def _is_for_all(caller: Caller) -> None:
    """Refuses nobody."""


class RpcHandler(NamedTuple):
    """Serves one method: `serve` gets the caller, the request (or an iterator over requests) and the context, and
    returns the reply (or yields replies). `kind` is gRPC's name of the combination, such as "unary_stream"."""

    kind: str
    serve: Callable[[Caller, Any, grpc.ServicerContext], Any]
    why_not: Callable[[Caller], str | None] = _is_for_all
    """Returns why the method is not for this caller; None if it is."""


_Kind = Callable[[grpc.Channel], Callable[..., Any]]
"""Returns what makes calls of one kind over a channel."""

_READS: _Kind = attrgetter("unary_stream")
_WRITES: _Kind = attrgetter("stream_stream")


def _unary(channel: grpc.Channel) -> Callable[..., Any]:
    return lambda path, **serializers: channel.unary_unary(path, **serializers).with_call


_OLD_CHANNELS = 2
"""Channels that are kept open for calls that began before the certificates changed."""


class ClockDifference(NamedTuple):
    """By how many nanoseconds this clock is ahead of another machine's, give or take `error_ns`: half of the round trip
    in which it was asked."""

    ahead_ns: int
    error_ns: int


class Connection:
    """A channel to one server, with the credentials that every call carries.

    With certificates, nothing is sent before that of the server has been verified, with the name and `role` that it
    must have, at each connection that gRPC makes (server_verifier.py). When the files of the certificates change, or
    the server's own, the next call goes over a new channel; calls under way end on the old one.

    Raises ConfigError for an invalid address, CredentialError for a token that no server could have made, and
    KVClusterError in a process that was forked from the middle of a call.
    """

    def __init__(self, address: str, credentials: Credentials = ANONYMOUS, *, role: str = COORDINATOR) -> None:
        check_address(address)
        FORKS.check()
        self.address = address
        self._credentials = credentials
        token = credentials.token
        # gRPC would fail each call with no more than "Invalid metadata".
        if token and not (token.isascii() and token.isprintable()):
            raise CredentialError(
                "the token has a character that no token has; if it was read from a file, strip the line break"
            )
        self._metadata = (*METADATA, *((("authorization", f"Bearer {token}"),) if token else ()))
        self._verifier: ServerVerifier | None = None
        if credentials.certificates is not None:
            self._verifier = ServerVerifier(address, credentials.name_at(address), role, credentials.certificates)
        self._server: VerifiedServer | None = None
        """The server to which the channel may connect; None for one in the clear, or before there is a channel."""
        self._old: list[grpc.Channel] = []
        self._channel = self._new_channel() if self._verifier is None else None
        self.version: int | None = None
        """The version of the protocol that both sides speak, by the last answer; None before the first."""
        self.clock: ClockDifference | None = None
        """How this clock differs from that of the server, by the last answer that had the server's time."""
        self._calls: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._asking = 0
        self._closed = False

    def _new_channel(self) -> grpc.Channel:
        certificates, server = self._credentials.certificates, self._server
        if certificates is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        assert server is not None, "it is verified before there is a channel"
        name = self._credentials.server_name
        options = [*CHANNEL_OPTIONS, *((("grpc.ssl_target_name_override", name),) if name else ())]
        return grpc.secure_channel(self.address, certificates.channel(server.certificate), options=options)

    def ask(
        self, method: Method, question: Question | None, deadline: Deadline, namespace: NamespaceId | None = None
    ) -> Reply:
        """Asks one question, about that namespace if the method has one, and returns the answer. Raises Unavailable
        (Cancelled after `cut_off`), CallerError, CredentialError or ProtocolError."""
        request = method.encode_request(question, namespace, self.version or OLDEST_VERSION)
        before = time.time_ns()
        with FORKS.call(deadline):
            try:
                data, call = self._ask(method.path, request, deadline)
            except ServerChanged:
                before = time.time_ns()
                data, call = self._ask(method.path, request, deadline)
        self._compare_clocks(before, time.time_ns(), call)
        return method.decode_reply(data, self._learn(call))

    def read_stream(self, path: str, message: bytes, deadline: Deadline) -> Any:
        """Sends one message, and returns a stream of answers. Raises Unavailable; pass errors of the stream to
        `raise_for`."""
        return self._stream(_READS, path, message, deadline)

    def write_stream(self, path: str, messages: Iterator[bytes], deadline: Deadline) -> Any:
        """Sends many messages on a thread of gRPC's own, and returns a stream of answers. Raises as `read_stream`."""
        return self._stream(_WRITES, path, messages, deadline)

    def _learn(self, answered: Any) -> int:
        """Returns the version that both sides speak, by the trailers of an answer. Raises VersionError if there is
        none."""
        version = self.version = agreed_version(caller=OURS, server=versions_in(answered.trailing_metadata() or ()))
        return version

    def _compare_clocks(self, before: int, after: int, answered: Any) -> None:
        theirs = clock_in(answered.trailing_metadata() or ())
        if theirs is not None and after >= before:  # else this clock was set meanwhile
            self.clock = ClockDifference((before + after) // 2 - theirs, (after - before) // 2 + 1)

    def _ask(self, path: str, request: bytes, deadline: Deadline) -> Any:
        with self._lock:
            self._asking += 1
        try:
            return self._start(_unary, path, request, deadline)
        finally:
            with self._lock:
                self._asking -= 1

    def _stream(self, kind: _Kind, path: str, argument: object, deadline: Deadline) -> Any:
        FORKS.enter(deadline)
        try:
            call = self._start(kind, path, argument, deadline)
        except BaseException:
            FORKS.leave()
            raise
        if not call.add_callback(FORKS.leave):  # it has ended already
            FORKS.leave()
        return call

    def _start(self, kind: _Kind, path: str, argument: object, deadline: Deadline) -> Any:
        if not deadline.remaining_s():
            raise Unavailable(Miss(MissReason.DEADLINE, self.address))
        if self._closed:
            raise self._was_closed()
        server = self._verifier.verified(deadline) if self._verifier is not None else None
        with self._lock:
            channel = self._channel_to(server)
            calls, call = self._calls, self._calls.get(path)
            if call is None:
                call = self._calls[path] = kind(channel)(
                    path, request_serializer=identity, response_deserializer=identity
                )
        try:
            return call(argument, timeout=deadline.remaining_s(), metadata=self._metadata)
        except grpc.RpcError as error:
            if calls is not self._calls and _is_cancelled(error):
                raise Cancelled(_CUT_OFF) from None
            self.raise_for(error)
        except ValueError:
            if calls is not self._calls:
                raise Cancelled(_CUT_OFF) from None
            if not self._closed:
                raise
            raise self._was_closed() from None

    def _channel_to(self, server: VerifiedServer | None) -> grpc.Channel:
        """Returns the channel to the server as it was verified, a new one if it is to another. In the lock."""
        if self._closed:
            raise self._was_closed()
        if self._channel is None or server != self._server:
            while len(self._old) >= _OLD_CHANNELS:
                self._old.pop(0).close()
            if self._channel is not None:
                self._old.append(self._channel)
            self._server = server
            self._channel, self._calls = self._new_channel(), {}
        return self._channel

    def _was_closed(self) -> Unavailable:
        return Unavailable(Miss(MissReason.SHARD_LOST, f"{self.address}: this connection was closed"))

    def raise_for(self, error: grpc.RpcError) -> NoReturn:
        """Raises the error of our own tree for a gRPC error."""
        code = error.code() if hasattr(error, "code") else None
        detail = error.details() if hasattr(error, "details") else str(error)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Unavailable(Miss(MissReason.DEADLINE, self.address)) from None
        if code is grpc.StatusCode.CANCELLED and not self._closed:  # by the server; one that ends is UNAVAILABLE
            late = "the server stopped the exchange because the lease had ended: too slow, or a purge came"
            raise Unavailable(Miss(MissReason.DEADLINE, f"{self.address}: {late}")) from None
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise CredentialError(detail) from None
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self._learn(error)
            raise CallerError(detail) from None
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise LimitError(f"a message to or from {self.address} exceeds a size limit: {detail}") from None
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            self._learn(error)  # raises an error that names both sides, if that is why
            raise ProtocolError(detail) from None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(
                f"the server at {self.address} is no kvcluster server, or of another release, or has refused too many "
                f"calls in this second to say why: {detail}"
            ) from None
        if code is grpc.StatusCode.UNAVAILABLE and (detail or "").startswith(TOO_MANY_CALLS):
            raise RateLimited(Miss(MissReason.FULL, f"{self.address}: {detail}")) from None
        raise self._lost(error, detail or "") from None

    def _lost(self, error: grpc.RpcError, detail: str) -> Unavailable:
        """Returns the error for a server that does not answer. If it was not the server that said so, it may have
        another certificate when it is reached again."""
        miss = Miss(MissReason.SHARD_LOST, f"{self.address}: {_plain(detail)}")
        if self._verifier is None or self._server is None or error.trailing_metadata():
            return Unavailable(miss)
        self._verifier.forget(self._server)
        return ServerChanged(miss) if _OTHER_CERTIFICATE in detail else Unavailable(miss)

    def wait_ready(self, deadline: Deadline) -> None:
        """Raises Unreachable unless a server answers in time."""
        try:
            channel = self._verified_channel(deadline)
            grpc.channel_ready_future(channel).result(timeout=deadline.remaining_s())
        except (grpc.FutureTimeoutError, Unavailable):
            raise Unreachable(
                f"no server answers at {self.address}: check the address, or start a cluster (`kvcluster up`)"
            ) from None

    def _verified_channel(self, deadline: Deadline) -> grpc.Channel:
        """Returns the channel, once the server has been verified if it must be. Raises Unavailable at the deadline."""
        while True:
            try:
                server = self._verifier.verified(deadline) if self._verifier is not None else None
            except Unavailable:
                if not deadline.remaining_s():
                    raise
                threading.Event().wait(min(_PAUSE_S, deadline.remaining_s()))
                continue
            with self._lock:
                return self._channel_to(server)

    def cut_off(self) -> None:
        """Ends questions that are under way, by another channel for those that follow: gRPC has no other way to end a
        call that a thread waits for. May be called from any thread."""
        with self._lock:
            if self._closed or not self._asking:
                return
            if self._verifier is not None:
                self._verifier.end(Cancelled(_CUT_OFF))
            before = self._channel
            if before is None:
                return
            self._channel, self._calls = self._new_channel(), {}
        before.close()

    def close(self) -> None:
        """Ends calls that are under way. May be called from any thread, and again."""
        self._closed = True
        if self._verifier is not None:
            self._verifier.end(self._was_closed())
        for channel in (*self._old, self._channel):
            if channel is not None:
                channel.close()


def _is_cancelled(error: grpc.RpcError) -> bool:
    return hasattr(error, "code") and error.code() is grpc.StatusCode.CANCELLED


_NOT_CONNECTED = re.compile(
    r"[Ff]ailed to connect to (?:all addresses|remote host).*?([^:;]+?)(?: \(\d+\))?\W*$", re.DOTALL
)


def _plain(detail: str | None) -> str:
    """Returns why a call failed without gRPC's account of its attempts to connect: "connection refused"."""
    match = _NOT_CONNECTED.search(detail or "")
    return match[1].strip().lower() if match else detail or "no answer"


def status_of(error: Unavailable | KVClusterError) -> grpc.StatusCode:
    """Returns the gRPC status by which a server reports one of our errors. Connection.raise_for is the reverse."""
    if isinstance(error, Unavailable):
        late = error.miss.reason is MissReason.DEADLINE
        return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.UNAVAILABLE
    if isinstance(error, CredentialError):
        return grpc.StatusCode.UNAUTHENTICATED
    return grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, CallerError) else grpc.StatusCode.FAILED_PRECONDITION
