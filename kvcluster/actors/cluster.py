"""A cluster on a running Ray, started once and then left to Ray: one named coordinator actor and its shards.

The actors restart by themselves when their process dies: a coordinator relearns everything from the shards, a shard
begins empty under a new epoch, or with its disk tier. What a cluster of several nodes needs beyond that, its reconciler
does (reconciler.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcluster.actors import settings
from kvcluster.actors.reconciler import Reconciler, call
from kvcluster.config import Config, ServerConfig
from kvcluster.config.ports import overlapping, port_table
from kvcluster.core.ids import Epoch
from kvcluster.core.shard_scheduler import Schedule
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import publisher_of
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.transport.certificates import COORDINATOR, own_certificates
from kvcluster.transport.listener import bound_socket

_TRIES = 100
"""How often free ports are chosen that may turn out to be a shard's."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Handles of a cluster's actors. `address` is what clients connect to."""

    address: str
    coordinator: Any
    shards: tuple[Any, ...]
    stop: Callable[[], None]
    """Ends serving and kills the actors; Ray does not restart them."""

    trouble: Mapping[str, str]
    """By shard, why it is without one of its tiers, or with a smaller one; empty if all are as configured."""


def check(config: Config) -> tuple[int, int]:
    """Returns the ports to listen on, for workers and for shards. Raises ConfigError if credentials or ports cannot be
    used: to the caller, instead of only in an actor's log."""
    authenticator(config, "")
    certificates = own_certificates(config, COORDINATOR)
    QuotaFile(config.server.quota_file)
    ports = _ports(config)
    if config.metrics.port:
        bound_socket(config.metrics.host, config.metrics.port, "metrics.port").close()
    publisher = publisher_of(config, Epoch(0), lambda: None, certificates)
    if publisher is not None:
        publisher.start()
        publisher.close()
    return ports


def start(config: Config, *, detached: bool) -> Cluster:
    """Starts the actors on the Ray that this process is connected to, on this node and others, and waits until every
    shard is up. Raises ConfigError if the configuration or a port cannot be used, or if no node has room for a
    shard."""
    config = _listening(config, *check(config))
    settings.publish(config, "" if config.server.secret_file else secrets.token_urlsafe(32))
    reconciler = Reconciler(config, detached=detached)
    try:
        settle(reconciler)
    except BaseException:
        reconciler.kill_all()
        raise
    coordinator = reconciler.coordinator
    found = call(coordinator.address), coordinator, reconciler.shards, reconciler.kill_all
    return Cluster(*found, trouble_of(coordinator))


def settle(reconciler: Reconciler) -> Schedule:
    """Makes a pass, waits until all shards are up, and returns what was done. Raises ConfigError if the cluster lacks
    something that it would have to wait for."""
    plan = reconciler.step()
    if plan.waiting:
        raise ConfigError("; ".join(plan.waiting))
    if plan.kill or plan.drain:
        raise KVClusterError(f"there are shards that are not configured: {', '.join((*plan.kill, *plan.drain))}")
    reconciler.wait_until_up()
    return plan


def trouble_of(coordinator: Any) -> dict[str, str]:
    """Returns by shard why it is without one of its tiers, or with a smaller one. {} from an actor of an older release,
    which does not report it."""
    return call(coordinator.trouble) if hasattr(coordinator, "trouble") else {}


def _ports(config: Config) -> tuple[int, int]:
    """Returns the ports to listen on. They are bound here once, so that a port in use is an error of the caller and not
    of an actor that restarts again and again; free ports are chosen here, so that a restarted coordinator keeps
    them. A free port is none that the configuration gives to something else."""
    chosen = _bound(config.server)
    tries = 1
    while tries < _TRIES and overlapping(port_table(_listening(config, *chosen))) is not None:
        chosen = _bound(config.server)
        tries += 1
    return chosen


def _bound(server: ServerConfig) -> tuple[int, int]:
    with (
        bound_socket(server.host, server.port, "--port") as port,
        bound_socket(server.host, server.report_port, "server.report_port") as report_port,
    ):
        return port.getsockname()[1], report_port.getsockname()[1]


def _listening(config: Config, port: int, report_port: int) -> Config:
    return replace(config, server=replace(config.server, port=port, report_port=report_port))
