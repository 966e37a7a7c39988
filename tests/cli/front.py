"""A cluster within this process, whose coordinator is behind a real server: what the operators' commands talk to."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

from kvcluster.cli.main import main
from kvcluster.core.ids import CallId, Tenant
from kvcluster.core.messages import CoordinatorQuestion, Reply, Request
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.testing import MemoryCluster
from kvcluster.wire.methods import COORDINATOR


class Served:
    """A cluster of this process whose coordinator answers the command line."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.tenants = {digest(name): name for name in ("default", "other", "operator")}
        auth = Authenticator(self.tenants, "secret", frozenset({digest("operator")}))  # type: ignore[arg-type]
        handlers = unary_handlers(
            COORDINATOR, self._ask, frozenset({"Report", "Inventory"}), operators=frozenset({"Drain"})
        )
        self._server = GrpcServer(handlers, auth, "127.0.0.1", 0, threads=4)
        self._server.start()
        self.address = self._server.address

    def run(self, *arguments: str, token: str = "default") -> int:
        with patch.dict(os.environ, KVCLUSTER_TOKEN=token):
            return main([*arguments, "--address", self.address])

    def close(self) -> None:
        self._server.close(grace_s=0)

    def _ask(self, build: Callable[[CallId], Request[CoordinatorQuestion]], wait_s: float, tenant: Tenant) -> Reply:
        return self.cluster.running_coordinator().ask(build, wait_s, tenant)
