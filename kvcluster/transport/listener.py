"""The listening side of framed sockets: accepts connections, reads each one's credential, and serves it on its own
thread; and how servers choose ports and bound their connections.

`Descriptors` bounds how many connections each server of a process keeps, so that the process can still open its own
files. A process has a limit of descriptors (`ulimit -n`). Where that is high, the bounds of limits.py hold. Where it is
low, each server keeps at most its part, and all servers of a process leave at least three tenths for logs, disks, the
arena and what Ray and gRPC open for themselves.

`Listener` knows nothing of pages: `serve` decides what is done with a connection. Tenants share limits.STREAMS
connections (core/tenant_shares.py), or fewer if the process has few descriptors; one more gets an error and is closed.
Connections whose credential is not known yet are counted separately: at most limits.STREAMS_UNKNOWN, of which a further
one ends the oldest, and each for at most HELLO_S. So a stranger shuts out no caller whose credential arrives in time.
An error raised by `serve` ends its connection, and is sent to the other side if possible.

`check_is_ours` recognises another program's server at an address. gRPC reports of one only that it does not answer, and
after a while. So the server is greeted here as gRPC does: an HTTP/2 server sends its settings at once, most others send
what they are. One that sends nothing may be ours and not respond at the moment.

`bound_socket` binds a port, so that a port in use is an error of the caller and not of a process that starts again and
again. `first_free` finds the first free port of a range, so that firewalls can name the range.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import resource
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NoReturn, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import Caller, Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.tenant_shares import Shares
from kvcluster.errors import ConfigError, KVClusterError, ProtocolError
from kvcluster.transport.addresses import split_address
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable
from kvcluster.transport.certificates import CertificateNames, Certificates, check_server, speaks_tls
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.page_session import LONGEST_NS
from kvcluster.transport.tenant_memory import Account, TenantMemory
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind


class Descriptors(Enum):
    """What takes descriptors, and the part of the limit that it may take: one in so many."""

    CALLS = 4
    """Connections of one gRPC server. A coordinator has two, for workers and for shards."""

    STREAMS = 8
    """Connections of a listener whose credential is known."""

    UNKNOWN = 32
    """Connections of a listener whose credential has not arrived."""

    SCRAPES = 64
    """Connections to the metrics port that have not sent their request; with those that have, four times as many."""

    def bound(self, most: int, each: int = 1) -> int:
        """Returns how many there may be: `most`, or fewer by the limit of this process. Each takes `each` of it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return most
        return max(1, min(most, limit // (self.value * each)))


log = logging.getLogger(__name__)

HELLO_S = 5.0
"""Time for the handshake. The connecting side sends first."""

_LATE_S = 1.0
"""How long after HELLO_S a connection is ended by another thread than its own, which says why if it can. Within TLS it
cannot while key updates arrive faster than OpenSSL reads them: one call reads all of them."""

_NEXT_S = 3_600.0
"""How long an unused connection is kept; a lease ends long before."""

FRAME_S = 10.0
"""How long the body of a frame may take. Payloads have the deadline of their exchange."""

_LAST_MESSAGE_MS = 200
_BACKLOG = 128

CallerOf = Callable[[str | None], Caller]
"""Token -> caller; raises CredentialError."""

CallerNow = Callable[[], Caller]
"""Returns the caller of a connection's token. Raises CredentialError once it has been revoked."""


@dataclass(frozen=True, slots=True)
class ListenTls:
    """How a listener serves TLS. `client_certificates`: only to those who show a certificate. `caller_of`: who they
    are, by the token that they show besides, None for none; raises CredentialError."""

    certificates: Certificates
    client_certificates: bool
    caller_of: Callable[[str | None, CertificateNames], Caller]


@dataclass(frozen=True, slots=True)
class ListenAt:
    """Where the servers of a shard may listen: at `host`, on the first of `ports` that is free; `socket_dir`: in which
    directory a local socket lies, "" for one with an abstract name. `tls`: None where TCP is served in the clear."""

    host: str
    ports: range
    socket_dir: str = ""
    tls: ListenTls | None = None


Serve = Callable[[FramedSocket, CallerNow], None]
"""Serves one connection until it ends. Raises Unavailable when the other side has closed it, which is the usual end."""


Exchange = Callable[[FramedSocket, Caller, bytes], None]
"""One load or store, from the body of the frame that opens it to its end. Raises RefusedByShard if none began."""


def serve_exchanges(link: FramedSocket, caller_now: CallerNow, exchanges: Mapping[FrameKind, Exchange]) -> NoReturn:
    """Serves exchanges one after the other, by the kind of frame that opens one, until the connection ends or its token
    is revoked, which raises."""
    while True:
        try:
            kind, body = link.receive_request(*exchanges, deadline=patient())
            exchanges[kind](link, caller_now(), body)
        except RefusedByShard as refused:
            link.send(FrameKind.REFUSED, socket_frames.encode_refused(refused.refused), bounded())
        finally:
            link.requests.release()


def bounded(remaining_ns: float = math.inf) -> Deadline:
    """Returns the deadline for an answer to a caller that has `remaining_ns` left."""
    return Deadline.after_ms(min(remaining_ns / 1e6, LONGEST_NS / 1e6))


def patient() -> Deadline:
    """Returns the deadline for the next frame of a side that may be idle."""
    return Deadline.after_ms(_NEXT_S * 1e3)


def _admit_all(link: FramedSocket) -> None:
    """Admits every connection."""


def _count_none(error: KVClusterError) -> None:
    """Counts no refusals."""


class Listener:
    """Owns a listening socket from construction to `close`."""

    def __init__(
        self,
        listening: socket.socket,
        caller_of: CallerOf,
        serve: Serve,
        *,
        name: str,
        admit: Callable[[FramedSocket], None] = _admit_all,
        refused: Callable[[KVClusterError], None] = _count_none,
        descriptors: int = 1,
        tls: ListenTls | None = None,
    ) -> None:
        """`admit` is called with each connection before anything is read from it; an error that it raises is sent to
        the other side. `refused` is called with the error for which a connection is ended, if that is a fault of the
        other side or it has too many. `descriptors`: those that a connection takes."""
        listening.listen(_BACKLOG)
        self._admit, self._tls = admit, tls
        self._refused = refused
        self._listening = listening
        self._caller_of = caller_of
        self._serve = serve
        self._name = name
        self._links: dict[FramedSocket, threading.Thread] = {}
        # Those of _links whose credential has not arrived, oldest first, and when they are late.
        self._unknown: dict[FramedSocket, Deadline] = {}
        self._ended: dict[FramedSocket, None] = {}  # those of _links that were ended here, until their threads notice
        self._closing = 0  # connections that have ended and are being closed, which may take as long as a peer wants
        self._shares = Shares(Descriptors.STREAMS.bound(limits.STREAMS, descriptors))
        self._most_unknown = Descriptors.UNKNOWN.bound(limits.STREAMS_UNKNOWN, descriptors)
        self.bodies, self.requests = TenantMemory(limits.BODIES_BYTES), TenantMemory(limits.REQUESTS_BYTES)
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"kvcluster-{name}", daemon=True)

    def start(self) -> None:
        start_thread(self._accepting)

    def close(self) -> None:
        """Accepts no more, ends every connection, and waits for the threads. May be called again."""
        with self._lock:
            first, self._closed = not self._closed, True
            links = dict(self._links)
        if not first:
            return
        with contextlib.suppress(OSError):  # wakes accept
            self._listening.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.shutdown()
        for memory in (self.bodies, self.requests):
            memory.close()
        for thread in links.values():
            thread.join()
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listening.close()

    # ------------------------------------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            self._listening.settimeout(_LATE_S if self._end_late() else None)
            try:
                connected, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors, or a peer that has already closed: neither is a reason to stop listening.
                log.warning("%s could not accept a connection: %s", self._name, error)
                if not self._pause():
                    return
                continue
            self._begin(FramedSocket(connected, f"{self._name} peer {address or 'here'}", version=None))

    def _end_late(self) -> bool:
        """Ends the connections whose credential is late. Returns whether there are others that may become late."""
        with self._lock:
            for link, late in list(self._unknown.items()):
                if late.remaining_s():
                    return True
                self._end(link)
        return False

    def _end(self, link: FramedSocket) -> None:
        """Ends a connection whose credential has not arrived, within the lock."""
        del self._unknown[link]
        self._ended[link] = None
        link.break_off()

    def _pause(self) -> bool:
        """Waits before the next attempt. Returns False if the listener is being closed."""
        waiting = threading.Event()
        waiting.wait(0.05)
        return not self._closed

    def _begin(self, link: FramedSocket) -> None:
        thread = threading.Thread(target=self._run, args=(link,), name=f"kvcluster-{self._name}-link", daemon=True)
        with self._lock:
            if not self._closed and self._closing + len(self._ended) < self._most_unknown:
                if len(self._unknown) >= self._most_unknown:
                    self._end(next(iter(self._unknown)))
                try:
                    start_thread(thread)
                except KVClusterError as error:  # no reason to stop listening either
                    log.warning("%s ended a connection: %s", self._name, error)
                else:  # in the lock, for which the thread waits before it removes them
                    self._links[link] = thread
                    self._unknown[link] = Deadline.after_ms((HELLO_S + _LATE_S) * 1e3)
                    return
        link.close()

    def _run(self, link: FramedSocket) -> None:
        try:
            self._handle(link)
        except Unavailable as trouble:
            log.debug("%s: a connection ended: %s", self._name, trouble)
            link.fail(trouble, Deadline.after_ms(_LAST_MESSAGE_MS))
        except KVClusterError as error:
            log.info("%s: ending a connection: %s", self._name, error)
            self._refused(error)
            link.fail(error, Deadline.after_ms(_LAST_MESSAGE_MS))
        except Exception:
            log.exception("%s: a connection broke", self._name)
            link.fail(ProtocolError("the shard failed; its log says how"), Deadline.after_ms(_LAST_MESSAGE_MS))
        finally:
            with self._lock:
                del self._links[link]
                self._unknown.pop(link, None)
                self._ended.pop(link, None)
                self._closing += 1
            try:
                link.close()
            finally:
                with self._lock:
                    self._closing -= 1

    def _handle(self, link: FramedSocket) -> None:
        self._admit(link)
        hello = Deadline.after_ms(HELLO_S * 1e3)
        certificate = None
        if self._tls is not None:
            mutual = self._tls.client_certificates
            certificate = link.accept_tls(self._tls.certificates, hello, mutual=mutual)
        _, body = link.receive(FrameKind.HELLO, deadline=hello)
        try:
            token = body.decode() or None
        except UnicodeDecodeError:
            raise ProtocolError("the token is not UTF-8") from None
        caller_now: CallerNow = partial(self._caller_of, token)
        if self._tls is not None and certificate is not None:
            caller_now = partial(self._tls.caller_of, token, certificate)
        tenant = caller_now().tenant
        self._count(link, tenant)
        wait_ms = LONGEST_NS / 1e6
        link.charge(
            arriving=Account(self.bodies, tenant, wait_ms),
            requests=Account(self.requests, tenant, wait_ms),
            frame_ms=FRAME_S * 1e3,
        )
        try:
            self._serve(link, caller_now)
        finally:
            with self._lock:
                self._shares.remove(tenant)

    def _count(self, link: FramedSocket, tenant: Tenant) -> None:
        """Counts a connection as this tenant's. Raises Unavailable if the tenant has its share."""
        with self._lock:
            self._unknown.pop(link, None)
            if not self._shares.full(tenant):
                self._shares.add(tenant)
                return
            held = self._shares.held(tenant)
        log.warning("%s: a tenant has reached its limit of connections; it has %d", self._name, held)
        why = f"this shard has {held} connections of this tenant, which is its share; use fewer workers or more shards"
        error = Unavailable(Miss(MissReason.SHARD_LOST, why))
        self._refused(error)
        raise error


_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HEADER_BYTES = 9
_SETTINGS = 4
_SHOWN = 60
_TLS_ALERT = b"\x15\x03"


def check_is_ours(address: str, credentials: Credentials, wait_s: float) -> None:
    """Finds out what listens at `address` (host:port), within `wait_s` or so. Returns if it speaks HTTP/2 as a
    coordinator does, in the clear or, for credentials with certificates, within TLS and with a certificate that is
    accepted; or if it does not answer. Raises ProtocolError if it is another program's server or expects the other of
    both, and CredentialError if its certificate is refused."""
    if credentials.certificates is not None:
        connected = _dialled(address, wait_s)
        if connected is not None:
            with suppress(Unavailable):
                check_server(
                    connected, credentials.name_at(address), credentials.certificates, Deadline.after_ms(wait_s * 1e3)
                )
        return
    said = _answer(address, wait_s)
    if not said and (connected := _dialled(address, wait_s)) is not None:
        with suppress(OSError):
            if speaks_tls(connected, Deadline.after_ms(wait_s * 1e3)):
                said = _TLS_ALERT
    if not said or (len(said) >= _HEADER_BYTES and said[3] == _SETTINGS and not any(said[5:_HEADER_BYTES])):
        return
    if said.startswith(_TLS_ALERT):
        raise ProtocolError(
            f"the server at {address} speaks TLS only: name the file of the authorities that signed its certificate, "
            "as ca_file or in KVCLUSTER_CA_FILE (commands: --ca)"
        )
    line = said.splitlines()[0][:_SHOWN].decode("ascii", errors="replace")
    what = "an HTTP server without HTTP/2" if said.startswith(b"HTTP/") else "another program's server"
    raise ProtocolError(
        f"what listens at {address} is no kvcluster server but {what}, which says {line!r}: give the address of the "
        "coordinator, as `kvcluster up` prints it"
    )


def _dialled(address: str, wait_s: float) -> socket.socket | None:
    """Returns a connection to that address; None if none could be made."""
    with suppress(OSError):
        return socket.create_connection(split_address(address), timeout=wait_s)
    return None


def _answer(address: str, wait_s: float) -> bytes:
    """Returns the first bytes that the server sends; b"" if there is none, or it sends nothing in time."""
    connection = _dialled(address, wait_s)
    if connection is None:
        return b""
    said = b""
    with connection, suppress(OSError):
        connection.sendall(_GREETING)
        while len(said) < _HEADER_BYTES and (more := connection.recv(4_096)):
            said += more
    return said


T = TypeVar("T")

_FREE = range(15_000, 30_000)
"""Ports that systems give to no outgoing connection, and Kubernetes to no service. A port that is chosen here is bound
again later, by an actor: meanwhile Ray makes a hundred connections, any of which might have got one of theirs."""

_TRIES = 100

_draw = random.SystemRandom()  # processes that start at the same time must not draw alike


def first_free(ports: range, listen: Callable[[int], T]) -> T:
    """Returns what `listen` returns for the first port that it can listen on; range(1) stands for any free port. Raises
    the ConfigError of `listen` for the last port, with the range, if it fails for all."""
    for port in ports[:-1]:
        with suppress(ConfigError):
            return listen(port)
    try:
        return listen(ports[-1])
    except ConfigError as error:
        if len(ports) == 1:
            raise
        raise ConfigError(f"no port from {ports[0]} to {ports[-1]} is free; of the last: {error}") from None


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """Returns a socket that is bound to that port and does not listen. Port 0 is a free one, which this machine's
    outgoing connections do not get before it is bound again. Raises ConfigError if the port is in use."""
    if port == 0:
        for chosen in _draw.sample(_FREE, _TRIES):
            with suppress(ConfigError):
                return bound_socket(host, chosen, setting)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. "
            f"Choose another port ({setting}), or stop what listens there"
        ) from None
    return bound
