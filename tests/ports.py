"""Ports of loopback at which nothing listens, for processes that are told a port before they listen."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvcluster.config.ports import shard_metrics_ports

_RANGE = range(15_000, 32_000)
"""Below the ports that systems give to outgoing connections, of which Ray makes a hundred between our look and the
listener's bind."""

_draw = random.SystemRandom()  # tests that run at the same time must not draw alike


def free_port() -> int:
    """A port that was free a moment ago, and that no other test is likely to draw before it is taken."""
    for port in _draw.sample(_RANGE, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"none of 100 ports from {_RANGE} is free")


def metrics_port(*endpoints: str) -> int:
    """A free port for the coordinator's metrics, behind which none of these endpoints is: there are those of shards."""
    taken = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
    while taken & {port := free_port(), *shard_metrics_ports(port)}:
        """Another is drawn."""
    return port


@contextmanager
def refused(port: int) -> Iterator[None]:
    """Within the block, connections to this port of loopback are refused. The port of a server that was closed may be
    given to a server of another test at once; this one is held by a socket that does not listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or the kernel may give it to another server
        yield


def event_endpoints() -> tuple[str, str]:
    """Two ZMQ endpoints."""
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
