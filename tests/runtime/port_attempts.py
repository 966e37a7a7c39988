"""How each port of a cluster is tried: connect, show credentials, ask for something that needs the right. `WAYS` has
them by the rows of the table of ports (config/ports.py).

Every wait is bounded. A request that is neither served nor refused in time fails the test.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias

from kvcluster.core.dispatcher import READ_ONLY
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Drain,
    IssueCredential,
    PageWant,
    PrepareLoad,
    PrepareStore,
    ReadRequest,
    Refused,
    RefusedKind,
    Report,
    ShardInfo,
    WriteRequest,
)
from kvcluster.core.messages.common import Need
from kvcluster.core.messages.reports import PROOF_BYTES
from kvcluster.core.miss import MissReason
from kvcluster.errors import CredentialError, ProtocolError
from kvcluster.transport.addresses import split_address
from kvcluster.transport.base import DataPath, Payload, RefusedByShard, Unavailable, read_whole, run_to_completion
from kvcluster.transport.certificates import COORDINATOR as COORDINATOR_ROLE
from kvcluster.transport.certificates import SHARD as SHARD_ROLE
from kvcluster.transport.certificates import connect_tls
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.rpc import Connection
from kvcluster.transport.tcp_pages import TcpPages
from kvcluster.transport.worker_exchange import RecordSink
from kvcluster.wire import kv_events, zmtp
from kvcluster.wire.kv_events import ReplayRequest
from kvcluster.wire.methods import COORDINATOR, Question
from tests.runtime.events import stream
from tests.runtime.hosts import BOUND_S, EPOCH, SPACE, SPEC, Content, attempt, content, new_page, soon
from tests.runtime.listeners import HELD, WRITTEN, Listeners

NEW_SHARD = Epoch(7)
"""An incarnation that asks for its first credential."""

_LOOK_S = 0.05
_RECEIVED_BYTES = 65_536


class Outcome(Enum):
    """What became of a request."""

    SERVED = "yes"
    OWN = "own"
    """It was let in as another tenant than `me`, and found nothing of the namespace of `me` that it may have."""
    REFUSED = "no"
    """By an answer; or no connection was made, or it was ended."""


class Shown(NamedTuple):
    """What a client shows. Without certificates it speaks in the clear. `epoch`: the incarnation in whose name a shard
    reports."""

    credentials: Credentials
    epoch: Epoch = Epoch(6)


Ask: TypeAlias = Callable[[], Outcome]
"""Asks once, over a connection that is kept. Raises the errors of `outcome_of` if it is refused."""

Way: TypeAlias = Callable[[Listeners, Shown], AbstractContextManager[Ask]]
"""Opens a connection, which may be refused already."""


def outcome_of(ask: Ask) -> Outcome:
    """Asks once. Raises AssertionError or TimeoutError if there is no answer in time."""
    try:
        return ask()
    except Unavailable as error:
        assert error.miss.reason is not MissReason.DEADLINE, f"neither served nor refused in time: {error}"
    except (CredentialError, ProtocolError, ConnectionError, ssl.SSLError):
        """Refused, or cut off."""
    return Outcome.REFUSED


def tried(way: Way, listeners: Listeners, shown: Shown) -> Outcome:
    """What becomes of one request over a new connection."""

    def once() -> Outcome:
        with way(listeners, shown) as ask:
            return ask()

    return outcome_of(once)


# ------------------------------------------------------------------------------------------------ over gRPC and tcp


def _refused(answer: Refused) -> Outcome:
    """What a refusal by a core means."""
    if answer == READ_ONLY:
        return Outcome.REFUSED
    assert answer.kind is RefusedKind.UNKNOWN_NAMESPACE, f"refused for another reason: {answer.detail}"
    return Outcome.OWN


@contextmanager
def _asks(
    port: str, method: str, make: Callable[[Shown], Question], listeners: Listeners, shown: Shown
) -> Iterator[Ask]:
    with closing(Connection(listeners.addresses[port], shown.credentials)) as connection:

        def ask() -> Outcome:
            space = SPACE if method.startswith("Prepare") else None
            reply = connection.ask(COORDINATOR[method], make(shown), soon(), space)
            return _refused(reply) if isinstance(reply, Refused) else Outcome.SERVED

        yield ask


def _lookup(shown: Shown) -> Question:
    return PrepareLoad(attempt(), (new_page(HELD).key.hash,), Need((SPEC.whole(0),)))


def _reserve(shown: Shown) -> Question:
    block = new_page(WRITTEN).key.hash
    return PrepareStore(attempt(), 0, new_page(0).key.hash, block, (block,), ((0, SPEC.whole(0)),))


def _drain(shown: Shown) -> Question:
    return Drain(ShardId("a-shard-that-is-not"))


def _issue(shown: Shown) -> Question:
    return IssueCredential(NEW_SHARD, bytes(PROOF_BYTES), 1)


def _report(shown: Shown) -> Question:
    return Report(ShardInfo(ShardId("another"), shown.epoch, "127.0.0.1:1", "", 0, 0, 0, 0), Epoch(0), 1)


class _Read(RecordSink):
    """What a load brings, in the order of the layers."""

    def __init__(self) -> None:
        self.data = b""

    def receive(self, item: int, layer: int, codec: int, sums: object, data: Payload) -> None:
        taken = bytearray(data.nbytes)
        read_whole(data, memoryview(taken))
        self.data += taken


def _loads(path: DataPath) -> Outcome:
    sink = _Read()
    want = PageWant(new_page(HELD).key, 0, SPEC.whole(0).layers)
    assert run_to_completion(path.read(ReadRequest(SPACE, attempt(), EPOCH, (want,)), sink, soon())) == [None]
    assert sink.data == content(HELD)
    return Outcome.SERVED


def _stores(path: DataPath) -> Outcome:
    path.write(WriteRequest(SPACE, attempt(), EPOCH, (new_page(WRITTEN),)), Content([WRITTEN]), soon())
    return Outcome.SERVED


@contextmanager
def _moves(
    port: str,
    opened: Callable[[str, Credentials], DataPath],
    move: Callable[[DataPath], Outcome],
    listeners: Listeners,
    shown: Shown,
) -> Iterator[Ask]:
    with closing(opened(listeners.addresses[port], shown.credentials)) as path:

        def ask() -> Outcome:
            try:
                return move(path)
            except RefusedByShard as error:
                return _refused(error.refused)

        yield ask


# ------------------------------------------------------------------------------------------------ over bare sockets


def connected(address: str, shown: Shown, role: str) -> socket.socket:
    """A connection to that address, within TLS if certificates are shown, whose waits are bounded."""
    link = socket.create_connection(split_address(address), timeout=BOUND_S)
    if shown.credentials.certificates is not None:
        name = shown.credentials.name_at(address)
        link = connect_tls(link, name, shown.credentials.certificates, soon(), role=role)
    link.settimeout(BOUND_S)
    return link


@contextmanager
def _scrapes(port: str, role: str, listeners: Listeners, shown: Shown) -> Iterator[Ask]:
    def ask() -> Outcome:
        with connected(listeners.addresses[port], shown, role) as link:
            link.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b"".join(iter(lambda: link.recv(_RECEIVED_BYTES), b""))
        if not answer:
            raise ConnectionError("it was ended without an answer")
        assert answer.startswith(b"HTTP/1.1 200") and b"kvcluster_uptime_seconds" in answer
        return Outcome.SERVED

    yield ask


class ZmtpPeer:
    """The client's end of a connection of ZMTP, as a socket of that type."""

    def __init__(self, link: socket.socket, kind: bytes) -> None:
        self._socket = link
        self._inbound = zmtp.Inbound(zmtp.Bounds((b"PUB", b"ROUTER"), frames=4, nbytes=2**20))
        link.sendall(zmtp.GREETING + zmtp.encode_ready(kind))

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(zmtp.encode_message(frames))

    def receive(self) -> list[bytes]:
        """Returns the next message. Raises ConnectionError if the connection was ended."""
        while not (frames := self._inbound.next()):
            if frames is None:
                data = self._socket.recv(min(self._inbound.room, _RECEIVED_BYTES))
                if not data:
                    raise ConnectionError("it was ended")
                self._inbound.feed(data)
        return frames


@contextmanager
def _subscribes(listeners: Listeners, shown: Shown) -> Iterator[Ask]:
    with connected(listeners.addresses["events"], shown, COORDINATOR_ROLE) as link:
        peer = ZmtpPeer(link, b"SUB")
        peer.send(b"\x01" + kv_events.topic_of(stream()).encode())
        link.settimeout(_LOOK_S)

        def ask() -> Outcome:
            deadline = soon()
            while deadline.remaining_s():
                listeners.publish()
                with suppress(TimeoutError):  # the subscription had not arrived
                    assert kv_events.decode_batch(peer.receive()).topic == kv_events.topic_of(stream())
                    return Outcome.SERVED
            raise TimeoutError("a subscriber hears nothing")

        yield ask


@contextmanager
def _replays(listeners: Listeners, shown: Shown) -> Iterator[Ask]:
    with connected(listeners.addresses["replay"], shown, COORDINATOR_ROLE) as link:
        peer = ZmtpPeer(link, b"DEALER")

        def ask() -> Outcome:
            peer.send(*kv_events.encode_request(ReplayRequest(0)))
            while kv_events.decode_answer(peer.receive()) is not None:
                """The batches before the end of the answer."""
            return Outcome.SERVED

        yield ask


WAYS: Mapping[tuple[str, str], Mapping[str, Way]] = {
    ("server.port", "coordinator"): {
        "lookup": partial(_asks, "workers", "PrepareLoad", _lookup),
        "reserve": partial(_asks, "workers", "PrepareStore", _reserve),
        "drain": partial(_asks, "workers", "Drain", _drain),
    },
    ("server.report_port", "coordinator"): {
        "issue": partial(_asks, "reports", "IssueCredential", _issue),
        "report": partial(_asks, "reports", "Report", _report),
    },
    ("server.shard_ports", "shards: grpc and tcp"): {
        "grpc read": partial(_moves, "grpc", GrpcPages, _loads),
        "grpc write": partial(_moves, "grpc", GrpcPages, _stores),
        "tcp read": partial(_moves, "tcp", TcpPages, _loads),
        "tcp write": partial(_moves, "tcp", TcpPages, _stores),
    },
    ("metrics.port", "coordinator"): {"metrics": partial(_scrapes, "metrics", COORDINATOR_ROLE)},
    ("metrics.port", "shards"): {"metrics of shards": partial(_scrapes, "metrics of shards", SHARD_ROLE)},
    ("events.endpoint", "coordinator"): {"events": _subscribes},
    ("events.replay", "coordinator"): {"replay": _replays},
}
"""By setting and listener of a row of the table of ports: what is asked for there, by its name."""

ATTEMPTS: Mapping[str, Way] = {name: way for ways in WAYS.values() for name, way in ways.items()}
