"""Ports to listen on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvcluster.errors import ConfigError
from kvcluster.transport import listener
from kvcluster.transport.listener import bound_socket

HOST = "127.0.0.1"


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
