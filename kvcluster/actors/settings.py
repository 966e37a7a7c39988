"""What the processes of a cluster share through Ray's key-value store: the configuration, addresses and epochs.

An actor is given the name of its cluster and reads the configuration when it starts, so that one that starts again runs
what was published last. The store lives as long as Ray's head, and longer if that keeps its state in Redis. Secrets are
in files; only the secret of a cluster that has no file, on a Ray of one process, is in the store.

`announced_host`, `reachable_host` and `outward_address` return the addresses at which servers of actors are reached
from other machines, for servers that listen on all of a machine's addresses.
"""

from __future__ import annotations

import json
import socket
import time

import ray
from ray.experimental import internal_kv as kv

from kvcluster.config import Config, as_values, load
from kvcluster.config.ports import is_loopback
from kvcluster.core.ids import Epoch
from kvcluster.errors import ConfigError
from kvcluster.runtime.private_files import ACTORS, derived_key

SPACE = b"kvcluster"
_CONFIG, _SECRET, _REPORTS, _HOMES = "config", "secret", "report-address", "homes"
LEAVING = "leaving"


def publish(config: Config, secret: str = "") -> None:
    """Stores the configuration under the cluster's name. `secret`: of a cluster without a secret file."""
    _put(config.name, _CONFIG, json.dumps(as_values(config)))
    if secret:
        _put(config.name, _SECRET, secret)


def published(cluster: str) -> Config | None:
    """Returns the configuration that was published last; None if there is no such cluster."""
    text = _get(cluster, _CONFIG)
    return None if text is None else load(overrides=json.loads(text))


def config_key(cluster: str) -> bytes:
    """Returns the key under which the configuration of that cluster is published."""
    return f"{cluster}/{_CONFIG}".encode()


def read_settings(cluster: str) -> tuple[Config, str]:
    """Returns the configuration and the secret of the cluster's actors. Raises ConfigError if there is no such cluster
    or if its secret file cannot be used on this node."""
    config = published(cluster)
    if config is None:
        raise ConfigError(f"no configuration of a cluster {cluster!r} has been published on this Ray")
    if config.server.secret_file:
        return config, derived_key(config.server.secret_file, ACTORS)
    return config, _get(cluster, _SECRET) or ""


def forget(cluster: str) -> None:
    """Removes everything about the cluster."""
    for key in kv._internal_kv_list(f"{cluster}/".encode(), namespace=SPACE):
        kv._internal_kv_del(key, namespace=SPACE)


def next_epoch(cluster: str, process: str) -> Epoch:
    """Returns an epoch above all that this process has had on this Ray, whatever the clocks of its nodes show."""
    last = _get(cluster, f"epoch/{process}")
    epoch = max(time.time_ns(), int(last or 0) + 1)
    _put(cluster, f"epoch/{process}", str(epoch))
    return Epoch(epoch)


def announce_reports(cluster: str, address: str, server_name: str = "") -> None:
    """Stores the address to which shards report now, and the name that its certificate has, "" for the address
    itself."""
    _put(cluster, _REPORTS, f"{address} {server_name}".rstrip())


def report_address(cluster: str) -> tuple[str, str]:
    """Returns the address to which shards report now, "" while no coordinator has announced one, and the name of its
    certificate."""
    address, _, server_name = (_get(cluster, _REPORTS) or "").partition(" ")
    return address, server_name


def remember_homes(cluster: str, homes: dict[str, str]) -> None:
    """Stores which node each volume was last seen on, by shard."""
    _put(cluster, _HOMES, json.dumps(homes))


def remembered_homes(cluster: str) -> dict[str, str]:
    """Returns what `remember_homes` has stored."""
    text = _get(cluster, _HOMES)
    return {} if text is None else {str(shard): str(node) for shard, node in json.loads(text).items()}


def leaving_nodes(cluster: str) -> frozenset[str]:
    """Returns the ids of the nodes that have reported that they are about to end."""
    prefix = f"{cluster}/{LEAVING}/".encode()
    return frozenset(key[len(prefix) :].decode() for key in kv._internal_kv_list(prefix, namespace=SPACE))


def say_leaving(cluster: str, node: str) -> None:
    """Stores that the node with this id is about to end. It holds until that node has ended: an id is never used
    again."""
    _put(cluster, f"{LEAVING}/{node}", "1")


def _put(cluster: str, key: str, value: str) -> None:
    kv._internal_kv_put(f"{cluster}/{key}".encode(), value.encode(), overwrite=True, namespace=SPACE)


def _get(cluster: str, key: str) -> str | None:
    value: bytes | None = kv._internal_kv_get(f"{cluster}/{key}".encode(), namespace=SPACE)
    return None if value is None else value.decode()


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
