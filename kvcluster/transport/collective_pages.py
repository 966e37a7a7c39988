"""Pages by torch.distributed: frames on a TCP connection (framed_pages.py), and the bytes of pages beside them by Gloo
(collective_link.py). Off by default: see Security in docs/transports.md."""

from __future__ import annotations

from kvcluster.core.messages import Offer
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.base import Deadline, PageHost
from kvcluster.transport.collective_link import FRAME_BYTES, CollectiveLink, Stages
from kvcluster.transport.collective_pair import SHARD, WORKER, check_usable, join
from kvcluster.transport.framed_pages import FramedPages, FramedServer
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.listener import TenantOf, bounded
from kvcluster.transport.listening import first_free
from kvcluster.transport.page_link import PageLink
from kvcluster.transport.tcp_pages import NETWORK_STREAMS, connected_to, tune
from kvcluster.wire.socket_frames import FrameKind


class CollectivePages(FramedPages):
    """A worker's data path to a shard. Connects, and joins a pair, when it is first used."""

    name = "collective"
    streams = NETWORK_STREAMS

    def __init__(self, address: str, token: str | None, version: int = PROTOCOL_VERSION) -> None:
        super().__init__(address)
        self._token = token
        self._version = version
        self._stages = Stages()

    def _dial(self, deadline: Deadline) -> PageLink:
        connected = connected_to(self.address, deadline)
        frames, _ = dial(connected, self.address, self._token, deadline, self._version)
        try:
            return CollectiveLink(frames, join(frames, WORKER, deadline), self._stages)
        except BaseException:
            frames.close()
            raise


def open_path(offer: Offer, token: str | None) -> CollectivePages:
    """As path_selector.Opener. Raises KVClusterError without Gloo."""
    check_usable()
    return CollectivePages(offer.address, token, offer.protocol_version)


def serve(host: PageHost, tenant_of: TenantOf, listen_host: str, ports: range) -> CollectiveServer:
    """As transport_servers.Serve. Raises KVClusterError without Gloo."""
    check_usable()
    return first_free(ports, lambda port: CollectiveServer(host, tenant_of, listen_host, port))


class CollectiveServer(FramedServer):
    """The shard's side."""

    name = CollectivePages.name
    frame_bytes = FRAME_BYTES

    def __init__(self, host: PageHost, tenant_of: TenantOf, listen_host: str, port: int = 0) -> None:
        super().__init__(host, tenant_of, listen_host, port, descriptors=2)
        self._stages = Stages()

    def _linked(self, frames: FramedSocket) -> PageLink:
        frames.tune(tune)
        frames.send(FrameKind.WELCOME, b"", bounded())
        return CollectiveLink(frames, join(frames, SHARD, bounded()), self._stages)
