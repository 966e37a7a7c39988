"""A shard as a Ray actor: a process with an arena, a gRPC server, servers of the faster data paths beside it, and
connections to the coordinator and to the other shards, with credentials that the coordinator issues."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from functools import partial

import ray

from kvcluster.actors.actor_process import restarted, set_limits, waited_for
from kvcluster.actors.coordinator import end_process
from kvcluster.actors.coordinator_link import CoordinatorLink
from kvcluster.actors.settings import next_epoch, reachable_host, read_settings
from kvcluster.actors.stopping import on_sigterm, save_ms
from kvcluster.config import Config
from kvcluster.config.ports import port_text, shard_metrics_ports, shard_ports
from kvcluster.config_hash import config_hash
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Leave,
    ListeningPort,
    PagesSaved,
    ProcessFacts,
    ProcessInfo,
    ShardAddress,
)
from kvcluster.errors import KVClusterError
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
from kvcluster.runtime.shard_credentials import ShardCredentials
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.tenant_rates import RateLimiter, rates_of
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.runtime.volume import Identity, claim_volume
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Transport, Unavailable
from kvcluster.transport.certificates import SHARD as ROLE
from kvcluster.transport.certificates import Certificates, own_certificates, own_name
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.listener import ListenTls, first_free
from kvcluster.transport.process_location import locate_server
from kvcluster.transport.rpc import RpcHandler
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import SHARD

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
        published, secret = wait(lambda: read_settings(cluster))
        config = published.of_group(group)
        set_up_log(config.log, shard)
        if config.shard.disk_bytes:
            volume = Identity(cluster, group, ShardId(shard))
            wait(lambda: claim_volume(config.shard.disk_dir, volume))
        self._me = ray.get_runtime_context().current_actor
        self._takes = config.server.transports
        self._stop_ms = save_ms(config.shard)
        self._next_attempt = own_attempts()
        self._certificates = certificates = wait(lambda: own_certificates(config, ROLE))
        epoch = next_epoch(cluster, shard)
        self._credentials = credentials_of(epoch, secret, certificates)
        self._coordinator = CoordinatorLink(cluster, self._credentials, self._look_at_certificate)
        auth = _authenticator(config, secret, self._credentials, restarted=patient)
        self._metrics: MetricsServer | None = None
        self._location = locate_server(config.server.socket_dir)
        facts, clock = (lambda: self._facts(config)), (lambda: self._coordinator.clock)
        self._probe = PeerProbe(facts, clock, self._credentials.to_shard, self._location)
        # The server is bound before the core exists, because the core needs to know its own address.
        handlers: dict[str, RpcHandler] = {}
        rates = wait(lambda: rates_of(config.server, calls, restarted=patient))
        self._server = wait(lambda: _served(config, handlers, auth, calls, certificates, rates))
        at, name = self._server.address, own_name(certificates, self._server.host)
        self._host = ShardHost(
            *(ShardAddress(ShardId(shard), epoch, at, self._location.host, name), config),
            process=ProcessInfo(socket.gethostname(), __version__, config_hash(published)),
            tell=self._coordinator.report,
            open_source=self._open_source,
            on_end=self._leave,
            probe=self._probe.carry_out,
            rates=rates,
        )
        host = self._host
        handlers.update(unary_handlers(SHARD, host.ask, shared=_ALSO_FOR_SHARDS, metrics=calls))
        handlers.update(page_handlers(host))
        self._serve(config, auth)
        ports = shard_metrics_ports(config.metrics.port)
        self._metrics = wait(lambda: serve_metrics(config.metrics, ports, host, calls, certificates))
        if self._stop_ms:
            on_sigterm(self._save_and_end)

    def _serve(self, config: Config, auth: Authenticator) -> None:
        """Starts the servers of the data paths, and then everything else."""
        tls = None
        if self._certificates is not None:
            tls = ListenTls(self._certificates, config.security.client_certificates, auth.worker_within_tls)
        self._paths = serve_paths(self._host, auth, config.server, self._server.host, tls)
        self._server.start()
        self._host.start(self._paths.offers)
        self._garbage = GarbageKeeper()
        self._garbage.start()

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

    def _look_at_certificate(self) -> None:
        """Has the shard report what is to be done about its certificate."""
        if self._certificates is not None:
            warning = self._certificates.warning(time.time())
            self._host.inspect(lambda: setattr(self._host.core, "warning", warning))

    def _open_source(self, shard: ShardAddress) -> Transport:
        credentials = self._credentials.to_shard(shard)
        return choose(shard, credentials, self._next_attempt, self._location, takes=self._takes)

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


def credentials_of(epoch: Epoch, secret: str, certificates: Certificates | None) -> ShardCredentials:
    """Returns those of an incarnation, which proves itself by its certificate or, without one, by the secret."""
    return ShardCredentials(epoch, Credentials(None if certificates is not None else secret, certificates))


def _authenticator(config: Config, secret: str, own: ShardCredentials, *, restarted: bool) -> Authenticator:
    return authenticator(
        *(config, secret),
        epoch_of=own.epoch_of,
        secret_suffices=lambda: own.secret_suffices,
        restarted=restarted,
    )


def _served(
    config: Config,
    handlers: dict[str, RpcHandler],
    auth: Authenticator,
    calls: CallMetrics,
    certificates: Certificates | None = None,
    rates: RateLimiter | None = None,
) -> GrpcServer:
    """Returns a server on the first port for shards that is free on this node. Raises ConfigError if none is."""
    server = config.server
    host = reachable_host(server.host)

    def listen(port: int) -> GrpcServer:
        return GrpcServer(
            *(handlers, auth, host, port, server.threads),
            metrics=calls,
            setting="server.shard_ports",
            certificates=certificates,
            client_certificates=config.security.client_certificates,
            rates=rates,
        )

    return first_free(shard_ports(server), listen)
