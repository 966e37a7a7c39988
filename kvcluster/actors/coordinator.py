"""The coordinator as a Ray actor: a process with one gRPC server and one driver. It never imports torch."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from kvcluster.actors.addresses import announced_host
from kvcluster.actors.process_limits import set_limits
from kvcluster.actors.restarts import restarted, waited_for
from kvcluster.config import Config
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import Leave
from kvcluster.runtime.auth import authenticator
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.gc_freeze import GarbageKeeper
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.transport.rpc import host_and_port
from kvcluster.wire.methods import COORDINATOR

log = logging.getLogger(__name__)
_FOR_SHARDS = frozenset({"Report", "Inventory"})
_FOR_OPERATORS = frozenset({"Drain", "SetPolicy"})


class CoordinatorActor:
    """Serves from its constructor on, because Ray runs nothing else again when it restarts an actor.

    The port is the same in every incarnation, so that shards and workers find the next one at the same address.
    """

    def __init__(self, config: Config, secret: str) -> None:
        set_limits()
        patient, server = restarted(), config.server
        self._host = waited_for(
            lambda: CoordinatorHost(Epoch(time.time_ns()), config, on_end=end_process), patient=patient
        )
        auth = authenticator(server, secret, restarted=patient)
        handlers = unary_handlers(COORDINATOR, self._host.ask, _FOR_SHARDS, operators=_FOR_OPERATORS)
        self._server = waited_for(
            lambda: GrpcServer(handlers, auth, server.host, server.port, server.threads), patient=patient
        )
        self._garbage = GarbageKeeper()
        self._garbage.start()
        self._host.start()
        self._server.start()

    def address(self) -> str:
        """Returns the address at which shards and workers reach it, from other nodes too."""
        return host_and_port(announced_host(self._server.host), self._server.port)

    def shards_up(self) -> int:
        """Returns the number of shards whose whole inventory has been received."""
        up = self._host.inspect(lambda: sum(m.cursor.current for m in self._host.core.members.all()))
        assert isinstance(up, int)
        return up

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Ends serving; the caller ends the process."""
        self._server.close()
        self._host.close()
        self._garbage.close()


def end_process(leave: Leave) -> None:
    """Ends this incarnation; Ray starts the next. There is nothing to save: the shards hold the state."""
    log.warning("ending this process: %s", leave.reason)
    os._exit(1)


def with_state_dir(config: Config, folder: Path) -> Config:
    """Returns the configuration with `folder` as its state folder, unless it names one already."""
    if config.coordinator.state_dir:
        return config
    return replace(config, coordinator=replace(config.coordinator, state_dir=str(folder)))
