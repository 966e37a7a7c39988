"""`kvcluster.local()`: an embedded cluster, which this process starts and ends: processes on Ray, or threads of this
process alone (kvcluster/in_process).

Importing this needs no Ray; starting a cluster of processes does (embedded.py).
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from kvcluster.actors.node_memory import check_pools_in_process
from kvcluster.client import Client, connect
from kvcluster.config import Config, load, loading
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, ConfigError
from kvcluster.extras import needs
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transport.forks import OwnProcess


class Embedded(Protocol):
    """What runs an embedded cluster. `save` has shards with a disk tier save their pages, `stop` ends everything."""

    @property
    def address(self) -> str: ...

    def pids(self) -> list[int]: ...

    def save(self) -> None: ...

    def stop(self) -> None: ...


class LocalCluster(Unpicklable):
    """A running embedded cluster. Made by `kvcluster.local`; a context manager. Other processes of this machine connect
    to `address`, unless it was started with `ray=False`.

        cluster = kvcluster.local(shards=2, ram_bytes="64MiB")
        client = cluster.client(spec)
        cluster.close()

    It ends with its `with` block, by `close`, or with the process.
    """

    instead = "pass its address, and connect there (not with ray=False)"

    def __init__(self, embedded: Embedded, config: Config) -> None:
        self._process = OwnProcess()
        self._embedded = embedded
        self._config = config
        self._clients: dict[Client, None] = {}  # the open ones
        self._closed = False

    @property
    def address(self) -> str:
        """The coordinator's "host:port", for `kvcluster.connect` and for the command line's `--address`. That of a
        cluster with `ray=False` serves `kvcluster.connect` in this process alone."""
        return self._embedded.address

    def client(
        self, spec: KVSpec, *, token: str | None = None, part: Part | Mapping[int, Part] | None = None
    ) -> Client:
        """Returns a client of this cluster, which is closed with it. The arguments are those of `kvcluster.connect`.
        Raises as that, and CallerError if the cluster is closed."""
        if self._closed:
            raise CallerError("this cluster is closed; start another one with kvcluster.local()")
        client = connect(self.address, spec, token=token, part=part, config=self._config.own_client)
        self._clients[client] = None
        client.on_close = self._clients.pop
        return client

    def pids(self) -> list[int]:
        """Returns the process ids of the coordinator and the shards. A shard that was drained has none. With
        `ray=False` that of this process."""
        return self._embedded.pids()

    def close(self) -> None:
        """Closes the clients, has the shards save their pages if they have a disk tier, and ends all processes of the
        cluster. May be called again. In a forked child it leaves the parent's cluster as it is."""
        if self._closed or self._process.forked:
            return
        self._closed = True
        atexit.unregister(self.close)
        with ExitStack() as house:  # each is closed, whatever another raises
            house.callback(self._embedded.stop)
            for client in list(self._clients):
                house.callback(client.close)
            house.callback(self._embedded.save)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalCluster at {self.address}{', closed' if self._closed else ''}>"


def local(
    *,
    ray: bool = True,
    shards: int = 1,
    ram_bytes: str | int = "1GiB",
    host_bytes: str | int = 0,
    disk_bytes: str | int = 0,
    disk_dir: str | Path = "",
    port: int = 0,
    config: Mapping[str, Any] | None = None,
    device_bytes: str | int | None = None,
) -> LocalCluster:
    """Starts an embedded cluster: a coordinator, and `shards` shards, each with `ram_bytes` of memory, `host_bytes`
    below that for encoded pages, and `disk_bytes` of files in `disk_dir` below that, which outlive the cluster.

        with kvcluster.local(ray=False, ram_bytes="64MiB") as cluster:
            client = cluster.client(spec)

    For one process, `ray=False`: the cluster runs on threads of this process, starts in a moment, and needs no extra;
    no other process can connect to it. With `ray=True` coordinator and shards are processes on a Ray on loopback, and
    other processes of this machine connect to `cluster.address`.

    Sizes are bytes, or text such as "64MiB". `port` is that of the coordinator, 0 for a free one. `config` has settings
    by section, as in a configuration file: `config={"client": {"deadline_ms": 2_000}}` (docs/operations.md).
    `device_bytes` is the old name of `ram_bytes`, until release 0.4.

    Returns a LocalCluster. It ends with its `with` block, by `close()`, or at the latest with the process, so that it
    can stay open in a notebook. At its end the shards save in `disk_dir` what lies in memory, as far as there is room,
    within `shard.stop_ms`. With `ray=True` it uses the Ray that this process is connected to, if there is one;
    otherwise it starts one, which ends with the last cluster that uses it.

    Raises ConfigError if a setting cannot be used, and KVClusterError if `ray` is True and the extra `cluster` is not
    installed.
    """
    _check_types(ray, disk_dir, config)
    # One Ray can hold many. One with a disk tier has the same name again, by which it knows its volumes.
    mark = sha256(os.fsencode(Path(disk_dir).absolute())).hexdigest()[:8] if disk_dir else secrets.token_hex(4)
    below = {"name": f"local-{mark}", **loading.renamed(config or {})}
    below["shards"] = shards
    tiers = {
        "ram_bytes": loading.ram_bytes(ram_bytes, device_bytes),
        "host_bytes": host_bytes,
        "disk_bytes": disk_bytes,
    }
    below["shard"] = {**below.get("shard", {}), **tiers, "disk_dir": str(Path(disk_dir).absolute()) if disk_dir else ""}
    below["server"] = {"port": port, **below.get("server", {})}
    settings = load(overrides=below)
    running = LocalCluster(_on_ray(settings) if ray else _in_process(settings), settings)
    atexit.register(running.close)
    return running


def _check_types(ray: object, disk_dir: object, config: object) -> None:
    """Checks the arguments that are used before the settings are checked. Raises ConfigError."""
    if type(ray) is not bool:
        raise ConfigError(f"ray is {ray!r}; expected True or False")
    if not isinstance(disk_dir, (str, Path)):
        raise ConfigError(f"disk_dir is {disk_dir!r}; expected the path of a folder")
    if not (config is None or isinstance(config, Mapping)):
        raise ConfigError(f"config is {config!r}; expected a mapping of settings by section")
    for section in ("shard", "server"):
        if not isinstance((config or {}).get(section, {}), Mapping):
            raise ConfigError(f"config: {section} must be a table of settings, not {(config or {})[section]!r}")


def _on_ray(settings: Config) -> Embedded:
    with needs("ray", instead="or start a cluster within this process by kvcluster.local(ray=False)"):
        from kvcluster.actors.embedded import EmbeddedCluster

    return EmbeddedCluster.start(settings)


def _in_process(settings: Config) -> Embedded:
    from kvcluster.in_process.cluster import InProcessCluster

    if settings.server.port:
        raise ConfigError(
            f"a cluster within this process listens on no port, and port {settings.server.port} was given: leave it "
            "out, or pass ray=True for a cluster that other processes connect to"
        )
    check_pools_in_process(settings)
    cluster = InProcessCluster(settings)
    cluster.start()
    return cluster
