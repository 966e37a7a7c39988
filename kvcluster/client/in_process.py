"""The clusters that run within this process, by their address: `kvcluster.connect` finds them here.

Such an address means nothing to another process, nor to a forked child, which has none of the cluster's threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvcluster.transfers.coordinator_client import CoordinatorPort
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transport.addresses import IN_PROCESS as SCHEME
from kvcluster.transport.forks import OwnProcess

__all__ = ["SCHEME", "ServedHere", "served", "served_here"]


class ServedHere(Protocol):
    """A cluster of this process. Both raise CredentialError for a token that it does not know."""

    def port(self, token: str | None) -> CoordinatorPort:
        """Returns a connection to its coordinator."""

    def opener(self, token: str | None) -> OpenTransport:
        """Returns a function that opens transports to its shards."""


_SERVED: dict[str, tuple[OwnProcess, ServedHere]] = {}


@contextmanager
def served(address: str, cluster: ServedHere) -> Iterator[None]:
    """Has `connect` find the cluster at this address within the block."""
    _SERVED[address] = OwnProcess(), cluster
    try:
        yield
    finally:
        del _SERVED[address]


def served_here(address: object) -> ServedHere | None:
    """Returns the cluster of this process at that address; None if there is none."""
    process, cluster = _SERVED.get(address, (None, None)) if isinstance(address, str) else (None, None)
    return None if process is None or process.forked else cluster
