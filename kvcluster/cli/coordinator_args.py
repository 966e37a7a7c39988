"""The command-line options that select a coordinator, what it is shown, and the connection to it."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvcluster.client.credential import read_token
from kvcluster.client.status import status_dict
from kvcluster.config import ENCRYPTIONS, ClientConfig
from kvcluster.core.messages import GetStatus, Status
from kvcluster.errors import ConfigError, Unreachable
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.addresses import check_address, split_address
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import CA_FILE, CERT_FILE, KEY_FILE, Credentials, client_credentials
from kvcluster.transport.listener import check_is_ours
from kvcluster.transport.rpc import Connection

DEFAULT_PORT = 7070

_GREETING_S = 1.0
"""How long to wait for the first bytes from what listens there, by which another program's server is recognised."""

ANSWER_MS = 10_000
"""The longest that a command waits for the coordinator, and for each of its answers."""


def add_coordinator_args(command: Any) -> None:
    """Adds `--port`, `--address`, `--token-from`, those about TLS and `--encryption` to a command."""
    options = command.add_argument_group("which cluster")
    where = options.add_mutually_exclusive_group()
    where.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help=f"port of a coordinator on this machine (default {DEFAULT_PORT})",
    )
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of a coordinator on another machine (default: the environment variable KVCLUSTER_ADDRESS, or use "
        "--port)",
    )
    # No option takes the token itself: the arguments of a process can be read by every user of the machine.
    options.add_argument(
        "--token-from",
        dest="token",
        action=_ReadToken,
        default=os.environ.get("KVCLUSTER_TOKEN"),
        metavar="FILE",
        help="file that holds your token, where the cluster asks for one (default: the environment variable "
        "KVCLUSTER_TOKEN)",
    )
    add_tls_args(options)
    options.add_argument(
        "--encryption",
        choices=ENCRYPTIONS,
        metavar="HOW",
        default="",
        help="what encrypts the connection to another machine: tls, the network below (WireGuard, a mesh), or nothing "
        "(default: the environment variable KVCLUSTER_ENCRYPTION, or tls with --ca)",
    )


def add_tls_args(options: Any) -> None:
    """Adds `--ca`, `--cert` and `--key` to a command."""
    options.add_argument(
        "--ca",
        default="",
        metavar="FILE",
        help="certificates of the authorities by which the cluster's are verified, where it speaks TLS (default: the "
        f"environment variable {CA_FILE})",
    )
    options.add_argument(
        "--cert",
        default="",
        metavar="FILE",
        help=f"your own certificate, where the cluster asks for one (default: the environment variable {CERT_FILE})",
    )
    options.add_argument(
        "--key", default="", metavar="FILE", help=f"its key (default: the environment variable {KEY_FILE})"
    )


class _ReadToken(argparse.Action):
    """Stores the token that is in the named file."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            setattr(namespace, self.dest, read_token(values))
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def address_of(options: argparse.Namespace) -> str:
    """Returns host:port of the selected coordinator."""
    if options.address or options.port is not None:
        return str(options.address or f"127.0.0.1:{options.port}")
    return os.environ.get("KVCLUSTER_ADDRESS") or f"127.0.0.1:{DEFAULT_PORT}"


def credentials_of(options: argparse.Namespace) -> Credentials:
    """Returns what a command shows to the selected coordinator. Raises ConfigError as `client_credentials`."""
    return client_credentials(address_of(options), options.token, connection_config(options))


def connection_config(options: argparse.Namespace) -> ClientConfig:
    """Returns the settings of a client with which a command connects."""
    return ClientConfig(
        encryption=getattr(options, "encryption", ""),
        ca_file=options.ca,
        cert_file=options.cert,
        key_file=options.key,
    )


class SelectedCluster(NamedTuple):
    """What `connect` takes, beside a spec."""

    address: str
    token: str | None
    config: ClientConfig


def selected(options: argparse.Namespace) -> SelectedCluster:
    """Returns how a client connects to the selected cluster."""
    return SelectedCluster(address_of(options), options.token, connection_config(options))


@contextmanager
def coordinator(options: argparse.Namespace, *, wait_ms: int = 0, patient: bool = False) -> Iterator[GrpcPort]:
    """Connects to the selected coordinator. Waits up to `wait_ms` for it to answer, then raises Unreachable; with 0 it
    does not wait. If it is known at once that nothing listens, raises Unreachable at once, unless `patient`: then a
    coordinator that is about to start has `wait_ms`."""
    address = address_of(options)
    credentials = credentials_of(options)
    connection = Connection(address, credentials)
    try:
        if not patient:
            check_is_ours(address, credentials, _GREETING_S)
        if wait_ms:
            if not patient:
                _check_listens(address, wait_ms)
            connection.wait_ready(Deadline.after_ms(wait_ms))
        yield GrpcPort(connection)
    finally:
        connection.close()


def _check_listens(address: str, wait_ms: int) -> None:
    """As `check_listens`, and says what to do."""
    try:
        check_listens(address, wait_ms)
    except Unreachable as error:
        advice = "`kvcluster up` starts a cluster on this machine, --port or --address names another one"
        raise Unreachable(f"{error}: {advice}") from None


def check_listens(address: str, wait_ms: int) -> None:
    """Raises Unreachable if it is known at once that nothing listens at `address` (host:port), because the connection
    is refused or the host has no address; ConfigError if it is no address. gRPC would try again until the deadline."""
    check_address(address)
    try:
        socket.create_connection(split_address(address), timeout=wait_ms / 1e3).close()
    except ConnectionRefusedError:
        raise Unreachable(f"nothing listens at {address}") from None
    except socket.gaierror as error:
        raise Unreachable(f"the host of {address} is not known ({error.strerror})") from None
    except OSError:
        pass  # a host that is silent may answer yet


def read_status(port: GrpcPort, wait_ms: int) -> dict[str, Any]:
    """Returns the status as `client.status()` does. Raises Unavailable if the coordinator does not answer in time."""
    return status_dict(expect(Status, port.ask(GetStatus(), Deadline.after_ms(wait_ms))))
