"""Access to the bytes of a shard's tiers: one interface for reading, writing and erasing them, whatever medium they are
on.

The core decides which page goes where (core/tiers.py, core/shard/pool.py): it reserves and frees ranges. A `TierStore`
moves bytes to and from such a range and knows nothing of leases. Each addressable tier has a region of its own; each
other tier has a store, which is opened before the core begins, and returns the pages it recovered.

The invariant: a durable store returns from `erase` only when no later shard finds what was purged, or else it does not
keep the tombstones, so that the coordinator sends them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Erase, PageMove, PageSlot, Tier
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.tiers import STORED
from kvcluster.memory.page_bytes import PageBytes
from kvcluster.memory.region import Region
from kvcluster.transport.base import Unavailable
from kvcluster.transport.shm_server import SharedPool

log = logging.getLogger(__name__)


class TierBytes(PageBytes, Protocol):
    """The bytes of pages, of one tier or of several."""

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        """Copies the bytes of a page as they are stored, correct or not. Raises as `read`."""

    def write(self, move: PageMove, data: memoryview) -> None:
        """Writes a page to the move's target, with the checksums of the move's source. If it raises OSError, the page
        is not found at the target."""


class TierStore(TierBytes, Protocol):
    """The bytes of one tier. Writes and erasures come from one thread; all else may come from any thread."""

    @property
    def failed(self) -> str:
        """Why nothing can be read or written there until the shard starts again; "" if it can."""

    @property
    def pool(self) -> SharedPool | None:
        """Its memory, if processes on the same device may open it."""

    def erase(self, order: Erase) -> None:
        """Makes sure that what was purged does not come back. What it could not erase, it tries again with the next
        order."""

    def close(self) -> None: ...


OpenStore = Callable[[ShardConfig, ShardId], tuple[TierStore | None, RecoveredPages]]
"""Opens the store of a tier, and recovers its pages. The store is None if the tier is not configured, or if it cannot
be used: `trouble` then gives the reason, and the shard runs without that tier."""


class RegionStore:
    """Pages in a region that this process addresses. They end with the process, so there is nothing to erase."""

    pool, failed = None, ""

    def __init__(self, region: Region) -> None:
        self._region = region

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        last = slot.nbytes if stop is None else stop
        try:
            return self._region.view(slot.offset + start, last - start)
        except ValueError:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending")) from None

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        into[:] = self.read(slot)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        return nullcontext(self.read(slot, start, stop))

    def write(self, move: PageMove, data: memoryview) -> None:
        self.read(move.target)[:] = data

    def erase(self, order: Erase) -> None:
        pass

    def close(self) -> None:
        self._region.close()


class TierStores:
    """The stores of all tiers of one shard."""

    def __init__(self, regions: Mapping[Tier, Region], opened: Mapping[Tier, TierStore]) -> None:
        """`regions` hold the addressable tiers; `opened` are the stores of the others."""
        self.regions = regions
        regional = {tier: RegionStore(region) for tier, region in regions.items()}
        self._by_tier: dict[Tier, TierStore] = {**regional, **opened}
        self._opened = opened

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        """As PageBytes, for the tier of the page."""
        return self._by_tier[slot.tier].read(slot, start, stop)

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        """As TierBytes, for the tier of the page."""
        self._by_tier[slot.tier].read_into(slot, into)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        """As PageBytes, for the tier of the page."""
        return self._by_tier[slot.tier].fill(slot, start, stop)

    def write(self, move: PageMove, data: memoryview) -> None:
        """As TierBytes, for the tier of the target."""
        self._by_tier[move.target.tier].write(move, data)

    @property
    def pool(self) -> SharedPool | None:
        """The memory of a tier that processes on the same device may open, if there is one now."""
        return next((pool for store in self._opened.values() if (pool := store.pool) is not None), None)

    def erase(self, order: Erase) -> None:
        for store in self._by_tier.values():
            store.erase(order)

    def failed(self) -> dict[Tier, str]:
        """Returns the tiers whose stores have failed for good, each with the reason."""
        return {tier: why for tier, store in self._by_tier.items() if (why := store.failed)}

    def close(self) -> None:
        for store in self._by_tier.values():
            store.close()


def without(shard: ShardId, trouble: str) -> tuple[None, RecoveredPages]:
    """Returns what an OpenStore returns for a tier that cannot be used, and logs why."""
    log.warning("%s: %s", shard, trouble)
    return None, RecoveredPages(trouble=trouble)


def open_stores(config: ShardConfig, shard: ShardId) -> tuple[dict[Tier, TierStore], dict[Tier, RecoveredPages]]:
    """Opens the configured stores. Returns those that could be opened, and for every tier with a store what it
    recovered or why it could not be opened."""
    stores: dict[Tier, TierStore] = {}
    found: dict[Tier, RecoveredPages] = {}
    for tier in STORED:
        open_store: OpenStore = resolve_name(tier.spec.store)
        store, found[tier] = open_store(config, shard)
        if store is not None:
            stores[tier] = store
    return stores, found
