"""Where a chaos run takes place: on nodes in a network of their own (nodes.py), or on one host.

A site starts a cluster with the product's own means, tells where its processes are, and starts again what Ray does not:
a node. `OneHost` is for machines that give us no namespaces: what `kvcluster up` makes, without links and nodes to
lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvcluster.actors import background
from kvcluster.config import load
from tests.actors.processes import session
from tests.compat.processes import Process
from tests.ports import free_port


class Site(Protocol):
    """A running cluster and where it runs. A context manager; leaving it ends all of it."""

    form: str
    address: str
    token: str
    hosts: tuple[str, ...]
    nodes: tuple[str, ...]
    head_moves: bool
    """Whether the head's host may be lost: there is a Redis for Ray's state."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` where that host is."""

    def pids(self, node: str = "") -> list[int]:
        """Every process of the cluster, or of one node."""

    def node_at(self, address: str) -> str:
        """The node that has this address; "" where there is but one."""

    def link(self, sender: str, hearer: str, *, cut: bool) -> None:
        """Cuts a link one way, or heals it."""

    def await_end(self, node: str) -> None:
        """Waits until the Ray of a node that was given up has ended, or shows that it was not."""

    def mend(self) -> list[str]:
        """Starts again the nodes that have ended, and says what they left behind."""

    def join(self, node: str) -> None:
        """Makes a host a node."""

    def leave(self, node: str) -> list[str]:
        """Has a node leave as an operator does, and says what was wrong with that."""

    def kill(self, node: str) -> None:
        """Ends every process of a node at once, as a loss of power does, and waits until the first of them has ended:
        `mend` looks at that one."""

    def move_head(self) -> None:
        """Loses the head's host, and starts the head on another."""

    def shard_of(self, release: Path, name: str, ttl_ms: int) -> Process:
        """Starts a shard of another release beside the cluster's own."""


class OneHost:
    """A cluster that `kvcluster up` starts on loopback."""

    form = "one host"
    hosts = ()
    nodes = ()
    head_moves = False
    token = ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __enter__(self) -> OneHost:
        found = background.up(load(overrides={**self._settings, "server": {"port": free_port()}}))
        self._running = found.running
        assert found.started, f"port {self._running.port} has a cluster already"
        self.address = self._running.address
        return self

    def __exit__(self, *error: object) -> None:
        background.down(self._running.port)

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def pids(self, node: str = "") -> list[int]:
        return session(self._running.pid)

    def node_at(self, address: str) -> str:
        return ""

    def link(self, sender: str, hearer: str, *, cut: bool) -> None:
        raise AssertionError("one host has no links")

    def await_end(self, node: str) -> None:
        raise AssertionError("one host has no nodes to lose")

    def mend(self) -> list[str]:
        return []

    def join(self, node: str) -> None:
        raise AssertionError("one host has no nodes to come")

    def leave(self, node: str) -> list[str]:
        raise AssertionError("one host has no nodes to go")

    def kill(self, node: str) -> None:
        raise AssertionError("one host has no nodes to lose")

    def move_head(self) -> None:
        raise AssertionError("one host has no other for the head")

    def shard_of(self, release: Path, name: str, ttl_ms: int) -> Process:
        raise AssertionError("one host has none to spare")
