"""The processes of a cluster of several hosts that must go on, whatever happens to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.actors.processes import title
from tests.hosts.hosts import Cluster

GCS, RAYLET, COORDINATOR, SHARD = "/gcs_server", "/raylet", "ray::CoordinatorActor", "ray::ShardActor"


def titled(pids: Iterable[int], kind: str) -> list[int]:
    """Those of these processes that are of that kind."""
    return [pid for pid in pids if kind in title(pid).partition("\0")[0]]


def processes(cluster: Cluster, hosts: Sequence[str]) -> dict[str, list[int]]:
    """Ray's processes of these hosts, and the cluster's own, but for Ray's control store."""
    kinds = (RAYLET, COORDINATOR, SHARD)
    return {host: [pid for kind in kinds for pid in titled(cluster.network.pids(host), kind)] for host in hosts}
