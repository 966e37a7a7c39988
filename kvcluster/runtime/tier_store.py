"""The bytes of a shard's tiers: one interface to read, write and erase them on any medium, and moves between tiers.

The core decides which page goes where (core/tiers.py, core/shard/pool.py): it reserves and frees ranges. A `TierStore`
moves bytes to and from such a range and knows nothing of leases. Each addressable tier has a region of its own; each
other tier has a store, which is opened before the core begins, and returns the pages it recovered.

The invariant: a durable store returns from `erase` only when no later shard finds what was purged, or else it does not
keep the tombstones, so that the coordinator sends them again.

`move` and `stage` encode, decode or copy pages from one tier to another, and then verify them. The core has chosen the
pages and their targets (core/shard/tier_mover.py, core/shard/pin_handler.py); until it is answered no target is read
and no source is freed. An encoded or decoded page gets checksums of its new bytes, which derive from the verified
source, except for what the codec loses; a copied page is verified against the checksums that it had.

`move` does not get in the way of loads and stores: it runs beside the driver on one thread of a lower priority,
releases Python's lock while it encodes, and yields after each page. `stage` runs while a reader waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Erase, Moved, MovePages, PageMove, PageSlot, Stage, Staged, Tier
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.tiers import STORED
from kvcluster.memory import checksum, codec
from kvcluster.memory.region import PageBytes, Region
from kvcluster.runtime.scrub import matches
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
        """Makes sure that what was purged is not found again. Erasures that failed are tried again with the next
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


NICENESS = 12
"""Niceness of the thread: about a fifteenth of a normal thread's CPU time under contention. A caller that waits for
room leaves its own CPU time to this thread."""


def move(order: MovePages, places: TierBytes) -> Moved:
    """Moves the pages that `order` names. In a shard that is ending nothing is moved any more."""
    sums: list[bytes | None] = []
    corrupt: list[int] = []
    errors: list[tuple[int, int]] = []
    for index, page in enumerate(order.pages):
        made: bytes | None = None
        try:
            source = places.read(page.source)
            recodes = page.source.codec is not page.target.codec
            if page.target.tier.spec.addressable:
                with places.fill(page.target) as target:
                    made = _moved(page, source, target)
                    if page.sampled and made is not None:
                        errors.append((index, _lost(page, source, target)))
                # Verified afterwards: sound now means sound then.
                sound = matches(page.namespace, page.source, source) if recodes else made == page.source.sums
            elif recodes:
                sound, made = _encoded_and_written(page, source, places)
            else:
                sound = matches(page.namespace, page.source, source)
                made = _written(page, source, places) if sound else None
            if not sound:
                corrupt.append(index)
        except OSError as error:
            log.warning("a page of the %s tier cannot be read: %s", page.source.tier.name.lower(), error)
            corrupt.append(index)
        except Unavailable:
            pass
        sums.append(made)
        time.sleep(0)
    return Moved(order.attempt, tuple(sums), tuple(corrupt), tuple(errors))


def stage(order: Stage, places: TierBytes) -> Staged:
    """Reads the pages that `order` names from stores. Every page afterwards holds what was committed, or is named as
    corrupt."""
    corrupt: list[int] = []
    for index, page in enumerate(order.pages):
        try:
            with places.fill(page.target) as target:
                places.read_into(page.source, target)
                sound = matches(page.namespace, page.source, target)
        except OSError as error:
            log.warning("a page of the %s tier cannot be read: %s", page.source.tier.name.lower(), error)
            sound = False
        except Unavailable:
            sound = False
        if not sound:
            corrupt.append(index)
    return Staged(order.attempt, tuple(corrupt))


def _encoded_and_written(page: PageMove, source: memoryview, places: TierBytes) -> tuple[bool, bytes | None]:
    """Writes a page to its store in the codec of its target. Returns whether the source is sound, and the packed
    checksums of the encoded page; None if it cannot be encoded or written."""
    encoded = memoryview(bytearray(page.target.nbytes))
    sums = _moved(page, source, encoded)
    if not matches(page.namespace, page.source, source):  # verified afterwards, as above
        return False, None
    if sums is None:
        return True, None
    return True, _written(page._replace(source=page.source._replace(sums=sums)), encoded, places)


def _written(page: PageMove, source: memoryview, places: TierBytes) -> bytes | None:
    """Writes a page to its store and returns its packed checksums; None if it could not be written."""
    try:
        places.write(page, source)
    except OSError as error:
        log.warning("a page cannot be written to the %s tier: %s", page.target.tier.name.lower(), error)
        return None
    return page.source.sums


def _moved(page: PageMove, source: memoryview, target: memoryview) -> bytes | None:
    """Fills the target and returns its packed checksums; None if the page cannot be encoded."""
    key, before, after = page.source.key, page.source.codec, page.target.codec
    layers, identity = key.part.layers, checksum.identity(page.namespace, page.source.key, after)
    if before is after:
        return checksum.pack_sums(checksum.copy_sums(identity, 0, layers, target, source))
    encodes = before is Codec.RAW
    coder = _coder(page, after if encodes else before)
    if not encodes:
        coder.decode(source, target, layers)
    elif not coder.encode(source, target, layers):
        return None
    return checksum.pack_sums(checksum.layer_sums(identity, 0, layers, target))


def _lost(page: PageMove, source: memoryview, target: memoryview) -> int:
    """Returns the error of an encoded page, in millionths."""
    return int(_coder(page, page.target.codec).error(source, target, page.source.key.part.layers) * 1e6)


def _coder(page: PageMove, which: Codec) -> codec.Coder:
    key, spec = page.source.key, page.spec
    return codec.coder(which, spec.groups[key.group], block_tokens=spec.block_tokens, heads=key.part.heads)
