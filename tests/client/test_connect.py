"""Addresses: one that cannot be right is refused before anything is asked, and the error says what to write."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, get_args, get_type_hints

import grpc
import numpy
import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.messages import GetStatus
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, ConfigError, ProtocolError, Unreachable
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transfers.long_chains import TokenArray
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.rpc import Connection
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


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server without HTTP/2, which says 'HTTP/1.1 400 Bad Request'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program's server, which says 'SSH-2.0-OpenSSH_9.6'"),
        (b"-ERR unknown command 'PRI'\r\n", "another program's server, which says"),
    ],
)
def test_a_server_of_another_program_is_named_by_what_it_says(says: bytes, what: str) -> None:
    with speaking(says) as address, pytest.raises(ProtocolError, match="no kvcluster server but") as raised:
        kvcluster.connect(address, SPEC, config=ClientConfig(connect_ms=600_000))
    assert what in str(raised.value) and address in str(raised.value)


def test_a_server_that_says_nothing_is_waited_for_and_not_judged() -> None:
    with speaking(b"") as address, pytest.raises(Unreachable, match="in time"):
        kvcluster.connect(address, SPEC, config=ClientConfig(connect_ms=700))


@contextmanager
def speaking(says: bytes) -> Iterator[str]:
    """A server that sends this to every connection, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as held:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    held.enter_context(connection)
                    connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spec": {"model": "m"}}, "spec is a dict; expected a KVSpec"),
        ({"spec": None}, "spec is None; expected a KVSpec"),
        ({"config": {"deadline_ms": 1}}, "config is a dict; expected a ClientConfig"),
        ({"token": b"secret"}, "token is a bytes; expected the credential as text"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.delattr(grpc, "insecure_channel")
    with pytest.raises((CallerError, ConfigError), match=says):
        kvcluster.connect("127.0.0.1:7070", **{"spec": SPEC, **settings})


def test_a_part_that_is_none_is_refused() -> None:
    for part in (7, {0: "whole"}, (0, 1)):
        with pytest.raises(CallerError, match="expected a Part"), MemoryCluster() as cluster:
            cluster.client(SPEC, part=part)  # type: ignore[arg-type]


def test_a_coordinator_that_has_ended_is_named_without_grpcs_words() -> None:
    address = f"127.0.0.1:{free_port()}"
    port = GrpcPort(Connection(address))
    with pytest.raises(Unavailable) as raised:
        port.ask(GetStatus(), Deadline.after_ms(5_000))
    port.close()
    why = f"the coordinator at {address} does not answer ({address}: connection refused)"
    assert raised.value.miss == Miss(MissReason.COORDINATOR_LOST, why)


def test_arrays_of_numpy_and_torch_are_token_ids_to_a_type_checker() -> None:
    prompts = [numpy.arange(8, dtype=numpy.int32), torch.arange(8), [*range(8)], range(8)]
    for call in (Client.lookup, Client.store, Client.load, Client.explain, Client.sequence, Client.hashes):
        (taken,) = [hint for name, hint in get_type_hints(call).items() if name == "prompt"]
        assert TokenArray in get_args(taken)
    assert all(isinstance(given, TokenArray) for given in prompts[:2])
    assert len({kvcluster.Prompt(given).token_ids.tobytes() for given in prompts}) == 1  # type: ignore[attr-defined]
