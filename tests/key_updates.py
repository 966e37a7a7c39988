"""A peer of TLS 1.3 that sends key updates without an end after its handshake, by the OpenSSL that Python has.

Python's `ssl` sends none. OpenSSL reads them within one call, for as long as they arrive faster than it reads.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from pathlib import Path

MOST = 20_000_000
"""The most updates of one flood: some minutes."""

_BURST = 500
_READ = 1 << 16


def _library(name: str) -> ctypes.CDLL:
    """Returns the library of that name that Python's `ssl` has loaded, or else the system's."""
    assert ssl.OPENSSL_VERSION  # it is loaded
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if f"/lib{name}.so" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    return ctypes.CDLL(find_library(name))


class Updating:
    """The client of a connection. `certificate` and `key`: paths of PEM files, or "". `answered`: it asks the other
    side for updates, too, and reads none of them."""

    def __init__(
        self, connected: socket.socket, certificate: str = "", key: str = "", *, answered: bool = False
    ) -> None:
        self._socket = connected
        self._answered = int(answered)
        self._ssl, self._crypto = _library("ssl"), _library("crypto")
        for library, names in (
            (self._ssl, ("TLS_client_method", "SSL_CTX_new", "SSL_new")),
            (self._crypto, ("BIO_new", "BIO_s_mem")),
        ):
            for name in names:
                getattr(library, name).restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._ssl.SSL_CTX_new(ctypes.c_void_p(self._ssl.TLS_client_method())))
        if certificate:
            pem = 1
            assert self._ssl.SSL_CTX_use_certificate_file(self._context, certificate.encode(), pem) == 1
            assert self._ssl.SSL_CTX_use_PrivateKey_file(self._context, key.encode(), pem) == 1
        self._tls = ctypes.c_void_p(self._ssl.SSL_new(self._context))
        self._received, self._to_send = self._memory(), self._memory()
        self._ssl.SSL_set_bio(self._tls, self._received, self._to_send)  # which owns both now
        self._ssl.SSL_set_connect_state(self._tls)
        self._buffer = ctypes.create_string_buffer(_READ)

    def _memory(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._crypto.BIO_new(ctypes.c_void_p(self._crypto.BIO_s_mem())))

    def shake_hands(self) -> None:
        """Carries out the handshake. Raises OSError if the server makes none."""
        while self._ssl.SSL_do_handshake(self._tls) != 1:
            self._flush()
            data = self._socket.recv(_READ)
            if not data:
                raise ConnectionError("the server makes no handshake")
            self._crypto.BIO_write(self._received, data, len(data))
        self._flush()

    def update(self) -> None:
        """Sends _BURST updates. Raises OSError if the server has ended the connection, or takes no more in time."""
        for _ in range(_BURST):
            self._ssl.SSL_key_update(self._tls, self._answered)
            self._ssl.SSL_do_handshake(self._tls)
        self._flush()

    def close(self) -> None:
        self._ssl.SSL_free(self._tls)
        self._ssl.SSL_CTX_free(self._context)

    def _flush(self) -> None:
        data = b""
        while (got := self._crypto.BIO_read(self._to_send, self._buffer, _READ)) > 0:
            data += self._buffer.raw[:got]
        self._socket.sendall(data)


@contextmanager
def key_updates(host: str, port: int, certificate: str = "", key: str = "") -> Iterator[threading.Event]:
    """Within the block, such a peer sends updates to a server, after a handshake with this certificate if there is one.
    Yields an event that is set once the server has ended the connection."""
    ended, stop = threading.Event(), threading.Event()
    with socket.create_connection((host, port), timeout=60) as connected:
        peer = Updating(connected, certificate, key)
        peer.shake_hands()

        def flood() -> None:
            try:
                for _ in range(MOST // _BURST):
                    if stop.is_set():
                        return
                    peer.update()
            except OSError:
                ended.set()

        flooding = threading.Thread(target=flood, daemon=True)
        flooding.start()
        try:
            yield ended
        finally:
            stop.set()
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
            flooding.join()
            peer.close()
