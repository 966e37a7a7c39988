"""Which cluster a command means, and how it is asked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.client.status import status_dict
from kvcluster.core.messages import GetStatus, Status
from kvcluster.transport.base import Deadline
from kvcluster.transport.rpc import Connection

DEFAULT_PORT = 7070


def add_where(command: Any) -> None:
    """Adds `--port`, `--address` and `--token` to a command."""
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"a port of this machine (default {DEFAULT_PORT})"
    )
    where.add_argument("--address", help="host:port of a coordinator elsewhere")
    command.add_argument("--token", default=os.environ.get("KVCLUSTER_TOKEN"), help="or KVCLUSTER_TOKEN")


def address_of(options: argparse.Namespace) -> str:
    """host:port of its coordinator."""
    return str(options.address or f"127.0.0.1:{options.port}")


@contextmanager
def coordinator(options: argparse.Namespace, *, wait_ms: int = 0) -> Iterator[GrpcPort]:
    """A way to its coordinator, waiting up to `wait_ms` for one to answer. Raises Unreachable."""
    connection = Connection(address_of(options), options.token)
    try:
        if wait_ms:
            connection.wait_ready(Deadline.after_ms(wait_ms))
        yield GrpcPort(connection)
    finally:
        connection.close()


def read_status(port: GrpcPort, wait_ms: int) -> dict[str, Any]:
    """As `client.status()`. Raises Trouble where nobody answers in time."""
    return status_dict(expect(Status, port.ask(GetStatus(), Deadline.after_ms(wait_ms))))
