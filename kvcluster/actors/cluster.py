"""A cluster on a running Ray: one named coordinator actor and its shards, started, found and stopped.

The actors restart by themselves when their process dies: a coordinator relearns everything from the shards, a shard
begins empty under a new epoch.

The coordinator stays on the node that starts the cluster, because clients and shards know its address there. Shards are
spread over the nodes, and each claims its pool of Ray's `memory`: when a node is lost, its shards move to nodes with
enough room, and if there is none they wait for one.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvcluster.actors.coordinator import CoordinatorActor
from kvcluster.actors.shard import ShardActor
from kvcluster.config import Config
from kvcluster.core.ids import Epoch
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import publisher_of
from kvcluster.runtime.malloc_env import ENVIRONMENT

log = logging.getLogger(__name__)
NAMESPACE = "kvcluster"
COORDINATOR_NAME = "coordinator"
_RESTARTS = -1
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Handles of a cluster's actors. `address` is what clients connect to."""

    address: str
    coordinator: Any
    shards: tuple[Any, ...]

    def stop(self) -> None:
        """Ends serving and kills the actors; Ray does not restart them."""
        for actor in (*self.shards, self.coordinator):
            ray.kill(actor, no_restart=True)


def check(config: Config) -> tuple[int, int]:
    """Returns the ports to listen on, for workers and for shards. Raises ConfigError if credentials or ports cannot be
    used: to the caller, instead of only in an actor's log."""
    authenticator(config.server, "")
    ports = _ports(config)
    if config.metrics.port:
        for number in range(1 + config.shards):
            _bound(config.metrics.host, config.metrics.port + number, "metrics.port").close()
    publisher = publisher_of(config.events, Epoch(0), lambda: None)
    if publisher is not None:
        publisher.start()
        publisher.close()
    return ports


def start(config: Config, *, detached: bool) -> Cluster:
    """Starts the actors on the Ray that this process is connected to, and waits until every shard is up.

    Raises ConfigError if the configuration or a port cannot be used.
    """
    port, report_port = check(config)
    config = replace(config, server=replace(config.server, port=port, report_port=report_port))
    secret = secrets.token_urlsafe(32)
    here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)}
    coordinator = _actor(CoordinatorActor, COORDINATOR_NAME, detached, here, config, secret)
    started: list[Any] = [coordinator]
    try:
        address, report_address = _get(coordinator.address), _get(coordinator.report_address)
        for number, home in enumerate(_homes(config)):
            name = f"shard-{number}"
            started.append(_actor(ShardActor, name, detached, home, name, report_address, config, secret))
        for shard in started[1:]:
            _get(shard.address)
        _wait_until_up(coordinator, config.shards)
    except BaseException:
        for actor in started:
            ray.kill(actor, no_restart=True)
        raise
    return Cluster(address, coordinator, tuple(started[1:]))


def _actor(kind: type, name: str, detached: bool, where: dict[str, Any], *arguments: Any) -> Any:
    options: dict[str, Any] = {"namespace": NAMESPACE, "num_cpus": 0, "max_restarts": _RESTARTS, **where}
    if not ENVIRONMENT.items() <= os.environ.items():  # a Ray of our own passes it to its actors
        options["runtime_env"] = {"env_vars": ENVIRONMENT}
    if detached:  # the others are found by their handles, so that one Ray can hold many clusters
        options |= {"lifetime": "detached", "name": name}
    return ray.remote(kind).options(**options).remote(*arguments)


def _homes(config: Config) -> list[dict[str, Any]]:
    """Returns Ray's options that say where each shard starts: on the node with the fewest shards, among those with room
    for its pool.

    If there is not room for all, they start anywhere and claim nothing. The `memory` of a node is an estimate made when
    it was started, unless it was configured: a shard that claimed too much would never be started, while its arena
    finds out what the machine really has.
    """
    pool = config.shard.device_bytes + config.shard.host_bytes
    free = {node: int(has.get("memory", 0)) for node, has in available_resources_per_node().items()}
    taken = dict.fromkeys(free, 0)
    homes: list[dict[str, Any]] = []
    for _ in range(config.shards):
        fitting = [node for node in free if free[node] - taken[node] * pool >= pool]
        if not fitting:
            log.warning("Ray's nodes have room for %d of %d shards (ray start --memory)", len(homes), config.shards)
            return [{"scheduling_strategy": "SPREAD"}] * config.shards
        node = min(fitting, key=lambda node: (taken[node], -free[node], node))
        taken[node] += 1
        # Soft: when the node is lost, the shard may restart on another.
        homes.append({"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True), "memory": pool})
    return homes


def _get(method: Any) -> Any:
    """Calls a method of an actor and returns its result. Raises KVClusterError if the actor did not start."""
    try:
        return ray.get(method.remote(), timeout=_START_S)
    except ray.exceptions.RayActorError as error:
        raise KVClusterError(f"an actor of the cluster did not start: {error}") from None
    except ray.exceptions.GetTimeoutError:
        raise KVClusterError(f"an actor of the cluster did not start within {_START_S:.0f} s; see Ray's logs") from None


def _wait_until_up(coordinator: Any, shards: int) -> None:
    give_up = time.monotonic() + _START_S
    while _get(coordinator.shards_up) < shards:
        if time.monotonic() > give_up:
            raise KVClusterError(
                f"not all {shards} shards reported to the coordinator within {_START_S:.0f} s; see Ray's logs"
            )
        time.sleep(0.02)


def _ports(config: Config) -> tuple[int, int]:
    """Returns the ports to listen on. They are bound here once, so that a port in use is an error of the caller and not
    of an actor that restarts again and again; free ports are chosen here, so that a restarted coordinator keeps
    them."""
    server = config.server
    with (
        _bound(server.host, server.port, "--port") as port,
        _bound(server.host, server.report_port, "server.report_port") as report_port,
    ):
        return port.getsockname()[1], report_port.getsockname()[1]


def _bound(host: str, port: int, setting: str) -> socket.socket:
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
