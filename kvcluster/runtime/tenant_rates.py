"""Rates of tenants at one server: the calls that it lets through, and the exchanges that it begins.

The quotas name requests and bytes a second (core/quotas.py). Each server applies them to what arrives at it, by buckets
of its own (core/token_bucket.py): the coordinator to its calls, each shard to its calls and to the bytes that it moves
for loads and stores. Tenants of one cluster share no bucket over a network, so that a call waits for no other process.

A call beyond the rate is refused before its message is read. What keeps or returns something that the tenant has is
never refused (KEEPING): it would lose its open sequences for its lookups. Nor are the commands of operators.

An exchange beyond the rate of bytes is answered by the shard in place of its core: a load with a miss for each page, a
store with FULL, so that its worker goes on as it does without these pages, and counts it as no fault of the shard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvcluster.config import ServerConfig
from kvcluster.core.ids import CLUSTER, Caller, Tenant
from kvcluster.core.messages import Answer, Effect, Pin, PinGrant, Request, Reserve, Stalled, Tick, WriteGrant, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.token_bucket import TenantRates
from kvcluster.runtime.auth import COMMANDS
from kvcluster.runtime.driver import StateMachine
from kvcluster.runtime.metric_samples import CallMetrics, OperatorFile, Refusal
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.transport.exchange_summary import ExchangeSummary

M = TypeVar("M")

KEEPING = frozenset({"RenewTicket", "SyncTables", "EndTicket", "UnpinBlocks"})
"""Methods that renew what a tenant has, or give it back."""


class RateLimiter:
    """The rates of one process. Thread-safe."""

    def __init__(
        self, quotas: QuotaFile, metrics: CallMetrics | None = None, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """What is refused is counted in `metrics`, which also show whether the quotas are the newest."""
        if metrics is not None:
            metrics.watch_file(OperatorFile.QUOTAS, quotas.trouble)
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = TenantRates(lambda tenant: quotas.quotas().of(tenant).requests_per_second)
        self._bytes = TenantRates(lambda tenant: quotas.quotas().of(tenant).bytes_per_second)

    def admits(self, caller: Caller, method: str) -> bool:
        """Whether a call of that method may be served; takes it from its tenant's rate."""
        if caller.internal or method in KEEPING or (caller.operator and method in COMMANDS):
            return True
        with self._lock:
            return self._calls.take(caller.tenant, self._clock())

    def may_move(self, tenant: Tenant) -> bool:
        """Whether an exchange of that tenant may begin; counts one that may not."""
        if tenant == CLUSTER:
            return True
        with self._lock:
            wait_ns = self._bytes.wait_ns(tenant, self._clock())
        if wait_ns and self._metrics is not None:
            self._metrics.refused(Refusal.RATE)
        return not wait_ns

    def moved(self, summary: ExchangeSummary) -> None:
        """Takes the bytes of an exchange that has ended from its tenant's rate."""
        nbytes = sum(summary.nbytes.values())
        if nbytes and summary.tenant != CLUSTER:
            with self._lock:
                self._bytes.spend(summary.tenant, nbytes, self._clock())


def rates_of(config: ServerConfig, metrics: CallMetrics, *, restarted: bool) -> RateLimiter:
    """Returns the rates by the quota file of the configuration. Raises ConfigError if that cannot be used; not if the
    process has `restarted`."""
    return RateLimiter(QuotaFile(config.quota_file, must_exist=not restarted), metrics)


TOO_FAST = Miss(MissReason.FULL, "this tenant has used up its bytes per second at this shard; load or store it later")
"""Why a page is not moved beyond its tenant's rate."""


class Rated(Generic[M]):
    """A shard's core that begins no exchange of a tenant beyond its rate of bytes."""

    def __init__(self, core: StateMachine[M | Tick | Stalled], rates: RateLimiter) -> None:
        self._core = core
        self._rates = rates

    def step(self, message: Any, now: int) -> list[Effect]:
        question = message.question if isinstance(message, Request) else None
        if isinstance(question, Pin) and not self._rates.may_move(message.tenant):
            return [Answer(message.call, PinGrant((TOO_FAST,) * len(question.keys)))]
        if isinstance(question, Reserve) and not self._rates.may_move(message.tenant):
            return [Answer(message.call, WriteGrant((Written.FULL,) * len(question.pages)))]
        return self._core.step(message, now)

    def next_deadline(self) -> int | None:
        return self._core.next_deadline()
