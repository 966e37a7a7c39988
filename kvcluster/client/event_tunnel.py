"""Carries the bytes of local sockets through TLS to a publisher of KV events: sockets of ZeroMQ speak no TLS.

    a subscriber's socket -> a local port -> TLS, with this process's certificate -> the publisher

Each local connection has one of its own to the publisher, and a thread that moves bytes both ways; it ends when either
end does, and ZeroMQ connects again. The publisher's certificate is verified before a byte is passed on.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from contextlib import ExitStack, closing, suppress

from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.private_files import private_folder
from kvcluster.transport.addresses import check_address, host_of, split_address
from kvcluster.transport.base import Deadline
from kvcluster.transport.certificates import COORDINATOR, Certificates, connect_tls
from kvcluster.transport.listener import bound_socket
from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

_CONNECT_MS = 5_000
_OVER = select.POLLHUP | select.POLLERR | select.POLLNVAL
_MOVED_BYTES = 64 * 1024
_CONNECTIONS = 64
"""The most local connections at a time; a further one is closed."""


class EventTunnel:
    """Listens until `close`, on a socket in a folder of this user's own, or at `local` ("tcp://127.0.0.1:5557").
    `endpoint`: where the sockets of ZeroMQ connect. Raises ConfigError if it cannot listen, or if an endpoint is not
    tcp://HOST:PORT."""

    def __init__(self, publisher: str, certificates: Certificates, server_name: str = "", local: str = "") -> None:
        self._publisher = _address(publisher)
        self._certificates, self._name = certificates, server_name or host_of(self._publisher)
        self._house = ExitStack()
        if local:
            self._listening = bound_socket(*split_address(_address(local)), "the local endpoint")
            self.endpoint = local
        else:
            path = self._house.enter_context(private_folder("kvcluster-events-")).path / "tunnel"
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listening.bind(str(path))
            self.endpoint = f"ipc://{path}"
        self._listening.listen(_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._refused = ""
        self._thread = threading.Thread(target=self._accept, name="kvcluster-event-tunnel", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Ends all connections. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_now = dict(self._open)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for near, thread in open_now.items():
            with suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._thread.join()
        self._listening.close()
        self._house.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.05)  # out of descriptors, for example
                continue
            thread = threading.Thread(target=self._carry, args=(near,), name="kvcluster-event-link", daemon=True)
            with self._lock:
                if not self._closed and len(self._open) < _CONNECTIONS:
                    self._open[near] = thread
                    start_thread(thread)
                    continue
            near.close()

    def _carry(self, near: socket.socket) -> None:
        try:
            with near, closing(self._connected()) as far:
                self._refused = ""
                _carry(near, far)
        except (OSError, KVClusterError) as error:
            if str(error) != self._refused:  # once, and not at each attempt of ZeroMQ
                self._refused = str(error)
                log.warning("no KV events from %s: %s", self._publisher, error)
        finally:
            with self._lock:
                del self._open[near]

    def _connected(self) -> ssl.SSLSocket:
        connected = socket.create_connection(split_address(self._publisher), timeout=_CONNECT_MS / 1e3)
        deadline = Deadline.after_ms(_CONNECT_MS)
        return connect_tls(connected, self._name, self._certificates, deadline, role=COORDINATOR)


def _address(endpoint: str) -> str:
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{endpoint!r} is not tcp://HOST:PORT: events within TLS come over TCP")
    address = endpoint.removeprefix("tcp://")
    check_address(address)
    return address


def _carry(near: socket.socket, far: ssl.SSLSocket) -> None:
    """Moves bytes both ways until an end closes. Keeps _MOVED_BYTES of each at most."""
    near.setblocking(False)
    poll = select.poll()
    to_far, to_near = memoryview(b""), memoryview(b"")
    while True:
        try:
            if not to_far:
                to_far = memoryview(near.recv(_MOVED_BYTES))
                if not to_far:
                    return
        except BlockingIOError:
            """Nothing has come from here."""
        try:
            while to_far:
                to_far = to_far[far.send(to_far) :]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            """There is no room."""
        try:
            if not to_near:
                to_near = memoryview(far.recv(_MOVED_BYTES))
                if not to_near:
                    return
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            """Nothing has come from there."""
        try:
            while to_near:
                to_near = to_near[near.send(to_near) :]
        except BlockingIOError:
            """There is no room."""
        if not to_near and far.pending():
            continue
        # Either end that has ended is readable, whatever it is waited for.
        poll.register(near, (select.POLLIN if not to_far else 0) | (select.POLLOUT if to_near else 0))
        poll.register(far, (select.POLLIN if not to_near else 0) | (select.POLLOUT if to_far else 0))
        if any(happened & _OVER for _, happened in poll.poll()):
            return  # whatever is left is for nobody, or from nobody; ZeroMQ connects again
