"""Which tenant computes next: of those that want to, the one that has computed least.

A tenant that has not computed for a while starts with no more credit than the least of those that have: it cannot save
up time. So tenants that always want to compute get equal shares of it, whatever their computes are like, and one that
seldom does is served at the next piece (start-time fair queueing; Goyal, Vin and Cheng, SIGCOMM 1996). Pure: seconds
come from outside."""

from __future__ import annotations

from collections.abc import Iterable

from kvcluster.core.ids import Tenant


class ComputeTurns:
    """The seconds that each tenant has computed."""

    def __init__(self) -> None:
        self._spent: dict[Tenant, float] = {}
        self._active: dict[Tenant, int] = {}  # computes that wait or are under way

    def enter(self, tenant: Tenant) -> None:
        """The tenant has one compute more."""
        if tenant not in self._active:
            least = min((self._spent[other] for other in self._active), default=0.0)
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: Tenant) -> None:
        """One of its computes has ended."""
        left = self._active[tenant] - 1
        if left:
            self._active[tenant] = left
        else:
            del self._active[tenant]

    def spent(self, tenant: Tenant, seconds: float) -> None:
        """Takes into account that the tenant has computed for so long."""
        self._spent[tenant] += seconds

    def next_of(self, tenants: Iterable[Tenant]) -> Tenant | None:
        """Returns the one of these that is to compute next, of equal ones the first; None if there are none."""
        return min(tenants, key=self._spent.__getitem__, default=None)

    def due_before(self, tenant: Tenant, others: Iterable[Tenant]) -> bool:
        """Whether one of the others has computed less than this tenant."""
        mine = self._spent[tenant]
        return any(self._spent[other] < mine for other in others if other != tenant)
