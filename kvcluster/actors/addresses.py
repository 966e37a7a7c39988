"""Under which address the servers of actors are reached, where they listen at all of a machine's."""

from __future__ import annotations

import socket

import ray

from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import is_loopback

_EVERYWHERE = ("0.0.0.0", "::")


def announced_host(host: str) -> str:
    """Under which address others reach what listens at `host` on this node. ConfigError where nobody can tell."""
    return reachable_host(host) if host in _EVERYWHERE else host


def reachable_host(host: str) -> str:
    """Where a shard listens whose coordinator listens at `host`: at its own node's address, once that is to be
    reached from elsewhere."""
    if is_loopback(host):
        return host
    node: str = ray.util.get_node_ip_address()
    if not is_loopback(node):
        return node
    # A Ray of our own keeps to loopback and does not know this machine's address.
    if host not in _EVERYWHERE:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; it only chooses the way out
        except OSError:
            raise ConfigError(
                f"cannot tell how others reach this machine; give its address instead of {host}"
            ) from None
        address: str = probe.getsockname()[0]
        return address
