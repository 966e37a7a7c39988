"""A shard as a Ray actor: a process with an arena, one gRPC server for pages, and a reporter."""

from __future__ import annotations

import ctypes
import os
import socket
import time

import grpc
import ray

from kvcluster.actors.coordinator import end_process
from kvcluster.config import Config
from kvcluster.core.ids import Epoch, ShardId, Tenant
from kvcluster.core.messages import Inventory, Reply, Report
from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import authenticator, is_loopback
from kvcluster.runtime.server import Gate, Handler, Server, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.rpc import Connection
from kvcluster.transport.seam import Deadline
from kvcluster.wire.methods import COORDINATOR, SHARD


class ShardActor:
    """Serves from its constructor on, since that is all that Ray runs again when it restarts an actor."""

    def __init__(self, shard: str, coordinator: str, config: Config, secret: str) -> None:
        _keep_freed_memory()
        self._coordinator = Connection(coordinator, secret)
        gate = Gate(authenticator(config.server, secret))
        # The server is bound before the core exists, because the core has to know the address it is reached at.
        handlers: dict[str, Handler] = {}
        self._server = Server(handlers, reachable_host(config.server.host), 0, config.server.threads)
        self._host = ShardHost(
            ShardId(shard),
            Epoch(time.time_ns()),
            config,
            address=self._server.address,
            host=socket.gethostname(),
            tell=self._tell,
            on_end=end_process,
        )

        def tenant_of(context: grpc.ServicerContext) -> Tenant:
            return gate.caller(context).tenant

        handlers.update(unary_handlers(SHARD, gate, self._host.ask))
        handlers.update(page_handlers(self._host, tenant_of))
        self._server.start()
        self._host.start()

    def address(self) -> str:
        return self._server.address

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Ends serving; the process is ended by whoever asked."""
        self._server.close()
        self._host.close()
        self._coordinator.close()

    def _tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        return self._coordinator.ask(COORDINATOR[type(message).__name__], message, deadline)


def reachable_host(host: str) -> str:
    """Where a shard listens whose coordinator listens at `host`: at its own node's address, once that is to be
    reached from elsewhere."""
    if is_loopback(host):
        return host
    node: str = ray.util.get_node_ip_address()
    if not is_loopback(node):
        return node
    # A Ray of our own keeps to loopback and does not know this machine's address.
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; it only chooses the way out
        except OSError:
            raise ConfigError(
                f"cannot tell how others reach this machine; give its address instead of {host}"
            ) from None
        address: str = probe.getsockname()[0]
        return address


def _keep_freed_memory() -> None:
    """Tells the allocator of this process to reuse what it freed.

    gRPC wants each frame as a fresh bytes object of a megabyte. By default glibc maps and unmaps such blocks, and
    touching new pages costs more than the copy itself.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 64 * 2**20)
        mallopt(m_trim_threshold, 256 * 2**20)
