"""A cluster within one process: `kvcluster.local(ray=False)`.

Its address serves this process alone (client/in_process.py). A host that ends by itself, such as a shard that the
coordinator has given up because this process stood still, is replaced by a thread: a shard begins empty, or with its
disk tier, as after a restart of its process elsewhere.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvcluster.client.in_process import SCHEME, served
from kvcluster.config import Config
from kvcluster.config.ports import shard_metrics_ports
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Leave
from kvcluster.core.shard_scheduler import pool_bytes
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.in_process.hosts import InProcessHosts
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.metric_samples import CallMetrics, Histogram, Sample
from kvcluster.runtime.metrics_server import serve_metrics
from kvcluster.runtime.private_files import private_folder
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.volume import Identity, claim_volume
from kvcluster.transfers.coordinator_client import CoordinatorPort
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transport.base import Unavailable
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import SHARD

log = logging.getLogger(__name__)
_RESTARTING = "it is being restarted"


class InProcessCluster(InProcessHosts):
    """The hosts of a cluster of this process, from `start` to `stop`. Thread-safe."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError if the configuration has shards on every node that joins, or a token file that cannot be
        used."""
        if config.shards_in_all is None:
            raise ConfigError(
                "per_node is for clusters of several nodes; give groups of a cluster in one process shards"
            )
        self._house = ExitStack()
        if not config.coordinator.state_dir:  # a purge must outlast a coordinator that ends by itself
            folder = self._house.enter_context(private_folder("kvcluster-local-")).path
            config = replace(config, coordinator=replace(config.coordinator, state_dir=str(folder)))
        super().__init__(config)
        self.address = f"{SCHEME}{config.name}-{secrets.token_hex(4)}"
        self._auth = authenticator(config, "")
        self._lock = threading.Lock()
        self._ended = False

    @property
    def pool_bytes(self) -> int:
        """The memory that the pools of all shards take."""
        return sum(group.shards * pool_bytes(group) for group in self.config.shard_groups.values())

    def start(self) -> None:
        """Starts the hosts, and waits until the shards can be used. Raises ConfigError if a setting cannot be used;
        nothing is left running then."""
        try:
            self.start_coordinator()
            for group, settings in self.config.shard_groups.items():
                for number in range(settings.shards):
                    self._start_shard(ShardId(f"{group}-{number}"), group)
            self.wait_until_up()
            self._serve_metrics()
            self._house.enter_context(served(self.address, self))
        except BaseException:
            self.stop()
            raise

    def port(self, token: str | None) -> CoordinatorPort:
        """As ServedHere."""
        self._auth.worker(token)
        return self.port_of(partial(self._auth.caller, token))

    def opener(self, token: str | None) -> OpenTransport:
        """As ServedHere."""
        return self.opener_of(self._auth.worker(token))

    def pids(self) -> list[int]:
        """Returns the id of this process."""
        return [os.getpid()]

    def save(self) -> None:
        """Has the shards save their pages to their disk tiers, all at the same time, if they have any."""
        saving = [
            threading.Thread(target=_save, args=(host, settings.stop_ms), name="kvcluster-save", daemon=True)
            for shard, host in self.shards.items()
            if (settings := self._config_of(shard).shard).disk_bytes and settings.stop_ms
        ]
        for thread in saving:
            try:
                start_thread(thread)
            except KVClusterError:  # one after the other, then
                thread.run()
        for thread in saving:
            if thread.is_alive():
                thread.join()

    def stop(self) -> None:
        """Ends all hosts. May be called again."""
        with self._lock:
            self._ended = True
            self._house.close()
            for host in self.shards.values():
                host.close()
            self._shards.clear()
            self.stop_coordinator()

    # ------------------------------------------------------------------------ hosts that end by themselves

    def coordinator_left(self, leave: Leave) -> None:
        log.warning("the coordinator is restarted: %s", leave.reason)
        self._in_background(self._restart_coordinator)

    def shard_left(self, shard: ShardId, leave: Leave) -> None:
        if leave.for_good:
            log.warning("%s has ended: %s", shard, leave.reason)
            self._in_background(lambda: self._close_shard(shard))
        else:
            log.warning("%s is restarted: %s", shard, leave.reason)
            self._in_background(lambda: self._restart_shard(shard))

    def _in_background(self, work: Callable[[], object]) -> None:
        """Has a thread do this unless the cluster has ended: a host is closed outside its driver's lock."""

        def run() -> None:
            with self._lock:
                if not self._ended:
                    work()

        try:
            start_thread(threading.Thread(target=run, name="kvcluster-restart", daemon=True))
        except KVClusterError as error:
            log.critical("what has ended is not restarted: %s; start another cluster", error)

    def _restart_coordinator(self) -> None:
        self.stop_coordinator()
        self.start_coordinator()

    def _restart_shard(self, shard: ShardId) -> None:
        self._close_shard(shard)
        self._start_shard(shard, self._group_of(shard))

    def _close_shard(self, shard: ShardId) -> None:
        host = self._shards.pop(shard, None)
        if host is not None:
            host.close()

    def _start_shard(self, shard: ShardId, group: str) -> None:
        config = self.config.of_group(group)
        if config.shard.disk_bytes:
            claim_volume(config.shard.disk_dir, Identity(config.name, group, shard))
        self.start_host(shard, config)

    # ------------------------------------------------------------------------------------------- helpers

    def _group_of(self, shard: ShardId) -> str:
        return shard.rpartition("-")[0]

    def _config_of(self, shard: ShardId) -> Config:
        return self.config.of_group(self._group_of(shard))

    def _serve_metrics(self) -> None:
        metrics = self.config.metrics
        if not metrics.port:
            return
        ports = shard_metrics_ports(metrics.port)
        coordinator = _Current(lambda: self._coordinator)
        servers = [serve_metrics(metrics, range(metrics.port, metrics.port + 1), coordinator, self.calls)]
        for shard in self.shards:
            current = _Current(partial(self._shards.get, shard))
            servers.append(serve_metrics(metrics, ports, current, CallMetrics(SHARD)))
        for server in servers:
            assert server is not None, "a port is configured"
            self._house.callback(server.close)


class _Current:
    """The metrics of one host, whichever incarnation of it runs (MeteredHost)."""

    def __init__(self, find: Callable[[], CoordinatorHost | ShardHost | None]) -> None:
        self._find = find

    def samples(self) -> list[Sample | Histogram]:
        host = self._find()
        return host.samples() if host is not None else []

    def why_not_alive(self) -> str:
        host = self._find()
        return host.why_not_alive() if host is not None else ""

    def why_not_ready(self) -> str:
        host = self._find()
        return host.why_not_ready() if host is not None else _RESTARTING


def _save(host: ShardHost, stop_ms: int) -> None:
    try:
        host.save(stop_ms)
    except (Unavailable, KVClusterError) as error:
        log.warning("a shard has not saved its pages: %s", error)
