"""Where a chaos run takes place: on nodes in a network of their own, or on one host.

A site starts a cluster with the product's own means, tells where its processes are, and starts again what Ray does not:
a node. `Nodes` is the whole: a Ray head and two more nodes, each with its own address, and a host for each worker.
`OneHost` is for machines that give us no namespaces: what `kvcluster up` makes, without links and nodes to lose.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from kvcluster.actors import background
from kvcluster.config import SHARD_RESOURCE, load
from kvcluster.runtime.auth import digest, new_token
from tests.actors.processes import session, title
from tests.chaos.niceness import NODE, set_niceness
from tests.hosts.netns import Network
from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
HEAD, NODES = "head", ("one", "two")
WORKERS = {"near": HEAD, "far": "far"}
"""Where each worker is: one shares its host, and so its memory, with a shard; the other reaches all by network."""

_JOINED, _ENDED = "joined ", "Ray has ended on this node"
_JOINED_S = 180.0
_GIVEN_UP_S = 15.0
_GONE_S = 30.0
"""Ray's own agents look for their raylet for a while when it is gone."""


class Site(Protocol):
    """A running cluster and where it runs. A context manager; leaving it ends all of it."""

    form: str
    address: str
    token: str
    hosts: tuple[str, ...]
    nodes: tuple[str, ...]

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


class Nodes:
    """Three nodes and a worker's host in network namespaces, started by the product's own commands."""

    form = "three nodes in network namespaces"
    hosts = (HEAD, *NODES, *(host for host in WORKERS.values() if host != HEAD))
    nodes = NODES

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._network = Network(self.hosts)
        self._house = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.token = new_token()
        self.address = f"{self._network.addresses[HEAD]}:7070"

    def __enter__(self) -> Nodes:
        with ExitStack() as house:
            self._folder = Path(tempfile.mkdtemp(prefix="kvchaos-"))
            house.callback(shutil.rmtree, self._folder, ignore_errors=True)
            house.callback(self._reap)
            house.enter_context(self._network)
            self._configure()
            for node in (HEAD, *NODES):
                self._begin(node)
            for node in NODES:
                self._await_said(node, _JOINED)
            self._await_said(HEAD, "as configured")
            self._house = house.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._house.close()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return self._network.command(host, argv)

    def pids(self, node: str = "") -> list[int]:
        return [pid for name in ((node,) if node else (HEAD, *NODES)) for pid in self._network.pids(name)]

    def node_at(self, address: str) -> str:
        return next(host for host, its in self._network.addresses.items() if its == address)

    def link(self, sender: str, hearer: str, *, cut: bool) -> None:
        (self._network.cut if cut else self._network.heal)(sender, hearer)

    def await_end(self, node: str) -> None:
        with suppress(AssertionError):
            eventually(lambda: self._said(node).count(_ENDED) > self._ended[node], _GIVEN_UP_S)

    def mend(self) -> list[str]:
        left: list[str] = []
        assert self._running[HEAD].poll() is None, f"the head ended: {self._said(HEAD)}"
        ended = [node for node in NODES if self._running[node].poll() is not None]
        for node in ended:
            try:
                eventually(lambda node=node: not self.pids(node), _GONE_S)
            except AssertionError:
                left += [f"{node}: {title(pid)}" for pid in self.pids(node)]
                _kill(self.pids(node))
            self._begin(node)
        for node in NODES:
            # A node that was given up has said so, and joins again by itself.
            self._ended[node] = self._said(node).count(_ENDED)
            self._await_said(node, _JOINED, times=self._ended[node] + self._begun[node])
        return left

    def _configure(self) -> None:
        """Writes the files that every node has."""
        tokens, secret = self._folder / "tokens", self._folder / "secret"
        tokens.write_text(f"sha256:{digest(self.token)}  chaos  operator\n", encoding="utf-8")
        secret.write_text(new_token(), encoding="ascii")
        secret.chmod(0o600)
        server = {"host": "0.0.0.0", "report_port": 7071, "token_file": str(tokens), "secret_file": str(secret)}
        coordinator = {**self._settings.get("coordinator", {}), "state_dir": str(self._folder / "state")}
        settings = {**self._settings, "server": server, "coordinator": coordinator}
        (self._folder / "cluster.toml").write_text(_toml(settings), encoding="utf-8")
        self._begun, self._ended = dict.fromkeys((HEAD, *NODES), 0), dict.fromkeys(NODES, 0)

    def _begin(self, node: str) -> None:
        """Runs the command of that node, with room for as many shards as a node can lose at most: so that when one is
        lost, they fit on the others."""
        shard = load(overrides=self._settings).shard
        command = [sys.executable, "-m", "kvcluster.cli.main"]
        if node == HEAD:
            command += ["up", "--foreground"]
        else:
            command += [
                "join",
                self._network.addresses[HEAD],
                f"--memory={2 * (shard.device_bytes + shard.host_bytes)}",
            ]
        command += [f"--config={self._folder}/cluster.toml", f"--offer={SHARD_RESOURCE}=2"]
        with self._log(node).open("ab") as log:
            self._running[node] = subprocess.Popen(
                self.command(node, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        self._begun[node] += 1
        set_niceness(self._running[node].pid, NODE)

    def _await_said(self, node: str, text: str, times: int = 1) -> None:
        """Waits until the node's command has said this so many times."""
        try:
            eventually(lambda: self._said(node).count(text) >= times, _JOINED_S)
        except AssertionError:
            raise AssertionError(f"{node} has not said {text!r}, but: {self._said(node)}") from None

    def _log(self, node: str) -> Path:
        return self._folder / f"{node}.log"

    def _said(self, node: str) -> str:
        return self._log(node).read_text(encoding="utf-8", errors="replace")

    def _reap(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


class OneHost:
    """A cluster that `kvcluster up` starts on loopback."""

    form = "one host"
    hosts = ()
    nodes = ()
    token = ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __enter__(self) -> OneHost:
        self._running, started = background.up(load(overrides={**self._settings, "server": {"port": free_port()}}))
        assert started, f"port {self._running.port} has a cluster already"
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


def _toml(settings: Mapping[str, Any]) -> str:
    """The settings as TOML, whose values are written as in JSON."""
    top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if not isinstance(value, dict))
    for section, values in settings.items():
        if isinstance(values, dict):
            top += f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    return top


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
