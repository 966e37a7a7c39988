"""Ports of loopback that nobody listens at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def event_endpoints() -> tuple[str, str]:
    """Two, below the ports that systems give to whoever connects, as Ray does a hundred times."""
    free: list[int] = []
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
    return f"tcp://127.0.0.1:{free[0]}", f"tcp://127.0.0.1:{free[1]}"
