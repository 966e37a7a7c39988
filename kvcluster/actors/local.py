"""`kvcluster.local()`: a cluster for as long as a `with` block, on a Ray of this process's own, on loopback."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from kvcluster.actors import cluster
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.node_memory import OBJECT_STORE_BYTES, checked_bytes_for_pools
from kvcluster.actors.own_ray import own_ray
from kvcluster.actors.stopping import save_shards
from kvcluster.client import Client, connect
from kvcluster.config import ClientConfig, Config, load
from kvcluster.core.spec import KVSpec, Part

_SOCKET_PATH_BYTES = 107
_BELOW_FOLDER = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The longest path that Linux takes for a socket, and how long the path of Ray's longest is below a cluster's folder.
If the folder's name is too long, Ray gets another one in /tmp."""


class LocalCluster:
    """A running embedded cluster. Other processes of this machine connect to `address`."""

    def __init__(self, running: cluster.Cluster, config: ClientConfig) -> None:
        self._running = running
        self._config = config
        self._clients: list[Client] = []

    @property
    def address(self) -> str:
        return self._running.address

    def client(
        self, spec: KVSpec, *, token: str | None = None, part: Part | Mapping[int, Part] | None = None
    ) -> Client:
        """Returns a client of this cluster, which is closed with it."""
        client = connect(self.address, spec, token=token, part=part, config=self._config)
        self._clients.append(client)
        return client

    def pids(self) -> list[int]:
        """Returns the process ids of the coordinator and the shards. A shard that was drained has none."""
        pids: list[int] = []
        for asked in [actor.pid.remote() for actor in (self._running.coordinator, *self._running.shards)]:
            with suppress(ray.exceptions.ActorDiedError):
                pids.append(ray.get(asked))
        return pids

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._running.stop()


@contextmanager
def local(
    *,
    shards: int = 1,
    device_bytes: str | int = "1GiB",
    host_bytes: str | int = 0,
    disk_bytes: str | int = 0,
    disk_dir: str | Path = "",
    port: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Iterator[LocalCluster]:
    """Runs an embedded cluster: Ray on loopback, one coordinator, and `shards` shards, each with `device_bytes` of
    memory, `host_bytes` below that for encoded pages, and `disk_bytes` of files in `disk_dir` below that, which outlive
    the block. At its end the shards save there what lies in memory, as far as it has room, within `shard.stop_ms`.

    Uses the Ray that this process is connected to, if there is one; otherwise starts one and ends it with the block.
    `config` are overrides as in config.load. Raises ConfigError if a setting cannot be used.
    """
    # One Ray can hold many. One with a disk tier has the same name again, by which it knows its volumes.
    mark = sha256(os.fsencode(Path(disk_dir).absolute())).hexdigest()[:8] if disk_dir else secrets.token_hex(4)
    below = {"name": f"local-{mark}", **(config or {})}
    below["shards"] = shards
    tiers = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
    below["shard"] = {**below.get("shard", {}), **tiers, "disk_dir": str(Path(disk_dir).absolute()) if disk_dir else ""}
    below["server"] = {"port": port, **below.get("server", {})}
    settings = load(overrides=below)
    # The settings are checked before anything is started.
    cluster.check(settings)
    with ExitStack() as house:
        # The coordinator stays on this node, so it can use a folder of this machine.
        folder = house.enter_context(_private_folder())
        settings = with_state_dir(settings, Path(folder))
        if not ray.is_initialized():
            if len(os.fsencode(folder)) > _SOCKET_PATH_BYTES - _BELOW_FOLDER:
                folder = house.enter_context(_private_folder("/tmp"))
            house.enter_context(_embedded_ray(settings, Path(folder, "ray")))
        started = cluster.start(settings, detached=False)
        running = LocalCluster(started, settings.client)
        try:
            yield running
        finally:
            save_shards(started.shards, settings.shard)
            running.close()


def _private_folder(parent: str | None = None) -> TemporaryDirectory[str]:
    """Returns a temporary folder that only this user can enter."""
    return TemporaryDirectory(prefix="kvcluster-", dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _embedded_ray(config: Config, folder: Path) -> Iterator[None]:
    """A Ray of this process's own, without a dashboard. Its sockets and logs lie in `folder`, which Ray opens to all
    users of the machine: the folder above it must be closed to them, or they could replace a socket by their own."""
    memory = checked_bytes_for_pools(config)
    with own_ray():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=OBJECT_STORE_BYTES,
            _memory=memory,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        try:
            yield
        finally:
            ray.shutdown()
