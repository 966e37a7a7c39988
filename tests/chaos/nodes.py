"""A chaos run's nodes: hosts in a network of their own, started by the product's own commands.

The head has an address of its own that moves with it from one host to another, and Ray's state lies in Redis on a host
that is never lost, where there is a Redis. A further host is spare: it joins while another node is replaced, or has a
shard of an older release.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvcluster.config import SHARD_RESOURCE, load
from kvcluster.runtime.auth import digest, new_token
from kvcluster.runtime.private_files import ACTORS, derived_key
from tests.actors.processes import title
from tests.chaos.niceness import NODE, set_niceness
from tests.compat.processes import Process
from tests.hosts.netns import Network
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
HEAD, NODES, SPARE = "head", ("one", "two"), "spare"
WATCH = "watch"
"""The host of the observer, without a shard: what it stores may lie on any, and not on those of its own host alone."""

WORKERS = {"near": HEAD, "far": "far"}
"""Where each worker is: one shares its host, and so its memory, with a shard; the other reaches all by network."""

_HEADS = (HEAD, "second")
_REDIS = "redis"
_ADDRESS = "10.203.0.100"
_JOINED, _ENDED = "joined ", "Ray has ended on this node"
_JOINED_S = 180.0
_NODE_TIMEOUT_MS = 8_000
_GIVEN_UP_S = 15.0
_LEFT_S = 60.0
_GONE_S = 30.0
"""Ray's own agents look for their raylet for a while when it is gone."""


class Nodes:
    """A head, two nodes, a spare one and a worker's host. In faults the host `head` is the one that has the head."""

    form = "three nodes in network namespaces"
    hosts = (HEAD, *NODES, *(host for host in WORKERS.values() if host != HEAD))
    nodes = NODES

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.head_moves = shutil.which("redis-server") is not None
        self._network = Network((*self.hosts, SPARE, *_HEADS[1:], _REDIS, WATCH))
        self._house = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._head = HEAD
        self.token = new_token()
        self.address = f"{_ADDRESS}:7070"

    def __enter__(self) -> Nodes:
        with ExitStack() as house:
            self._folder = Path(tempfile.mkdtemp(prefix="kvchaos-"))
            house.callback(shutil.rmtree, self._folder, ignore_errors=True)
            house.callback(self._reap)
            house.enter_context(self._network)
            self._network.move(_ADDRESS, HEAD)
            self._configure()
            if self.head_moves:
                self._start_redis()
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
        hosts = (self._host(node),) if node else (*_HEADS, *NODES, SPARE)
        return [pid for host in hosts for pid in self._network.pids(host) if not _is_of_the_run(pid)]

    def node_at(self, address: str) -> str:
        return next(host for host, its in self._network.addresses.items() if its == address)

    def link(self, sender: str, hearer: str, *, cut: bool) -> None:
        (self._network.cut if cut else self._network.heal)(self._host(sender), self._host(hearer))

    def await_end(self, node: str) -> None:
        with suppress(AssertionError):
            eventually(lambda: self._said(node).count(_ENDED) > self._ended.get(node, 0), _GIVEN_UP_S)

    def mend(self) -> list[str]:
        left: list[str] = []
        assert self._running[self._head].poll() is None, f"the head ended: {self._said(self._head)}"
        for node in (node for node in NODES if self._running[node].poll() is not None):
            left += self._await_gone(node)
            self._begin(node)
        for node in NODES:
            # A node that was given up has said so, and joins again by itself.
            self._ended[node] = self._said(node).count(_ENDED)
            self._await_said(node, _JOINED, times=self._ended[node] + self._begun[node])
        return left

    # ----------------------------------------------------------------------- who comes, goes and moves

    def join(self, node: str) -> None:
        """Makes that host a node."""
        self._begin(node)
        self._await_said(node, _JOINED, times=self._said(node).count(_ENDED) + self._begun[node])

    def leave(self, node: str) -> list[str]:
        """Has that node leave as an operator does, and says what was wrong with that."""
        self._running[node].send_signal(signal.SIGTERM)
        status = self._running[node].wait(_LEFT_S)
        wrong = [f"{node} was told to leave; its status is {status}"] if status else []
        return wrong + [f"leaked by a node that left: {what}" for what in self._await_gone(node)]

    def kill(self, node: str) -> None:
        _kill(self.pids(node))
        self._running[node].wait(_GIVEN_UP_S)

    def move_head(self) -> None:
        """Takes the head's host away, as a loss of power does, and starts the head on another one."""
        old = self._head
        while pids := self.pids(old):  # they may be starting others
            _kill(pids)
        self._running[old].wait()
        self._head = next(host for host in _HEADS if host != old)
        self._network.move(_ADDRESS, self._head)
        self._begin(self._head)

    def shard_of(self, release: Path, name: str, ttl_ms: int) -> Process:
        """Starts a shard of another release, without Ray, on the spare host. Its pool has room for all prompts, so that
        it evicts nothing before it is drained."""
        peer = {"HOST": self._network.addresses[SPARE], "TTL_MS": str(ttl_ms), "POOL": "256MiB"}
        peer["TOKENS"] = str(self._folder / "tokens")
        peer["SECRET"] = derived_key(str(self._folder / "secret"), ACTORS)
        env = {f"KVCLUSTER_PEER_{key}": value for key, value in peer.items()}
        return Process(release, "shard", name, f"{_ADDRESS}:7071", wrapper=self.command(SPARE, []), env=env)

    # ------------------------------------------------------------------------------------------ processes

    def _host(self, node: str) -> str:
        return self._head if node == HEAD else node

    def _configure(self) -> None:
        """Writes the files that every node has."""
        tokens, secret, password = (self._folder / name for name in ("tokens", "secret", "redis-password"))
        tokens.write_text(f"sha256:{digest(self.token)}  chaos  operator\n", encoding="utf-8")
        for file in (secret, password):
            file.write_text(new_token(), encoding="ascii")
            file.chmod(0o600)
        server = {"host": "0.0.0.0", "report_port": 7071, "token_file": str(tokens), "secret_file": str(secret)}
        server["advertise"] = _ADDRESS
        coordinator = {**self._settings.get("coordinator", {}), "state_dir": str(self._folder / "state")}
        settings = {**self._settings, "server": server, "coordinator": coordinator}
        # A node that hangs or is cut off for longer than briefly is to be given up, and replaced.
        settings["ray"] = {"node_timeout_ms": _NODE_TIMEOUT_MS}
        if self.head_moves:
            redis = f"{self._network.addresses[_REDIS]}:6379"
            settings["ray"] |= {"redis": redis, "redis_password_file": str(password)}
        (self._folder / "cluster.toml").write_text(_toml(settings), encoding="utf-8")

    def _start_redis(self) -> None:
        password = (self._folder / "redis-password").read_text(encoding="ascii")
        command = ["redis-server", "--bind", self._network.addresses[_REDIS], "--requirepass", password, "--save", ""]
        self._spawn(_REDIS, [*command, "--appendonly", "no", "--dir", str(self._folder)])

    def _begin(self, node: str) -> None:
        """Runs the command of that node, with room for as many shards as a node can lose at most: so that when one is
        lost, they fit on the others."""
        shard = load(overrides=self._settings).shard
        command = [sys.executable, "-m", "kvcluster.cli.main"]
        if node in _HEADS:
            command += ["up", "--foreground", f"--node-ip={self._network.addresses[node]}"]
        else:
            command += ["join", _ADDRESS, f"--memory={2 * (shard.ram_bytes + shard.host_bytes)}"]
        self._spawn(node, [*command, f"--config={self._folder}/cluster.toml", f"--offer={SHARD_RESOURCE}=2"])
        self._begun[node] = self._begun.get(node, 0) + 1
        set_niceness(self._running[node].pid, NODE)

    def _spawn(self, host: str, command: Sequence[str]) -> None:
        with self._log(host).open("ab") as log:
            self._running[host] = subprocess.Popen(
                self.command(host, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )

    def _await_said(self, node: str, text: str, times: int = 1) -> None:
        """Waits until the node's command has said this so many times."""
        try:
            eventually(lambda: self._said(node).count(text) >= times, _JOINED_S)
        except AssertionError:
            raise AssertionError(f"{node} has not said {text!r}, but: {self._said(node)}") from None

    def _await_gone(self, node: str) -> list[str]:
        """Waits until no process of that node is left, and ends and names those that stay."""
        try:
            eventually(lambda: not self.pids(node), _GONE_S)
        except AssertionError:
            left = [f"{node}: {title(pid)}" for pid in self.pids(node)]
            _kill(self.pids(node))
            return left
        return []

    def _log(self, node: str) -> Path:
        return self._folder / f"{node}.log"

    def _said(self, node: str) -> str:
        return self._log(node).read_text(encoding="utf-8", errors="replace")

    def _reap(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def _toml(settings: Mapping[str, Any]) -> str:
    """The settings as TOML, whose values are written as in JSON."""
    top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if not isinstance(value, dict))
    for section, values in settings.items():
        if isinstance(values, dict):
            top += f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    return top


def _is_of_the_run(pid: int) -> bool:
    """Whether that is a process of the run itself, which is no part of the node on its host."""
    return "tests.chaos." in title(pid)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
