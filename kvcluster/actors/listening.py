"""Whether ports can be listened on: found out before anything starts, so that a port in use is an error of the caller
and not of a process that starts again and again."""

from __future__ import annotations

import socket

from kvcluster.errors import ConfigError


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """Returns a socket that is bound to that port and does not listen. Raises ConfigError if the port is in use."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. "
            f"Choose another port ({setting}), or stop what listens there"
        ) from None
    return bound
