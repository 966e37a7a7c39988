"""What the router must know of Ray's internals, for the releases of the extra `ray-serve` (written against 2.60).

The names in `ray.serve.request_router` are public, though marked as alpha: the base class, its mixins, requests and
replicas. Two things are private: the module of Serve's own router, and the router's cache of each replica's queue
length. No other module of this package uses Ray's internals; `Any` lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import LocalityMixin, MultiplexMixin, PendingRequest, ReplicaID, RequestRouter
from ray.serve.request_router import RunningReplica as Replica
from ray.util.metrics import Counter

__all__ = ["Counters", "PendingRequest", "Replica", "ReplicaID", "Router", "host_names"]


class Router(LocalityMixin, MultiplexMixin, RequestRouter):
    """The base class that Serve's own routers share, but without its first-come-first-served mixin: that mixin may hand
    a replica that was chosen for one request to an older request, whose prefix is on another host."""

    async def power_of_two(self, candidates: list[Replica], request: PendingRequest | None) -> list[list[Replica]]:
        """Returns the ranks that Serve would choose by itself."""
        ranks: list[list[Replica]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidates, request)
        return ranks

    def ongoing(self, replica: Replica) -> int | None:
        """Returns the number of ongoing requests of a replica from this router's cache; None if it is not cached."""
        known: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return known


def host_names() -> dict[str, str]:
    """Returns the host name of each live node by node id. Blocks while it asks Ray's head node."""
    return {str(node["NodeID"]): str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}


class Counters:
    """Counts requests, in metrics beside Serve's own (`ray_kvcluster_router_...`)."""

    def __init__(self, deployment: str, application: str) -> None:
        tags = {"deployment": deployment, "application": application}
        description = "Requests by the outcome of locating their prefix."
        self._outcomes = self._counter("requests", description, tags, ("outcome",))
        self._waited = self._counter("waited_ms", "Milliseconds that requests waited for that.", tags)
        self._sent = self._counter("sent", "Requests with preferred replicas, by where they went.", tags, ("to",))

    def asked(self, outcome: str, waited_ns: int) -> None:
        self._outcomes.inc(1, {"outcome": outcome})
        if waited_ns:
            self._waited.inc(waited_ns / 1e6)

    def sent(self, to: str) -> None:
        self._sent.inc(1, {"to": to})

    @staticmethod
    def _counter(name: str, description: str, tags: dict[str, str], more: Sequence[str] = ()) -> Any:
        counter = Counter(f"kvcluster_router_{name}", description=description, tag_keys=(*tags, *more))
        counter.set_default_tags(tags)
        return counter
