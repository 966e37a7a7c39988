"""What strangers cost who connect to the ports of a cluster within TLS, and go no further: in memory, threads,
descriptors and CPU of the process that listens there.

Memory is the most that was resident beyond what was before the first way of its port: what an allocator keeps of one
way serves the next one.
"""

from __future__ import annotations

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tests.attacks.reach import HELLO, dialled, dialled_within
from tests.bounds.measure import Bench, cpu_ms, resident
from tests.bounds.table import PAGE

MANY = 2_000
BEGIN, END = "<!-- handshakes -->", "<!-- end of handshakes -->"
HEAD = (
    "| port | connections that | at once | threads | memory of all, MiB | CPU of one, ms | an honest request, ms "
    "| what bounds it |\n|---|---|---|---|---|---|---|---|"
)
ENDED_S = 20.0
"""Within so many seconds each connection without a handshake is ended."""

KIB = 64
"""What a connection may take, as many as there may be at a port."""

_HELD_S, _FLOOD_S, _LOOK_S, _PATIENCE_S = 1.0, 3.0, 0.05, 10.0


@dataclass(frozen=True, slots=True)
class Port:
    """`most`: connections that are kept at once, and some that are being closed. `threads`: the most of them."""

    at: str  # the process
    most: int
    threads: int
    held: str


PORTS: Mapping[str, Port] = {
    "events": Port("coordinator", 160, 4, "EVENT_PEERS, half of them of one address; 10 s; one thread for all"),
    "metrics": Port("coordinator", 300, 300, "64 connections without a request, a thread each; 5 s"),
    "tcp": Port("shard", 200, 200, "STREAMS_UNKNOWN, a thread each; 5 s"),
    "coordinator": Port("coordinator", 4_200, 8, "CONNECTIONS; 5 s for a handshake, 60 s without a call"),
    "shard": Port("shard", 4_200, 8, "CONNECTIONS; 5 s for a handshake, 60 s without a call"),
}
"""In the order in which they are measured: those first that keep little."""


@dataclass(slots=True)
class Cost:
    """What one way cost. `left`: connections without a handshake that were not ended in time."""

    port: str
    way: str
    at_once: int = 0
    threads: int = 0
    memory: int = 0
    cpu_ms: float = 0.0
    honest_ms: float = 0.0
    left: int = 0

    def row(self) -> str:
        """Returns the row of the page."""
        return (
            f"| {self.port} | {self.way} | {self.at_once:,} | {self.threads:,} | {self.memory / 2**20:,.1f} "
            f"| {self.cpu_ms:.1f} | {self.honest_ms:,.0f} | {PORTS[self.port].held} |"
        )

    def failures(self) -> list[str]:
        """Returns what was too much, in words."""
        port, name = PORTS[self.port], f"{self.port}, connections that {self.way}"
        found = []
        if self.at_once > port.most:
            found.append(f"{name}: {self.at_once} at once")
        if self.threads > port.threads:
            found.append(f"{name}: {self.threads} threads")
        if self.memory > KIB * 1_024 * port.most:
            found.append(f"{name}: {self.memory / 2**20:,.0f} MiB")
        if self.left:
            found.append(f"{name}: {self.left} were open after {ENDED_S:.0f} s")
        return found


def _silent(address: str) -> socket.socket:
    return dialled(address, _PATIENCE_S)


def _half(address: str) -> socket.socket:
    link = dialled(address, _PATIENCE_S)
    link.sendall(HELLO)
    return link


WAYS: Mapping[str, tuple[Callable[[str], socket.socket], bool]] = {
    "send nothing": (_silent, True),
    "send half a hello": (_half, True),
    "say nothing after the handshake": (partial(dialled_within, timeout_s=_PATIENCE_S), True),
    "end after the handshake": (partial(dialled_within, timeout_s=_PATIENCE_S), False),
}
"""How strangers connect, and whether they keep the connections."""

_WITHOUT = ("send nothing", "send half a hello")


class _Watched:
    """The most that a process had of each, from `start` to `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self._first = self._most = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, int, int]:
        """Returns the most resident bytes, and by how many descriptors and threads the process grew."""
        self._stop.set()
        self._thread.join()
        memory, descriptors, threads = self._most
        return memory, descriptors - self._first[1], threads - self._first[2]

    def _now(self) -> tuple[int, int, int]:
        folder = f"/proc/{self._pid}"
        return resident(self._pid), len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task"))

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            memory, descriptors, threads = self._now()
            self._most = max(self._most[0], memory), max(self._most[1], descriptors), max(self._most[2], threads)


def measure(bench: Bench, port: str, many: int = MANY) -> list[Cost]:
    """Returns what `many` connections of each way cost at this port. Raises ConnectionError if an honest client that
    connects meanwhile is not served."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    before = resident(bench.pids[PORTS[port].at])
    return [_cost(bench, port, way, many, before) for way in WAYS]


def _cost(bench: Bench, port: str, way: str, many: int, before: int) -> Cost:
    pid, (connect, kept) = bench.pids[PORTS[port].at], WAYS[way]
    found, began, burnt = Cost(port, way), time.monotonic(), cpu_ms(pid)
    watched, links = _Watched(pid), []
    opened, until = 0, began + (2 * _PATIENCE_S if kept else _FLOOD_S)
    while (opened < many or not kept) and time.monotonic() < until:
        opened += 1
        with suppress(OSError):
            link = connect(bench.address(port))
            links.append(link) if kept else link.close()
    bench.serves()
    threading.Event().wait(_HELD_S)
    memory, found.at_once, found.threads = watched.stop()
    found.memory = max(0, memory - before)
    found.cpu_ms = (cpu_ms(pid) - burnt) / opened
    if way in _WITHOUT:
        found.left = _left_open(links)
    for link in links:
        link.close()
    found.honest_ms = max((sample.ms for sample in bench.honest.between(began, time.monotonic())), default=0.0)
    return found


def _left_open(links: list[socket.socket]) -> int:
    """Returns how many of these the other side has not ended in time."""
    left, give_up, pause = links, time.monotonic() + ENDED_S, threading.Event()
    while (left := [link for link in left if _is_open(link)]) and time.monotonic() < give_up:
        pause.wait(_LOOK_S)
    return len(left)


def _is_open(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return bool(link.recv(4_096))
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def rows() -> dict[tuple[str, str], list[str]]:
    """Returns the cells of each row of the page, by port and way."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(each[0], each[1]): each for each in cells[1:]}


def write(costs: list[Cost]) -> None:
    """Puts all rows into the page."""
    text, body = PAGE.read_text(encoding="utf-8"), "\n".join([HEAD, *(cost.row() for cost in costs)])
    PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + "\n" + body + "\n" + text[text.index(END) :], encoding="utf-8")
