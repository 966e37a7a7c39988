"""The worker's and the shard's half of the shm transport, under the names that kvcluster/transports.py looks for."""

from __future__ import annotations

from kvcluster.core.messages import Offer
from kvcluster.transport.listener import TenantOf
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmHost, ShmServer


def open_path(offer: Offer, token: str | None) -> ShmPages:
    """As path_selector.Opener."""
    return ShmPages(offer.address, token, offer.protocol_version, device=offer.details.decode(errors="replace"))


def serve(host: ShmHost, tenant_of: TenantOf, listen_host: str, ports: range) -> ShmServer:
    """As transport_servers.Serve. Ignores host and ports: it listens at a random abstract name."""
    return ShmServer(host, tenant_of)
