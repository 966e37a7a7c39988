"""What a stranger does with handshakes: it breaks them off, makes many, or goes on with nothing but key updates."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle
from typing import Protocol

from tests.attacks.reach import HELLO, dialled, dialled_within, speaks_tls
from tests.key_updates import Updating

Act = Callable[[], int]

_BEGINNINGS = (b"", b"PRI * HTTP/2.0\r\n", b"\x00", bytes(64), b"GET / HTTP/1.1\r\n\r\n", HELLO)
_UPDATING = 12


class WithPorts(Protocol):
    @property
    def ports(self) -> Sequence[str]:
        """The addresses of all that listens."""


@contextmanager
def handshakes(target: WithPorts) -> Iterator[Act]:
    """Connections that send the beginning of something, or nothing, and are closed."""
    numbers, ports = count(), target.ports

    def act() -> int:
        at = next(numbers)
        with dialled(ports[at % len(ports)]) as link:
            link.sendall(_BEGINNINGS[at // len(ports) % len(_BEGINNINGS)])
        return 1

    yield act


@contextmanager
def whole_handshakes(target: WithPorts) -> Iterator[Act]:
    """Whole handshakes of TLS, one after the other; nothing is sent after them."""
    addresses = cycle(target.ports)

    def act() -> int:
        with dialled_within(next(addresses)):
            return 1

    yield act


@contextmanager
def updates(target: WithPorts) -> Iterator[Act]:
    """Some connections that send key updates after their handshake; one that is ended is opened again. In the clear
    they are what a handshake begins with."""
    addresses = cycle(target.ports)
    links: deque[tuple[socket.socket, Updating | None]] = deque()

    def opened() -> tuple[socket.socket, Updating | None]:
        link = dialled(next(addresses), 1.0)
        try:
            peer = Updating(link) if speaks_tls() else None
            if peer is not None:
                peer.shake_hands()
        except BaseException:
            link.close()
            raise
        return link, peer

    def act() -> int:
        if len(links) < _UPDATING:
            links.append(opened())
            return 1
        link, peer = links.popleft()
        try:
            if peer is None:
                link.sendall(HELLO)
            else:
                peer.update()
        except OSError:
            link.close()
            if peer is not None:
                peer.close()
            raise
        links.append((link, peer))
        return 1

    yield act
