"""Where the bytes of a shard's tiers are: one seam for reading, writing and erasing them, whatever they lie in.

The core decides which page lies where (core/tiers.py, core/pool.py): it reserves and frees ranges. A `TierStore` moves
bytes to and from such a range and knows nothing of leases. All addressable tiers lie in one region, the shard's arena;
each of the others has a store of its own, which is opened before the core begins, and tells what is there from before.

The invariant: a durable store returns from `erase` only when what was purged is found by no later shard, or keeps the
tombstones to itself, so that the coordinator tells them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.disk_recovery import RecoveredPages
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Erase, PageMove, PageSlot, Tier
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.tiers import ADDRESSABLE, STORED
from kvcluster.pages.region import Region
from kvcluster.transport.base import Unavailable


class TierStore(Protocol):
    """The bytes of one tier. Writes and erasures come from one thread; views and reads from any."""

    def view(self, slot: PageSlot) -> memoryview | None:
        """The page where it lies; None where the tier is not addressable. Raises Unavailable once it is closed."""

    def read(self, slot: PageSlot, into: memoryview) -> None:
        """Copies the bytes as they lie there, right or wrong. Raises OSError where there are not as many."""

    def write(self, move: PageMove, data: memoryview) -> None:
        """Puts a page, whose checksums are those of the move's source, where the move's target says. Raises OSError;
        the page is not found there then."""

    def erase(self, order: Erase) -> None:
        """Makes sure that what was purged does not come back. What it could not erase it tries again with the next."""

    def close(self) -> None: ...


OpenStore = Callable[[ShardConfig, ShardId], tuple[TierStore | None, RecoveredPages]]
"""Opens the store of a tier, and recovers what is there. None where it is not configured, or cannot be used and
Found.why_none says why; the shard runs without that tier then."""


class ArenaStore:
    """Pages in a region that this process addresses. They end with the process, so there is nothing to erase."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def view(self, slot: PageSlot) -> memoryview:
        try:
            return self._region.view(slot.offset, slot.nbytes)
        except ValueError:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending")) from None

    def read(self, slot: PageSlot, into: memoryview) -> None:
        into[:] = self.view(slot)

    def write(self, move: PageMove, data: memoryview) -> None:
        self.view(move.target)[:] = data

    def erase(self, order: Erase) -> None:
        pass

    def close(self) -> None:
        self._region.close()


class TierStores:
    """The stores of all tiers of one shard."""

    def __init__(self, region: Region, opened: Mapping[Tier, TierStore]) -> None:
        """`region` holds the addressable tiers, `opened` are the stores of the others."""
        arena = ArenaStore(region)
        self._by_tier: dict[Tier, TierStore] = {**dict.fromkeys(ADDRESSABLE, arena), **opened}
        self._all: list[TierStore] = [arena, *opened.values()]

    def view(self, slot: PageSlot) -> memoryview | None:
        """As TierStore.view."""
        return self._by_tier[slot.tier].view(slot)

    def bytes_of(self, slot: PageSlot) -> memoryview:
        """A page where it lies, or a copy of it. Raises Unavailable in a shard that is ending, OSError where it cannot
        be read."""
        store = self._by_tier[slot.tier]
        view = store.view(slot)
        if view is None:
            view = memoryview(bytearray(slot.nbytes))
            store.read(slot, view)
        return view

    def read(self, slot: PageSlot, into: memoryview) -> None:
        """As TierStore.read."""
        self._by_tier[slot.tier].read(slot, into)

    def write(self, move: PageMove, data: memoryview) -> None:
        """As TierStore.write."""
        self._by_tier[move.target.tier].write(move, data)

    def erase(self, order: Erase) -> None:
        for store in self._all:
            store.erase(order)

    def close(self) -> None:
        for store in self._all:
            store.close()


def open_stores(config: ShardConfig, shard: ShardId) -> tuple[dict[Tier, TierStore], dict[Tier, RecoveredPages]]:
    """Opens the stores that this configuration asks for. What each of them found is told also of one that could not be
    opened."""
    stores: dict[Tier, TierStore] = {}
    found: dict[Tier, RecoveredPages] = {}
    for tier in STORED:
        open_store: OpenStore = resolve_name(tier.spec.store)
        store, found[tier] = open_store(config, shard)
        if store is not None:
            stores[tier] = store
    return stores, found
