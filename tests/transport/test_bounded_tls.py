"""The server's side of TLS of which each call reads a bounded number of bytes."""

from __future__ import annotations

import array
import fcntl
import socket
import ssl
import termios
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from kvcluster.transport.bounded_tls import READ_BYTES, BoundedTls
from kvcluster.transport.certificates import certificate_of, server_context
from tests.authority import Authority
from tests.key_updates import Updating
from tests.waiting import eventually

BOUND_S = 20.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def served(authority: Authority, *, mutual: bool = False) -> Iterator[tuple[BoundedTls, socket.socket]]:
    """A server before its handshake, and the socket at the other end."""
    near, far = socket.socketpair()
    near.settimeout(BOUND_S)
    context = server_context(authority.issue("s", "shard").certificates(), mutual=mutual)
    with near, closing(BoundedTls(far, context)) as server:
        yield server, near


def shaken(server: BoundedTls) -> bool:
    with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
        server.do_handshake()
        return True
    return False


@contextmanager
def connected(authority: Authority, server: BoundedTls, near: socket.socket) -> Iterator[ssl.SSLSocket]:
    """A client of Python's `ssl`, after the handshake."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    mine = authority.issue("me", "events", names=())
    context.load_cert_chain(mine.files.cert, mine.files.key)
    made: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: made.append(context.wrap_socket(near, server_hostname="127.0.0.1")))
    thread.start()
    eventually(lambda: shaken(server), BOUND_S)
    thread.join(BOUND_S)
    with made[0] as client:
        yield client


def received(server: BoundedTls, nbytes: int) -> bytes:
    data = b""

    def look() -> bool:
        nonlocal data
        with suppress(ssl.SSLWantReadError):
            data += server.recv(1_000)
        return len(data) >= nbytes

    eventually(look, BOUND_S)
    return data


def waiting(connected: BoundedTls) -> int:
    """Returns how many bytes lie in the kernel."""
    count = array.array("i", [0])
    fcntl.ioctl(connected.fileno(), termios.FIONREAD, count)
    return count[0]


def test_bytes_pass_in_both_directions_and_the_certificate_is_known(authority: Authority) -> None:
    with served(authority, mutual=True) as (server, near), connected(authority, server, near) as client:
        shown = certificate_of(server.session)
        assert shown is not None and shown.has_role("kvcluster", "events")
        client.sendall(b"a" * 50_000)
        assert received(server, 50_000) == b"a" * 50_000
        left, heard = memoryview(b"b" * 300_000), bytearray()

        def look() -> bool:
            nonlocal left
            with suppress(ssl.SSLWantWriteError):
                left = left[server.send(left) :]
            heard.extend(client.recv(65_536))
            return len(heard) == 300_000

        eventually(look, BOUND_S)
        assert heard == b"b" * 300_000 and not left
        with pytest.raises(ssl.SSLWantReadError):
            server.recv(1)


def test_what_was_decrypted_and_not_asked_for_is_pending(authority: Authority) -> None:
    with served(authority) as (server, near), connected(authority, server, near) as client:
        client.sendall(b"abc")
        eventually(lambda: waiting(server))
        assert server.recv(2) == b"ab" and server.pending()
        assert server.recv(2) == b"c" and not server.pending()


@pytest.mark.parametrize("politely", [False, True])
def test_the_end_of_the_stream_is_no_bytes(authority: Authority, *, politely: bool) -> None:
    with served(authority) as (server, near), connected(authority, server, near) as client:
        client.sendall(b"last")
        if politely:
            with suppress(ssl.SSLError, OSError):
                client.settimeout(0.1)
                client.unwrap()
        client.close()
        assert received(server, 4) == b"last"
        eventually(lambda: waiting(server) == 0)
        with suppress(ssl.SSLWantReadError):
            assert server.recv(1) == b""
        assert server.recv(1) == b""


def test_one_call_reads_a_bounded_number_of_key_updates(authority: Authority) -> None:
    with served(authority) as (server, near), closing(Updating(near)) as peer:
        shaking = threading.Thread(target=peer.shake_hands)
        shaking.start()
        eventually(lambda: shaken(server), BOUND_S)
        shaking.join(BOUND_S)
        peer.update()
        sent = waiting(server)
        assert sent > 2 * READ_BYTES
        with pytest.raises(ssl.SSLWantReadError):
            server.recv(1_000)
        assert waiting(server) == sent - READ_BYTES


def test_a_peer_that_takes_no_answers_to_its_key_updates_is_ended(authority: Authority) -> None:
    with served(authority) as (server, near), closing(Updating(near, answered=True)) as peer:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        shaking = threading.Thread(target=peer.shake_hands)
        shaking.start()
        eventually(lambda: shaken(server), BOUND_S)
        shaking.join(BOUND_S)

        def ended() -> bool:
            peer.update()
            while waiting(server):
                try:
                    server.recv(1_000)
                except ConnectionAbortedError:
                    return True
                except ssl.SSLWantReadError:
                    """There is more."""
            return False

        eventually(ended, BOUND_S)
