"""Shares: how much each tenant may hold of something of which there is a limited amount.

A tenant may take more while it then holds no more than a multiple of what is left free (the dynamic threshold of
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM Transactions on
Networking, 1998). Nothing has to know how many tenants there are. With the multiple 1, a tenant alone may hold half of
all; `n` that take all that they can hold `1 / (n + 1)` each, and as much stays free for a tenant that arrives later.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.core.ids import Holder, Tenant

Owner = tuple[Tenant, Holder]


class Shares:
    """The amounts that tenants hold of `most`: a number of things, or of bytes.

    `alone` (0 to less than 1) is the share that a tenant may hold if no other holds anything. `most` may change.
    `quota` returns what a tenant may hold whatever is free (core/quotas.py), None for no such bound: the lesser counts.
    """

    def __init__(
        self, most: int, alone: float = 0.5, quota: Callable[[Tenant], int | None] = lambda tenant: None
    ) -> None:
        self.most = most
        self._alone = alone
        self._quota = quota
        self._held: dict[Tenant, int] = {}
        self.total = 0

    def held(self, tenant: Tenant) -> int:
        return self._held.get(tenant, 0)

    def full(self, tenant: Tenant, amount: int = 1) -> bool:
        """Whether the tenant may not take this amount more."""
        quota = self._quota(tenant)
        if quota is not None and self.held(tenant) + amount > quota:
            return True
        free = self.most - self.total - amount
        return (self.held(tenant) + amount) * (1 - self._alone) > free * self._alone

    def room(self, tenant: Tenant) -> int:
        """Returns the largest amount more that the tenant may take, at least 0."""
        free, held, quota = self.most - self.total, self.held(tenant), self._quota(tenant)
        room = max(0, int(free * self._alone - held * (1 - self._alone)))
        return room if quota is None else min(room, max(0, quota - held))

    def add(self, tenant: Tenant, amount: int = 1) -> None:
        """Takes this amount, which may be 0."""
        if amount:
            self._held[tenant] = self.held(tenant) + amount
            self.total += amount

    def remove(self, tenant: Tenant, amount: int = 1) -> None:
        """Gives back what `add` took."""
        if not amount:
            return
        left = self._held[tenant] - amount
        self.total -= amount
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]


class HolderShares:
    """The things that holders have: at most `each` a holder, and of `most` things and of limits.HOLDERS holders the
    share of its tenant."""

    def __init__(self, each: int, most: int) -> None:
        self._each = each
        self._held: dict[Owner, int] = {}
        self._things = Shares(most)
        self._holders = Shares(limits.HOLDERS)

    def held(self, tenant: Tenant) -> int:
        """The number of things that the tenant's holders have."""
        return self._things.held(tenant)

    def full(self, owner: Owner) -> bool:
        """Whether this holder may not take one thing more."""
        tenant, held = owner[0], self._held.get(owner)
        if self._things.full(tenant):
            return True
        return held >= self._each if held is not None else self._holders.full(tenant)

    def add(self, owner: Owner) -> None:
        held = self._held.get(owner, 0)
        if not held:
            self._holders.add(owner[0])
        self._held[owner] = held + 1
        self._things.add(owner[0])

    def remove(self, owner: Owner) -> None:
        left = self._held[owner] - 1
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
            self._holders.remove(owner[0])
        self._things.remove(owner[0])
