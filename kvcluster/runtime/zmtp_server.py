"""A server of ZMTP for one thread: ports that sockets of ZeroMQ connect to, each with a bound on all that it keeps.

    peers -> Inbound -> Port.heard          a message of a peer
    peers <- Port.following                 the next message for a peer, once the one before it has been taken

With certificates all is within TLS, and a peer is let in by its own, in the role of an operator or of a reader of
events.

Nothing is queued for a peer: the port is asked for the next message when the peer has room. So a slow peer costs the
one message that it is being sent. What strangers may do here is bounded in number, memory and time:
`limits.EVENT_PEERS` connections to a port, by shares of their source addresses; one message of `Port.bounds` each; so
many messages and connections in a round, and a rest between two rounds. A connection that sends nothing, or takes
nothing of what it is being sent, is closed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.tenant_shares import Shares
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.transport.bounded_tls import BoundedTls
from kvcluster.transport.certificates import (
    EVENTS,
    OPERATOR,
    CertificateNames,
    Certificates,
    certificate_of,
    server_context,
)
from kvcluster.wire import zmtp

log = logging.getLogger(__name__)

REST_NS = 100_000
"""The rest after a round, for each message, each read and each connection of that round: meanwhile no peer is read and
no connection accepted. Each takes some WORK_NS, so that floods have a tenth of the interpreter, and a quiet peer is
read at once."""

WORK_NS = 10_000
"""What TLS takes of a round counts as so many messages: a handshake as some fifty."""

ACCEPTED_PER_ROUND = 16
RECEIVED_PER_ROUND = 8
"""Messages of one peer: a subscriber with 64 topics is read in eight rounds."""

SENT_PER_TURN = 64
"""Messages to one peer before the others have their turn."""

HANDSHAKE_NS = 10_000_000_000
"""How long a connection may take until it has named the type of its socket."""

PATIENCE_NS = 30_000_000_000
"""How long a peer may take nothing of a message that it is being sent."""

_SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a peer, on top of the message that it is being sent."""

_RECEIVED_BYTES = 4_096
"""What is received of one peer in a round."""

_NO_DESCRIPTOR = 1_000
"""The work that a connection counts as if it cannot be accepted, so that the next attempt is later."""

_SWEEP_NS = 1_000_000_000
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Port(Protocol):
    """What a server does for the peers of one port."""

    socket: bytes
    """The type of the socket that peers connect to."""
    bounds: zmtp.Bounds

    def heard(self, peer: Peer, frames: list[bytes]) -> None:
        """Takes a message. Raises KVClusterError if the peer is to be disconnected."""

    def busy(self, peer: Peer) -> bool:
        """Whether further messages of a peer have to wait."""

    def following(self, peer: Peer) -> bytes | None:
        """Returns the next message for a peer; None if there is none yet."""

    def closed(self, peer: Peer) -> None:
        """Forgets a peer."""


class EventAccess(NamedTuple):
    """Who reads the events of a cluster that speaks TLS."""

    certificates: Certificates
    cluster: str
    is_revoked: Callable[[CertificateNames], bool]

    def lets_in(self, shown: CertificateNames | None) -> bool:
        """Whether the bearer of this verified certificate may read the events of all tenants."""
        if shown is None or not any(shown.has_role(self.cluster, role) for role in (OPERATOR, EVENTS)):
            return False
        try:
            return not self.is_revoked(shown)
        except KVClusterError:  # no token file can be used
            return False


class Peer:
    """One connection to a port. `asked`: whether it has sent a message that the port keeps something of."""

    def __init__(self, port: Port, link: socket.socket | BoundedTls, address: str, now_ns: int) -> None:
        self.port = port
        self.link = link
        self.certificate: CertificateNames | None = None
        self.shaking = isinstance(link, BoundedTls)  # until the handshake is over nothing is sent or read
        self.address = Tenant(address)
        self.inbound = zmtp.Inbound(port.bounds)
        self.out = memoryview(zmtp.GREETING + zmtp.encode_ready(port.socket))
        self.asked = False
        self.since_ns = self.moved_ns = now_ns
        self.blocked = False
        self.is_full = False
        self.is_open = True


class ZmtpServer:
    """`wake` is a socket that ends a wait when it can be read. Everything but the constructor belongs to one thread."""

    def __init__(self, wake: socket.socket, clock: Callable[[], int], access: EventAccess | None = None) -> None:
        self._clock, self._access = clock, access
        self._waiting = selectors.DefaultSelector()  # the wake, peers without room, and the one below
        self._reading = selectors.DefaultSelector()  # listening sockets, and all peers
        self._waiting.register(wake, _READ, None)
        self._is_reading = False
        self._read_at = clock()
        self._work = 0
        self._swept_ns = clock()
        self._listening: list[socket.socket] = []
        self._decrypted: dict[Peer, None] = {}  # peers of which OpenSSL has more than was read
        self._undelivered: dict[Peer, None] = {}  # peers whose messages wait for the next round
        self._shares: dict[Port, Shares] = {}
        self._peers: dict[Port, dict[Peer, None]] = {}
        self.refused = 0
        """Connections that were closed for a limit, or for what the peer sent or did not send."""

    def listen(self, endpoint: str, port: Port, setting: str) -> str:
        """Begins to accept peers of a port at `tcp://host:port`, and returns the actual endpoint. Raises ConfigError,
        which names `setting`, if it cannot."""
        host, _, number = endpoint.removeprefix("tcp://").rpartition(":")
        host = "" if host == "*" else host.strip("[]")
        try:
            if not endpoint.startswith("tcp://") or not number.isdecimal():
                raise OSError("it is not tcp://host:port")
            family = socket.AF_INET6 if "[" in endpoint else socket.AF_INET
            bound = socket.create_server((host, int(number)), family=family, backlog=limits.EVENT_PEERS)
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            advice = (
                "another process listens there: end it, or choose another port"
                if in_use
                else "it must be an address of this machine, such as tcp://127.0.0.1:5557"
            )
            raise ConfigError(f"{setting} = {endpoint!r} cannot be bound ({error}): {advice}") from None
        bound.setblocking(False)
        self._listening.append(bound)
        self._shares[port], self._peers[port] = Shares(limits.EVENT_PEERS), {}
        self._reading.register(bound, _READ, port)
        name = bound.getsockname()
        return f"tcp://[{name[0]}]:{name[1]}" if family == socket.AF_INET6 else f"tcp://{name[0]}:{name[1]}"

    def close(self) -> None:
        """Closes all connections and ports."""
        for peers in self._peers.values():
            for peer in list(peers):
                self.drop(peer)
        for bound in self._listening:
            bound.close()
        self._reading.close()
        self._waiting.close()

    def wait(self, timeout_s: float) -> None:
        """Waits for the wake, a peer or the timeout, and does what peers wait for."""
        now_ns = self._clock()
        rest_s = max(0, self._read_at - now_ns) / 1e9
        if not rest_s and (self._decrypted or any(not peer.port.busy(peer) for peer in self._undelivered)):
            self._round()
        elif not self._is_reading and not rest_s:
            self._waiting.register(self._reading, _READ, self._reading)
            self._is_reading = True
        if not self._is_reading:
            timeout_s = min(timeout_s, max(0, self._read_at - now_ns) / 1e9)
        for key, _ in self._waiting.select(timeout_s):
            if key.data is self._reading:
                self._round()
            elif isinstance(key.data, Peer):
                self._unblock(key.data)
                self.pump(key.data)
        self._sweep()

    def pump(self, peer: Peer) -> bool:
        """Sends to a peer what follows, as much as it takes. Returns whether there may be more at once."""
        sent = 0
        while peer.is_open and not peer.shaking and not peer.blocked and sent < SENT_PER_TURN:
            if not peer.out:
                following: bytes | None = peer.inbound.answer
                peer.inbound.answer = b""
                if not following:
                    following = peer.port.following(peer) if peer.inbound.ready else None
                if following is None:
                    return False
                peer.out, peer.moved_ns = memoryview(following), self._clock()
            self._send(peer)
            sent += 1
        return peer.is_open and not peer.blocked

    def drop(self, peer: Peer) -> None:
        """Closes a connection. May be called again."""
        if not peer.is_open:
            return
        peer.is_open = False
        self._unblock(peer)
        if not peer.is_full:
            self._reading.unregister(peer.link)
        peer.link.close()
        peer.out = memoryview(b"")
        self._undelivered.pop(peer, None)
        self._decrypted.pop(peer, None)
        del self._peers[peer.port][peer]
        self._shares[peer.port].remove(peer.address)
        peer.port.closed(peer)

    # ------------------------------------------------------------------------------------------- inside

    def _round(self) -> None:
        """Accepts connections and reads peers, a bounded number of messages."""
        if self._is_reading:
            self._waiting.unregister(self._reading)
            self._is_reading = False
        self._work = 0
        decrypted, self._decrypted = self._decrypted, {}
        for peer in decrypted:
            self._read(peer)
        for peer in list(self._undelivered):
            self._deliver(peer)
        for key, _ in self._reading.select(0):
            if isinstance(key.data, Peer):
                self._read(key.data)
            else:
                self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
        self._read_at = self._clock() + self._work * REST_NS

    def _accept(self, bound: socket.socket, port: Port) -> None:
        peers, shares = self._peers[port], self._shares[port]
        for _ in range(ACCEPTED_PER_ROUND):
            try:
                link, address = bound.accept()
            except BlockingIOError:
                return
            except OSError:  # it has ended, or this process has no descriptor left
                self._work += _NO_DESCRIPTOR
                return
            self._work += 1
            host = Tenant(address[0])
            if shares.full(host):
                silent = next((peer for peer in peers if not peer.asked and peer.address == host), None)
                self.refused += 1
                if silent is None:
                    link.close()
                    continue
                self.drop(silent)
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(port, self._within_tls(link), host, self._clock())
            peers[peer] = None
            shares.add(host)
            self._reading.register(peer.link, _READ, peer)
            self.pump(peer)

    def _within_tls(self, link: socket.socket) -> socket.socket | BoundedTls:
        """Returns what moves the bytes of a connection that was accepted."""
        if self._access is None:
            return link
        return BoundedTls(link, server_context(self._access.certificates, mutual=True))

    def _shake(self, peer: Peer) -> bool:
        """Carries the handshake on. Returns whether it is over; closes the connection if it fails, or if the peer's
        certificate lets nobody in."""
        assert isinstance(peer.link, BoundedTls) and self._access is not None
        try:
            peer.link.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            log.debug("closed a connection from %s: %s", peer.address, error)
        else:
            peer.certificate = certificate_of(peer.link.session)
            if self._access.lets_in(peer.certificate):
                peer.shaking = False
                return True
        self.refused += 1
        self.drop(peer)
        return False

    def _read(self, peer: Peer) -> None:
        self._work += 1
        if not peer.is_open or peer.is_full:
            return
        room = peer.inbound.room
        if not room:  # its messages wait for the port: so does the rest, in the kernel
            peer.is_full = True
            self._reading.unregister(peer.link)
            return
        data = self._received(peer, room)
        if data is None:
            return
        if data:
            peer.inbound.feed(data)
            self._deliver(peer)
        else:
            self.drop(peer)

    def _received(self, peer: Peer, room: int) -> bytes | None:
        """Returns what a peer has sent, at most `room` bytes; b"" at the end, None if there is nothing for it yet.
        Counts the work of TLS."""
        began = self._clock()
        try:
            if peer.shaking:
                if not self._shake(peer):
                    return None
                self.pump(peer)
            return peer.link.recv(min(room, _RECEIVED_BYTES))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return b""
        finally:
            if isinstance(peer.link, BoundedTls):
                self._work += (self._clock() - began) // WORK_NS

    def _deliver(self, peer: Peer) -> None:
        """Hands messages to the port, as many as one round has of a peer. The others wait for the next round."""
        self._undelivered.pop(peer, None)
        try:
            self._take(peer)
        except KVClusterError as error:
            log.debug("closed a connection from %s: %s", peer.address, error)
            self.refused += 1
            self.drop(peer)
        if peer.inbound.answer:
            self.pump(peer)
        if peer.is_full and peer.is_open and peer.inbound.room:
            peer.is_full = False
            self._reading.register(peer.link, _READ, peer)
        if peer.is_open and isinstance(peer.link, BoundedTls) and peer.link.pending():
            self._decrypted[peer] = None  # it wakes nobody

    def _take(self, peer: Peer) -> None:
        for _ in range(RECEIVED_PER_ROUND):
            if peer.port.busy(peer):
                break
            frames = peer.inbound.next()
            if frames is None:
                return
            self._work += 1
            if frames:
                peer.port.heard(peer, frames)
        self._undelivered[peer] = None

    def _send(self, peer: Peer) -> None:
        try:
            sent = peer.link.send(peer.out)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        except OSError:
            self.drop(peer)
            return
        peer.out = peer.out[sent:]
        if sent:
            peer.moved_ns = self._clock()
        if peer.out:
            peer.blocked = True
            self._waiting.register(peer.link, _WRITE, peer)

    def _unblock(self, peer: Peer) -> None:
        if peer.blocked:
            peer.blocked = False
            self._waiting.unregister(peer.link)

    def _sweep(self) -> None:
        """Once a second: closes the connections that send nothing, or take nothing."""
        now_ns = self._clock()
        if now_ns - self._swept_ns < _SWEEP_NS:
            return
        self._swept_ns = now_ns
        for peers in self._peers.values():
            for peer in list(peers):
                if self._access is not None and not peer.shaking and not self._access.lets_in(peer.certificate):
                    self.refused += 1
                    self.drop(peer)
                    continue
                silent = not peer.inbound.ready and now_ns - peer.since_ns > HANDSHAKE_NS
                if silent or (peer.blocked and now_ns - peer.moved_ns > PATIENCE_NS):
                    self.refused += 1
                    self.drop(peer)
