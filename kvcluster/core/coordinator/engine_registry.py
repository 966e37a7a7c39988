"""The running engines that use the cache, and the weights under which private ones are to cache.

An engine registers repeatedly; one that is silent for `ttl_ns` is forgotten. Nothing depends on this: an engine that
never registers is served like any other.

What engines report about themselves is kept as UTF-8 in one piece, since a `str` may take four bytes a character, and
each tenant may use its share of limits.ENGINES_BYTES.

An engine whose weights were changed in memory has withdrawn: only an operator knows its weights now. The weights that
the operator sets are an order to the engines that are private at that time, each for its current withdrawal and for no
later one: an engine whose weights have changed once more since would take the name of weights that it does not have.

Engines whose credential is read-only are kept apart from those that store: what one of them says of itself, under
whatever id, changes neither what is known of another nor what that is ordered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.coordinator.run_versions import RunVersions
from kvcluster.core.ids import Tenant
from kvcluster.core.messages.coordinator import EngineInfo
from kvcluster.core.spec import RUN_WEIGHTS
from kvcluster.core.tenant_shares import Shares

RECORD_BYTES = 640
"""What an engine costs besides its texts: its record, its key and its places in two dicts."""

_RUN_BYTES = 640
"""What the version of a training run's weights costs in `versions`, besides its texts, which are there once more."""

_BETWEEN = b"\xff"
"""Separates texts: it occurs in no UTF-8."""

_READ_ONLY = _BETWEEN
"""Ends the key of an engine whose credential is read-only."""

_FORGOTTEN_PER_STEP = 1_024
"""Silent engines that one step forgets."""


@dataclass(slots=True)
class _Known:
    """One engine, when it last registered, and the weights (`ordered`) that it is to use in withdrawal number
    `ordered_for`."""

    texts: bytes
    private: bool
    withdrawn: int
    ready: bool
    protocol: int
    seen_at: int
    ordered: str = ""
    ordered_for: int = 0

    def info(self) -> EngineInfo:
        model, name, engine, weights, *facts = self.texts.decode(errors="surrogateescape").split("\udcff")
        pairs = tuple(zip(facts[::2], facts[1::2], strict=True))
        return EngineInfo(engine, name, model, weights, pairs, self.private, self.withdrawn, self.ready, self.protocol)

    def version(self) -> tuple[str, str]:
        """Returns its model and weights."""
        model, _, _, weights = self.texts.split(_BETWEEN, 4)[:4]
        return model.decode(), weights.decode()

    def order(self) -> list[bytes]:
        """Returns model, name and id: engines are listed in this order."""
        return self.texts.split(_BETWEEN, 3)[:3]


class EngineRegistry:
    """Engines by tenant and id. `quota`: the most of a tenant, None for no bound but its share of memory. `versions`:
    the weights of training runs that engines use, without those whose credential is read-only."""

    def __init__(self, ttl_ns: int, quota: Callable[[Tenant], int | None] = lambda tenant: None) -> None:
        self.ttl_ns = ttl_ns
        self._quota = quota
        self._known: OrderedDict[tuple[Tenant, bytes], _Known] = (
            OrderedDict()
        )  # those that are silent the longest first
        self._of: dict[Tenant, dict[bytes, _Known]] = {}
        self._shares = Shares(limits.ENGINES_BYTES)
        self.versions = RunVersions()

    @property
    def nbytes(self) -> int:
        """The bytes that all tenants are charged for."""
        return self._shares.total

    def count(self, tenant: Tenant) -> int:
        """Returns the number of engines of a tenant, those included that are silent and not forgotten yet."""
        return len(self._of.get(tenant, {}))

    def register(self, tenant: Tenant, info: EngineInfo, now: int, *, read_only: bool = False) -> str | None:
        """Returns the weights that this engine is to cache under, "" if no operator has set them; None if the tenant
        has reached its share of the memory for engines, or its quota of such engines. `read_only`: its credential
        is."""
        self._forget_silent(now)
        name = info.engine.encode() + (_READ_ONLY if read_only else b"")
        facts = (text for fact in info.facts for text in fact)
        texts = _BETWEEN.join(map(str.encode, (info.model, info.name, info.engine, info.weights, *facts)))
        before = self._of.get(tenant, {}).get(name)
        more = _cost(texts) - (_cost(before.texts) if before is not None else 0)
        if more > 0 and self._shares.full(tenant, more):
            return None
        quota = self._quota(tenant)
        if before is None and quota is not None and self._alike(tenant, read_only) >= quota:
            return None
        self._shares.add(tenant, more)
        known = _Known(texts, info.private, info.withdrawn, info.ready, info.protocol, now)
        if before is not None:
            known.ordered, known.ordered_for = before.ordered, before.ordered_for
        if not read_only:
            self.versions.add(tenant, info.model, info.weights)
            if before is not None:
                self.versions.remove(tenant, *before.version())
        self._known[tenant, name] = self._of.setdefault(tenant, {})[name] = known
        self._known.move_to_end((tenant, name))
        return known.ordered if info.private and known.ordered_for == info.withdrawn else ""

    def living(self, tenant: Tenant, now: int) -> tuple[tuple[EngineInfo, int], ...]:
        """Returns the tenant's engines, by model and name, each with the nanoseconds since it last registered."""
        return _listed(self._own(tenant, now), now)

    def set_weights(
        self, tenant: Tenant, model: str, weights: str, engine: str, now: int
    ) -> tuple[tuple[EngineInfo, int], ...]:
        """Orders the engines of a model that are private now and ready to cache under `weights`; only `engine`, an id
        or a name, unless it is "". Returns the engines that it has ordered, at most limits.LISTED_ENGINES of them."""
        model_, engine_, ordered = model.encode(), engine.encode(), []
        for known in self._own(tenant, now):
            of, name, number = known.order()
            if of == model_ and engine_ in (b"", number, name) and known.private and known.ready:
                known.ordered, known.ordered_for = weights, known.withdrawn
                ordered.append(known)
        return _listed(ordered, now)

    def _alike(self, tenant: Tenant, read_only: bool) -> int:
        """Returns the number of the tenant's engines that are read-only, or that are not."""
        return sum(name.endswith(_READ_ONLY) == read_only for name in self._of.get(tenant, {}))

    def _own(self, tenant: Tenant, now: int) -> list[_Known]:
        """Returns the tenant's engines in the order of a listing."""
        own = [known for known in self._of.get(tenant, {}).values() if now - known.seen_at <= self.ttl_ns]
        return sorted(own, key=_Known.order)

    def _forget_silent(self, now: int) -> None:
        for _ in range(_FORGOTTEN_PER_STEP):
            owned, known = next(iter(self._known.items()), (None, None))
            if owned is None or known is None or now - known.seen_at <= self.ttl_ns:
                return
            tenant, name = owned
            del self._known[owned], self._of[tenant][name]
            if not name.endswith(_READ_ONLY):
                self.versions.remove(tenant, *known.version())
            self._shares.remove(tenant, _cost(known.texts))
            if not self._of[tenant]:
                del self._of[tenant]


def _cost(texts: bytes) -> int:
    model, _, _, weights = texts.split(_BETWEEN, 4)[:4]
    of_run = weights.startswith(RUN_WEIGHTS.encode())
    # A `str` may take four bytes a character.
    return RECORD_BYTES + len(texts) + of_run * (_RUN_BYTES + 4 * len(model) + 8 * len(weights))


def _listed(engines: list[_Known], now: int) -> tuple[tuple[EngineInfo, int], ...]:
    return tuple((known.info(), now - known.seen_at) for known in engines[: limits.LISTED_ENGINES])
