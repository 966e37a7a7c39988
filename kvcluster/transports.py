"""The transports that move pages, the fastest first, one row each. No other module names a transport.

This is data and imports nothing: the configuration takes its names from here, and a transport's code is named by a
string and loaded when it is first used. Control messages use gRPC, so gRPC is always available; it comes last.

To add a transport: a row here, and a module with `open_path(offer, credentials)` for workers
(transport/path_selector.py, Opener) and `serve(host, tenant_of, at)` for shards (runtime/transport_servers.py, Serve).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """One transport. `module` has its client and server half; "" for gRPC, which control messages use anyway.

    `version` is that of the protocol between the halves: a worker ignores offers of other versions. `same_host`: both
    ends must be on one host. `isolates_tenants`: False if a worker could reach pages of other tenants, so that it is
    offered only if there is a single tenant. `offered_where` and `remedy` are for people: when the transport is
    offered, and what to do if it is offered and does not work.
    """

    name: str
    module: str
    offered_where: str
    remedy: str
    version: int = 0
    same_host: bool = False
    isolates_tenants: bool = True


SPECS = (
    TransportSpec(
        "shm",
        "kvcluster.transport.shm_pages",
        "it is for workers on the shard's own host, where all tokens are of one tenant and server.transports names it; "
        "the shard's log says if it could not be served",
        "run the worker as the user of the shard, and in its network namespace (in Kubernetes: the same pod); or give "
        "both a socket directory (server.socket_dir, and KVCLUSTER_SOCKET_DIR for the worker)",
        same_host=True,
        isolates_tenants=False,
    ),
    TransportSpec(
        "tcp",
        "kvcluster.transport.tcp_pages",
        "the cluster's configuration names it in server.transports; the shard's log says if it could not listen",
        "let connections through to that address, in firewalls and network policies; until then there is gRPC",
    ),
    TransportSpec(
        "grpc",
        "",
        "it is always offered",
        "let connections through to that address, in firewalls and network policies; see the shard's log",
    ),
)

BY_NAME = {spec.name: spec for spec in SPECS}
NAMES = tuple(BY_NAME)
BESIDE_GRPC = tuple(spec for spec in SPECS if spec.module)
