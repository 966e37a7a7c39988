"""What strangers can do to the ports of KV events: connect, subscribe and ask, and have hardly anything kept for it.

Peers here are plain sockets that speak ZMTP themselves, since those of ZeroMQ are too polite."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvcluster.core import limits
from kvcluster.core.messages.reports import Publish
from kvcluster.runtime import event_publisher, zmtp_server
from kvcluster.runtime.event_publisher import EventPublisher
from kvcluster.wire import kv_events, zmtp
from tests.resident import resident_bytes
from tests.runtime.events import effect, heard, published, replayed, stored, stream, subscribed
from tests.waiting import eventually

MIB = 2**20
TOPIC = b"kv@0000000000000000@"


@contextmanager
def dialled(endpoint: str, kind: bytes = b"SUB", *, hello: bool = True, received: int = 0) -> Iterator[socket.socket]:
    """A connection; the kernel keeps `received` bytes for it, if that is not 0."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket() as link:
        link.settimeout(30)
        if received:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
        link.connect((host, int(port)))
        if hello:
            link.sendall(zmtp.GREETING + zmtp.encode_ready(kind))
        yield link


def is_closed(link: socket.socket) -> bool:
    """Whether the other side has closed the connection. Reads what comes meanwhile."""
    link.settimeout(0.01)
    try:
        while link.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def subscribe(link: socket.socket, topic: bytes) -> None:
    link.sendall(zmtp.encode_frame(b"\x01" + topic))


def known(publisher: EventPublisher) -> int:
    return len(publisher._subscribers.peers())


def connections(publisher: EventPublisher) -> int:
    return sum(map(len, publisher._server._peers.values()))


def still_serves(publisher: EventPublisher) -> None:
    """Another subscriber is heard and hears."""
    with subscribed(publisher) as subscriber:
        publisher.publish(effect(1, of=7))
        assert heard(subscriber).topic == kv_events.topic_of(stream(7))


@pytest.mark.parametrize("begins", [b"", TOPIC], ids=["any", "possible"])
def test_many_subscriptions_of_one_connection_cost_no_memory(begins: bytes) -> None:
    draw = random.Random(1)
    with published() as publisher:
        still_serves(publisher)
        before = resident_bytes()
        with ExitStack() as links:
            for _ in range(4):
                link = links.enter_context(dialled(publisher.endpoint))
                with suppress(OSError):
                    for _ in range(500):
                        subscribe(link, begins + draw.randbytes(4_000))
            still_serves(publisher)
            assert resident_bytes() - before < 16 * MIB
        eventually(lambda: known(publisher) == 0)


def test_subscriptions_are_bounded_in_number_and_bytes_and_a_cancelled_one_makes_room() -> None:
    with published() as publisher, ExitStack() as links:
        first, second, third = (links.enter_context(dialled(publisher.endpoint)) for _ in range(3))
        for number in range(limits.SUBSCRIPTIONS):
            subscribe(first, TOPIC + str(number).encode())
            subscribe(first, TOPIC + str(number).encode())  # once more is the same
        first.sendall(zmtp.encode_frame(b"\x00" + TOPIC + b"0"))
        subscribe(first, TOPIC + b"another")
        for number in range(limits.SUBSCRIBED_BYTES // 4_000 + 1):
            subscribe(second, TOPIC + str(number).encode() + 4_000 * b"a")
        eventually(lambda: is_closed(second))
        subscribe(third, b"neither ours nor kept")
        assert not is_closed(first)
        subscribe(first, TOPIC + b"one too many")
        eventually(lambda: is_closed(first))
        assert not is_closed(third)
        assert publisher.counters()["refused"] == 2 and known(publisher) == 0


@pytest.mark.parametrize("replay", [False, True])
def test_a_message_without_an_end_costs_no_memory(replay: bool) -> None:
    with published() as publisher:
        still_serves(publisher)
        before = resident_bytes()
        endpoint = publisher.replay_endpoint if replay else publisher.endpoint
        with dialled(endpoint, b"DEALER" if replay else b"SUB") as link:
            with suppress(OSError):
                for _ in range(8_000):
                    link.sendall(zmtp.encode_frame(bytes(4_000), 1))
            eventually(lambda: is_closed(link))
        still_serves(publisher)
        assert resident_bytes() - before < 8 * MIB


def test_connections_that_say_nothing_keep_no_subscriber_out() -> None:
    with published() as publisher, ExitStack() as links, subscribed(publisher) as subscriber:
        for at in range(3 * limits.EVENT_PEERS):
            links.enter_context(dialled(publisher.endpoint, hello=at % 2 == 1))
        still_serves(publisher)
        assert connections(publisher) <= limits.EVENT_PEERS // 2
        publisher.publish(effect(1))
        assert heard(subscriber).topic == kv_events.topic_of(stream(7))


def test_so_many_subscribers_of_one_address_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_PEERS", 4)
    with published() as publisher, ExitStack() as links:
        two = [links.enter_context(dialled(publisher.endpoint)) for _ in range(2)]
        for link in two:
            subscribe(link, TOPIC)
        eventually(lambda: known(publisher) == 2)
        with dialled(publisher.endpoint) as third:
            eventually(lambda: is_closed(third))
        assert not any(map(is_closed, two))
        two.pop().close()
        eventually(lambda: known(publisher) == 1)
        with dialled(publisher.endpoint) as fourth:
            subscribe(fourth, TOPIC)
            eventually(lambda: known(publisher) == 2)


def test_a_connection_that_does_not_say_what_it_is_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_server, "HANDSHAKE_NS", 0)
    monkeypatch.setattr(zmtp_server, "_SWEEP_NS", 0)
    with published() as publisher:
        with dialled(publisher.endpoint, hello=False) as link:
            link.sendall(zmtp.GREETING[:30])
            eventually(lambda: is_closed(link))
        assert publisher.counters()["refused"] == 1


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(b"PULL", b""), (b"SUB", zmtp.encode_frame(b"\x02kv@")), (b"SUB", zmtp.encode_message([b"\x01kv@", b"more"]))],
)
def test_a_peer_that_is_no_subscriber_is_disconnected(kind: bytes, sent: bytes) -> None:
    with published() as publisher, dialled(publisher.endpoint, kind) as link:
        link.sendall(sent)
        eventually(lambda: is_closed(link))


def test_a_subscriber_that_takes_nothing_costs_one_batch_and_sees_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "SENT_BATCHES", 3)
    large = tuple(stored(number) for number in range(4_000))
    with (
        published(buffer_batches=1) as publisher,
        subscribed(publisher) as quick,
        dialled(publisher.endpoint, received=64 * 1024) as deaf,
    ):
        subscribe(deaf, b"kv@")
        eventually(lambda: known(publisher) == 2)
        for number in range(40):
            publisher.publish(Publish(stream(), large))
            while heard(quick).sequence != 1_001 + number:
                pass
        assert connections(publisher) == 2, "it is slow, and is kept"
        sent = publisher._subscribers._sent
        assert sent.first == sent.end - 3
        inbound, numbers = zmtp.Inbound(zmtp.Bounds((b"PUB",), frames=3, nbytes=MIB)), []
        while not numbers or numbers[-1] < 1_040:
            inbound.feed(deaf.recv(inbound.room))
            while (frames := inbound.next()) is not None:
                numbers += [kv_events.decode_batch(frames).sequence] if frames else []
        assert numbers == sorted(numbers) and len(numbers) < 41, "it has lost some, and their numbers show it"


def test_a_reader_that_takes_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_server, "_SWEEP_NS", 0)
    large = tuple(stored(number) for number in range(4_000))
    with published() as publisher, dialled(publisher.endpoint) as deaf:
        subscribe(deaf, b"kv@")
        eventually(lambda: known(publisher) == 1)
        monkeypatch.setattr(zmtp_server, "PATIENCE_NS", 0)

        def given_up() -> bool:
            publisher.publish(Publish(stream(), large))
            return known(publisher) == 0

        eventually(given_up)


def test_replays_beyond_those_under_way_wait_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "ANSWERS", 1)
    large = tuple(stored(number) for number in range(4_000))
    with published() as publisher, dialled(publisher.replay_endpoint, b"DEALER") as deaf:
        for _ in range(30):
            publisher.publish(Publish(stream(), large))
        eventually(lambda: publisher.counters()["batches"] == 31)
        request = zmtp.encode_message(kv_events.encode_request(kv_events.ReplayRequest(0)))
        deaf.sendall(request * 1_000)  # more than are read while one is answered
        eventually(lambda: publisher.counters()["replays"] == 1)
        deaf.close()
        assert len(replayed(publisher.replay_endpoint)) == 31


def test_a_flood_is_read_no_faster_than_it_is_rested_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp_server, "REST_NS", 10**15)
    with published() as publisher, dialled(publisher.endpoint) as link:
        for _ in range(100):
            subscribe(link, TOPIC)
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 2)  # publishing does not rest
        assert known(publisher) == 0, "after the round that has accepted the connection"


def test_a_ping_is_answered() -> None:
    with published() as publisher, dialled(publisher.endpoint) as link:
        link.sendall(zmtp.encode_frame(b"\x04PING\x00\x64context", 4))
        inbound, answer = zmtp.Inbound(zmtp.Bounds((b"PUB",), frames=3, nbytes=MIB)), b""
        while b"PONGcontext" not in answer:
            answer += link.recv(1_000)
        inbound.feed(answer)
        while inbound.next() is not None:
            pass
        assert inbound.ready


@pytest.mark.parametrize(
    ("prefix", "may"),
    [
        (b"", True),
        (b"kv@", True),
        (b"kv@0123", True),
        (b"kv@0123456789abcdef@", True),
        (b"kv@0123456789abcdef@a@\nb", True),
        (b"kx", False),
        (b"kv@0123456789abcdefg", False),
        (b"kv@0123456789ABCDEF@", False),
        (b"kv@0123@llama", False),
        (TOPIC + bytes(kv_events.TOPIC_BYTES), False),
    ],
)
def test_only_what_a_topic_may_begin_with_is_kept(prefix: bytes, may: bool) -> None:
    assert kv_events.may_begin_topic(prefix) is may


def test_the_longest_topic_may_be_subscribed_to() -> None:
    longest = kv_events.encode_topic(kv_events.topic_of(stream(1, "\U0001f40e" * 1_024)))
    assert kv_events.may_begin_topic(longest)
    assert len(longest) < event_publisher.Subscribers.bounds.nbytes
