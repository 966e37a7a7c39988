"""Links of a given speed and delay, made by a proxy in a process of its own, which counts the bytes that pass.

A link is shared by all connections through it, as a network card is: in each direction bytes leave one after the other
at its speed, and arrive after the delay. What waits for the link is bounded, so a sender is slowed down as by a full
queue.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from benchmarks.checkout import module_command
from benchmarks.transfer.worker import answer_requests, inherited_connection
from kvcluster.cli.child_process import ChildProcess
from kvcluster.errors import ConfigError
from kvcluster.transport.addresses import split_address

_CHUNK = 64 * 1024
_QUEUE_S = 0.02
"""What waits for a link takes it at most so long, or is a few chunks: the queue of a switch."""

_FORM = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)/(\d+(?:\.\d+)?)(us|ms)")
_UNITS = {"mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True)
class EmulatedLink:
    """`round_trip_s`: twice the delay of one direction."""

    name: str
    bytes_per_s: float
    round_trip_s: float


def link(text: str) -> EmulatedLink:
    """Returns the link that "1gbit/2ms" means: its speed, and its round trip. Raises ConfigError."""
    found = _FORM.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--links {text}: expected a speed and a round trip, as in 1gbit/2ms or 100mbit/500us")
    speed, unit, delay, of = found.groups()
    return EmulatedLink(text, float(speed) * _UNITS[unit] / 8, float(delay) * _UNITS[of])


class Direction:
    """One direction of a link."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.nbytes = 0

    def arrival(self, nbytes: int) -> tuple[float, float]:
        """Returns when these bytes will have left, and when they arrive."""
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + nbytes / self._bytes_per_s
            self.nbytes += nbytes
            return self._free_at, self._free_at + self._delay_s


class _Pump:
    """Moves what comes from one socket to another, by way of one direction of the link."""

    def __init__(self, source: socket.socket, target: socket.socket, way: Direction) -> None:
        self._source = source
        self._target = target
        self._way = way
        self._flying: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        for run in (self._receive, self._deliver):
            threading.Thread(target=run, daemon=True).start()

    def _receive(self) -> None:
        try:
            while data := self._source.recv(_CHUNK):
                left, arrives = self._way.arrival(len(data))
                with self._changed:
                    self._flying.append((arrives, data))
                    self._changed.notify()
                _sleep_until(left - _QUEUE_S)
        except OSError:
            pass
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _deliver(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._flying or self._ended)
                    if not self._flying:
                        break
                    arrives, data = self._flying.popleft()
                _sleep_until(arrives)
                self._target.sendall(data)
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            self._source.close()


class LinkServer:
    """What the process of a link does: it listens on a port for each address, and forwards to that over the link."""

    def __init__(self, bytes_per_s: float, round_trip_s: float) -> None:
        self._out = Direction(bytes_per_s, round_trip_s / 2)
        self._back = Direction(bytes_per_s, round_trip_s / 2)
        self._ports: dict[str, str] = {}

    def through(self, address: str) -> str:
        """Returns the address of this host at which `address` is reached over the link."""
        if address not in self._ports:
            listening = socket.create_server(("127.0.0.1", 0))
            self._ports[address] = f"127.0.0.1:{listening.getsockname()[1]}"
            threading.Thread(target=self._accept, args=(listening, address), daemon=True).start()
        return self._ports[address]

    def counted(self) -> int:
        """Returns the bytes that have passed, in both directions."""
        return self._out.nbytes + self._back.nbytes

    def _accept(self, listening: socket.socket, address: str) -> None:
        while True:
            near, _ = listening.accept()
            try:
                far = socket.create_connection(split_address(address))
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Pump(near, far, self._out)
            _Pump(far, near, self._back)


class LinkProcess:
    """A link in a process of its own. A context manager."""

    def __init__(self, of: EmulatedLink) -> None:
        command = module_command("benchmarks.attention.links", str(of.bytes_per_s), str(of.round_trip_s))
        self._child = ChildProcess(command, name="the link")
        self._lock = threading.Lock()

    def through(self, address: str) -> str:
        """As LinkServer.through. Thread-safe."""
        with self._lock:
            found: str = self._child.ask("through", address=address)
        return found

    def counted(self) -> int:
        """As LinkServer.counted. Thread-safe."""
        with self._lock:
            found: int = self._child.ask("counted")
        return found

    def __enter__(self) -> LinkProcess:
        self._child.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._child.__exit__(kind, value, at)


def _sleep_until(at: float) -> None:
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)


if __name__ == "__main__":
    answer_requests(inherited_connection(), LinkServer(*map(float, sys.argv[1:3])))
