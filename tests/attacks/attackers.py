"""The attacks: what a stranger, or a tenant with a token of its own, sends to a cluster to spoil it for others.

An attacker is a process: `python -m tests.attacks.attackers NAME`, with the target as JSON on standard input. It
repeats one act until it is told to end (SIGTERM) or has done it MOST times, as fast as the cluster lets it. It says
BEGUN after the first, and in the end how often it did it and how often it was refused or cut off.

Most go through gRPC, plain sockets and ZMQ themselves, so that no courtesy of the client stands in the way.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import grpc
import torch

import kvcluster
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, SEQUENCE_BYTES, Attempt, BlockHash, Holder, SequenceId
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    EngineInfo,
    Explain,
    GetOffers,
    Need,
    NewPage,
    Offers,
    PageKey,
    PrepareStore,
    RegisterEngine,
    SyncTables,
    TableChange,
    WriteRequest,
)
from kvcluster.core.spec import KVSpec
from kvcluster.transport.base import Deadline
from kvcluster.transport.grpc_pages import WRITE
from kvcluster.transport.rpc import CHANNEL_OPTIONS, Connection
from kvcluster.wire import frames, zmtp
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.versions import METADATA
from tests.attacks.attend_attackers import long_computes, long_questions, long_registrations, made_up_spans
from tests.attacks.http_attackers import drips, scrapes
from tests.attacks.reach import channel, dialled, shows
from tests.attacks.setting import LONG, SPEC, TINY, kv, prompt
from tests.attacks.tls_attackers import handshakes, updates, whole_handshakes

MOST = 50_000_000
BEGUN = "begun"
_HEADERS_ONLY = 256
_HELD = 3_900
_IN_FLIGHT = 64
_PAUSE_S = 0.02
_PATIENT = Deadline.after_ms(600_000)
_CONFIG = ClientConfig(deadline_ms=60_000, connect_ms=60_000)

_WRITERS = 16
_SUBSCRIBERS = 8
_TOPICS = 10_000
_BURST = 100
_LONG_BLOCKS = limits.STORE_TOKENS // LONG.block_tokens

R = TypeVar("R")
Act = Callable[[], int]
"""Does the attack's act, and returns how often; 0 if there is nothing to do just now. Raises if it was refused."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker knows: the addresses of a cluster, and a token unless it is a stranger."""

    coordinator: str
    events: str
    shards: tuple[str, ...]
    sockets: tuple[str, ...]  # those of the tcp transport
    metrics: tuple[str, ...]
    token: str | None

    @property
    def servers(self) -> tuple[str, ...]:
        """The gRPC servers."""
        return (self.coordinator, *self.shards)

    @property
    def ports(self) -> tuple[str, ...]:
        """All that listens."""
        return (*self.servers, *self.sockets, *self.metrics, self.events.removeprefix("tcp://"))


@dataclass(frozen=True, slots=True)
class Attack:
    """`by_tenant`: the attacker has a token of its own. `limited`: it is a tenant with quotas; then less of it may be
    noticed (verdict.py)."""

    what: str
    begin: Callable[[Target], Any]  # a context manager of an Act
    by_tenant: bool = False
    limited: bool = False


def look(address: str, token: str, events: str, metrics: tuple[str, ...]) -> Target:
    """Returns the target as a tenant finds it: strangers know the ports, too, since ports can be tried."""
    shards = tuple(shard.address for shard in _attach(address, token).shards)
    offers = [ask(shard, token, SHARD["GetOffers"], GetOffers(), Offers).offers for shard in shards]
    sockets = tuple(offer.address for made in offers for offer in made if offer.transport == "tcp")
    return Target(address, events, shards, sockets, metrics, token)


# ------------------------------------------------------------------------------------------ strangers


@contextmanager
def _header_streams(target: Target) -> Iterator[Act]:
    """Calls whose message never comes, so many at each server; one that ends is begun again."""
    open_calls: dict[str, list[tuple[Any, threading.Event]]] = {}
    path = COORDINATOR["GetStatus"].path

    def silence(ended: threading.Event) -> Iterator[bytes]:
        ended.wait()
        yield from ()

    def begun(call: Any) -> tuple[Any, threading.Event]:
        ended = threading.Event()
        future = call.future(silence(ended))
        future.add_done_callback(lambda _: ended.set())
        return future, ended

    with ExitStack() as house:
        begin: dict[str, Any] = {
            address: house.enter_context(channel(address, CHANNEL_OPTIONS)).stream_unary(path)
            for address in target.servers
        }

        def act() -> int:
            more = 0
            for address, call in begin.items():
                going = [each for each in open_calls.get(address, ()) if not each[1].is_set()]
                fresh = [begun(call) for _ in range(_HEADERS_ONLY - len(going))]
                open_calls[address], more = going + fresh, more + len(fresh)
            return more

        try:
            yield act
        finally:
            for calls in open_calls.values():
                for _, ended in calls:
                    ended.set()


@contextmanager
def _idle_connections(target: Target) -> Iterator[Act]:
    """Connections that are kept and say nothing; one that ends is opened again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    addresses = target.ports
    held: deque[socket.socket] = deque()

    def act() -> int:
        if len(held) < _HELD:
            link = dialled(addresses[len(held) % len(addresses)])
            link.setblocking(False)
            held.append(link)
            return 1
        link = held.popleft()
        if _is_open(link):
            held.append(link)
        else:
            link.close()
        return 0

    try:
        yield act
    finally:
        for link in held:
            link.close()


@contextmanager
def _huge_messages(target: Target) -> Iterator[Act]:
    """Messages as long as a server may take, to the coordinator and shards in turn."""
    huge = bytes(limits.MESSAGE_BYTES)
    with _flood(target, {address: (COORDINATOR["Ping"].path, lambda: huge) for address in target.servers}, 4) as act:
        yield act


@contextmanager
def _subscriptions(target: Target) -> Iterator[Act]:
    """Subscriptions to KV events of 16 MiB each, in frames of ZMTP 3: ZMQ's own client is slow to make them."""
    hello = zmtp.GREETING + zmtp.encode_ready(b"SUB")
    subscribe = zmtp.encode_frame(b"\x01" + bytes(16 * 2**20))

    def act() -> int:
        with dialled(target.events.removeprefix("tcp://")) as link:
            link.sendall(hello)
            link.sendall(subscribe)
            link.recv(1)
        return 1

    yield act


@contextmanager
def _topics(target: Target) -> Iterator[Act]:
    """Subscriptions to 10,000 topics of 4,000 bytes each from every connection, of which some are kept."""
    links: deque[socket.socket] = deque()
    sent = 0

    def act() -> int:
        nonlocal sent
        if not sent % _TOPICS:
            if len(links) == _SUBSCRIBERS:
                links.popleft().close()
            links.append(dialled(target.events.removeprefix("tcp://")))
            links[-1].sendall(zmtp.GREETING + zmtp.encode_ready(b"SUB"))
        names = (b"\x01kv@" + os.urandom(8).hex().encode() + b"@" + os.urandom(3_980) for _ in range(_BURST))
        sent += _BURST
        try:
            links[-1].sendall(b"".join(map(zmtp.encode_frame, names)))
        except OSError:
            sent = 0
            raise
        return _BURST

    try:
        yield act
    finally:
        for link in links:
            link.close()


@contextmanager
def _endless_messages(target: Target) -> Iterator[Act]:
    """Messages to the publisher of KV events whose last frame never comes."""
    link: socket.socket | None = None
    frames = zmtp.encode_frame(bytes(4_000), 1) * _BURST

    def act() -> int:
        nonlocal link
        if link is None:
            link = dialled(target.events.removeprefix("tcp://"))
            link.sendall(zmtp.GREETING + zmtp.encode_ready(b"SUB"))
        try:
            link.sendall(frames)
        except OSError:
            link.close()
            link = None
            raise
        return _BURST

    yield act


# ------------------------------------------------------------------------------------------- tenants


@contextmanager
def _tiny_messages(target: Target) -> Iterator[Act]:
    """The shortest questions that there are, many at once."""
    pings = {address: (COORDINATOR["Ping"].path, lambda: b"") for address in (target.coordinator,)}
    pings |= {address: (SHARD["Ping"].path, lambda: b"") for address in target.shards}
    with _flood(target, pings, _IN_FLIGHT) as act:
        yield act


@contextmanager
def _prepares(target: Target, blocks: int) -> Iterator[Act]:
    """Stores that are prepared and never begun, each by another worker that does not exist."""
    method, space = COORDINATOR["PrepareStore"], _attach(target.coordinator, target.token).namespace

    def prepare() -> bytes:
        hashes = tuple(random_hash() for _ in range(blocks))
        question = PrepareStore(new_attempt(), 0, random_hash(), hashes[0], hashes, ((0, SPEC.whole(0)),))
        return method.encode_request(question, space)

    with _flood(target, {target.coordinator: (method.path, prepare)}, _IN_FLIGHT) as act:
        yield act


@contextmanager
def _token_ids(target: Target) -> Iterator[Act]:
    """Stores that are prepared and never begun, each with as many token ids as a message may hold, for KV events."""
    method, space = COORDINATOR["PrepareStore"], _attach(target.coordinator, target.token, LONG).namespace
    tokens = range(2**28, 2**28 + _LONG_BLOCKS * LONG.block_tokens)

    def prepare() -> bytes:
        hashes = tuple(random_hash() for _ in range(_LONG_BLOCKS))
        parts = ((0, LONG.whole(0)),)
        question = PrepareStore(new_attempt(), 0, random_hash(), hashes[0], hashes, parts, tokens=tokens)
        return method.encode_request(question, space)

    with _flood(target, {target.coordinator: (method.path, prepare)}, _WRITERS) as act:
        yield act


@contextmanager
def _engines(target: Target, nbytes: int) -> Iterator[Act]:
    """Engines that do not exist, whose facts have so many bytes of characters of four bytes."""
    method, numbers = COORDINATOR["RegisterEngine"], count()
    fact = "\U0001f40e" * (nbytes // 4 // limits.ENGINE_FACTS)

    def register() -> bytes:
        facts = tuple((str(number), fact) for number in range(limits.ENGINE_FACTS))
        return method.encode_request(RegisterEngine(EngineInfo(f"engine{next(numbers)}", "n", "m", "w", facts)), None)

    with _flood(target, {target.coordinator: (method.path, register)}, _IN_FLIGHT) as act:
        yield act


@contextmanager
def _explains(target: Target) -> Iterator[Act]:
    """The longest question of the coordinator that there is, about blocks that it has never seen."""
    method, space = COORDINATOR["Explain"], _attach(target.coordinator, target.token).namespace
    hashes = tuple(random_hash() for _ in range(limits.BLOCKS_PER_CALL))
    encoded = method.encode_request(Explain(hashes, Need((SPEC.whole(0),))), space)
    with _flood(target, {target.coordinator: (method.path, lambda: encoded)}, _IN_FLIGHT) as act:
        yield act


@contextmanager
def _reservations(target: Target, spec: KVSpec, pages: int, *, keep: bool) -> Iterator[Act]:
    """Pages that are reserved and never sent. They are kept for as long as the shard lets them, and reserved again; or
    they are given back at once."""
    stop = threading.Event()

    def reserve(at: AttachedShard) -> Iterator[bytes]:
        keys = [PageKey(random_hash(), 0, spec.whole(0)) for _ in range(pages)]
        new = tuple(NewPage(key, random_hash(), 0) for key in keys)
        yield frames.encode_write_request(WriteRequest(at.namespace, new_attempt(), at.epoch, new, 30 * 10**9))
        if keep:
            stop.wait()

    with ExitStack() as house:
        attached = {
            shard: ask(shard, target.token, SHARD["Attach"], AttachShard(spec), AttachedShard)
            for shard in target.shards
        }
        connections = {shard: Connection(shard, shows(target.token)) for shard in target.shards}
        for connection in connections.values():
            house.callback(connection.close)
        house.callback(stop.set)
        going: dict[str, deque[Any]] = {shard: deque() for shard in target.shards}

        def act() -> int:
            begun = 0
            for shard, connection in connections.items():
                calls = going[shard]
                if not keep and len(calls) == _WRITERS:
                    deque(calls.popleft(), 0)  # reads the answers, without which the call does not end
                for _ in range(len(calls)):
                    call = calls.popleft()
                    if call.is_active():
                        calls.append(call)
                while len(calls) < _WRITERS:
                    calls.append(connection.write_stream(WRITE, reserve(attached[shard]), _PATIENT))
                    begun += 1
            return begun

        yield act


@contextmanager
def _long(target: Target, calls: Callable[[Target], Mapping[str, tuple[str, Callable[[], bytes]]]]) -> Iterator[Act]:
    """Long messages that are valid, eight at once."""
    with _flood(target, calls(target), 8) as act:
        yield act


@contextmanager
def _stores(target: Target, first: int, *, pin: bool) -> Iterator[Act]:
    """Prompts from the number `first` on that are stored and never asked for, more than the cluster can hold; or each
    of them pinned."""
    with _client(target) as client:
        values, numbers = kv(0), count(first)

        def act() -> int:
            stored = prompt(next(numbers))
            blocks = client.store(stored, values).blocks
            if not pin:
                return blocks
            client.flush()
            return client.pin(stored, 600).blocks

        yield act


@contextmanager
def _holds(target: Target) -> Iterator[Act]:
    """Prompts that are stored, each with a ticket that is kept and renewed, so that nothing of it may be evicted; and
    tickets once more for those before it."""
    with _client(target) as client, ExitStack() as house:
        values, numbers = kv(0), count(3 * 10**6)
        tickets: deque[ExitStack] = deque()

        def act() -> int:
            stored = prompt(next(numbers))
            client.store(stored, values)
            client.flush()
            one = house.enter_context(ExitStack())
            one.enter_context(client.prepare_load(client.hashes(stored)))
            tickets.append(one)
            if len(tickets) >= limits.TICKETS_PER_HOLDER:
                tickets.popleft().close()
            return 1

        yield act


@contextmanager
def _tables(target: Target) -> Iterator[Act]:
    """Tables of open sequences, of blocks that no shard has, each by another worker that does not exist."""
    method = COORDINATOR["SyncTables"]
    space = ask(target.coordinator, target.token, COORDINATOR["Attach"], Attach(TINY), Attached).namespace

    def sync() -> bytes:
        blocks = tuple(random_hash() for _ in range(limits.BLOCKS_PER_CALL))
        changes = (TableChange(SequenceId(bytes(SEQUENCE_BYTES)), 0, blocks),)
        return method.encode_request(SyncTables(Holder(os.urandom(HOLDER_BYTES)), 1, changes), space)

    with _flood(target, {target.coordinator: (method.path, sync)}, _IN_FLIGHT // 16) as act:
        yield act


ATTACKS: Mapping[str, Attack] = {
    "streams": Attack("calls without a message", _header_streams),
    "handshakes": Attack("connections that break off", handshakes),
    "tls-handshakes": Attack("handshakes of TLS without a call", whole_handshakes),
    "key-updates": Attack("key updates of TLS without an end", updates),
    "connections": Attack("idle connections", _idle_connections),
    "huge": Attack("messages of 64 MiB without a token", _huge_messages),
    "subscriptions": Attack("subscriptions of 16 MiB", _subscriptions),
    "topics": Attack("10,000 topics of 4,000 bytes a connection", _topics),
    "endless": Attack("messages to the port of KV events without an end", _endless_messages),
    "drips": Attack("requests for metrics that come byte by byte", drips),
    "scrapes": Attack("24 scrapers of metrics without a pause", scrapes),
    "huge-tenant": Attack("messages of 64 MiB", _huge_messages, by_tenant=True),
    "tiny": Attack("the shortest messages", _tiny_messages, by_tenant=True),
    "holders": Attack("workers that do not exist", partial(_prepares, blocks=1), by_tenant=True),
    "prepares": Attack(
        "stores of 8,192 blocks, prepared", partial(_prepares, blocks=limits.BLOCKS_PER_CALL), by_tenant=True
    ),
    "explains": Attack("explains of 8,192 blocks", _explains, by_tenant=True),
    "token-ids": Attack("stores of 262,144 token ids, prepared", _token_ids, by_tenant=True),
    "engines": Attack(
        "engines with as much to say as they may", partial(_engines, nbytes=limits.ENGINE_BYTES - 512), by_tenant=True
    ),
    "huge-engines": Attack(
        "engines with 1,024 characters of four bytes a fact",
        partial(_engines, nbytes=4 * 1_024 * limits.ENGINE_FACTS),
        by_tenant=True,
    ),
    "reservations": Attack(
        "reservations without pages", partial(_reservations, spec=SPEC, pages=256, keep=True), by_tenant=True
    ),
    "huge-reservations": Attack(
        f"reservations of {limits.WRITE_PAGES:,} pages, given back",
        partial(_reservations, spec=TINY, pages=limits.WRITE_PAGES, keep=False),
        by_tenant=True,
    ),
    "spans": Attack("attends to made-up blocks, 65,536 each", made_up_spans, by_tenant=True),
    "attends": Attack("attends of seconds", long_computes, by_tenant=True),
    "registrations": Attack("registrations of 60 MiB", partial(_long, calls=long_registrations), by_tenant=True),
    "questions": Attack("questions of 2 MiB", partial(_long, calls=long_questions), by_tenant=True),
    "stores": Attack("stores without end", partial(_stores, first=10**6, pin=False), by_tenant=True),
    "at-its-limit": Attack(
        "stores without end of a tenant at its limits of bytes and rates",
        partial(_stores, first=4 * 10**6, pin=False),
        by_tenant=True,
        limited=True,
    ),
    "pins": Attack("pins without end", partial(_stores, first=2 * 10**6, pin=True), by_tenant=True),
    "holds": Attack("tickets for all that is stored", _holds, by_tenant=True),
    "tables": Attack("tables of blocks that no shard has", _tables, by_tenant=True),
}


# -------------------------------------------------------------------------------------------- helpers


@contextmanager
def _flood(target: Target, calls: Mapping[str, tuple[str, Callable[[], bytes]]], in_flight: int) -> Iterator[Act]:
    """Unary calls of these paths at these addresses in turn, so many of them under way at any time."""
    metadata = (*METADATA, ("authorization", f"Bearer {target.token}")) if target.token else METADATA
    options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
    with ExitStack() as house:
        senders: list[tuple[Any, Callable[[], bytes]]] = [
            (house.enter_context(channel(address, options)).unary_unary(path), message)
            for address, (path, message) in calls.items()
        ]
        under_way: deque[Any] = deque()
        at = 0

        def act() -> int:
            nonlocal at
            while len(under_way) < in_flight:
                send, message = senders[at % len(senders)]
                at += 1
                under_way.append(send.future(message(), metadata=metadata, timeout=60))
            under_way.popleft().result()
            return 1

        yield act


@contextmanager
def _client(target: Target) -> Iterator[Client]:
    with kvcluster.connect(target.coordinator, SPEC, token=target.token, config=_CONFIG) as client:
        yield client


def _attach(address: str, token: str | None, spec: KVSpec = SPEC) -> Attached:
    return ask(address, token, COORDINATOR["Attach"], Attach(spec), Attached)


def ask(address: str, token: str | None, method: Method, question: Any, kind: type[R]) -> R:
    connection = Connection(address, shows(token))
    try:
        answer = connection.ask(method, question, _PATIENT)
    finally:
        connection.close()
    assert isinstance(answer, kind)
    return answer


def new_attempt() -> Attempt:
    return Attempt(Holder(os.urandom(HOLDER_BYTES)), 1)


def random_hash() -> BlockHash:
    return BlockHash(os.urandom(HASH_BYTES))


def _is_open(link: socket.socket) -> bool:
    try:
        return bool(link.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    facts = json.loads(sys.stdin.readline())
    facts |= {name: tuple(fact) for name, fact in facts.items() if isinstance(fact, list)}
    target = Target(**facts)
    done, refused, begun = 0, 0, False
    with suppress(KeyboardInterrupt), ATTACKS[sys.argv[1]].begin(target) as act:
        while not stop.is_set() and done + refused < MOST:
            try:
                now = act()
            except (OSError, grpc.RpcError, kvcluster.KVClusterError):
                refused += 1
            else:
                done += now
                if not now:
                    stop.wait(_PAUSE_S)
            if not begun:
                print(BEGUN, flush=True)
                begun = True
        print(json.dumps({"done": done, "refused": refused}), flush=True)
        os._exit(0)  # what is under way ends with the process


if __name__ == "__main__":
    main()
