"""The coordinator as a Ray actor: a process with one gRPC server and one driver. It never imports torch."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from kvcluster.actors.addresses import announced_host
from kvcluster.config import Config
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import Leave
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.gc_freeze import GarbageKeeper
from kvcluster.runtime.server import Gate, GrpcServer, unary_handlers
from kvcluster.transport.rpc import host_and_port
from kvcluster.wire.methods import COORDINATOR

log = logging.getLogger(__name__)
_FOR_SHARDS = frozenset({"Report", "Inventory"})
_FOR_OPERATORS = frozenset({"Drain", "SetPolicy"})


class CoordinatorActor:
    """Serves from its constructor on, since that is all that Ray runs again when it restarts an actor.

    The port is the same in every incarnation, so that shards and workers find the next one where the last was.
    """

    def __init__(self, config: Config, secret: str) -> None:
        self._host = CoordinatorHost(Epoch(time.time_ns()), config, on_end=end_process)
        gate = Gate(authenticator(config.server, secret))
        handlers = unary_handlers(COORDINATOR, gate, self._host.ask, _FOR_SHARDS, operators=_FOR_OPERATORS)
        self._server = GrpcServer(handlers, config.server.host, config.server.port, config.server.threads)
        self._garbage = GarbageKeeper()
        self._garbage.start()
        self._host.start()
        self._server.start()

    def address(self) -> str:
        """Where shards and workers find it, those of other nodes too."""
        return host_and_port(announced_host(self._server.host), self._server.port)

    def shards_up(self) -> int:
        """How many shards have told all they hold."""
        up = self._host.inspect(lambda: sum(m.cursor.current for m in self._host.core.members.all()))
        assert isinstance(up, int)
        return up

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Ends serving; the process is ended by whoever asked."""
        self._server.close()
        self._host.close()
        self._garbage.close()


def end_process(leave: Leave) -> None:
    """This incarnation is over; Ray starts the next. There is nothing to save: shards own the truth."""
    log.warning("ending this process: %s", leave.reason)
    os._exit(1)


def with_state_dir(config: Config, folder: Path) -> Config:
    """The same, with tombstones in that folder, unless the configuration names another."""
    if config.coordinator.state_dir:
        return config
    return replace(config, coordinator=replace(config.coordinator, state_dir=str(folder)))
