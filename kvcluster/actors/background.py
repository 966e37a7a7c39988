"""A cluster that keeps running on this machine: `up` starts it, or what is missing of it, `find` finds it again, `down`
ends it.

`up` starts a Ray head of its own, on loopback, as a session of processes, and records its address and process id in a
folder that only this user can write to. `down` ends that session and nothing else (ray_node.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ray

from kvcluster.actors import cluster, settings
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.node_memory import checked_bytes_for_pools
from kvcluster.actors.own_ray import TOKEN, OwnPaths, own_ray
from kvcluster.actors.ray_node import (
    HEAD_OPTIONS,
    RayNode,
    free_port,
    session_logs,
    signals_delayed,
    start_node,
    started,
)
from kvcluster.actors.reconciler import Reconciler
from kvcluster.actors.stopping import longest_save_ms
from kvcluster.config import Config, as_values, differences, load
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime import kept_logs
from kvcluster.runtime.private_files import user_folder

_PLENTY = 1_000
"""More shards than any machine takes."""


@dataclass(frozen=True, slots=True)
class Running:
    """The record of a running cluster. `pid`: of its session's leader. `started`: when that process began, in clock
    ticks since boot, which distinguishes it from a later process of the same id. `config`: its settings
    (config.as_values)."""

    address: str
    shards: int
    pid: int
    started: int
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


class UpOutcome(NamedTuple):
    """What `up` found and did. `started`: False if the cluster was running already; `again` then names the shards that
    were missing and have been started. `trouble`: by shard, why it is without a tier, or with a smaller one."""

    running: Running
    started: bool
    again: tuple[str, ...] = ()
    trouble: Mapping[str, str] = MappingProxyType({})


def up(config: Config, *, starting: Callable[[], object] = lambda: None) -> UpOutcome:
    """Starts a cluster in the background; of the cluster that already runs on that port, the shards that are missing.

    `starting` is called when the settings have been checked and the slow part begins. Raises ConfigError for settings
    that cannot be used, such as a port in use, or that differ from those of the running cluster.
    """
    with alone():
        known = find(fixed_port(config))
        if known is not None:
            return _completed(_as_asked(known, config))
        check(config)
        starting()
        with own_ray(), local_head(config) as head:
            started = cluster.start(with_state_dir(config, state_dir(config)), detached=True)
            running = record(config, head, started)
            head.kept = True
            return UpOutcome(running, True, trouble=started.trouble)


def find(port: int) -> Running | None:
    """Returns the cluster that `up` started on that port, if it still runs."""
    try:
        running = Running(**json.loads(_record(port).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return running if started(running.pid) == running.started else None


def down(port: int) -> bool:
    """Ends the cluster that `up` started on that port; its shards save their pages before, if they have a disk tier.
    Returns False if there is none."""
    with alone():
        running = find(port)
        if running is not None:
            head = RayNode(running.pid, _ray_folder(port))
            head.end(longest_save_ms(load(overrides=running.config)))
        forget(port)
        return running is not None


def fixed_port(config: Config) -> int:
    """Returns the port by which later commands find the cluster. Raises ConfigError if it is any free one."""
    if config.server.port == 0:
        raise ConfigError(
            "a cluster that keeps running needs a fixed port, so that later commands find it: give --port"
        )
    return config.server.port


def check(config: Config) -> None:
    """Checks the settings before anything is started. Raises ConfigError."""
    checked_bytes_for_pools(config)
    cluster.check(config)
    forget(config.server.port)


class LocalHead:
    """A Ray of this machine alone, to which this process is connected. `kept`: it runs on when the block ends."""

    def __init__(self, node: RayNode, address: str) -> None:
        self.node = node
        self.address = address
        self.kept = False


@contextlib.contextmanager
def local_head(config: Config) -> Iterator[LocalHead]:
    """Starts a Ray on loopback for the cluster of this configuration, and connects this process to it. Ends it with the
    block unless it is kept, and removes its files."""
    port, folder = free_port(), _ray_folder(config.server.port)
    # By default the ports of Ray's workers are a range, in which `port` must not lie.
    where = [*HEAD_OPTIONS, "--node-ip-address=127.0.0.1", f"--port={port}"]
    where += ["--min-worker-port=0", "--max-worker-port=0"]
    head: LocalHead | None = None
    log = kept_logs.begin(str(config.server.port), session_logs(folder)) / kept_logs.RAY_LOG
    try:
        memory = checked_bytes_for_pools(config)
        with signals_delayed():
            node = start_node(folder, where, memory, offered(config), log=log, gpus=config.gpus_of_twins)
            head = LocalHead(node, f"127.0.0.1:{port}")
        head.node.wait_until_up()
        with connected(head.address, "127.0.0.1", folder):
            yield head
    finally:
        if head is None or not head.kept:
            if head is not None:
                head.node.end(longest_save_ms(config))
            forget(config.server.port)


@contextlib.contextmanager
def connected(address: str, node_ip: str = "", folder: Path | None = None) -> Iterator[None]:
    """Connects this process to the Ray at that address within the block. `node_ip`: this machine's address among its
    nodes; "" for what Ray finds out. Raises KVClusterError if Ray refuses."""
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    options |= {"_node_ip_address": node_ip} if node_ip else {}
    options |= {"_temp_dir": str(folder)} if folder is not None else {}
    try:
        ray.init(configure_logging=False, job_config=OwnPaths(), **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise KVClusterError(f"cannot connect to the Ray at {address} from this machine: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def offered(config: Config) -> dict[str, float]:
    """Returns the custom resources of a node that takes as many shards of each group as its memory allows."""
    resources: dict[str, float] = {}
    for group in config.shard_groups.values():
        for name, amount in group.resources.items():
            resources[name] = resources.get(name, 0.0) + amount * _PLENTY
    return resources


def record(config: Config, head: LocalHead, running: cluster.Cluster) -> Running:
    """Records a running cluster for later commands."""
    pid = head.node.pid
    known = Running(running.address, len(running.shards), pid, started(pid) or 0, as_values(config))
    _record(config.server.port).write_text(json.dumps(asdict(known)), encoding="utf-8")
    return known


def forget(port: int) -> None:
    """Removes all files of a cluster that no longer runs, but not its logs."""
    for run in kept_logs.runs(str(port))[:1]:
        kept_logs.keep(run)
    _record(port).unlink(missing_ok=True)
    for name in (str(port), f"{port}.state"):
        shutil.rmtree(user_folder() / name, ignore_errors=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one `up` or `down` of this user run at a time: a second one waits, and sees the result of the first."""
    folder = os.open(user_folder(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _as_asked(running: Running, config: Config) -> Running:
    """Raises ConfigError if the cluster runs with other settings."""
    if differ := differences(load(overrides=running.config), config):
        raise ConfigError(
            f"a cluster runs at {running.address} with other settings: {'; '.join(differ)}. "
            f"`kvcluster down --port {running.port}` ends it"
        )
    return running


def _completed(running: Running) -> UpOutcome:
    """Starts the shards that are missing, such as one that was drained: there is no reconciler in the background."""
    head = RayNode(running.pid, _ray_folder(running.port))
    address = f"127.0.0.1:{head.option('--port')}"
    with own_ray(head.variable(TOKEN)), connected(address, "127.0.0.1", head.folder):
        config = settings.published(load(overrides=running.config).name)
        if config is None:
            raise KVClusterError(
                f"the cluster at {running.address} has lost its configuration; `kvcluster down --port {running.port}` "
                "ends it"
            )
        reconciler = Reconciler(config, detached=True)
        plan = cluster.settle(reconciler)
        again = tuple(str(start.shard) for start in plan.start)
        return UpOutcome(running, False, again, cluster.trouble_of(reconciler.coordinator))


def _record(port: int) -> Path:
    return user_folder() / f"{port}.json"


def state_dir(config: Config) -> Path:
    """Returns the folder in which its coordinator keeps state for the next one. It is removed with the shards that it
    describes."""
    return user_folder() / f"{config.server.port}.state"


def _ray_folder(port: int) -> Path:
    """Returns the folder in which that cluster's Ray keeps its sockets and logs."""
    return user_folder() / str(port)
