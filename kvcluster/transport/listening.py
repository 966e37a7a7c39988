"""Ports to listen on: a socket that is bound to one, so that a port in use is an error of the caller and not of a
process that starts again and again; and the first free one of a range, so that firewalls can name the range."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvcluster.errors import ConfigError

T = TypeVar("T")

_FREE = range(15_000, 30_000)
"""Ports that systems give to no outgoing connection, and Kubernetes to no service. A port that is chosen here is bound
again later, by an actor: meanwhile Ray makes a hundred connections, any of which might have got one of theirs."""

_TRIES = 100

_draw = random.SystemRandom()  # processes that start at the same time must not draw alike


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
    """Returns a socket that is bound to that port and does not listen. Port 0 is a free one, which this machine's
    outgoing connections do not get before it is bound again. Raises ConfigError if the port is in use."""
    if port == 0:
        for chosen in _draw.sample(_FREE, _TRIES):
            with suppress(ConfigError):
                return bound_socket(host, chosen, setting)
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
