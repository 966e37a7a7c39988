"""What Ray knows of a cluster: its nodes with what is free on them, and the actors of a namespace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    each actor that exists; that of a shard which is gone is found by its address."""
    by_host = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    hosts = {shard: address.rpartition(":")[0].strip("[]") for shard, address in shards.items()}
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
