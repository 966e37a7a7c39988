"""The ports of a cluster, in one table: what listens on them, which setting moves them, and who connects.

Firewalls, docs/operations.md and charts follow this table. Everything in it is fixed, so that a network policy can name
it; "0" in a setting takes any free port, which suits a cluster on one machine.
"""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise
from typing import NamedTuple

from kvcluster.config.sections import Config, ServerConfig
from kvcluster.errors import ConfigError

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
SHARD_PORTS, _SHARDS_AFTER = 64, 30
"""Unless `server.shard_ports` is set, shards take their ports from a range of SHARD_PORTS ports, which begins
_SHARDS_AFTER behind the coordinator's. So two clusters of one machine with different ports begin their search at
different ports."""

METRICS_PORTS = 64
"""Shards listen for metrics on the first free port of their node among the METRICS_PORTS after the coordinator's."""

WORKERS, NODES, OPERATORS = "workers", "nodes of the cluster", "monitoring"
SUBSCRIBERS = "subscribers of KV events"


class PortUse(NamedTuple):
    """One row: a range of ports, the setting that moves it, the process that listens and who connects to it. `ray`:
    Ray listens there, and only where the cluster has a Ray of several nodes of its own."""

    ports: range
    setting: str
    listener: str
    callers: str
    ray: bool = False


def parse_ports(text: str, setting: str) -> range:
    """Returns the ports of "7100-7163" or "7100"; range(1), for any free port, of "0". Raises ConfigError."""
    match = _RANGE.fullmatch(text.strip())
    first = int(match[1]) if match else -1
    last = int(match[2]) if match and match[2] else first
    if not 0 <= first <= last <= 65_535 or (first == 0) != (last == 0):
        raise ConfigError(f'{setting} must be a range of ports such as "7100-7163", or "0" for any, not {text!r}')
    return range(first, last + 1)


def shard_ports(server: ServerConfig) -> range:
    """Returns the ports on which shards listen; range(1) for any. Raises ConfigError if the setting is no range."""
    if server.shard_ports:
        return parse_ports(server.shard_ports, "server.shard_ports")
    if not server.port:
        return range(1)
    first = server.port + _SHARDS_AFTER
    if first + SHARD_PORTS > 2**16:  # there is no room behind it
        first = server.port - _SHARDS_AFTER - SHARD_PORTS + 1
    return range(first, first + SHARD_PORTS)


def port_table(config: Config) -> list[PortUse]:
    """Returns all ports of this configuration that are fixed, in the order of docs/operations.md."""
    server, metrics, ray = config.server, config.metrics, config.ray
    used = [
        PortUse(_one(server.port), "server.port", "coordinator", WORKERS),
        PortUse(_one(server.report_port), "server.report_port", "coordinator", NODES),
        PortUse(shard_ports(server), "server.shard_ports", "shards: grpc and tcp", f"{WORKERS}, {NODES}"),
        PortUse(_one(metrics.port), "metrics.port", "coordinator", OPERATORS),
        PortUse(shard_metrics_ports(metrics.port), "metrics.port", "shards", OPERATORS),
    ]
    if not metrics.port:
        used = used[:3]
    for setting, endpoint in (("events.endpoint", config.events.endpoint), ("events.replay", config.events.replay)):
        used.append(PortUse(_one(_port_of(endpoint)), setting, "coordinator", SUBSCRIBERS))
    if server.secret_file:
        node_ports, worker_ports = (
            parse_ports(text, f"ray.{name}")
            for name, text in (("node_ports", ray.node_ports), ("worker_ports", ray.worker_ports))
        )
        used += [
            PortUse(_one(ray.port), "ray.port", "Ray's head", NODES, ray=True),
            PortUse(node_ports, "ray.node_ports", "Ray's processes of each node", NODES, ray=True),
            PortUse(worker_ports, "ray.worker_ports", "Ray's actors", NODES, ray=True),
        ]
    return [use for use in used if use.ports.start]


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def port_text(ports: range) -> str:
    """Returns "7100-7163" or "7100", the inverse of `parse_ports`."""
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"


def shard_metrics_ports(port: int) -> range:
    """Returns the ports on which shards serve metrics, from that of the coordinator."""
    return range(port + 1, port + 1 + METRICS_PORTS)


def overlapping(uses: list[PortUse]) -> tuple[PortUse, PortUse] | None:
    """Returns two rows that share a port; None if there are none."""
    by_start = sorted(uses, key=lambda use: use.ports.start)
    for before, after in pairwise(by_start):
        if after.ports.start < before.ports.stop:
            return before, after
    return None


def _port_of(endpoint: str) -> int:
    """Returns the port of "tcp://host:port"; 0 for none, or if it is malformed (rules.py)."""
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() else 0


def _one(port: int) -> range:
    return range(port, port + 1)
