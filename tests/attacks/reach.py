"""How attackers and the honest tenant reach a cluster: in the clear, or within TLS where the environment names an
authority (KVCLUSTER_CA_FILE)."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from kvcluster.config import ClientConfig
from kvcluster.transport.addresses import split_address
from kvcluster.transport.credentials import CA_FILE, Credentials, tls_credentials
from kvcluster.transport.tcp_pages import TcpPages

HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(range(32))
"""The beginning of the first message of a handshake."""


def speaks_tls() -> bool:
    """Whether the cluster does."""
    return CA_FILE in os.environ


@cache
def _credentials(authority: str) -> Credentials:
    return tls_credentials(ClientConfig(ca_file=authority))


def shows(token: str | None) -> Credentials:
    """What a process with this token shows."""
    return Credentials(token, _credentials(os.environ.get(CA_FILE, "")).certificates)


def tcp_pages(address: str, token: str | None) -> TcpPages:
    return TcpPages(address, shows(token))


def channel(address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """A channel without the product's client."""
    if not speaks_tls():
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(os.environ[CA_FILE]).read_bytes()), options)


@cache
def _context(authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])  # gRPC ends a connection without it after the handshake
    return context


def dialled(address: str, timeout_s: float = 10.0) -> socket.socket:
    """A socket in the clear."""
    return socket.create_connection(split_address(address), timeout=timeout_s)


def dialled_within(address: str, timeout_s: float = 10.0) -> socket.socket:
    """A socket within TLS after the handshake, if the cluster speaks TLS."""
    connected = dialled(address, timeout_s)
    if not speaks_tls():
        return connected
    try:
        return _context(os.environ[CA_FILE]).wrap_socket(connected, server_hostname=split_address(address)[0])
    except BaseException:
        connected.close()
        raise
