"""A cluster at the other end of a link whose rate a test sets, and whatever is run at this end.

`Namespaces` is the whole: two hosts of a network of their own (tests/hosts/netns.py), and what the cluster's host sends
goes through a token bucket of the kernel. `OneHost` is for machines that give us none: loopback, and a relay of our own
before the shard that passes on what it sends no faster. Either way a cluster of tests/cli/served.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from tests.hosts import netns

ROOT = Path(__file__).parents[2]
SHARD, WORKER = "shard", "worker"
_SLICE = 16 * 1024


class Link(Protocol):
    """A context manager; leaving it ends the cluster."""

    form: str
    coordinator: str
    paths: tuple[str, ...]
    """Those that lead to the shard."""

    def __enter__(self) -> Link: ...

    def __exit__(self, *error: object) -> None: ...

    def throttle(self, bytes_per_s: int) -> None:
        """From now on the worker's host hears no more than that from the cluster's."""

    def run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs `argv` on the worker's host to its end."""


def throttled() -> Link:
    """The best that this machine gives."""
    missing = netns.missing() or _no_bucket()
    return OneHost(missing) if missing else Namespaces()


def _no_bucket() -> str:
    """Why the kernel throttles no link; "" where it does."""
    with netns.Network((SHARD,)) as network:
        done = _ran(network.command(SHARD, _bucket(1_000_000)))
    return "" if done.returncode == 0 else f"no link can be throttled: {done.stderr.strip()}"


def _bucket(bytes_per_s: int) -> list[str]:
    # tc's "bps" are bytes. A bucket holds what comes between two ticks of a slow clock, and one large packet at least.
    burst, rate = max(_SLICE, bytes_per_s // 50), f"{bytes_per_s}bps"
    return f"tc qdisc replace dev eth0 root tbf rate {rate} burst {burst} latency 200ms".split()


class Namespaces:
    """Two hosts, and a token bucket between them."""

    form = "in network namespaces"
    paths: tuple[str, ...] = ("tcp", "grpc")

    def __init__(self) -> None:
        self._network = netns.Network((SHARD, WORKER))
        self._house = ExitStack()

    def __enter__(self) -> Link:
        with ExitStack() as house:
            house.enter_context(self._network)
            served = _Program(self._network.command(SHARD, _program(self._network.addresses[SHARD])))
            house.enter_context(served)
            self.coordinator = served.told["coordinator"]
            self._house = house.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._house.close()

    def throttle(self, bytes_per_s: int) -> None:
        done = _ran(self._network.command(SHARD, _bucket(bytes_per_s)))
        assert done.returncode == 0, done.stderr

    def run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _ran(self._network.command(WORKER, argv))


class OneHost:
    """Loopback, and a relay between the worker and the shard."""

    paths: tuple[str, ...] = ("grpc",)

    def __init__(self, why: str) -> None:
        self.form = f"on one host, because {why}"
        self._relay = _Relay()
        self._house = ExitStack()

    def __enter__(self) -> Link:
        with ExitStack() as house:
            house.callback(self._relay.close)
            served = house.enter_context(_Program(_program("127.0.0.1", self._relay.address)))
            self.coordinator = served.told["coordinator"]
            self._relay.start(served.told["shard"])
            self._house = house.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._house.close()

    def throttle(self, bytes_per_s: int) -> None:
        self._relay.bytes_per_s = bytes_per_s

    def run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return _ran(argv)


def _program(host: str, shard_at: str = "") -> list[str]:
    return [sys.executable, "-m", "tests.cli.served", host, *([shard_at] if shard_at else [])]


def _ran(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)


class _Program:
    """The cluster's process, which ends with its stdin."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv

    def __enter__(self) -> _Program:
        self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cluster has not come up"
        self.told: dict[str, str] = json.loads(line)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=20)
        self._process.kill()
        self._process.wait()


class _Relay:
    """Forwards bytes between each client that connects and one address; bytes from that address at most at its rate."""

    def __init__(self) -> None:
        self.bytes_per_s = 10**9
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._target = ("", 0)
        self._sockets: list[socket.socket] = [self._listening]
        self._ended = threading.Event()

    def start(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                threading.Thread(target=self._pass_on, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, True), daemon=True).start()

    def _pass_on(self, sender: socket.socket, hearer: socket.socket, throttled: bool) -> None:
        with suppress(OSError):
            while data := sender.recv(_SLICE):
                hearer.sendall(data)
                if throttled:
                    self._ended.wait(len(data) / self.bytes_per_s)
        with suppress(OSError):
            hearer.shutdown(socket.SHUT_WR)
