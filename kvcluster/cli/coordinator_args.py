"""The command-line options that select a coordinator, and the connection to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.client.credential import read_token
from kvcluster.client.status import status_dict
from kvcluster.core.messages import GetStatus, Status
from kvcluster.errors import ConfigError
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection

DEFAULT_PORT = 7070

ANSWER_MS = 10_000
"""The longest that a command waits for the coordinator, and for each of its answers."""


def add_coordinator_args(command: Any) -> None:
    """Adds `--port`, `--address` and `--token-from` to a command."""
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of a coordinator on this machine (default {DEFAULT_PORT})"
    )
    where.add_argument("--address", help="host:port of a coordinator on another machine (default: use --port)")
    # No option takes the token itself: the arguments of a process can be read by every user of the machine.
    command.add_argument(
        "--token-from",
        dest="token",
        action=_ReadToken,
        default=os.environ.get("KVCLUSTER_TOKEN"),
        metavar="FILE",
        help="file that holds the token of this client (default: the token is in the environment, KVCLUSTER_TOKEN)",
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
    return str(options.address or f"127.0.0.1:{options.port}")


@contextmanager
def coordinator(options: argparse.Namespace, *, wait_ms: int = 0) -> Iterator[GrpcPort]:
    """Connects to the selected coordinator. Waits up to `wait_ms` for it to answer, then raises Unreachable; with 0 it
    does not wait."""
    connection = Connection(address_of(options), options.token)
    try:
        if wait_ms:
            connection.wait_ready(Deadline.after_ms(wait_ms))
        yield GrpcPort(connection)
    finally:
        connection.close()


def read_status(port: GrpcPort, wait_ms: int) -> dict[str, Any]:
    """Returns the status as `client.status()` does. Raises Unavailable if the coordinator does not answer in time."""
    return status_dict(expect(Status, port.ask(GetStatus(), Deadline.after_ms(wait_ms))))
