"""`kvcluster join`: a node of a cluster of several hosts, for as long as the process runs.

It starts Ray's processes on this machine and starts them again when they end, because the head was lost, this node was
cut off, or a process died. When it is asked to end it notifies the reconciler, which drains the shards of this node
beside their replacements, and waits for that as long as it may.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcluster.actors.foreground import Say, stopped_by_signals
from kvcluster.actors.node_memory import bytes_for_pools
from kvcluster.actors.own_ray import NodeNotes, check_head, ray_of_nodes
from kvcluster.actors.ray_node import RayNode, fixed_ports, following_logs, running_node, session_of
from kvcluster.actors.stopping import is_shard, longest_save_ms
from kvcluster.config import Config, as_values, size_text
from kvcluster.errors import ConfigError, KVClusterError, Unreachable
from kvcluster.runtime.private_files import RAY, derived_key

_FIRST_S, _LONGEST_S = 1.0, 15.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Joining:
    """How a node joins. `head`: HOST:PORT of Ray's head. `node_ip`: this machine's address among the nodes; "" for the
    one by which it reaches the head. `offers`: its custom resources; `labels`: its labels. `memory`: bytes for the
    pools of its shards; 0 for what the machine or container has. `leave_s`: how long its shards may take to drain.
    `config_s`: how long to wait for the head to run the same configuration."""

    head: str
    node_ip: str = ""
    offers: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0
    leave_s: float = 20.0
    config_s: float = 0.0


def join(config: Config, joining: Joining, say: Say) -> None:
    """Runs the node until a signal. Raises ConfigError if the head refuses the secret or is no Ray, at the first
    try."""
    token = derived_key(config.server.secret_file, RAY)
    with stopped_by_signals() as stop, ray_of_nodes(config):
        pause_s, first = _FIRST_S, True
        while not stop.is_set():
            try:
                check_head(joining.head, token)
                if joining.config_s:
                    notes = NodeNotes(joining.head, config.name)
                    wait_for_config(config, notes.published, joining.config_s, say, stop)
                _run_node(config, joining, say, stop)
                pause_s, first = _FIRST_S, False
            except KVClusterError as error:
                if first and isinstance(error, ConfigError):
                    raise
                say(f"{error}. Next try in {pause_s:g} s")
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)


def _run_node(config: Config, joining: Joining, say: Say, stop: threading.Event) -> None:
    """Runs Ray's processes of this node until they end, or until `stop` is set and the node has left."""
    node_ip = joining.node_ip or address_towards(joining.head)
    shards = max(1, int(sum(joining.offers.values())))
    memory = joining.memory or bytes_for_pools(shards=shards)
    where = [
        f"--address={joining.head}",
        *fixed_ports(config.ray, node_ip),
        *_labels(joining),
    ]
    gpus = config.gpus_of_twins
    with running_node(node_ip, where, memory, joining.offers, longest_save_ms(config), gpus) as node:
        say(f"joined {joining.head} as {node_ip}, with {size_text(memory, 4)} for pools")
        with following_logs(node, config.log):
            while node.runs() and not stop.wait(_LOOK_S):
                pass
            if stop.is_set() and node.runs():
                _leave(config, joining, node_ip, node, say)
            elif not stop.is_set():
                say(f"Ray has ended on this node: {node.last_words()}")


def _leave(config: Config, joining: Joining, node_ip: str, node: RayNode, say: Say) -> None:
    """Has the shards of this node drained, and waits until they have ended, but no longer than the node may take."""
    give_up = time.monotonic() + joining.leave_s
    try:
        notes = NodeNotes(joining.head, config.name)
        me = notes.node_id(node_ip)
        notes.say_leaving(me)
    except Exception as error:  # whatever Ray's client raises: the node ends in any case
        say(f"leaving without a drain, because Ray's head does not answer: {error}")
        return
    say(f"leaving: the shards of this node drain, for {joining.leave_s:g} s at most")
    while node.runs() and shards_here(node.pid) and time.monotonic() < give_up:
        time.sleep(_LOOK_S)
    left = shards_here(node.pid)
    say(f"left with {left} shard(s) that had not drained" if left else "left: every shard of this node has drained")
    with contextlib.suppress(Exception):
        notes.forget(me)


def shards_here(session: int) -> int:
    """Returns how many processes of shards run in this session."""
    return sum(map(is_shard, session_of(session)))


def address_towards(head: str) -> str:
    """Returns this machine's address on the way to HOST:PORT. Raises ConfigError if there is no way."""
    host, _, port = head.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing; it only selects the interface
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise Unreachable(f"{head} cannot be reached from this machine: {error.strerror or error}") from None


def _labels(joining: Joining) -> list[str]:
    labels = ",".join(f"{name}={value}" for name, value in joining.labels.items())
    return [f"--labels={labels}"] if labels else []


_ASK_S = 1.0


def wait_for_config(
    config: Config,
    published: Callable[[], str | None],
    wait_s: float,
    say: Callable[[str], object],
    stop: threading.Event,
) -> bool:
    """Waits until the head runs the configuration that a joining node was given: until `published` returns it as JSON,
    for `wait_s` at most or until `stop` is set. Returns whether it has. If `published` raises, as where no head
    answers, it is called again.

    Files may reach hosts at different times, as those of a ConfigMap reach the pods that mount it. So a node that
    starts with a changed configuration may find a head that has not read it yet, and its shards would start with the
    old settings.
    """
    wanted, give_up, waits = as_values(config), time.monotonic() + wait_s, False
    while not stop.is_set():
        try:
            text = published()
        except Exception:  # whatever Ray's client raises
            text = None
        if text is not None and json.loads(text) == wanted:
            return True
        if time.monotonic() >= give_up:
            break
        if not waits:
            say(f"waiting until the head runs this configuration, for {wait_s:g} s at most")
            waits = True
        stop.wait(_ASK_S)
    if waits:
        say("the head runs another configuration; joining all the same, and shards start with what the head has")
    return False
