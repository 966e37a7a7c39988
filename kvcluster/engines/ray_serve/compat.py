"""What the router must know of Ray's inside, for the releases of the extra `ray-serve` (written against 2.60).

Public, though marked as alpha, is what `ray.serve.request_router` names: the base class, its mixins, requests and
replicas. Private are the place of Serve's own router, and how many requests a router believes that each replica has.
Nothing else of this package looks inside Ray; `Any` lives here.
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
    """The base class that Serve's own routers share, without first come, first served: there a replica that was found
    for one request may be given to an older one, which has its prefix elsewhere."""

    async def power_of_two(self, candidates: list[Replica], request: PendingRequest | None) -> list[list[Replica]]:
        """The ranks that Serve would choose by itself."""
        ranks: list[list[Replica]] = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidates, request)
        return ranks

    def ongoing(self, replica: Replica) -> int | None:
        """Requests under way at a replica as far as this router knows without asking."""
        known: int | None = self.replica_queue_len_cache.get(replica.replica_id)
        return known


def host_names() -> dict[str, str]:
    """The host name of each living node, by its id. Asks Ray's head, and so may take its time."""
    return {str(node["NodeID"]): str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}


class Counters:
    """Counts for whoever watches a deployment, among Serve's own metrics (`ray_kvcluster_router_...`)."""

    def __init__(self, deployment: str, application: str) -> None:
        tags = {"deployment": deployment, "application": application}
        self._outcomes = self._counter("requests", "Requests by what was known of their prefix.", tags, ("outcome",))
        self._waited = self._counter("waited_ms", "How long requests were kept to find out.", tags)
        self._sent = self._counter("sent", "Preferred requests by where they went.", tags, ("to",))

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
