"""`kvcluster up --foreground` and `kvcluster up --address`: a process that keeps a cluster as it is configured.

It makes passes of the reconciler until it is asked to end, and prints what the cluster waits for whenever that changes.
It reads its configuration file again when that changes: a valid one is published, so that processes that start from
then on run it. The process keeps no state: the next one continues where it ended. While Ray's head does not answer, as
without the Redis that keeps its state, it makes no pass: the coordinator and the shards go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ray

from kvcluster.actors import background, cluster, settings
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.node_memory import bytes_for_pools
from kvcluster.actors.own_ray import answers, asks_for_a_token, own_ray, ray_of_nodes, redis_password
from kvcluster.actors.ray_node import HEAD_OPTIONS, RayNode, fixed_ports, following_logs, running_node
from kvcluster.actors.ray_view import ends_on_signals, ends_with_ray
from kvcluster.actors.reconciler import Reconciler, call
from kvcluster.actors.stopping import longest_save_ms
from kvcluster.config import Config, differences
from kvcluster.core.shard_scheduler import Schedule
from kvcluster.errors import ConfigError, KVClusterError, Unreachable
from kvcluster.runtime.auth import read_token_file
from kvcluster.transport.listener import bound_socket

Say = Callable[[str], object]
"""Prints a line for the operator."""

UNAUTHENTICATED, TENANTS = "unauthenticated-ray", "several-tenants"
"""What `--allow` names: a Ray that asks for no token, and several tenants on a Ray that others use, too."""

_PASS_S = 2.0
_AWAY_S = 60.0
"""How long another's Ray may be away: its head may be started again."""
_ENDED = "Ray has ended on this node; start this command again"
_AWAY = "Ray's head does not answer; until it does, what runs goes on, and nothing is started, drained or ended"


class ConfigSource(NamedTuple):
    """Where the configuration comes from. `read` returns it and raises ConfigError; `path`: the file, "" for none."""

    read: Callable[[], Config]
    path: str = ""

    def stamp(self) -> tuple[int, int, int]:
        """Returns what changes when the file does."""
        try:
            found = os.stat(self.path)
        except OSError:
            return 0, 0, 0
        return found.st_ino, found.st_size, found.st_mtime_ns


def run_local(source: ConfigSource, say: Say) -> None:
    """Runs a cluster on a Ray of this machine alone until a signal. Raises ConfigError, or KVClusterError if Ray
    ends."""
    config = source.read()
    port = background.fixed_port(config)
    with background.alone():
        known = background.find(port)
        if known is not None:
            raise ConfigError(f"a cluster runs at {known.address} already; `kvcluster down --port {port}` ends it")
        background.check(config)
    say(f"starting Ray, a coordinator and {_count(config)}: usually ten seconds")
    state, given = background.state_dir(config), source
    source = ConfigSource(lambda: with_state_dir(given.read(), state), given.path)
    with (
        own_ray(),
        background.local_head(config) as head,
        _watched(head.node, config),
        following_logs(head.node, config.log),
        stopped_by_signals() as stop,
    ):
        running = cluster.start(source.read(), detached=True)
        background.record(config, head, running)
        reconciler = Reconciler(source.read(), detached=True)
        _reconcile(reconciler, config, source, say, stop, head.node.runs, head.address)


def run_head(source: ConfigSource, node_ip: str, offers: Mapping[str, float], say: Say) -> None:
    """Runs the head of a cluster of several nodes until a signal, and keeps the cluster as configured. `node_ip`: the
    address of this machine that the other nodes reach. Raises ConfigError, or KVClusterError if Ray ends."""
    config = source.read()
    with (
        ray_of_nodes(config),
        _head(config, node_ip, offers) as head,
        _watched(head, config),
        following_logs(head, config.log),
    ):
        address = f"{node_ip}:{config.ray.port}"
        with (
            ends_on_signals(lambda: head.end(longest_save_ms(config))),
            background.connected(address, node_ip),
            stopped_by_signals() as stop,
        ):
            say(f"Ray's head listens at {address}; on each other node: kvcluster join {address} --config FILE")
            _adopt(config, say)
            _reconcile(Reconciler(config, detached=True), config, source, say, stop, head.runs, address)


def run_on(address: str, source: ConfigSource, allowed: frozenset[str], say: Say, *, once: bool) -> bool:
    """Keeps a cluster on the Ray at that address until a signal, or, if `once`, starts it and returns. Returns False if
    it is up but degraded. Raises ConfigError if that Ray or the configuration is not what the operator has allowed."""
    config = source.read()
    check_trust(config, address, allowed)
    lost = f"the Ray at {address} has not answered for {_AWAY_S:.0f} s; start this command again"
    with (
        ends_with_ray(lambda: answers(address), lambda: None, lost, patience_s=_AWAY_S),
        background.connected(address),
        stopped_by_signals() as stop,
    ):
        running = settings.published(config.name)
        if once and running is not None and (differ := differences(running, config)):
            raise ConfigError(
                f"cluster {config.name!r} runs there with other settings: {'; '.join(differ)}. "
                "`kvcluster up --foreground` follows a changed configuration"
            )
        _adopt(config, say)
        reconciler = Reconciler(config, detached=True)
        if once:
            try:
                cluster.settle(reconciler)
            except BaseException:
                if running is None:
                    reconciler.kill_all()
                raise
            return _say_up(reconciler, _count(config), say)
        _reconcile(reconciler, config, source, say, stop, lambda: True, address)
        return True


def end_on(address: str, name: str) -> bool:
    """Ends the cluster of that name on the Ray at that address. Returns False if there is none."""
    with background.connected(address):
        config = settings.published(name)
        if config is None:
            return False
        reconciler = Reconciler(config, detached=True)
        reconciler.find_actors()
        reconciler.kill_all()
        return True


def check_trust(config: Config, address: str, allowed: frozenset[str]) -> None:
    """Raises ConfigError unless the operator has allowed what this Ray cannot keep apart: anyone who reaches a Ray can
    run code there as any shard."""
    if not config.server.secret_file:
        raise ConfigError(
            "a cluster on a Ray that is there already needs server.secret_file: without it, its secret would lie in "
            "Ray's store. `kvcluster token --secret` makes one"
        )
    if not asks_for_a_token(address) and UNAUTHENTICATED not in allowed:
        raise ConfigError(
            f"the Ray at {address} asks for no token: whoever reaches it can run code there as the cluster. Start Ray "
            f"with RAY_AUTH_MODE=token, or give --allow {UNAUTHENTICATED}"
        )
    token_file = config.server.token_file
    if token_file and read_token_file(token_file).tenant_count > 1 and TENANTS not in allowed:
        raise ConfigError(
            f"{token_file} names several tenants, and other jobs of this Ray could read the pages of all of them. Give "
            f"the cluster a Ray of its own (`kvcluster up --foreground`), or give --allow {TENANTS}"
        )


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set within the block. To be entered after this process has connected to Ray,
    which then takes these signals for itself."""
    stop = threading.Event()
    before = {sig: signal.signal(sig, lambda *_: stop.set()) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@contextlib.contextmanager
def _head(config: Config, node_ip: str, offers: Mapping[str, float]) -> Iterator[RayNode]:
    """Starts the head of a Ray of several nodes, and ends its processes on this machine with the block."""
    bound_socket(node_ip, config.ray.port, "ray.port").close()
    where = [*HEAD_OPTIONS, f"--port={config.ray.port}"]
    where += fixed_ports(config.ray, node_ip)
    if password := redis_password(config):
        where.append(f"--redis-password={password}")  # Ray itself passes it on like this
    shards = int(sum(offers.values()))
    memory = bytes_for_pools(shards=shards) if shards else 0
    with running_node(node_ip, where, memory, offers, longest_save_ms(config), config.gpus_of_twins) as node:
        yield node


def _watched(head: RayNode, config: Config) -> contextlib.AbstractContextManager[None]:
    """Ends this process if the head ends, even while a call of Ray does not return."""
    return ends_with_ray(head.runs, lambda: head.end(longest_save_ms(config)), _ENDED)


def _adopt(config: Config, say: Say) -> None:
    """Publishes the configuration, and prints what it changes of one that was published before."""
    before = settings.published(config.name)
    if before is not None and (differ := differences(before, config)):
        say(
            f"the configuration has changed: {'; '.join(differ)}. Processes that run keep theirs until they start again"
        )
    settings.publish(config)


def _reconcile(
    reconciler: Reconciler,
    config: Config,
    source: ConfigSource,
    say: Say,
    stop: threading.Event,
    runs: Callable[[], bool],
    address: str,
) -> None:
    """Makes passes until `stop` is set. Raises KVClusterError when Ray does not run any more."""
    said, stamp, was_up = "", source.stamp(), False
    while not stop.is_set():
        if not runs():
            raise KVClusterError(_ENDED)
        try:
            if not answers(address):  # a call of Ray would wait for it, and take no signal
                raise Unreachable(_AWAY)
            if (changed := source.stamp()) != stamp:
                config = _read_again(source, config, reconciler, say)
                stamp = changed
            plan = reconciler.step()
            line = _state(plan)
            if not line and not was_up:
                reconciler.wait_until_up()
                was_up = True
                _say_up(reconciler, f"{len(reconciler.shards)} shard(s)", say)
        except KVClusterError as error:
            line = str(error)
        except ray.exceptions.RayError as error:  # the head has ended during the pass
            line = f"Ray does not answer: {error}"
        if line != said:
            say(line or "as configured")
            said = line
        stop.wait(_PASS_S)


def _say_up(reconciler: Reconciler, shards: str, say: Say) -> bool:
    """Says that the cluster is up, and which shards are without one of their tiers. Returns whether none is."""
    say(f"up at {call(reconciler.coordinator.address)}: {shards}")
    trouble = cluster.trouble_of(reconciler.coordinator)
    for shard, why in trouble.items():
        say(f"{shard} is degraded: {why}")
    return not trouble


def _read_again(source: ConfigSource, config: Config, reconciler: Reconciler, say: Say) -> Config:
    """Follows a changed file. Returns what holds from now on; an invalid file changes nothing."""
    try:
        changed = source.read()
        if changed.name != config.name:
            raise ConfigError(f"a running cluster cannot be renamed from {config.name!r} to {changed.name!r}")
    except ConfigError as error:
        say(f"the changed configuration is not used: {error}")
        return config
    _adopt(changed, say)
    reconciler.reconfigure(changed)
    return changed


def _state(plan: Schedule) -> str:
    """Returns a line for what was done and is waited for; "" if there is nothing to say."""
    parts = [f"starting {', '.join(start.shard for start in plan.start)}"] if plan.start else []
    parts += [f"draining {', '.join(plan.drain)}"] if plan.drain else []
    parts += list(plan.waiting)
    parts += [f"the volume of {shard} on node {node} belongs to no configured shard" for shard, node in plan.orphans]
    return "; ".join(parts)


def _count(config: Config) -> str:
    shards = ", ".join(
        f"{group.shards} of group {name}" + (" a node" if group.per_node else "")
        for name, group in config.groups.items()
    )
    return f"{config.shards} shard(s)" if not config.groups else f"shards: {shards}"
