"""A shard as a Ray actor: a process with an arena, a gRPC server, servers of the faster data paths beside it, and
connections to the coordinator and to the other shards, which carry the secret that the cluster keeps for itself."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from functools import partial

import ray

from kvcluster.actors.addresses import reachable_host
from kvcluster.actors.coordinator import end_process
from kvcluster.actors.process_limits import set_limits
from kvcluster.actors.restarts import restarted, waited_for
from kvcluster.config import Config
from kvcluster.config_hash import config_hash
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import Inventory, Leave, Reply, Report, ShardAddress
from kvcluster.release import __version__
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.gc_freeze import GarbageKeeper
from kvcluster.runtime.metrics import CallMetrics, Refusal
from kvcluster.runtime.metrics_server import serve_metrics
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Deadline, Transport
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.rpc import Connection, RpcHandler
from kvcluster.wire.methods import COORDINATOR, SHARD

log = logging.getLogger(__name__)
_ALSO_FOR_SHARDS = frozenset({"GetOffers", "Suspect"})
_KILL_S = 10.0


class ShardActor:
    """Serves from its constructor on, because Ray runs nothing else again when it restarts an actor."""

    def __init__(self, shard: str, reports_to: str, config: Config, secret: str) -> None:
        set_limits()
        self._me = ray.get_runtime_context().current_actor
        self._secret = secret
        self._coordinator = Connection(reports_to, secret)
        self._takes = config.server.transports
        self._next_attempt = own_attempts()
        auth = authenticator(config.server, secret, restarted=restarted())
        # The server is bound before the core exists, because the core needs to know its own address.
        handlers: dict[str, RpcHandler] = {}
        calls = CallMetrics(SHARD)
        host = reachable_host(config.server.host)
        self._server = GrpcServer(handlers, auth, host, 0, config.server.threads, metrics=calls)
        self._host = ShardHost(
            ShardId(shard),
            Epoch(time.time_ns()),
            config,
            address=self._server.address,
            host=socket.gethostname(),
            node=socket.gethostname(),
            release=__version__,
            config_hash=config_hash(config),
            tell=self._tell,
            open_source=self._open_source,
            on_end=self._leave,
            version_refused=partial(calls.refused, Refusal.VERSION),
        )

        handlers.update(unary_handlers(SHARD, self._host.ask, shared=_ALSO_FOR_SHARDS, metrics=calls))
        handlers.update(page_handlers(self._host))
        self._paths = serve_paths(self._host, auth, config.server, self._server.host)
        self._server.start()
        self._host.start(self._paths.offers)
        self._garbage = GarbageKeeper()
        self._garbage.start()
        number = 1 + int(shard.rpartition("-")[2])
        self._metrics = waited_for(
            lambda: serve_metrics(config.metrics, number, self._host, calls), patient=restarted()
        )

    def address(self) -> str:
        return self._server.address

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Ends serving; the caller ends the process."""
        if self._metrics is not None:
            self._metrics.close()
        self._server.close()
        self._paths.close()
        self._host.close()
        self._coordinator.close()
        self._garbage.close()

    def _tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        return self._coordinator.ask(COORDINATOR[type(message).__name__], message, deadline)

    def _open_source(self, shard: ShardAddress) -> Transport:
        return choose(shard, self._secret, self._next_attempt, takes=self._takes)

    def _leave(self, leave: Leave) -> None:
        if not leave.for_good:
            end_process(leave)
        # Called under the driver's lock, where nothing may block.
        threading.Thread(target=self._leave_for_good, args=(leave,), name="kvcluster-leave", daemon=True).start()

    def _leave_for_good(self, leave: Leave) -> None:
        """Ends this actor by `ray.kill`: Ray restarts an actor whose process exits, but not one that was killed like
        this."""
        log.warning("ending this shard, which is not restarted: %s", leave.reason)
        ray.kill(self._me, no_restart=True)
        time.sleep(_KILL_S)
        end_process(leave)  # Ray's head is unreachable; the shard is drained all the same, and the next starts empty
