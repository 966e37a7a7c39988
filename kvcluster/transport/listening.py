"""Ports to listen on: a socket that is bound to one, so that a port in use is an error of the caller and not of a
process that starts again and again; and the first free one of a range, so that firewalls can name the range."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvcluster.errors import ConfigError

T = TypeVar("T")


def first_free(ports: range, listen: Callable[[int], T]) -> T:
    """Returns what `listen` returns for the first port that it can listen on; range(1) stands for any free port. Raises
    the ConfigError of `listen` for the last port, with the range, if it fails for all."""
    for port in ports[:-1]:
        with suppress(ConfigError):
            return listen(port)
    try:
        return listen(ports[-1])
    except ConfigError as error:
        if len(ports) == 1:
            raise
        raise ConfigError(f"no port from {ports[0]} to {ports[-1]} is free; of the last: {error}") from None


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """Returns a socket that is bound to that port and does not listen. Raises ConfigError if the port is in use."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. "
            f"Choose another port ({setting}), or stop what listens there"
        ) from None
    return bound
