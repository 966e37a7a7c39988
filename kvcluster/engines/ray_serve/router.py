"""A request router for Ray Serve that prefers replicas on the host that holds a prompt's prefix.

Serve asks the router for ranks of replicas, probes the replicas of one rank for free capacity, and goes on to the next
rank if there is none. So the preferred replicas are a rank before those of power of two choices, and a request falls
back to the latter if a preferred replica is full or has ended, if the coordinator does not answer, if the request is
not understood, or if this module has a bug. `prefix_locator` asks the coordinator and bounds the wait.

Serve may ask for the ranks of one request several times until a replica accepts it; the router keeps the location for
that. Serve pickles this module by value into the routing processes, so nothing in it is changed after import.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import kvcluster.engines.ray_serve.prompts as prompts
import kvcluster.engines.ray_serve.replica_choice as policy
import kvcluster.engines.ray_serve.settings as settings
from kvcluster.engines.ray_serve.compat import Counters, PendingRequest, Replica, ReplicaID, Router, host_names
from kvcluster.engines.ray_serve.prefix_locator import Hosts, LocateOutcome, PrefixLocation, PrefixLocator

log = logging.getLogger("ray.serve")
"""Serve's own logger, so that messages appear in the deployment's log."""

_REMEMBERED = 4_096
"""Requests that wait for a replica, or were cancelled meanwhile: more than a router keeps waiting at once."""


@dataclass(slots=True)
class _Asked:
    """State of one request. `preferred` are the replicas preferred last, by `ReplicaID.unique_id`."""

    answer: PrefixLocation
    preferred: tuple[str, ...] = ()


class KVClusterRouter(Router):
    """The router that `request_router_config` names (docs/ray-serve.md). Its settings are RouterSettings."""

    def initialize_state(self, **given: Any) -> None:
        """Serve calls this once, on its event loop. Raises ConfigError for invalid settings."""
        self._settings = settings.parse_settings(given)
        self._where = PrefixLocator(self._settings, log.warning)
        self._hosts = Hosts(host_names, log.warning)
        self._counters = Counters(self._deployment_id.name, self._deployment_id.app_name)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._mistaken = False
        if self._settings.mode != "off":
            self._where.start()

    async def choose_replicas(
        self, candidate_replicas: list[Replica], pending_request: PendingRequest | None = None
    ) -> list[list[Replica]]:
        """Serve's interface: returns the preferred replicas, if any, before the ranks of power of two choices."""
        first: list[Replica] = []
        mode = self._settings.mode
        if pending_request is not None and mode != "off":
            try:
                first = await self._preferred(candidate_replicas, pending_request)
            except Exception as error:  # the request is routed as without this router
                self._counters.asked("mistake", 0)
                if not self._mistaken:
                    self._mistaken = True
                    log.warning("routing without prefix locations: %s: %s", type(error).__name__, error)
        ranks = await self.power_of_two(candidate_replicas, pending_request)
        return [first, *ranks] if first and mode == "on" else ranks

    def update_replicas(self, replicas: list[Replica]) -> None:
        """Serve's interface: `replicas` are all that exist now. Looks up their hosts before a request needs them."""
        super().update_replicas(replicas)
        for one in replicas:
            self._hosts.of(one.node_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Serve's interface: a replica has accepted the request."""
        asked = self._asked.pop(pending_request.metadata.internal_request_id, None)
        if asked is not None and asked.preferred:
            self._counters.sent("preferred" if replica_id.unique_id in asked.preferred else "another")

    async def _preferred(self, replicas: list[Replica], request: PendingRequest) -> list[Replica]:
        """Returns the replicas on the host of the prompt's prefix; [] if that is not known or no host holds it."""
        key = request.metadata.internal_request_id
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(await self._find(request))
            while len(self._asked) > _REMEMBERED:
                self._asked.popitem(last=False)
        if asked.answer.outcome is not LocateOutcome.FOUND:
            return []
        candidates = [
            policy.ReplicaCandidate(one.replica_id.unique_id, self._hosts.of(one.node_id), self.ongoing(one))
            for one in replicas
        ]
        asked.preferred = policy.preferred(
            asked.answer.stretches, candidates, min_blocks=self._settings.min_blocks, ahead=self._settings.ahead
        )
        return [one for one in replicas if one.replica_id.unique_id in asked.preferred]

    async def _find(self, request: PendingRequest) -> PrefixLocation:
        """Locates the request's prefix, and counts the outcome."""
        prompt = prompts.find(request.args, request.kwargs)
        if request.metadata.multiplexed_model_id:
            prompt = "adapter"  # the adapter's content hash is not known here, and its name does not contain it
        if isinstance(prompt, str):
            self._counters.asked(prompt, 0)
            return PrefixLocation(LocateOutcome.NOTHING)
        began = time.perf_counter_ns()
        answer = await self._where.find(prompt)
        self._counters.asked(answer.outcome.value, time.perf_counter_ns() - began)
        return answer
