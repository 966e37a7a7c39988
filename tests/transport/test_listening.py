"""Ports to listen on, and the end of a listener while a connection begins."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from kvcluster.core.ids import Tenant
from kvcluster.errors import ConfigError
from kvcluster.transport import framed_socket, listener
from kvcluster.transport.certificates import SHARD, Certificates, accepting
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.listener import Listener, ListenTls, bound_socket
from tests.authority import Authority

HOST = "127.0.0.1"
BOUND_S = 20.0


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        with bound_socket(HOST, 0, "server.port") as bound:
            assert 1_024 <= bound.getsockname()[1] < first


def test_a_free_port_is_one_that_nobody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(listener, "_FREE", [taken])
        monkeypatch.setattr(listener, "_TRIES", 1)
        with bound_socket(HOST, 0, "server.port") as bound:
            assert bound.getsockname()[1] != taken


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0.*\(server\.port\)"):
        bound_socket("192.0.2.1", 0, "server.port")


def test_close_ends_a_connection_whose_socket_is_being_put_within_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, shut = threading.Event(), threading.Event()
    shutdown = FramedSocket.shutdown

    def wrap(connected: socket.socket, certificates: Certificates, *, mutual: bool) -> ssl.SSLSocket:
        made = accepting(connected, certificates, mutual=mutual)
        wrapped.set()
        assert shut.wait(BOUND_S)
        return made

    def shut_before_it_is_wrapped(link: FramedSocket) -> None:
        shutdown(link)
        shut.set()

    monkeypatch.setattr(framed_socket, "accepting", wrap)
    monkeypatch.setattr(FramedSocket, "shutdown", shut_before_it_is_wrapped)
    monkeypatch.setattr(listener, "HELLO_S", 2 * BOUND_S)  # or the end of its time would end it, too
    tls = ListenTls(Authority(tmp_path).issue("me", SHARD).certificates(), False, lambda shown: Tenant("me"))
    listening = bound_socket(HOST, 0, "server.port")
    served = Listener(listening, lambda token: Tenant("me"), lambda link, tenant: None, name="tested", tls=tls)
    served.start()
    closing = threading.Thread(target=served.close, daemon=True)
    with socket.create_connection(listening.getsockname()):  # a client that says nothing
        assert wrapped.wait(BOUND_S)
        closing.start()
        closing.join(BOUND_S)
        assert not closing.is_alive()
