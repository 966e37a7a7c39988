"""An embedded cluster: its actors, and the Ray of this process that they run on.

The first cluster starts that Ray, and the last one that is stopped ends it, in whatever order they are. A Ray that this
process was connected to before is used, and left as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import ray

from kvcluster.actors import cluster
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.lean_ray import lean_ray
from kvcluster.actors.node_memory import OBJECT_STORE_BYTES, check_fits_beside, checked_bytes_for_pools, pools_of
from kvcluster.actors.own_ray import OwnPaths, own_ray
from kvcluster.actors.ray_node import check_shown, session_logs
from kvcluster.actors.ray_view import with_errors
from kvcluster.actors.stopping import save_shards
from kvcluster.config import Config
from kvcluster.errors import KVClusterError
from kvcluster.runtime import kept_logs
from kvcluster.runtime.private_files import private_folder

_PREFIX = "kvcluster-local-"
_SOCKET_PATH_BYTES = 107
_BELOW_FOLDER = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The longest path that Linux takes for a socket, and how long the path of Ray's longest is below a cluster's folder.
If the folder's name is too long, Ray gets another one in /tmp."""


class EmbeddedCluster:
    """The actors of one cluster. `house` is closed when they have ended."""

    def __init__(self, running: cluster.Cluster, config: Config, house: ExitStack) -> None:
        self._running = running
        self._config = config
        self._house = house

    @classmethod
    def start(cls, config: Config) -> EmbeddedCluster:
        """Starts the actors, and a Ray if this process has none. Raises ConfigError, before anything is started, if a
        setting cannot be used."""
        cluster.check(config)
        with ExitStack() as house:
            # The coordinator stays on this node, so it can use a folder of this machine.
            config = with_state_dir(config, house.enter_context(private_folder(_PREFIX)).path)
            house.enter_context(_RAY.used(config))
            running = cluster.start(config, detached=False)
            return cls(running, config, house.pop_all())

    @property
    def address(self) -> str:
        """The coordinator's."""
        return self._running.address

    def pids(self) -> list[int]:
        """Returns the process ids of the coordinator and the shards. A shard that was drained has none."""
        pids: list[int] = []
        for asked in [actor.pid.remote() for actor in (self._running.coordinator, *self._running.shards)]:
            with suppress(ray.exceptions.ActorDiedError):
                pids.append(ray.get(asked))
        return pids

    def save(self) -> None:
        """Has the shards save their pages to their disk tiers, if they have any."""
        save_shards(self._running.shards, self._config.shard)

    def stop(self) -> None:
        """Ends the actors, and the Ray if no other cluster uses it."""
        with self._house:
            self._running.stop()


class _EmbeddedRay:
    """The Ray that clusters of this process have started, if any; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._taken = 0  # bytes, of the pools of all users
        self._room = 0
        self._house = ExitStack()

    @contextmanager
    def used(self, config: Config) -> Iterator[None]:
        """A Ray runs within the block: the one that this process is connected to, otherwise one started for `config`.
        Raises ConfigError if the machine has too little memory for its pools."""
        with self._lock:
            ours = bool(self._users) or not ray.is_initialized()
            if self._users:
                check_fits_beside(config, self._taken, self._room)
            elif ours:
                self._room = checked_bytes_for_pools(config)
                self._house.enter_context(_running_ray(self._room, config.gpus_of_twins))
            self._count(ours, pools_of(config))
        try:
            yield
        finally:
            with self._lock:
                self._count(-ours, -pools_of(config))
                if not self._users:
                    self._house.close()

    def _count(self, users: int, nbytes: int) -> None:
        self._users += users
        self._taken += nbytes if users else 0


_RAY = _EmbeddedRay()


@contextmanager
def _running_ray(memory: int, gpus: int) -> Iterator[None]:
    """A Ray of this process's own, without a dashboard. Its actors may claim so many bytes and so many GPUs in name; at
    0 GPUs, those that Ray finds. Its sockets and logs lie in a folder, which Ray opens to all users of the machine: the
    folder above it is closed to them, or they could replace a socket by their own. Raises KVClusterError if it does not
    start."""
    with ExitStack() as house:
        folder = house.enter_context(private_folder(_PREFIX)).path
        if len(os.fsencode(folder)) > _SOCKET_PATH_BYTES - _BELOW_FOLDER:
            folder = house.enter_context(private_folder(_PREFIX, Path("/tmp"))).path
        house.enter_context(own_ray())
        run = kept_logs.begin(kept_logs.EMBEDDED, session_logs(folder / "ray"))
        try:
            _start_ray(memory, gpus, folder / "ray")
            yield
        finally:
            ray.shutdown()
            kept_logs.keep(run)


def _start_ray(memory: int, gpus: int, folder: Path) -> None:
    """Starts a Ray of this machine alone and connects this process to it. Raises KVClusterError with the errors of
    Ray's processes, and ConfigError as `check_shown`."""
    check_shown(gpus)
    try:
        with lean_ray():
            ray.init(
                address="local",
                job_config=OwnPaths(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=OBJECT_STORE_BYTES,
                _memory=memory,
                num_gpus=gpus or None,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
            )
    except Exception as error:  # Ray has no type of its own for this
        ray.shutdown()
        raise KVClusterError(with_errors(f"Ray did not start: {error}", folder)) from error
