"""The servers of data paths beside a shard's gRPC server, and the offers by which clients learn of them.

A path that the configuration names and that can be served here is offered with its address; for every other path the
offers carry the reason, so that a slow connection can be explained. A shard that can serve none of them still serves
gRPC.

Shared memory maps the whole arena into its workers, where no shard separates one tenant's pages from another's. It is
therefore offered only if all workers are of one tenant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Protocol

from kvcluster.config import ServerConfig
from kvcluster.config.ports import shard_ports
from kvcluster.core.messages import Offer, Offers
from kvcluster.errors import KVClusterError
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.listener import CallerOf, ListenAt, ListenTls
from kvcluster.transports import BESIDE_GRPC, TransportSpec

log = logging.getLogger(__name__)


class PathServer(Protocol):
    """Serves one data path, from `start` to `close`."""

    @property
    def address(self) -> str:
        """The address, in the form that the client's end of this path dials."""

    @property
    def details(self) -> bytes:
        """Further data that the client's end needs, at most limits.OFFER_BYTES."""

    def start(self) -> None: ...

    def close(self) -> None: ...


Serve = Callable[[ShardHost, CallerOf, ListenAt], PathServer]
"""Starts a server from a shard, its credentials, and where it may listen. Raises OSError or KVClusterError if the path
cannot be served."""


def _serve(spec: TransportSpec, host: ShardHost, caller_of: CallerOf, at: ListenAt) -> PathServer:
    serve: Serve = resolve_name(f"{spec.module}:serve")
    return serve(host, caller_of, at)


SERVERS: Mapping[str, Serve] = {spec.name: partial(_serve, spec) for spec in BESIDE_GRPC}

_WHY_CHARS = 512
"""The most characters of a reason that is sent: well within what the wire takes."""


@dataclass(slots=True)
class PathServers:
    """The started servers of one shard incarnation, and its offers."""

    offers: Offers
    servers: list[PathServer]

    def close(self) -> None:
        """Ends the servers. May be called repeatedly."""
        for server in self.servers:
            server.close()


def serve_paths(
    host: ShardHost,
    auth: Authenticator,
    config: ServerConfig,
    listen_host: str,
    tls: ListenTls | None = None,
    servers: Mapping[str, Serve] = SERVERS,
) -> PathServers:
    """Starts every server that can be served for this shard. `tls`: None to serve in the clear."""
    at = ListenAt(listen_host, shard_ports(config), config.socket_dir, tls)
    started: list[PathServer] = []
    offered: list[Offer] = []
    refused: list[tuple[str, str]] = []

    for spec in BESIDE_GRPC:
        name, why = spec.name, _why_not(spec, auth, config, servers)
        if why is not None:
            refused.append((name, why))
            continue
        try:
            server = servers[name](host, auth.worker, at)
            server.start()
        except (OSError, KVClusterError) as error:
            log.warning("%s is not served: %s", name, error)
            refused.append((name, f"the shard cannot serve it: {error}"[:_WHY_CHARS]))
        else:
            started.append(server)
            offered.append(Offer(name, server.address, spec.version, server.details))
    return PathServers(Offers(host.core.epoch, tuple(offered), tuple(refused)), started)


def _why_not(
    spec: TransportSpec, auth: Authenticator, config: ServerConfig, servers: Mapping[str, Serve]
) -> str | None:
    if spec.name not in config.transports:
        return "the shard's configuration leaves it out"
    if spec.name not in servers:
        return "the shard cannot serve it on its platform"
    if not spec.isolates_tenants and not auth.one_tenant:
        return "the token file names several tenants, and shared memory would let them read one another's pages"
    return None
