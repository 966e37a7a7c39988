"""Token buckets: how fast each tenant may call a server, or move bytes through it.

A bucket has the tokens of BURST_NS of its rate at most, and fills at that rate. A call takes its tokens before it is
served (`take`). The bytes of an exchange are known only when it has ended, so they are taken then, and the bucket may
owe (`spend`): while it owes, nothing more begins (`wait_ns`). The clock is passed in; a shell asks under its own lock.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.core.ids import Tenant

BURST_NS = 1_000_000_000
"""A second: a worker that starts a batch of requests at once, and then none, is not slowed below its rate."""

_SECOND = 1_000_000_000


class TokenBucket:
    """The tokens of one tenant, in units of a token times a second, so that all is integers but the rate."""

    __slots__ = ("_at", "_left")

    def __init__(self, rate: float, now: int) -> None:
        self._left = max(rate * BURST_NS, float(_SECOND))
        self._at = now

    def _fill(self, rate: float, now: int) -> None:
        most = max(rate * BURST_NS, float(_SECOND))  # one token at least: a rate below one a second serves a call too
        self._left = min(most, self._left + rate * max(0, now - self._at))
        self._at = max(self._at, now)

    def take(self, rate: float, now: int) -> bool:
        """Takes one token. Returns False, and takes nothing, if there is none."""
        self._fill(rate, now)
        if self._left < _SECOND:
            return False
        self._left -= _SECOND
        return True

    def spend(self, amount: int, rate: float, now: int) -> None:
        """Takes so many tokens, also such as there are not."""
        self._fill(rate, now)
        self._left -= amount * _SECOND

    def wait_ns(self, rate: float, now: int) -> int:
        """Returns how long until the bucket owes nothing; 0 if it owes nothing now."""
        self._fill(rate, now)
        return 0 if self._left >= 0 else int(-self._left / rate) + 1


class TenantRates:
    """The buckets of all tenants. `rate` returns the tokens a second of a tenant now, None for no bound: it may change
    at any time. Tenants are those of the token file, so there are few; of more than limits.RATED_TENANTS the one that
    came first is forgotten."""

    def __init__(self, rate: Callable[[Tenant], float | None]) -> None:
        self._rate = rate
        self._buckets: dict[Tenant, TokenBucket] = {}

    def take(self, tenant: Tenant, now: int) -> bool:
        """As TokenBucket.take; True for a tenant without a bound."""
        rate = self._rate(tenant)
        return rate is None or self._bucket(tenant, rate, now).take(rate, now)

    def spend(self, tenant: Tenant, amount: int, now: int) -> None:
        """As TokenBucket.spend."""
        rate = self._rate(tenant)
        if rate is not None:
            self._bucket(tenant, rate, now).spend(amount, rate, now)

    def wait_ns(self, tenant: Tenant, now: int) -> int:
        """As TokenBucket.wait_ns; 0 for a tenant without a bound."""
        rate = self._rate(tenant)
        return 0 if rate is None else self._bucket(tenant, rate, now).wait_ns(rate, now)

    def _bucket(self, tenant: Tenant, rate: float, now: int) -> TokenBucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= limits.RATED_TENANTS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[tenant] = TokenBucket(rate, now)
        return bucket
