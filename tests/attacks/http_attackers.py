"""What a stranger sends to the ports of metrics and probes."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tests.attacks.reach import dialled_within

Act = Callable[[], int]

_DRIPPING = 256
_DRIP_S = 0.5
_SCRAPERS = 24
_SCRAPE = b"GET /metrics HTTP/1.0\r\n\r\n"
_READ = 1 << 16


class WithMetrics(Protocol):
    @property
    def metrics(self) -> Sequence[str]:
        """The addresses of the ports of metrics."""


@contextmanager
def drips(target: WithMetrics) -> Iterator[Act]:
    """Connections that send a byte of a request every half second; one that is cut off is opened again."""
    links: deque[tuple[float, socket.socket]] = deque()

    def act() -> int:
        if len(links) < _DRIPPING:
            links.append((0.0, dialled_within(target.metrics[len(links) % len(target.metrics)])))
            return 1
        due, link = links[0]
        if due > time.monotonic():
            return 0
        links.popleft()
        try:
            link.sendall(b"G")
        except OSError:
            link.close()
            raise
        links.append((time.monotonic() + _DRIP_S, link))
        return 1

    try:
        yield act
    finally:
        for _, link in links:
            link.close()


@contextmanager
def scrapes(target: WithMetrics) -> Iterator[Act]:
    """So many scrapers of all metrics, each of which asks again when it was answered."""
    links: deque[socket.socket] = deque()

    def act() -> int:
        while len(links) < _SCRAPERS:
            link = dialled_within(target.metrics[int.from_bytes(os.urandom(1), "big") % len(target.metrics)])
            links.append(link)
            link.sendall(_SCRAPE)
        with links.popleft() as oldest:
            while oldest.recv(_READ):
                pass
        return 1

    try:
        yield act
    finally:
        for link in links:
            link.close()
