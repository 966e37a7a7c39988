"""Brings a cluster to its configuration, again and again: looks at Ray, lets the scheduler decide (core/
shard_scheduler.py), and starts, drains and ends actors.

Every pass is complete by itself, so that it does not matter which process makes it, how often, and what happened since
the last. Ray itself starts an actor again whose process died. What Ray does not do is done here: a shard that was
drained or whose node is lost is replaced, a new node gets its shards, and shards that are too many are drained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvcluster.actors import settings
from kvcluster.actors.coordinator import CoordinatorActor
from kvcluster.actors.ray_node import without_colours
from kvcluster.actors.ray_view import HEAD_RESOURCE, ActorSeen, NodesSeen, nodes_of, seen_actors
from kvcluster.actors.shard import ShardActor
from kvcluster.config import Config, GroupConfig
from kvcluster.core.ids import ShardId
from kvcluster.core.shard_scheduler import RunningShard, Schedule, Start, expected, pool_bytes, schedule
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.malloc_env import ENVIRONMENT

COORDINATOR_NAME = "coordinator"
_RESTARTS = -1
_START_S = 60.0
_ASK_S = 10.0


class Reconciler:
    """Makes the passes for one cluster. `detached`: its actors outlive this process, on the nodes that offer what their
    groups claim, and the coordinator runs on Ray's head; otherwise they end with this process, whose node has the
    coordinator, and claim memory only."""

    def __init__(self, config: Config, *, detached: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._detached = detached
        self._clock = clock
        self._absent_since: dict[ShardId, float] = {}
        self._actors: dict[str, Any] = {}  # an actor that is not detached ends when nothing holds its handle
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Takes another configuration from the next pass on."""
        groups = config.shard_groups
        if not self._detached:
            groups = {name: replace(group, resources={}) for name, group in groups.items()}
        self._config = config
        self._groups: Mapping[str, GroupConfig] = groups
        self._nodes = NodesSeen(config)

    @property
    def coordinator(self) -> Any:
        """The coordinator's handle, after the first pass."""
        return self._actors[COORDINATOR_NAME]

    @property
    def shards(self) -> tuple[Any, ...]:
        """Handles of the shards that exist, in the order of their names."""
        return tuple(actor for name, actor in sorted(self._actors.items()) if name != COORDINATOR_NAME)

    def step(self) -> Schedule:
        """Makes one pass and returns what was done and is waited for. Raises ConfigError or KVClusterError if an actor
        did not start."""
        seen = self.find_actors()
        if COORDINATOR_NAME not in seen:
            self._start_coordinator()
        draining = self._draining()
        self._record_leaving(seen)
        nodes = self._nodes.read()
        running = [
            RunningShard(ShardId(name), each.node, name in draining)
            for name, each in seen.items()
            if name != COORDINATOR_NAME
        ]
        absent, given_up = self._absent({shard: node.name for node in nodes for shard in node.volumes})
        plan = schedule(self._groups, nodes, running, absent, given_up)
        self._carry_out(plan, seen)
        shards = expected(plan, running, absent)
        # For the status, so it is not waited for.
        self.coordinator.scheduled.remote(list(plan.waiting), list(plan.orphans), sorted(shards))
        return plan

    def find_actors(self) -> dict[str, ActorSeen]:
        """Finds the actors that exist, and returns them by name."""
        seen = seen_actors(self._config.name)
        self._actors = {name: each.handle for name, each in seen.items()}
        return seen

    def wait_until_up(self) -> None:
        """Waits until every shard that exists is up. Raises KVClusterError after a minute."""
        give_up = self._clock() + _START_S
        while call(self.coordinator.shards_up) < len(self.shards):
            if self._clock() > give_up:
                raise KVClusterError(
                    f"not all {len(self.shards)} shards reported to the coordinator within {_START_S:.0f} s; "
                    "`kvcluster logs` prints theirs"
                )
            time.sleep(0.02)

    def kill_all(self) -> None:
        """Ends all actors for good, and removes what was published."""
        for actor in (*self.shards, self._actors.get(COORDINATOR_NAME)):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        settings.forget(self._config.name)

    # ------------------------------------------------------------------------------------------- the pass

    def _carry_out(self, plan: Schedule, seen: Mapping[str, ActorSeen]) -> None:
        for shard in plan.kill:
            ray.kill(seen[shard].handle, no_restart=True)
            self._actors.pop(shard, None)
        for start in plan.start:
            self._start_shard(start)
        for start in plan.start:
            call(self._actors[start.shard].address)
            if start.bound:
                self._nodes.add_volume(start.node, start.shard)
        for shard in plan.drain:  # last, so that replacements take what is drained
            call(partial(self.coordinator.drain.remote, shard), _ASK_S)

    def _draining(self) -> frozenset[str]:
        return frozenset(call(self.coordinator.draining, _ASK_S))

    def _record_leaving(self, seen: Mapping[str, ActorSeen]) -> None:
        """Records in Ray's store which nodes are to be taken down, as operators have reported to the coordinator
        (`kvcluster drain --local`). It is asked after the pass has found which shards exist and drain, so that a shard
        that has ended by then is among the answers."""
        leaving: dict[str, str] = call(self.coordinator.leaving, _ASK_S)
        if leaving:
            for node in nodes_of(leaving, {name: each.node for name, each in seen.items()}):
                settings.say_leaving(self._config.name, node)
            call(partial(self.coordinator.leaving_heard.remote, list(leaving)), _ASK_S)

    def _absent(self, lies: Mapping[ShardId, str]) -> tuple[dict[ShardId, str], list[ShardId]]:
        """Returns the volumes whose nodes are away: those that are still waited for, with the names of the nodes, and
        those that are not."""
        known = settings.remembered_homes(self._config.name)
        now_known = known | {str(shard): node for shard, node in lies.items()}
        if now_known != known:
            known = now_known
            settings.remember_homes(self._config.name, known)
        now = self._clock()
        absent: dict[ShardId, str] = {}
        given_up: list[ShardId] = []
        for name, node in known.items():
            shard = ShardId(name)
            if shard in lies:
                self._absent_since.pop(shard, None)
            elif now - self._absent_since.setdefault(shard, now) < self._config.volume_wait_ms / 1e3:
                absent[shard] = node
            else:
                given_up.append(shard)
        return absent, given_up

    # -------------------------------------------------------------------------------------------- actors

    def _start_coordinator(self) -> None:
        if self._detached:
            where: dict[str, Any] = {"resources": {HEAD_RESOURCE: 0.001}}
        else:
            here = ray.get_runtime_context().get_node_id()
            where = {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
        self._actors[COORDINATOR_NAME] = self._actor(CoordinatorActor, COORDINATOR_NAME, where, self._config.name)
        call(self.coordinator.address)

    def _start_shard(self, start: Start) -> None:
        group = self._groups[start.group]
        where: dict[str, Any] = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(start.node, soft=not start.bound),
            "memory": pool_bytes(group),
            "num_gpus": group.shard.num_gpus,
            "resources": dict(group.resources),
        }
        name = str(start.shard)
        self._actors[name] = self._actor(ShardActor, name, where, self._config.name, name, start.group)

    def _actor(self, kind: type, name: str, where: dict[str, Any], *arguments: Any) -> Any:
        options: dict[str, Any] = {"name": name, "namespace": self._config.name}
        options |= {"num_cpus": 0, "max_restarts": _RESTARTS, **where}
        if not ENVIRONMENT.items() <= os.environ.items():  # a Ray of our own passes it to its actors
            options["runtime_env"] = {"env_vars": ENVIRONMENT}
        if self._detached:
            options["lifetime"] = "detached"
        return ray.remote(kind).options(**options).remote(*arguments)


def call(method: Any, timeout_s: float = _START_S) -> Any:
    """Calls a method of an actor, or a function that does, and returns the result. Raises ConfigError with an actor's
    error about its settings, and KVClusterError if it did not start or does not answer."""
    try:
        return ray.get(method.remote() if hasattr(method, "remote") else method(), timeout=timeout_s)
    except ray.exceptions.RayActorError as error:
        said = _config_error(str(error))
        if said:
            raise ConfigError(said) from None
        raise KVClusterError(f"an actor of the cluster did not start: {_last_line(str(error))}") from None
    except ray.exceptions.GetTimeoutError:
        raise KVClusterError(
            f"an actor of the cluster did not answer within {timeout_s:.0f} s; `kvcluster logs` prints its log"
        ) from None


def _last_line(text: str) -> str:
    """Returns the last line of an error text of Ray, which is the error itself: tracebacks in colours precede it."""
    lines = [line.strip() for line in without_colours(text).splitlines()]
    return next((line for line in reversed(lines) if line), "Ray gives no reason")


def _config_error(text: str) -> str:
    """Returns the message of the ConfigError that ended a constructor; "" if it was none."""
    marker = f"{ConfigError.__module__}.{ConfigError.__name__}: "
    _, found, rest = text.partition(marker)
    return rest.strip().partition("\n")[0] if found else ""
