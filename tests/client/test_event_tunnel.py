"""The tunnel of KV events through TLS ends a connection when either side has ended, whatever is still to be moved."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvcluster.client.event_tunnel import EventTunnel
from kvcluster.transport.base import Deadline
from kvcluster.transport.certificates import COORDINATOR, accepting, handshake
from tests.authority import Authority
from tests.waiting import eventually

BOUND_S = 20.0
_MANY = bytes(2**20)


class Ends:
    """A subscriber's end of a tunnel, and the publisher's, which has carried out its handshake."""

    def __init__(self, house: ExitStack, folder: Path) -> None:
        authority = Authority(folder)
        listening = house.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(BOUND_S)
        publisher = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        self.tunnel = house.enter_context(closing(EventTunnel(publisher, authority.client())))
        self.subscriber = house.enter_context(socket.socket(socket.AF_UNIX))
        self.subscriber.connect(self.tunnel.endpoint.removeprefix("ipc://"))
        connected, _ = listening.accept()
        certificates = authority.issue("publisher", COORDINATOR).certificates()
        self.publisher = house.enter_context(accepting(connected, certificates, mutual=False))
        handshake(self.publisher, "the tunnel", Deadline.after_ms(BOUND_S * 1e3))
        self.subscriber.setblocking(False)

    @property
    def carried(self) -> int:
        """How many connections the tunnel has."""
        return len(self.tunnel._open)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as house:
        yield Ends(house, tmp_path)


def fill(send: Callable[[bytes], int]) -> None:
    """Sends until the other side, which reads nothing, and all between have no more room."""
    refused = 0

    def is_full() -> bool:
        nonlocal refused
        try:
            send(_MANY)
            refused = 0
        except (BlockingIOError, ssl.SSLWantWriteError):
            refused += 1
        return refused > 5

    eventually(is_full)


def test_bytes_go_both_ways(ends: Ends) -> None:
    ends.subscriber.setblocking(True)
    ends.publisher.setblocking(True)
    ends.subscriber.sendall(b"topic")
    assert ends.publisher.recv(5) == b"topic"
    ends.publisher.sendall(b"event")
    assert ends.subscriber.recv(5) == b"event"


def test_a_subscriber_that_ends_while_its_publisher_takes_nothing_ends_the_connection(ends: Ends) -> None:
    fill(ends.subscriber.send)
    assert ends.carried == 1
    ends.subscriber.close()
    eventually(lambda: not ends.carried, BOUND_S)


def test_a_publisher_that_ends_while_its_subscriber_takes_nothing_ends_the_connection(ends: Ends) -> None:
    fill(ends.publisher.send)
    assert ends.carried == 1
    ends.publisher.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ends.publisher.close()
    eventually(lambda: not ends.carried, BOUND_S)
