"""What Ray knows of a cluster (its nodes with what is free on them, and the actors of a namespace), and what to do if
Ray has ended or did not start.

`ends_with_ray` ends a process whose Ray has ended, though its main thread may be in a call of Ray. Such a call does not
return once the store of Ray's head is lost, takes no signal, and keeps a core busy. So a thread watches, gives the main
thread a while to notice by itself, and then ends the process. Its supervisor (systemd, a container) starts it again.
`ends_on_signals` does the same for a process that was told to end.

`errors_in_logs` finds why a Ray did not start: what its processes wrote into their logs before they ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvcluster.actors.ray_private import actor_table, available_resources_per_node
from kvcluster.actors.settings import leaving_nodes
from kvcluster.config import Config
from kvcluster.core.ids import ShardId
from kvcluster.core.shard_scheduler import Node
from kvcluster.runtime.volume import volumes_in
from kvcluster.transport.addresses import host_of
from kvcluster.transport.thread_start import start_thread

HEAD_RESOURCE = "node:__internal_head__"
"""A resource of Ray's own, of which the node of its head offers one and no other node any."""

_ANSWER_S = 30.0


class ActorSeen(NamedTuple):
    """A living actor. `node`: the id of its node; "" while Ray has none for it."""

    handle: Any
    node: str


def seen_actors(namespace: str) -> dict[str, ActorSeen]:
    """Returns the actors of this namespace by name, without those that are dead for good."""
    table = actor_table()
    seen: dict[str, ActorSeen] = {}
    for named in list_named_actors(all_namespaces=True):
        if named["namespace"] != namespace:
            continue
        try:
            handle = ray.get_actor(named["name"], namespace=namespace)
        except ValueError:
            continue  # it has died since
        row = table.get(handle._actor_id.hex(), {})
        alive = row.get("State") == "ALIVE"
        seen[named["name"]] = ActorSeen(handle, row["Address"]["NodeID"] if alive else "")
    return seen


def nodes_of(shards: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    """Returns the ids of the living nodes of these shards, which are given with their addresses. `seen`: the node of
    each actor that exists; that of a shard that has ended is found by its address."""
    by_host = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    hosts = {shard: host_of(address) for shard, address in shards.items()}
    found = (seen.get(shard) or by_host.get(host) for shard, host in hosts.items())
    return list(dict.fromkeys(node for node in found if node))


class NodesSeen:
    """The living nodes. Each is asked once for the volumes that lie on it."""

    def __init__(self, config: Config) -> None:
        groups = config.shard_groups.items()
        self._disks = {(name, group.shard.disk_dir) for name, group in groups if group.shard.disk_bytes}
        self._cluster = config.name
        self._volumes: dict[str, frozenset[ShardId]] = {}

    def read(self) -> list[Node]:
        """Returns the nodes as they are now. A node that does not answer is left out until it does."""
        free = available_resources_per_node()
        leaving = leaving_nodes(self._cluster)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in free]
        self._ask(node["NodeID"] for node in nodes if node["NodeID"] not in self._volumes)
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                free[node["NodeID"]],
                node["Resources"],
                dict(node.get("Labels") or {}),
                self._volumes[node["NodeID"]],
                leaving=node["NodeID"] in leaving,
            )
            for node in nodes
            if node["NodeID"] in self._volumes
        ]

    def add_volume(self, node: str, shard: ShardId) -> None:
        """Notes that a shard was started that makes its volume there."""
        self._volumes[node] = self._volumes.get(node, frozenset()) | {shard}

    def _ask(self, nodes: Iterable[str]) -> None:
        if not self._disks:
            self._volumes.update(dict.fromkeys(nodes, frozenset()))
            return
        asked = {node: _volumes_on(node, self._cluster, self._disks) for node in nodes}
        for node, answer in asked.items():
            try:
                self._volumes[node] = frozenset(ray.get(answer, timeout=_ANSWER_S))
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                ray.cancel(answer, force=True)


def _volumes_on(node: str, cluster: str, disks: Collection[tuple[str, str]]) -> Any:
    """Returns a reference to the shards whose volumes lie on this node."""

    def found() -> list[ShardId]:
        return [shard for group, disk_dir in disks for shard in volumes_in(disk_dir, cluster, group)]

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(found).options(num_cpus=0, scheduling_strategy=where, max_retries=0).remote()


_LOOK_S = 1.0


@contextlib.contextmanager
def ends_with_ray(
    runs: Callable[[], bool], end: Callable[[], object], why: str, *, patience_s: float = 10.0
) -> Iterator[None]:
    """Within the block, if Ray does not run for `patience_s` at a stretch, `runs` returning False: prints `why`, calls
    `end`, and ends the process with status 1. Raises KVClusterError if there is no room for a thread."""
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(runs, end, why, patience_s, over), name="kvcluster-ray-watch", daemon=True
    )
    start_thread(thread)
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def ends_on_signals(end: Callable[[], object], *, patience_s: float = 10.0) -> Iterator[None]:
    """Within the block, which must be entered in the main thread: if SIGTERM or SIGINT has not ended the block within
    `patience_s`, calls `end`, and ends the process with status 0. A handler in Python runs only when the main thread's
    call of Ray has returned. Raises KVClusterError if there is no room for a thread."""
    over = threading.Event()
    received, wake = socket.socketpair()
    wake.setblocking(False)

    def watch() -> None:
        while (number := received.recv(1)) and number[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        if number and not over.wait(patience_s):
            end()
            os._exit(0)

    with received, wake:
        thread = threading.Thread(target=watch, name="kvcluster-signals", daemon=True)
        start_thread(thread)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            wake.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            thread.join()


class Absence:
    """How long Ray has been away, as of looks at it. `patience_s`: how long it may be."""

    def __init__(self, patience_s: float, now_s: float) -> None:
        self._patience_s = patience_s
        self._ran_s = now_s

    def too_long(self, *, runs: bool, now_s: float) -> bool:
        """Takes what a look has found. Returns whether Ray has been away for longer than it may."""
        if runs:
            self._ran_s = now_s
        return now_s - self._ran_s > self._patience_s


def _watch(
    runs: Callable[[], bool], end: Callable[[], object], why: str, patience_s: float, over: threading.Event
) -> None:
    absence = Absence(patience_s, time.monotonic())
    while not over.wait(_LOOK_S):
        if absence.too_long(runs=runs(), now_s=time.monotonic()):
            sys.stderr.write(f"kvcluster: {why}\n")
            sys.stderr.flush()
            end()
            os._exit(1)


_NATIVE = re.compile(r"\[[^\]]+ [ECF] \d+ \d+\] \([\w-]+\) (?P<text>.*)")
"""An error of the processes in C++: `[date time,ms E pid tid] (raylet) file.cc:1: ...`; or C for what ended it, F."""
_PYTHON = re.compile(r"(?P<text>[\w.]+(?:Error|Exception): .*)")
"""The last line of a traceback of a process in Python."""
_LINES, _LINE_CHARS, _FILE_BYTES = 6, 300, 1 << 20


def errors_in_logs(folder: Path) -> str:
    """Returns the last errors that the processes of the Ray with this folder have logged, one a line with the name of
    the log, each once; "" if there are none. The folder is `temp_dir` of Ray."""
    found: dict[str, str] = {}  # by text: a process writes an error into two of its logs
    for path in sorted((folder / "session_latest" / "logs").glob("*.*")):
        for text in _errors(path):
            found.setdefault(text, path.stem)
    return "\n".join(f"{log}: {text}" for text, log in list(found.items())[-_LINES:])


def with_errors(problem: str, folder: Path) -> str:
    """Returns the description of a problem, followed by the errors in the logs of the Ray with this folder, if any."""
    errors = errors_in_logs(folder)
    return f"{problem}; in its logs:\n{errors}" if errors else problem


def _errors(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            lines = file.read(_FILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:  # a link to a log that was removed
        return
    for line in lines:
        if match := _NATIVE.match(line) or _PYTHON.match(line):
            yield match["text"].strip()[:_LINE_CHARS]
