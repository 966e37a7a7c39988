"""A request router for Ray Serve that prefers replicas on the host where a prompt's prefix lies.

Serve asks it for ranks of replicas, probes those of a rank for room, and goes to the next rank where there is none. So
a preference is a rank before the one that power of two choices would give, and everything that keeps it from being
followed ends there: a replica that is full or gone, a coordinator that does not answer, a request that is not
understood, and a mistake in here. How the coordinator is asked, and for how long: `prefix_locator`.

Serve may ask for ranks of one request again and again until there is room; what was found out is kept for that. It
hands this module on by value to whoever routes, so nothing in here is changed after it was imported.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import kvcluster.engines.ray_serve.policy as policy
import kvcluster.engines.ray_serve.prompts as prompts
import kvcluster.engines.ray_serve.settings as settings
from kvcluster.engines.ray_serve.compat import Counters, PendingRequest, Replica, ReplicaID, Router, host_names
from kvcluster.engines.ray_serve.hosts import Hosts
from kvcluster.engines.ray_serve.prefix_locator import LocateOutcome, PrefixLocation, PrefixLocator

log = logging.getLogger("ray.serve")
"""Serve's own, so that what is said stands in the deployment's log."""

_REMEMBERED = 4_096
"""Requests that wait for room, or went away while they did: more than a router keeps waiting at once."""


@dataclass(slots=True)
class _Asked:
    """What is known of one request. `preferred`: the replicas that it was last to go to, by `ReplicaID.unique_id`."""

    answer: PrefixLocation
    preferred: tuple[str, ...] = ()


class KVClusterRouter(Router):
    """Named in `request_router_config` (docs/ray-serve.md); `initialize_state` takes what RouterSettings has."""

    def initialize_state(self, **given: Any) -> None:
        """Called by Serve once, on its event loop. Raises ConfigError for settings that are wrong."""
        self._settings = settings.read(given)
        self._where = PrefixLocator(self._settings, log.warning)
        self._hosts = Hosts(host_names, log.warning)
        self._counters = Counters(self._deployment_id.name, self._deployment_id.app_name)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._mistaken = False
        self._where.start()

    async def choose_replicas(
        self, candidate_replicas: list[Replica], pending_request: PendingRequest | None = None
    ) -> list[list[Replica]]:
        """Serve's interface: the preferred replicas, where there are any, before those of power of two choices."""
        first: list[Replica] = []
        if pending_request is not None:
            try:
                first = await self._preferred(candidate_replicas, pending_request)
            except Exception as error:  # the request goes where it would have gone without us
                self._counters.asked("mistake", 0)
                if not self._mistaken:
                    self._mistaken = True
                    log.warning("routes without knowing where prefixes lie: %s: %s", type(error).__name__, error)
        ranks = await self.power_of_two(candidate_replicas, pending_request)
        return [first, *ranks] if first else ranks

    def update_replicas(self, replicas: list[Replica]) -> None:
        """Serve's interface: these there are now. Their hosts are known by the time that somebody asks."""
        super().update_replicas(replicas)
        for one in replicas:
            self._hosts.of(one.node_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Serve's interface: a replica has accepted it."""
        asked = self._asked.pop(pending_request.metadata.internal_request_id, None)
        if asked is not None and asked.preferred:
            self._counters.sent("preferred" if replica_id.unique_id in asked.preferred else "another")

    async def _preferred(self, replicas: list[Replica], request: PendingRequest) -> list[Replica]:
        """Those that the prompt's prefix lies beside; nothing where that is not known, or nothing of it lies there."""
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
        """Asks where the request's prompt lies, and counts what came of it."""
        prompt = prompts.find(request.args, request.kwargs)
        if request.metadata.multiplexed_model_id:
            prompt = "adapter"  # whose content is not known here, and its name says nothing
        if isinstance(prompt, str):
            self._counters.asked(prompt, 0)
            return PrefixLocation(LocateOutcome.NOTHING)
        began = time.perf_counter_ns()
        answer = await self._where.find(prompt)
        self._counters.asked(answer.outcome.value, time.perf_counter_ns() - began)
        return answer
