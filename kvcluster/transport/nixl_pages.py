"""Pages by NIXL: the frames of an exchange on a TCP connection (framed_pages.py), and the bytes of pages beside it
(nixl_link.py). Off by default: see Security in docs/transports.md."""

from __future__ import annotations

from kvcluster.core.messages import Offer
from kvcluster.core.miss import Miss, MissReason
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.base import Deadline, PageHost, Unavailable
from kvcluster.transport.framed_pages import FramedPages, FramedServer
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.listener import HELLO_S, TenantOf, bounded
from kvcluster.transport.listening import first_free
from kvcluster.transport.nixl_end import END_BYTES, SLOT_BYTES, NixlEnd, nixl
from kvcluster.transport.nixl_link import join
from kvcluster.transport.page_link import PageLink
from kvcluster.transport.tcp_pages import NETWORK_STREAMS, connected_to, tune
from kvcluster.wire.socket_frames import FrameKind


class NixlPages(FramedPages):
    """A worker's data path to a shard. Connects when it is first used."""

    name = "nixl"
    streams = NETWORK_STREAMS

    def __init__(self, address: str, token: str | None, version: int = PROTOCOL_VERSION) -> None:
        super().__init__(address)
        self._token = token
        self._version = version

    def _dial(self, deadline: Deadline) -> PageLink:
        connected = connected_to(self.address, deadline)
        frames, _ = dial(connected, self.address, self._token, deadline, self._version)
        try:
            return join(frames, deadline)
        except BaseException:
            frames.close()
            raise


def open_path(offer: Offer, token: str | None) -> NixlPages:
    """As path_selector.Opener. Raises KVClusterError if NIXL is not installed."""
    nixl()
    return NixlPages(offer.address, token, offer.protocol_version)


def serve(host: PageHost, tenant_of: TenantOf, listen_host: str, ports: range) -> NixlServer:
    """As transport_servers.Serve. Raises KVClusterError if NIXL is not installed."""
    nixl()
    return first_free(ports, lambda port: NixlServer(host, tenant_of, listen_host, port))


class NixlServer(FramedServer):
    """The shard's side."""

    name = NixlPages.name
    frame_bytes = SLOT_BYTES
    descriptors = 1 + NixlEnd.descriptors

    def _link(self, frames: FramedSocket) -> PageLink:
        if not frames.ends.try_take(END_BYTES):
            why = "all memory for connections by NIXL is in use; use fewer workers, more shards, or tcp"
            raise Unavailable(Miss(MissReason.SHARD_LOST, why))
        try:
            frames.tune(tune)
            frames.send(FrameKind.WELCOME, b"", bounded())
            return join(frames, Deadline.after_ms(HELLO_S * 1e3))
        except BaseException:
            frames.ends.release()
            raise
