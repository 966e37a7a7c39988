"""The server's side of TLS on a non-blocking socket, of which no call reads more than READ_BYTES.

`ssl.SSLSocket.recv` reads until there are bytes for its caller. Key updates are none, and OpenSSL reads them within one
call for as long as they arrive, so a peer that sends them without a pause would keep the only thread of a server. Here
the bytes of the socket pass through memory, and each call has a bounded number of them.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

READ_BYTES = 4_096
"""What one call reads of the socket: the first message of a handshake, or 150 key updates."""

_RECORD_BYTES = 16 * 1024
"""What one call encrypts: one record."""

_ANSWER_BYTES = 4_096
"""Answers to key updates that a peer does not take. More than these end the connection."""


class BoundedTls:
    """Owns its socket. `recv`, `send` and `do_handshake` raise as those of an `ssl.SSLSocket` that does not block:
    SSLWantReadError, SSLWantWriteError, after which the next `send` must begin with the same bytes, or OSError."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.session = context.wrap_bio(self._received, self._encrypted, server_side=True)
        self._unsent = b""
        self._sending = 0  # bytes of the caller that _unsent and _encrypted hold
        self._filled = False  # whether the last call has returned as many bytes as it was asked for
        self._ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """May be called again."""
        self._socket.close()

    def do_handshake(self) -> None:
        self._receive()
        try:
            self.session.do_handshake()
        finally:
            self._answer()

    def recv(self, nbytes: int) -> bytes:
        """Returns at most so many bytes; b"" at the end of the stream."""
        data = self._decrypt(nbytes)
        if not data and not self._ended:
            self._receive()
            data = self._decrypt(nbytes)
        self._answer()
        if not data and not self._ended:
            raise ssl.SSLWantReadError
        return data

    def pending(self) -> bool:
        """Whether `recv` may return bytes although the socket has none."""
        return self._filled

    def send(self, data: memoryview) -> int:
        """Sends some of the first bytes, and returns how many."""
        if not self._sending:
            self._sending = self.session.write(data[:_RECORD_BYTES])
        self._flush()
        sent, self._sending = self._sending, 0
        return sent

    # ------------------------------------------------------------------------------------------- inside

    def _receive(self) -> None:
        """Takes what has arrived, at most READ_BYTES."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()

    def _decrypt(self, nbytes: int) -> bytes:
        data = bytearray()
        try:
            while len(data) < nbytes and not self._ended:
                part = self.session.read(nbytes - len(data))
                self._ended = not part
                data += part
        except ssl.SSLWantReadError:
            """All that was received is decrypted, but the beginning of a record."""
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._ended = True
        self._filled = len(data) == nbytes
        return bytes(data)

    def _answer(self) -> None:
        """Sends what OpenSSL answers by itself, as much as the socket takes. Raises OSError if too much is left."""
        if self._ended:
            return
        with suppress(ssl.SSLWantWriteError):
            self._flush()
        if not self._sending and len(self._unsent) > _ANSWER_BYTES:
            raise ConnectionAbortedError("the peer takes no answers to its key updates")

    def _flush(self) -> None:
        """Sends what is encrypted. Raises SSLWantWriteError if the socket does not take all of it."""
        self._unsent += self._encrypted.read()
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None
            self._unsent = self._unsent[sent:]
