"""What a listener keeps of those who connect and show no credential."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport import framed_socket, listener
from kvcluster.transport.base import Unavailable
from kvcluster.transport.listener import Listener, ListenTls, bound_socket
from tests.authority import Authority
from tests.key_updates import key_updates
from tests.waiting import eventually

HOST = "127.0.0.1"


def listening_tls(folder: Path) -> ListenTls:
    certificates = Authority(folder).issue("s", "shard").certificates()
    return ListenTls(certificates, False, lambda _: Tenant("one"))


@contextmanager
def listening(tls: ListenTls | None) -> Iterator[tuple[Listener, int]]:
    """A listener that serves nothing, and its port."""
    bound = bound_socket(HOST, 0, "server.port")
    port = int(bound.getsockname()[1])
    served = Listener(bound, lambda _: Tenant("one"), lambda *_: None, name="test", tls=tls)
    served.start()
    try:
        yield served, port
    finally:
        served.close()


def test_key_updates_hold_no_thread_beyond_the_time_for_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.1)
    monkeypatch.setattr(listener, "_LATE_S", 0.1)
    with listening(listening_tls(tmp_path)) as (served, port), key_updates(HOST, port) as ended:
        eventually(ended.is_set, 20.0)
        eventually(lambda: not served._links)


def test_a_connection_is_ended_whose_thread_looks_at_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_the_end(connected: socket.socket, *_: object) -> None:
        connected.setblocking(True)
        while socket.socket.recv(connected, 1_000):
            pass
        raise Unavailable(Miss(MissReason.SHARD_LOST, "it has ended"))

    monkeypatch.setattr(listener, "HELLO_S", 0.1)
    monkeypatch.setattr(framed_socket, "handshake", to_the_end)
    with listening(listening_tls(tmp_path)) as (served, port), socket.create_connection((HOST, port)):
        eventually(lambda: served._links)
        eventually(lambda: not served._links, 20.0)


def test_a_connection_is_ended_whose_peer_sends_faster_than_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that is shut down gives on what arrives."""

    def to_the_end(connected: socket.socket, *_: object) -> None:
        connected.setblocking(True)
        with suppress(OSError):
            while socket.socket.recv(connected, 100):
                pass
        raise Unavailable(Miss(MissReason.SHARD_LOST, "it has ended"))

    def flood(link: socket.socket) -> None:
        with suppress(OSError):
            for _ in range(20_000):
                link.sendall(bytes(2**20))

    monkeypatch.setattr(listener, "HELLO_S", 0.1)
    monkeypatch.setattr(listener, "_LATE_S", 0.1)
    monkeypatch.setattr(framed_socket, "handshake", to_the_end)
    with listening(listening_tls(tmp_path)) as (served, port), socket.create_connection((HOST, port)) as link:
        flooding = threading.Thread(target=flood, args=(link,), daemon=True)
        flooding.start()
        eventually(lambda: served._links)
        eventually(lambda: not served._links, 20.0)
        flooding.join(20.0)


def test_threads_that_do_not_notice_their_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def unaware(*_: object) -> None:
        assert go_on.wait(20.0)
        raise Unavailable(Miss(MissReason.SHARD_LOST, "it has ended"))

    monkeypatch.setattr(limits, "STREAMS_UNKNOWN", 2)
    monkeypatch.setattr(framed_socket, "handshake", unaware)
    with listening(listening_tls(tmp_path)) as (served, port), ExitStack() as house:
        links = [house.enter_context(socket.create_connection((HOST, port))) for _ in range(12)]
        try:
            links[-1].settimeout(20.0)
            assert links[-1].recv(1_000) == b"", "it is closed, and served by no thread"
            assert len(served._links) == 4
        finally:
            go_on.set()
        eventually(lambda: not served._links)
        with socket.create_connection((HOST, port)):
            eventually(lambda: not served._ended)


def test_a_connection_that_sends_nothing_ends_whether_or_not_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.1)
    with listening(None) as (served, port), socket.create_connection((HOST, port)) as silent:
        eventually(lambda: not served._links and not served._unknown)
        silent.settimeout(20.0)
        assert silent.recv(1_000), "its own thread says why"
