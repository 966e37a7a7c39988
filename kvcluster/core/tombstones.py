"""Tombstones: what was purged, so that no process that was cut off or down brings it back.

The coordinator makes one for each purge, with a number above all that it knows; each shard carries out those that it
has not, in order, and reports so in its stream. Both keep all of them, since either may be the only one that remembers
them when the other restarts. A purge that names the same namespaces again replaces the older one, and "clear" replaces
every purge of its tenant; so there are never more tombstones than different things to purge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.messages import Tombstone
from kvcluster.core.spec import KVSpec


class Tombstones:
    """Tombstones in order of their numbers."""

    def __init__(self, known: Iterable[Tombstone] = ()) -> None:
        self._stones: list[Tombstone] = []
        for stone in known:
            self.add(stone)

    @property
    def highest(self) -> int:
        return self._stones[-1].number if self._stones else 0

    def all(self) -> tuple[Tombstone, ...]:
        return tuple(self._stones)

    def since(self, number: int) -> tuple[Tombstone, ...]:
        """Returns those above `number`."""
        return tuple(stone for stone in self._stones if stone.number > number)

    def add(self, stone: Tombstone) -> bool:
        """Adds a tombstone in order of its number. Returns False if it is known, or a later one covers it."""
        if self._is_known(stone):
            return False
        self._insert(stone)
        return True

    def learn(self, stones: Iterable[Tombstone]) -> list[Tombstone]:
        """Adds the tombstones that another process remembers. Returns those that are new here and have to be carried
        out.

        If there are more than limits.TOMBSTONES, those of the tenant that has most become one "clear": to forget too
        much is safe.
        """
        before = self._stones
        for stone in stones:
            self.add(stone)
        while len(self._stones) > limits.TOMBSTONES:
            tenants = [stone.tenant for stone in self._stones]
            owner = max(tenants, key=tenants.count)
            last = max(stone.number for stone in self._stones if stone.tenant == owner)
            if tenants.count(owner) == 1:
                break
            self._insert(Tombstone(last, owner))
        return [stone for stone in self._stones if stone not in before]

    def renew(self, carried_out: Iterable[Tombstone], epoch: Epoch) -> list[Tombstone]:
        """Gives new numbers to tombstones that a shard would take for old although it has not carried them out; it has
        carried out `carried_out`. Such were learnt late, or made under a clock that was set back. Carrying one out
        twice is safe. Returns those with new numbers."""
        theirs = Tombstones(carried_out)
        renewed: list[Tombstone] = []
        last = 0
        for stone in self.all():
            twice, last = stone.number == last, stone.number
            if twice or (stone.number <= theirs.highest and not theirs._is_known(stone)):
                renewed.append(replace(stone, number=max(self.next_number(epoch), theirs.highest + 1)))
                self._insert(renewed[-1])
        return renewed

    def admits(self, stone: Tombstone) -> bool:
        """Whether it replaces another, or there is room for one more of its tenant."""
        owned = [known for known in self._stones if known.tenant == stone.tenant]
        room = len(owned) < limits.TOMBSTONES_PER_TENANT and len(self._stones) < limits.TOMBSTONES
        return room or any(_covers(stone, known) for known in owned)

    def next_number(self, epoch: Epoch) -> int:
        """Returns a number above all that are known and all that earlier coordinators used: their epochs were lower."""
        return max(self.highest + 1, epoch)

    def latest(self, tenant: Tenant, spec: KVSpec) -> int:
        """Returns the number of the last tombstone that names this namespace; 0 if none does."""
        return max((stone.number for stone in self._stones if stone.names(tenant, spec)), default=0)

    def _is_known(self, stone: Tombstone) -> bool:
        """Whether it is known, or a later one covers it."""
        return any(known.number >= stone.number and _covers(known, stone) for known in self._stones)

    def _insert(self, stone: Tombstone) -> None:
        kept = [known for known in self._stones if not (known.number <= stone.number and _covers(stone, known))]
        self._stones = sorted([*kept, stone], key=lambda known: known.number)


def _covers(wider: Tombstone, other: Tombstone) -> bool:
    """Whether `wider` names every namespace that `other` does."""
    return (
        wider.tenant == other.tenant
        and wider.model in (None, other.model)
        and wider.weights in (None, other.weights)
        and wider.adapter in (None, other.adapter)
    )
