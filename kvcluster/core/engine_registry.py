"""The running engines that use the cache, and the weights under which private ones are to cache.

An engine registers repeatedly; one that is silent for `ttl_ns` is forgotten. Nothing depends on this: an engine that
never registers is served like any other.

An engine whose weights were changed in memory has withdrawn: only an operator knows its weights now. What the operator
sets is an order for the engines that are private at that time, each for its current withdrawal. It does not hold for
later ones: an engine that has changed its weights once more since would take the name of weights that it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages.engines import EngineInfo
from kvcluster.core.shares import Shares


@dataclass(slots=True)
class _Known:
    """One engine, when it last registered, and the weights that it is to use in the withdrawal of that number."""

    info: EngineInfo
    seen_at: int
    weights: str = ""
    withdrawn: int = 0


class EngineRegistry:
    """Engines by tenant and id."""

    def __init__(self, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._known: dict[tuple[Tenant, str], _Known] = {}
        self._shares = Shares(limits.ENGINES)

    def register(self, tenant: Tenant, info: EngineInfo, now: int) -> str | None:
        """Returns the weights that this engine is to cache under, "" if no operator has set them; None if the tenant
        has reached the limit of engines."""
        self._forget_silent(now)
        known = self._known.get((tenant, info.engine))
        if known is None:
            if self._shares.full(tenant):
                return None
            self._shares.add(tenant)
            known = self._known[tenant, info.engine] = _Known(info, now)
        known.info, known.seen_at = info, now
        return known.weights if info.private and known.withdrawn == info.withdrawn else ""

    def living(self, tenant: Tenant, now: int) -> tuple[tuple[EngineInfo, int], ...]:
        """Returns the tenant's engines, by model and name, each with the nanoseconds since it last registered."""
        self._forget_silent(now)
        own = [(known.info, now - known.seen_at) for (owner, _), known in self._known.items() if owner == tenant]
        own.sort(key=lambda one: (one[0].model, one[0].name, one[0].engine))
        return tuple(own[: limits.LISTED_ENGINES])

    def set_weights(
        self, tenant: Tenant, model: str, weights: str, engine: str, now: int
    ) -> tuple[tuple[EngineInfo, int], ...]:
        """Orders the engines of a model that are private now and ready to cache under `weights`; only `engine`, an id
        or a name, unless it is "". Returns the engines that it has ordered."""
        told = []
        for info, ago in self.living(tenant, now):
            if info.model != model or engine not in ("", info.engine, info.name) or not (info.private and info.ready):
                continue
            known = self._known[tenant, info.engine]
            known.weights, known.withdrawn = weights, info.withdrawn
            told.append((info, ago))
        return tuple(told)

    def _forget_silent(self, now: int) -> None:
        silent = [key for key, known in self._known.items() if now - known.seen_at > self.ttl_ns]
        for key in silent:
            del self._known[key]
            self._shares.remove(key[0])
