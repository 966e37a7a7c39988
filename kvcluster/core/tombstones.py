"""Tombstones: what was purged, so that nobody who was away brings it back.

The coordinator makes one for each purge, above every number that it knows; each shard carries out those that it
has not, in order, and says so in its stream. Both keep all of them, since either may be the only one that remembers
when the other restarts. A purge that names the same namespaces again takes the place of the older, and "clear" the
place of every purge of its tenant; so there are never more than there are different things to purge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.messages import Tombstone
from kvcluster.core.spec import KVSpec


class Tombstones:
    """In order of their numbers."""

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
        """Those above `number`."""
        return tuple(stone for stone in self._stones if stone.number > number)

    def add(self, stone: Tombstone) -> bool:
        """False where it is known, or a later one says as much. One that is learnt late takes its place in order."""
        if self._says(stone):
            return False
        self._insert(stone)
        return True

    def learn(self, stones: Iterable[Tombstone]) -> list[Tombstone]:
        """Takes in what somebody else remembers; those that are new here, to be heeded.

        Where there are more of them than may be, those of the tenant that has most become one "clear": to forget
        too much is safe.
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
        """Numbers anew those that a shard which has carried out these has not, and would take for old: they were learnt
        late, or made under a clock that went back. To carry one out twice is safe. Those that were renewed."""
        theirs = Tombstones(carried_out)
        renewed: list[Tombstone] = []
        last = 0
        for stone in self.all():
            twice, last = stone.number == last, stone.number
            if twice or (stone.number <= theirs.highest and not theirs._says(stone)):
                renewed.append(replace(stone, number=max(self.next_number(epoch), theirs.highest + 1)))
                self._insert(renewed[-1])
        return renewed

    def admits(self, stone: Tombstone) -> bool:
        """Does it take the place of another, or is there room for one more of its tenant?"""
        owned = [known for known in self._stones if known.tenant == stone.tenant]
        room = len(owned) < limits.TOMBSTONES_PER_TENANT and len(self._stones) < limits.TOMBSTONES
        return room or any(_covers(stone, known) for known in owned)

    def next_number(self, epoch: Epoch) -> int:
        """Above all that are known, and above what earlier coordinators made: their epochs were lower."""
        return max(self.highest + 1, epoch)

    def latest(self, tenant: Tenant, spec: KVSpec) -> int:
        """The number of the last that names this namespace; 0 where none does."""
        return max((stone.number for stone in self._stones if stone.names(tenant, spec)), default=0)

    def _says(self, stone: Tombstone) -> bool:
        """Is it known, or does a later one say as much?"""
        return any(known.number >= stone.number and _covers(known, stone) for known in self._stones)

    def _insert(self, stone: Tombstone) -> None:
        kept = [known for known in self._stones if not (known.number <= stone.number and _covers(stone, known))]
        self._stones = sorted([*kept, stone], key=lambda known: known.number)


def _covers(wider: Tombstone, other: Tombstone) -> bool:
    """Does `wider` name every namespace that `other` does?"""
    return (
        wider.tenant == other.tenant
        and wider.model in (None, other.model)
        and wider.weights in (None, other.weights)
        and wider.adapter in (None, other.adapter)
    )
