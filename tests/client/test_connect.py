"""Addresses: one that cannot be right is refused before anything is asked, and the error says what to write."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.errors import ConfigError, Unreachable
from tests.client.build import SPEC
from tests.ports import free_port


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("http://127.0.0.1:7070", ": write 127.0.0.1:7070"),
        ("https://cache.example/", ", such as 127.0.0.1:7070"),
        ("grpc://cache:7070/", ": write cache:7070"),
        ("dns:///cache:7070", ": write cache:7070"),
        ("cache:7070/v1", ": write cache:7070"),
        (" cache:7070\n", ": write cache:7070"),
        ("::1:7070", r": write \[::1\]:7070"),
        ("cache", ", such as 127.0.0.1:7070"),
        ("7070", ", such as 127.0.0.1:7070"),
        (":7070", ", such as 127.0.0.1:7070"),
        ("cache:", ", such as 127.0.0.1:7070"),
        ("cache:99999", ", such as 127.0.0.1:7070"),
        ("unix:/tmp/socket", ", such as 127.0.0.1:7070"),
        ("a host:7070", ", such as 127.0.0.1:7070"),
    ],
)
def test_a_malformed_address_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, address: str, instead: str
) -> None:
    monkeypatch.delattr(grpc, "insecure_channel")
    with pytest.raises(ConfigError, match=f"is not host:port{instead}$"):
        kvcluster.connect(address, SPEC)


@pytest.mark.parametrize("address", [None, 7070, b"cache:7070"])
def test_an_address_that_is_no_text_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="expected host:port as text"):
        kvcluster.connect(address, SPEC)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_where_nothing_listens_is_named(host: str) -> None:
    address = f"{host}:{free_port()}"
    with pytest.raises(Unreachable) as raised:
        kvcluster.connect(address, SPEC, config=ClientConfig(connect_ms=50))
    assert f"no server answers at {address}" in str(raised.value) and "kvcluster up" in str(raised.value)
