"""Where a chaos run takes place: on nodes in a network of their own, or on one host.

A site starts a cluster with the product's own means, tells where its processes are, and starts again what Ray does not:
a node. `Nodes` is the whole: a Ray head and two more nodes, each with its own address, and a host for each worker.
`OneHost` is for machines that give us no namespaces: what `kvcluster up` makes, without links and nodes to lose.
"""

from __future__ import annotations

import json
import os
import secrets
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
from kvcluster.actors.node_memory import OBJECT_STORE_BYTES
from kvcluster.config import load
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

HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
"""How Ray's head finds out within 5 s that a node hangs or is cut off, where by default it takes 14. docs/operations.md
tells operators of several nodes; a Ray of one node has nothing to gain, and a false alarm would end it."""

_RAY_PORT = 6379
_STARTED = "Ray runtime started"
_TRIES, _JOINED_S = 5, 120.0
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
    """Three nodes and a worker's host in network namespaces."""

    form = "three nodes in network namespaces"
    hosts = (HEAD, *NODES, *(host for host in WORKERS.values() if host != HEAD))
    nodes = NODES

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._network = Network(self.hosts)
        self._house = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.token = new_token()
        self.address = ""

    def __enter__(self) -> Nodes:
        with ExitStack() as house:
            # Short, because sockets lie within it.
            self._folder = Path(tempfile.mkdtemp(prefix="kvchaos-"))
            house.callback(shutil.rmtree, self._folder, ignore_errors=True)
            house.callback(self._reap)
            house.enter_context(self._network)
            self._environment = os.environ | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_urlsafe(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",
                **HEALTH_CHECKS,
            }
            for node in (HEAD, *NODES):
                self._begin(node)
                if node == HEAD:  # the others have nothing to join before it is there
                    self._await_node(node)
            for node in NODES:
                self._await_node(node)
            self.address = self._start_cluster()
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
        with suppress(subprocess.TimeoutExpired):
            self._running[node].wait(_GIVEN_UP_S)

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
        for node in ended:
            self._await_node(node)
        return left

    def _begin(self, node: str) -> None:
        """`ray start` on that node, as an operator does it."""
        address = self._network.addresses
        folder = self._folder / node
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shard = load(overrides=self._settings).shard
        pool = shard.device_bytes + shard.host_bytes
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [
            f"--node-ip-address={address[node]}",
            f"--temp-dir={folder}",
            "--num-cpus=0",
            "--disable-usage-stats",
        ]
        # Room for as many shards as a node can lose at most: so that when one is lost, they fit on the others.
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--memory={2 * pool}"]
        if node == HEAD:
            command += ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", "--include-log-monitor=false"]
        else:
            command += [f"--address={address[HEAD]}:{_RAY_PORT}"]
        with self._log(node).open("wb") as log:
            self._running[node] = subprocess.Popen(
                self.command(node, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )
        set_niceness(self._running[node].pid, NODE)

    def _await_node(self, node: str) -> None:
        """Waits until the node has joined. Where Ray gives up because the machine has too much else to do, it is tried
        again, as an operator would."""
        for _ in range(_TRIES):
            eventually(lambda: _STARTED in self._said(node) or self._running[node].poll() is not None, _JOINED_S)
            if self._running[node].poll() is None:
                return
            said = self._said(node)
            _kill(self.pids(node))
            self._begin(node)
        raise AssertionError(f"Ray does not start on {node}: {said}")

    def _start_cluster(self) -> str:
        tokens = self._folder / "tokens"
        tokens.write_text(f"sha256:{digest(self.token)}  chaos  operator\n", encoding="utf-8")
        host = self._network.addresses[HEAD]
        settings = {
            **self._settings,
            "server": {"host": host, "port": 7070, "token_file": str(tokens)},
            "coordinator": {**self._settings.get("coordinator", {}), "state_dir": str(self._folder / "state")},
        }
        command = [sys.executable, "-m", "tests.chaos.start", f"{host}:{_RAY_PORT}", json.dumps(settings)]
        done = subprocess.run(
            self.command(HEAD, command), check=False, capture_output=True, text=True, cwd=ROOT, env=self._environment
        )
        assert done.returncode == 0, f"the cluster did not start: {done.stdout}{done.stderr}"
        return done.stdout.split()[-1]

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


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
