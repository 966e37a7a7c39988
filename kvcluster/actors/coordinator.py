"""The coordinator as a Ray actor: a process with a driver and two gRPC servers. It never imports torch.

Workers ask at one port, shards report at another: what strangers and tenants do to the first, such as opening all the
connections that it accepts, keeps no report away, and its messages are shorter. A firewall may close the other to all
but the nodes of the cluster.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvcluster.actors.actor_process import restarted, set_limits, waited_for
from kvcluster.actors.settings import announce_reports, announced_host, next_epoch, read_settings
from kvcluster.config import Config
from kvcluster.config_hash import config_hash
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, CallId, ShardId, Tenant
from kvcluster.core.messages import Drain, Leave, ListeningPort, ProcessFacts, ProcessInfo, Reply, Request, ScheduleSeen
from kvcluster.memory.arena import memory_limit_bytes
from kvcluster.release import __version__
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.gc_freeze import GarbageKeeper
from kvcluster.runtime.json_log import set_up_log
from kvcluster.runtime.kept_logs import mark
from kvcluster.runtime.metric_samples import CallMetrics
from kvcluster.runtime.metrics_server import serve_metrics
from kvcluster.runtime.server import Ask, GrpcServer, unary_handlers
from kvcluster.runtime.shard_credentials import CredentialIssuer
from kvcluster.runtime.tenant_rates import RateLimiter
from kvcluster.transport.addresses import host_and_port
from kvcluster.transport.certificates import COORDINATOR as ROLE
from kvcluster.transport.certificates import own_certificates, own_name
from kvcluster.transport.rpc import RpcHandler
from kvcluster.wire.methods import COORDINATOR

log = logging.getLogger(__name__)
_REPORTS = frozenset({"Report", "Inventory"})
_ISSUING = frozenset({"IssueCredential"})
_FOR_OPERATORS = frozenset({"Drain", "SetPolicy", "Probe"})
_DRAIN_S = 5.0
_LINE_CHARS = 1_024


class CoordinatorActor:
    """Serves from its constructor on, because Ray runs nothing else again when it restarts an actor.

    The ports are the same in every incarnation. Workers find the next one at the same address, or at the advertised
    name; shards look it up.
    """

    def __init__(self, cluster: str) -> None:
        """`cluster`: the name under which its configuration was published."""
        mark("coordinator")
        set_limits()
        calls = CallMetrics(COORDINATOR)
        patient = restarted()
        wait = partial(waited_for, patient=patient, failed=calls.start_failed)
        config, secret = wait(lambda: read_settings(cluster))
        set_up_log(config.log, "coordinator")
        server, metrics = config.server, config.metrics
        epoch = next_epoch(cluster, "coordinator")
        process = ProcessInfo(socket.gethostname(), __version__, config_hash(config))
        self._certificates = certificates = wait(lambda: own_certificates(config, ROLE))
        issuer = CredentialIssuer()
        self._auth = auth = wait(lambda: authenticator(config, secret, epoch_of=issuer.epoch_of, restarted=patient))
        made = partial(CoordinatorHost, epoch, config, on_end=end_process, restarted=patient)
        self._host = wait(lambda: made(process=process, certificates=certificates, is_revoked=auth.is_revoked))
        for_workers, for_shards = handlers_of(self._host.ask, issuer, calls)
        host, message_bytes = server.host, limits.QUESTION_BYTES
        self._advertised = server.advertise
        self._server = wait(
            lambda: GrpcServer(
                *(for_workers, auth, host, server.port, server.threads, message_bytes, calls),
                setting="server.port, --port",
                certificates=certificates,
                client_certificates=config.security.client_certificates,
                rates=RateLimiter(self._host.quotas, calls),
            )
        )
        self._reports = wait(
            lambda: GrpcServer(
                *(for_shards, auth, host, server.report_port, server.threads, limits.MESSAGE_BYTES, calls),
                setting="server.report_port",
                certificates=certificates,
                client_certificates=True,
            )
        )
        self._garbage = GarbageKeeper()
        self._garbage.start()
        self._host.start()
        self._reports.start()
        self._server.start()
        ports = range(metrics.port, metrics.port + 1)
        reports_at = announced_host(self._reports.host)
        at = host_and_port(reports_at, self._reports.port)
        announce_reports(cluster, at, own_name(certificates, reports_at))
        self._metrics = wait(lambda: serve_metrics(metrics, ports, self._host, calls, certificates))
        self._host.inspect(lambda: self._host.core.set_facts(self._facts(config)))

    def address(self) -> str:
        """Returns the address at which workers reach it, from other nodes too."""
        return host_and_port(self._advertised or announced_host(self._server.host), self._server.port)

    def _facts(self, config: Config) -> ProcessFacts:
        """Returns what this process reports about itself in probes."""
        server = config.server
        ports = [
            ListeningPort("workers", self._server.port, str(server.port or "")),
            ListeningPort("reports", self._reports.port, str(server.report_port or "")),
        ]
        if self._metrics is not None:
            ports.append(ListeningPort("metrics", self._metrics.port, str(config.metrics.port)))
        return ProcessFacts(0, memory_limit_bytes(), tuple(ports))

    def scheduled(self, waiting: list[str], orphans: list[tuple[str, str]], shards: list[str]) -> None:
        """Takes what the reconciler saw in its last pass, for the status, and adds why the newest token file is not in
        use, if it is not, and what is to be done about this process's certificate."""
        certificate = "" if self._certificates is None else self._certificates.warning(time.time())
        waiting = [*filter(None, (self._auth.trouble(), certificate)), *waiting]
        self._host.tell(schedule_of(waiting, orphans, shards))

    def draining(self) -> list[str]:
        """Returns the names of the shards that are draining."""
        return self._host.inspect(lambda: [m.info.shard for m in self._host.core.state.members.all() if m.draining])

    def leaving(self) -> dict[str, str]:
        """Returns the shards whose nodes are to be taken down, with their addresses, until `leaving_heard`."""
        return self._host.inspect(lambda: {str(k): v for k, v in self._host.core.state.members.leaving.items()})

    def leaving_heard(self, shards: list[str]) -> None:
        """Forgets that the nodes of these shards are to be taken down: Ray's store has it now."""
        leaving = self._host.core.state.members.leaving
        self._host.inspect(lambda: [leaving.pop(ShardId(shard), None) for shard in shards])

    def drain(self, shard: str) -> None:
        """Begins to drain a shard."""
        drain = Drain(ShardId(shard))
        self._host.ask(lambda call: Request(call, CLUSTER, None, drain), _DRAIN_S)

    def shards_up(self) -> int:
        """Returns the number of shards whose whole inventory has been received."""
        return self._host.inspect(lambda: sum(m.joined for m in self._host.core.state.members.all()))

    def trouble(self) -> dict[str, str]:
        """Returns by shard why it is without one of its tiers, or with a smaller one; {} if all are as configured."""
        members = self._host.core.state.members
        return self._host.inspect(lambda: {str(m.info.shard): m.info.trouble for m in members.all() if m.info.trouble})

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Ends serving; the caller ends the process."""
        if self._metrics is not None:
            self._metrics.close()
        self._server.close()
        self._reports.close()
        self._host.close()
        self._garbage.close()


def handlers_of(
    ask: Ask,
    issuer: CredentialIssuer,
    metrics: CallMetrics | None = None,
) -> tuple[dict[str, RpcHandler], dict[str, RpcHandler]]:
    """Returns the handlers of the server for workers, and of that for shards. `ask` has a question decoded, and
    passes it on to the core; `issuer` answers what shards ask it for."""

    def issue(build: Callable[[CallId], Request[Any]], wait_s: float, tenant: Tenant) -> Reply:
        """Answers a question that is not for the core."""
        return issuer.issue(build(CallId(0)).question)

    reports = {name: COORDINATOR[name] for name in _REPORTS}
    issuing = {name: COORDINATOR[name] for name in _ISSUING}
    questions = {name: method for name, method in COORDINATOR.items() if name not in _REPORTS | _ISSUING}
    return (
        unary_handlers(questions, ask, operators=_FOR_OPERATORS, metrics=metrics),
        unary_handlers(reports, ask, _REPORTS, metrics=metrics)
        | unary_handlers(issuing, issue, _ISSUING, metrics=metrics),
    )


def schedule_of(waiting: Sequence[str], orphans: Sequence[tuple[str, str]], shards: Collection[str]) -> ScheduleSeen:
    """Returns what the status shows of a pass of the reconciler: at most SCHEDULE_LINES of each, and no more of a text
    than is sent."""
    lines = tuple(line[:_LINE_CHARS] for line in waiting[: limits.SCHEDULE_LINES])
    volumes = tuple((ShardId(shard), node) for shard, node in orphans[: limits.SCHEDULE_LINES])
    return ScheduleSeen(lines, volumes, frozenset(map(ShardId, shards)))


def end_process(leave: Leave) -> None:
    """Ends this incarnation; Ray starts the next. There is nothing to save: the shards hold the state."""
    log.warning("ending this process: %s", leave.reason)
    os._exit(1)


def with_state_dir(config: Config, folder: Path) -> Config:
    """Returns the configuration with `folder` as its state folder, unless it names one already."""
    if config.coordinator.state_dir:
        return config
    return replace(config, coordinator=replace(config.coordinator, state_dir=str(folder)))
