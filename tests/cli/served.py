"""A cluster behind sockets without Ray: one coordinator and one shard, real servers, in any process.

As a program, `python -m tests.cli.served HOST [SHARD_AT]`, it says on stdout where it is and serves until stdin ends.
Where SHARD_AT is given, the shard is reached there, through a proxy, and over gRPC alone.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from kvcluster.config import load
from kvcluster.core.ids import CLUSTER, Epoch, ShardId
from kvcluster.core.messages import Inventory, Offer, Offers, Reply, Report, ShardAddress
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.base import Deadline
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.rpc import RpcHandler
from kvcluster.transport.tcp_pages import TcpServer
from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.ports import refused
from tests.runtime.hosts import no_source
from tests.waiting import eventually


class Served:
    """A context manager. Everybody is the tenant `default`; `coordinator` and `shard` are addresses."""

    def __init__(self, host: str, *, shard_at: str = "", **shard: Any) -> None:
        quick = {"ram_bytes": "32MiB", "report_interval_ms": 20, "report_retry_ms": 5, "scrub_bytes": 0, **shard}
        config = load(overrides={"shards": 1, "shard": quick})
        authenticator = Authenticator(None, "between the actors")
        self._coordinator = CoordinatorHost(Epoch(time.time_ns()), config, on_end=lambda leave: None)
        front = unary_handlers(COORDINATOR, self._coordinator.ask, frozenset({"Report", "Inventory"}))
        self._front = GrpcServer(front, authenticator, host, 0, threads=8)
        handlers: dict[str, RpcHandler] = {}
        self._back = GrpcServer(handlers, authenticator, host, 0, threads=8)
        self._shard = ShardHost(
            ShardAddress(ShardId("shard-0"), Epoch(time.time_ns()), shard_at or self._back.address, "another"),
            config,
            tell=self._tell,
            open_source=no_source,
            on_end=lambda leave: None,
        )

        self._tcp = TcpServer(self._shard, authenticator.caller, host)
        offered = () if shard_at else (Offer("tcp", self._tcp.address),)
        self._offers = Offers(self._shard.core.epoch, offered)
        handlers.update(unary_handlers(SHARD, self._shard.ask))
        handlers.update(page_handlers(self._shard))
        self.coordinator, self.shard = self._front.address, self._back.address
        self._refusing = ExitStack()

    def __enter__(self) -> Served:
        self._coordinator.start()
        self._front.start()
        self._back.start()
        self._tcp.start()
        self._shard.start(self._offers)
        eventually(lambda: any(member.joined for member in self._coordinator.core.state.members.all()))
        return self

    def __exit__(self, *error: object) -> None:
        self._refusing.close()
        for server in (self._front, self._back):
            server.close(grace_s=0)
        self._tcp.close()
        self._shard.close()
        self._coordinator.close()

    def cut_off_shard(self) -> None:
        """It lives, and tells the coordinator so, but no worker reaches it any more."""
        self._back.close(grace_s=0)
        self._tcp.close()
        for port in (self._back.port, int(self._tcp.address.rpartition(":")[2])):
            self._refusing.enter_context(refused(port))

    def pages(self) -> int:
        """Returns the number of pages that the shard holds."""
        held = self._shard.inspect(lambda: len(list(self._shard.core.pool.ready())))
        assert isinstance(held, int)
        return held

    def tombstones(self) -> int:
        """Returns the tombstones that purges have left."""
        left = self._coordinator.inspect(lambda: len(self._coordinator.core.state.tombstones.all()))
        assert isinstance(left, int)
        return left

    def _tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        return self._coordinator.ask(build_request(message, CLUSTER), deadline.remaining_s())


if __name__ == "__main__":
    host, shard_at = [*sys.argv[1:], ""][:2]
    with Served(host, shard_at=shard_at) as served:
        print(json.dumps({"coordinator": served.coordinator, "shard": served.shard}), flush=True)
        sys.stdin.read()
