"""Pages over TCP sockets: from the arena with sendmsg, into the destination with recv_into, no copy in between. The
exchanges are those of framed_pages.py."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from kvcluster.core import limits
from kvcluster.core.messages import Offer
from kvcluster.core.miss import Miss, MissReason
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.base import Deadline, PageHost, Streams, Unavailable
from kvcluster.transport.framed_pages import FramedPages, FramedServer
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.listener import TenantOf, bounded
from kvcluster.transport.listening import first_free
from kvcluster.transport.page_link import PageLink
from kvcluster.wire.socket_frames import FrameKind

_BUFFER_BYTES = 2**20
"""A socket's buffer in each direction, which Linux doubles: the bytes in flight at 10 GB/s and 0.2 ms latency."""

_FRAME_BYTES = 4 * limits.FRAME_BYTES
"""A frame costs both sides a wake-up and some tens of microseconds, and the shard a renewal of its lease."""

_STREAMS = 2 if (os.cpu_count() or 1) > 2 else 1
"""One Python thread can drive about 3 GB/s. A second thread needs a core for itself and one for the kernel's part."""

_DECODING = 2 if (os.cpu_count() or 1) > 1 else 1
"""While one thread decodes, the other receives."""

NETWORK_STREAMS = Streams(stores=_STREAMS, loads=_STREAMS, decoding=_DECODING, device=_STREAMS)


class TcpPages(FramedPages):
    """A worker's data path to a shard over TCP. Connects when it is first used."""

    name = "tcp"
    streams = NETWORK_STREAMS

    def __init__(self, address: str, token: str | None, version: int = PROTOCOL_VERSION) -> None:
        super().__init__(address)
        self._token = token
        self._version = version

    def _dial(self, deadline: Deadline) -> PageLink:
        return PageLink(
            dial(connected_to(self.address, deadline), self.address, self._token, deadline, self._version)[0]
        )


def connected_to(address: str, deadline: Deadline) -> socket.socket:
    """Returns a new connection. Raises Unavailable."""
    host, _, port = address.rpartition(":")
    try:
        connected = socket.create_connection((host.strip("[]"), int(port)), timeout=deadline.remaining_s() or 1e-3)
    except TimeoutError:
        raise Unavailable(Miss(MissReason.DEADLINE, f"{address}: it does not answer")) from None
    except OSError as error:
        raise Unavailable(Miss(MissReason.SHARD_LOST, f"{address}: {error.strerror or error}")) from None
    tune(connected)
    return connected


def tune(connected: socket.socket) -> None:
    """Sets the options of a connection that pages or their frames travel on."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)


# ------------------------------------------------------------------------------------------- server


def open_path(offer: Offer, token: str | None) -> TcpPages:
    """As path_selector.Opener."""
    return TcpPages(offer.address, token, offer.protocol_version)


def serve(host: PageHost, tenant_of: TenantOf, listen_host: str, ports: range) -> TcpServer:
    """As transport_servers.Serve."""
    return first_free(ports, lambda port: TcpServer(host, tenant_of, listen_host, port))


class TcpServer(FramedServer):
    """The shard's side."""

    name = TcpPages.name
    frame_bytes = _FRAME_BYTES

    def _link(self, frames: FramedSocket) -> PageLink:
        frames.tune(tune)
        frames.send(FrameKind.WELCOME, b"", bounded())
        return PageLink(frames)
