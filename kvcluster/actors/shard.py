"""A shard as a Ray actor: a process with an arena, a gRPC server, servers of the faster data paths beside it, and
connections to the coordinator and to the other shards, which carry the secret that the cluster keeps for itself."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import ray

from kvcluster.actors.actor_process import restarted, set_limits, waited_for
from kvcluster.actors.coordinator import end_process
from kvcluster.actors.settings import next_epoch, reachable_host, read_settings, report_address
from kvcluster.actors.stopping import on_sigterm, save_ms
from kvcluster.config import Config, ServerConfig
from kvcluster.config.ports import port_text, shard_metrics_ports, shard_ports
from kvcluster.config_hash import config_hash
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import (
    Inventory,
    Leave,
    ListeningPort,
    PagesSaved,
    ProcessFacts,
    ProcessInfo,
    Reply,
    Report,
    ShardAddress,
)
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.memory.arena import memory_limit_bytes
from kvcluster.release import __version__
from kvcluster.runtime.auth import Authenticator, authenticator
from kvcluster.runtime.gc_freeze import GarbageKeeper
from kvcluster.runtime.json_log import set_up_log
from kvcluster.runtime.kept_logs import mark
from kvcluster.runtime.metric_samples import CallMetrics
from kvcluster.runtime.metrics_server import MetricsServer, serve_metrics
from kvcluster.runtime.peer_probe import PeerProbe
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.tenant_rates import RateLimiter, rates_of
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.runtime.volume import Identity, claim_volume
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.listener import first_free
from kvcluster.transport.process_location import locate_server
from kvcluster.transport.rpc import ClockDifference, Connection, RpcHandler
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import COORDINATOR, SHARD

log = logging.getLogger(__name__)
_ALSO_FOR_SHARDS = frozenset({"GetOffers", "Suspect"})
_KILL_S = 10.0


class ShardActor:
    """Serves from its constructor on, because Ray runs nothing else again when it restarts an actor."""

    def __init__(self, cluster: str, shard: str, group: str) -> None:
        """`cluster`: the name under which its configuration was published."""
        mark(shard)
        set_limits()
        calls = CallMetrics(SHARD)
        patient = restarted()
        wait = partial(waited_for, patient=patient, failed=calls.start_failed)
        published, self._secret = wait(lambda: read_settings(cluster))
        config = published.of_group(group)
        set_up_log(config.log, shard)
        if config.shard.disk_bytes:
            volume = Identity(cluster, group, ShardId(shard))
            wait(lambda: claim_volume(config.shard.disk_dir, volume))
        self._me = ray.get_runtime_context().current_actor
        self._coordinator = CoordinatorLink(cluster, self._secret)
        self._takes = config.server.transports
        self._stop_ms = save_ms(config.shard)
        self._next_attempt = own_attempts()
        auth = authenticator(config.server, self._secret, restarted=patient)
        self._metrics: MetricsServer | None = None
        self._location = locate_server(config.server.socket_dir)
        self._probe = PeerProbe(
            lambda: self._facts(config), lambda: self._coordinator.clock, self._secret, self._location
        )
        # The server is bound before the core exists, because the core needs to know its own address.
        handlers: dict[str, RpcHandler] = {}
        rates = wait(lambda: rates_of(config.server, calls, restarted=patient))
        self._server = wait(lambda: _served(config.server, handlers, auth, calls, rates))
        self._host = ShardHost(
            ShardAddress(ShardId(shard), next_epoch(cluster, shard), self._server.address, self._location.host),
            config,
            process=ProcessInfo(socket.gethostname(), __version__, config_hash(published)),
            tell=self._coordinator.report,
            open_source=self._open_source,
            on_end=self._leave,
            probe=self._probe.carry_out,
            rates=rates,
        )
        host = self._host
        handlers.update(unary_handlers(SHARD, host.ask, shared=_ALSO_FOR_SHARDS, metrics=calls))
        handlers.update(page_handlers(self._host))
        self._paths = serve_paths(self._host, auth, config.server, self._server.host)
        self._server.start()
        self._host.start(self._paths.offers)
        self._garbage = GarbageKeeper()
        self._garbage.start()
        ports = shard_metrics_ports(config.metrics.port)
        self._metrics = wait(lambda: serve_metrics(config.metrics, ports, self._host, calls))
        if self._stop_ms:
            on_sigterm(self._save_and_end)

    def address(self) -> str:
        return self._server.address

    def pid(self) -> int:
        return os.getpid()

    def save(self) -> PagesSaved | None:
        """Saves the hottest pages to the disk tier, because the shard is to stop; returns when they are saved or
        `shard.stop_ms` have passed. The shard stores nothing more, and serves loads until it is ended. Returns None if
        it has no disk tier, or no time for it."""
        return self._host.save(self._stop_ms) if self._stop_ms else None

    def stop(self) -> None:
        """Ends serving; the caller ends the process."""
        if self._metrics is not None:
            self._metrics.close()
        self._server.close()
        self._paths.close()
        self._probe.close()
        self._host.close()
        self._coordinator.close()
        self._garbage.close()

    def _open_source(self, shard: ShardAddress) -> Transport:
        return choose(shard, self._secret, self._next_attempt, self._location, takes=self._takes)

    def _facts(self, config: Config) -> ProcessFacts:
        """Returns what this process reports about itself in probes."""
        allowed = port_text(shard_ports(config.server))
        ports = [ListeningPort("grpc", self._server.port, allowed)]
        tcp = (offer.address for offer in self._paths.offers.offers if offer.transport == "tcp")
        ports += [ListeningPort("tcp", int(address.rpartition(":")[2]), allowed) for address in tcp]
        if self._metrics is not None:
            allowed = port_text(shard_metrics_ports(config.metrics.port))
            ports.append(ListeningPort("metrics", self._metrics.port, allowed))
        pools = config.shard.ram_bytes + config.shard.host_bytes
        return ProcessFacts(pools, memory_limit_bytes(), tuple(ports))

    def _save_and_end(self) -> None:
        self._try_to_save()
        end_process(Leave("it was told to stop"))

    def _try_to_save(self) -> None:
        try:
            self.save()
        except Unavailable as error:
            log.warning("the pages of this shard are not saved: %s", error)

    def _leave(self, leave: Leave) -> None:
        if not leave.for_good:
            end_process(leave)
        # Called under the driver's lock, where nothing may block.
        thread = threading.Thread(target=self._leave_for_good, args=(leave,), name="kvcluster-leave", daemon=True)
        try:
            start_thread(thread)
        except KVClusterError as error:  # Ray starts it again, and the coordinator drains that one again
            log.warning("this shard leaves without saving its pages: %s", error)
            end_process(leave)

    def _leave_for_good(self, leave: Leave) -> None:
        """Ends this actor by `ray.kill`: Ray restarts an actor whose process exits, but not one that was killed like
        this. Its pages are saved before: a shard of its name may start on its volume, when the node is back."""
        self._try_to_save()
        log.warning("ending this shard, which is not restarted: %s", leave.reason)
        ray.kill(self._me, no_restart=True)
        time.sleep(_KILL_S)
        end_process(leave)  # Ray's head is unreachable; the shard is drained all the same, and the next starts empty


def _served(
    config: ServerConfig,
    handlers: dict[str, RpcHandler],
    auth: Authenticator,
    calls: CallMetrics,
    rates: RateLimiter | None = None,
) -> GrpcServer:
    """Returns a server on the first port for shards that is free on this node. Raises ConfigError if none is."""
    host = reachable_host(config.host)
    setting = "server.shard_ports"

    def listen(port: int) -> GrpcServer:
        return GrpcServer(handlers, auth, host, port, config.threads, metrics=calls, setting=setting, rates=rates)

    return first_free(shard_ports(config), listen)


_LOOK_UP_S = 2.0


class CoordinatorLink:
    """A shard's connection to its coordinator, which may start again elsewhere: the address is looked up again when the
    connection fails. Used by one thread, except for `close`."""

    def __init__(self, cluster: str, secret: str) -> None:
        self._cluster = cluster
        self._secret = secret
        self._address = ""
        self._announced = ""
        self._lookup: threading.Thread | None = None
        self._connection: Connection | None = None

    def report(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        """Sends a report and returns its answer. Raises Unavailable or KVClusterError."""
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        try:
            return self._connection.ask(COORDINATOR[type(message).__name__], message, deadline)
        except (Unavailable, Unreachable):
            self._connect()
            raise

    @property
    def clock(self) -> ClockDifference | None:
        """How this clock differs from the coordinator's, by the last report that was answered."""
        return self._connection.clock if self._connection is not None else None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        """Connects to the announced address if it is another one. Raises Unreachable while there is none."""
        address = self._looked_up()
        if not address:
            raise Unreachable(f"no coordinator of cluster {self._cluster!r} has announced itself yet")
        if address != self._address:
            self.close()
            self._address, self._connection = address, Connection(address, self._secret)

    def _looked_up(self) -> str:
        """Returns the announced address; the last known one if Ray's head does not answer soon, as while it is away or
        cut off. Its answer may then take minutes, and the coordinator may be heard long before."""
        if self._lookup is None or not self._lookup.is_alive():
            self._lookup = threading.Thread(target=self._look_up, name="kvcluster-coordinator", daemon=True)
            start_thread(self._lookup)
        self._lookup.join(_LOOK_UP_S)
        return self._announced

    def _look_up(self) -> None:
        with suppress(ray.exceptions.RayError):  # it is asked again after the next report that fails
            self._announced = report_address(self._cluster)
