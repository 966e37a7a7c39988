"""Listening on the first port of a range that is free, so that firewalls can name the range."""

from __future__ import annotations

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
