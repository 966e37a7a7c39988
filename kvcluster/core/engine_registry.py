"""The engines that live: who uses the cache, and what those whose weights have changed are to cache under.

An engine registers and goes on registering; one that is silent for `ttl_ns` is gone. Nothing rests on this: an engine
that never registers is served as any other.

An engine whose weights were changed in memory has withdrawn: only an operator knows what they are now. What he says is
an order for those that are private when he says it, each for the withdrawal that it is in. It does not stand for later:
an engine that has changed its weights once more since would take the name of weights that it has not got.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages.engines import EngineInfo


@dataclass(slots=True)
class _Known:
    """One engine, when it was heard of, and the weights that it is to use in its withdrawal of that number."""

    info: EngineInfo
    seen_at: int
    weights: str = ""
    withdrawn: int = 0


class EngineRegistry:
    """Engines by tenant and id."""

    def __init__(self, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._known: dict[tuple[Tenant, str], _Known] = {}

    def register(self, tenant: Tenant, info: EngineInfo, now: int) -> str | None:
        """What it is to cache under, "" where nobody has said; None where as many are known as may be."""
        self._forget_silent(now)
        known = self._known.get((tenant, info.engine))
        if known is None:
            if len(self._known) >= limits.ENGINES:
                return None
            known = self._known[tenant, info.engine] = _Known(info, now)
        known.info, known.seen_at = info, now
        return known.weights if info.private and known.withdrawn == info.withdrawn else ""

    def living(self, tenant: Tenant, now: int) -> tuple[tuple[EngineInfo, int], ...]:
        """Those of a tenant, by model and name, with how long ago each was heard of."""
        self._forget_silent(now)
        own = [(known.info, now - known.seen_at) for (owner, _), known in self._known.items() if owner == tenant]
        own.sort(key=lambda one: (one[0].model, one[0].name, one[0].engine))
        return tuple(own[: limits.LISTED_ENGINES])

    def set_weights(
        self, tenant: Tenant, model: str, weights: str, engine: str, now: int
    ) -> tuple[tuple[EngineInfo, int], ...]:
        """Orders those of a model that are private now and ready to use these; `engine`, where given, alone. Returns
        whom it has ordered."""
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
