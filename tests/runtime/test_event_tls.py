"""What handshakes within TLS, and readers of KV events who have a certificate, can do to the port of KV events."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvcluster.client.events import EventSubscriber
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.runtime.event_publisher import EventPublisher
from kvcluster.runtime.zmtp_server import WORK_NS, EventAccess, ZmtpServer
from kvcluster.wire import zmtp
from tests.authority import CLUSTER, Authority, Issued
from tests.key_updates import key_updates
from tests.runtime.events import effect, published
from tests.waiting import eventually


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def access(authority: Authority) -> EventAccess:
    return EventAccess(authority.issue("c", "coordinator").certificates(), CLUSTER, lambda _: False)


def hears(publisher: EventPublisher, reader: Issued) -> None:
    """A reader with this certificate hears what is published."""
    ca, cert, key = reader.files
    with EventSubscriber(publisher.endpoint, config=ClientConfig(ca_file=ca, cert_file=cert, key_file=key)) as one:

        def heard() -> bool:
            publisher.publish(effect(1))
            return one.next(0.2) is not None

        eventually(heard)


def test_key_updates_of_one_reader_keep_no_other_from_hearing(authority: Authority) -> None:
    reader = authority.issue("reader", "events")
    with published(access=access(authority)) as publisher:
        host, _, port = publisher.endpoint.removeprefix("tcp://").rpartition(":")
        with key_updates(host, int(port), reader.files.cert, reader.files.key):
            hears(publisher, reader)


def test_connections_that_do_not_finish_their_handshake_keep_no_reader_out(authority: Authority) -> None:
    with published(access=access(authority)) as publisher:
        host, _, port = publisher.endpoint.removeprefix("tcp://").rpartition(":")
        links = [socket.create_connection((host, int(port)), timeout=30) for _ in range(limits.EVENT_PEERS)]
        hears(publisher, authority.issue("reader", "events"))
        for link in links:
            link.close()


class _Silent:
    """A port that says nothing."""

    socket = b"PUB"
    bounds = zmtp.Bounds((b"SUB",), frames=1, nbytes=1_000)

    def heard(self, *_: object) -> None: ...

    def busy(self, _: object) -> bool:
        return False

    def following(self, _: object) -> None: ...

    def closed(self, _: object) -> None: ...


def test_a_handshake_is_rested_from_as_long_as_it_took(authority: Authority) -> None:
    now, step_ns, reader = 0, 100 * WORK_NS, authority.issue("reader", "events")

    def clock() -> int:
        nonlocal now
        now += step_ns
        return now

    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(reader.files.cert, reader.files.key)
    waking, wake = socket.socketpair()
    with waking, wake, closing(ZmtpServer(wake, clock, access(authority))) as server:
        endpoint = server.listen("tcp://127.0.0.1:0", _Silent(), "events.endpoint")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        def connect() -> None:
            with (
                socket.create_connection((host, int(port)), timeout=30) as near,
                context.wrap_socket(near, server_hostname=host) as link,
            ):
                link.recv(1_000)

        thread = threading.Thread(target=connect)
        thread.start()
        most = 0
        while thread.is_alive():
            server.wait(0.01)
            most = max(most, server._work)
        assert most >= step_ns // WORK_NS
