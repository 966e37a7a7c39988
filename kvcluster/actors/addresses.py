"""The addresses at which servers of actors are reached from other machines, for servers that listen on all of a
machine's addresses."""

from __future__ import annotations

import socket

import ray

from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import is_loopback

_EVERYWHERE = ("0.0.0.0", "::")


def announced_host(host: str) -> str:
    """Returns the address at which other machines reach a server that listens at `host` on this node. Raises
    ConfigError if that address cannot be found out."""
    return reachable_host(host) if host in _EVERYWHERE else host


def reachable_host(host: str) -> str:
    """Returns where a shard listens whose coordinator listens at `host`: loopback for loopback, otherwise its own
    node's address. Raises ConfigError if that address cannot be found out."""
    if is_loopback(host):
        return host
    node: str = ray.util.get_node_ip_address()
    if not is_loopback(node):
        return node
    # A Ray of our own stays on loopback and does not know this machine's address.
    return outward_address(host)


def outward_address(host: str) -> str:
    """Returns the address at which other machines reach a server that listens at `host` on this one. Raises ConfigError
    if that cannot be found out."""
    if host not in _EVERYWHERE:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; it only selects the outgoing interface
        except OSError:
            raise ConfigError(
                f"cannot find out the address at which others reach this machine; give its address instead of {host}"
            ) from None
        address: str = probe.getsockname()[0]
        return address
