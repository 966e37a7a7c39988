"""The pages of one shard, by tier and key, and the room that they take. The states of a page are in page.py.

A block may lie in two tiers at once, as twins: encoded below, and decoded above. The pages of a tier that is not
addressable are not read in place: each reader gets a private copy in the staging tier, which is freed with its lease.
This module owns no bytes and knows no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import PageAllocator
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import NewPage, PageKey, Tier, TierUse, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.disk_recovery import RecoveredPage, RecoveredPages
from kvcluster.core.shard.leases import Lease, LeaseKind
from kvcluster.core.shard.page import IllegalTransition, Page, PageAction, PageState
from kvcluster.core.tiers import ADDRESSABLE, INGEST, ON_DEVICE, READ_ORDER, STAGING, StoreAllocator, TierAllocator

PoolKey = tuple[NamespaceId, PageKey]
"""The key of a page within a tier. A plain tuple, which is made in a fifth of the time of a named one: every question
about a page makes one."""


class PagePool:
    """Pages by tier and key, over an allocator for each tier. `below` are the allocators of the other addressable
    tiers, `stores` those of the rest."""

    def __init__(
        self,
        allocator: PageAllocator,
        below: Mapping[Tier, PageAllocator] | None = None,
        stores: Mapping[Tier, StoreAllocator] | None = None,
    ) -> None:
        self.allocator = allocator
        self.memory = {INGEST: allocator, **(below or {})}
        self.stores = dict(stores or {})
        self.allocators: dict[Tier, TierAllocator] = dict(sorted({**self.memory, **self.stores}.items()))
        """The fastest tier first."""
        self.tiers = tuple(self.allocators)
        self._pages: dict[Tier, dict[PoolKey, Page]] = {tier: {} for tier in self.allocators}
        self._by_cost = [self._pages[tier] for tier in sorted(self.tiers, key=READ_ORDER.__getitem__)]
        self._condemned: dict[int, Page] = {}  # by generation: their keys may be taken again; and private copies
        self._generation = 0
        self._uses = 0
        self._held: dict[NamespaceId, dict[tuple[int, Part], int]] = {}  # number of pages of each part that take space
        self.lost: set[Tier] = set()
        """The tiers whose stores have failed: nothing is reserved there any more, and they are not reported."""
        self.uncharged_bytes = dict.fromkeys(self.allocators, 0)
        """What pages take of each tier that no tenant is charged for, rounded up as it allocates: those that are
        WRITING, and those that are condemned, which their readers keep."""
        self.changes = 0
        """Incremented whenever a page is reserved or changes its state."""

    @classmethod
    def of(cls, config: ShardConfig, found: Mapping[Tier, RecoveredPages] | None = None) -> PagePool:
        """Builds the pool of the configured addressable tiers, and of the tiers whose stores could be opened, if there
        is a staging tier to read them through."""
        first = PageAllocator(INGEST.spec.nbytes(config), config.extent_bytes)
        below: dict[Tier, PageAllocator] = {}
        stores: dict[Tier, StoreAllocator] = {}
        for tier in ADDRESSABLE[1:]:
            if nbytes := tier.spec.nbytes(config):
                below[tier] = PageAllocator(nbytes, config.extent_bytes)
        for tier, there in (found or {}).items():
            if there.capacity_bytes and STAGING in below:
                assert tier.spec.allocator is not None, "a store of an addressable tier"
                stores[tier] = tier.spec.allocator(there.capacity_bytes, there.file_bytes)
        return cls(first, below, stores)

    def __len__(self) -> int:
        return sum(map(len, self._pages.values()))

    def count(self, tier: Tier) -> int:
        """Returns the number of pages that are WRITING or READY in that tier."""
        return len(self._pages[tier])

    def others(self, wanted_bytes: int = 0) -> tuple[TierUse, ...]:
        """Returns the use of each tier but the one that workers write into. `wanted_bytes`: bytes of the staging tier
        that readers wait for."""
        return tuple(
            TierUse(
                *(tier, allocator.capacity_bytes, allocator.free_bytes, self.count(tier)),
                wanted_bytes=wanted_bytes if tier is STAGING else 0,
                writing_bytes=self.uncharged_bytes[tier],
            )
            for tier, allocator in self.allocators.items()
            if tier is not INGEST and tier not in self.lost
        )

    def lost_pages(self, most: int) -> list[Page]:
        """Returns READY pages of tiers that are lost, so many at most."""
        pages = (page for tier in self.lost for page in self._pages[tier].values() if page.state is PageState.READY)
        return list(islice(pages, most))

    @property
    def memory_bytes(self) -> dict[Tier, int]:
        """The bytes of each addressable tier, whose pages lie in a region of its own."""
        return {tier: allocator.capacity_bytes for tier, allocator in self.memory.items()}

    def parts(self, space: NamespaceId) -> Collection[tuple[int, Part]]:
        """Returns the (group, part) pairs of this namespace that have pages in this pool."""
        return self._held.get(space, {}).keys()

    @property
    def condemned(self) -> int:
        return len(self._condemned)

    def get(self, space: NamespaceId, key: PageKey) -> Page | None:
        """Returns the READY page for this key, of twins the one that costs a reader least; otherwise one that is
        WRITING; otherwise None."""
        pool_key = (space, key)
        writing: Page | None = None
        for pages in self._by_cost:
            page = pages.get(pool_key)
            if page is not None:
                if page.state is PageState.READY:
                    return page
                writing = writing or page
        return writing

    def find(
        self, space: NamespaceId, key: PageKey, accept: Loss, *, encoded: bool = False, on_device: bool = False
    ) -> Page | Miss:
        """Returns the page for a reader that accepts that loss, or the miss. `encoded`: of twins the lower one, because
        a copy of the decoded one could be encoded a second time. `on_device`: of twins one on a device."""
        for tier in ON_DEVICE if on_device else ():
            near = self.on(tier, space, key)
            if near is not None and near.state is PageState.READY and near.loss <= accept:
                return near
        page = self.get(space, key)
        if page is not None and encoded and page.decoded:
            page = self.below_of(page)
        if page is None:
            return Miss(MissReason.EVICTED)
        if page.state is not PageState.READY:
            return Miss(MissReason.PENDING)
        if page.loss <= accept:
            return page
        better = (twin for twin in self.elsewhere(page) if twin.state is PageState.READY and twin.loss <= accept)
        return next(better, None) or Miss(MissReason.LOSSY, f"only with {page.loss.name.lower()}")

    def on(self, tier: Tier, space: NamespaceId, key: PageKey) -> Page | None:
        """Returns the page that is WRITING or READY for this key in that tier, or None."""
        pages = self._pages.get(tier)
        return pages.get((space, key)) if pages is not None else None

    def elsewhere(self, page: Page) -> list[Page]:
        """Returns the pages that are WRITING or READY for the same key in other tiers."""
        return [other for other in self.there(page.space, page.key) if other.tier is not page.tier]

    def ready_at(self, tier: Tier, owner: PoolKey, offset: int) -> Page | None:
        """Returns the page that a store allocator names, if it is READY: one that was withdrawn keeps its place for its
        readers, while another may have its name."""
        page = self._pages[tier].get(owner)
        return page if page is not None and page.state is PageState.READY and page.offset == offset else None

    def below_of(self, page: Page) -> Page | None:
        """Returns the page's READY twin in a tier below, the upper one of two; None if there is none."""
        below = (self.on(tier, page.space, page.key) for tier in self.allocators if tier > page.tier)
        return next((twin for twin in below if twin is not None and twin.state is PageState.READY), None)

    def ready(self) -> Iterator[Page]:
        """Yields every READY page: the fastest tier first, and within a tier the oldest reservation first."""
        return (page for pages in self._pages.values() for page in pages.values() if page.state is PageState.READY)

    def everything(self) -> Iterator[Page]:
        """Yields every page that takes space, for checks that nothing leaks."""
        for pages in self._pages.values():
            yield from pages.values()
        yield from self._condemned.values()

    def there(self, space: NamespaceId, key: PageKey) -> list[Page]:
        """Returns the pages that are WRITING or READY for this key, the fastest tier first."""
        pool_key, there = (space, key), []
        for pages in self._pages.values():
            page = pages.get(pool_key)
            if page is not None:
                there.append(page)
        return there

    def taken(self, there: Sequence[Page], loss: Loss, into: Tier = INGEST) -> Written | None:
        """Returns why a page with that loss, for whose key `there` are the pages, need not be written in tier `into`:
        DUPLICATE if a READY page has no more loss, PENDING if one is being written in that tier, or with no more loss
        in another. Otherwise None: a page that is being written in another tier with more loss is dropped once this one
        is READY."""
        if any(page.state is PageState.READY and page.loss <= loss for page in there):
            return Written.DUPLICATE
        writing = (page for page in there if page.state is PageState.WRITING)
        return Written.PENDING if any(page.tier is into or page.loss <= loss for page in writing) else None

    def reserve(
        self,
        space: NamespaceId,
        new: NewPage,
        nbytes: int,
        *,
        tier: Tier = INGEST,
        codec: Codec = Codec.RAW,
    ) -> Page | None:
        """Returns a page to write, or None if there is no room for it."""
        pool_key, pages = (space, new.key), self._pages[tier]
        assert pool_key not in pages, "one writer a page"
        offset = None if tier in self.lost else self.allocators[tier].reserve(nbytes, pool_key)
        if offset is None:
            return None
        page = pages[pool_key] = self._page(space, new, offset, nbytes, tier, codec)
        return page

    def adopt(self, tier: Tier, found: RecoveredPage) -> bool:
        """Adds a recovered page of that tier as READY. Returns False if its key is taken or it cannot lie at its
        offset."""
        pool_key = (found.namespace, found.key)
        pages = self._pages[tier]
        if pool_key in pages or not self.stores[tier].adopt(found.offset, found.nbytes, pool_key):
            return False
        new = NewPage(found.key, found.parent, found.depth, found.loss)
        pages[pool_key] = page = self._page(found.namespace, new, found.offset, found.nbytes, tier, found.codec)
        self.commit(page, found.sums)
        return True

    def private(self, page: Page) -> Page | None:
        """Reserves a private copy of this page in the staging tier, which `find` does not return; None if there is no
        room."""
        pool_key = (page.space, page.key)
        offset = self.memory[STAGING].reserve(page.nbytes, pool_key)
        if offset is None:
            return None
        copy = self._page(page.space, page.new(), offset, page.nbytes, STAGING, page.codec)
        self._condemned[copy.generation] = copy
        return copy

    def lend(self, copy: Page, sums: bytes) -> None:
        """Gives a private copy, whose bytes are complete and verified, to its one reader, until that unpins it."""
        self._act(copy, PageAction.LEND)
        assert copy.generation in self._condemned, "not a private copy"
        copy.sums = sums
        copy.pins = 1

    def commit(self, page: Page, sums: bytes) -> None:
        """Makes the page READY: its bytes are complete and verified."""
        self._act(page, PageAction.COMMIT)
        page.sums = sums
        self._count_uncharged(page, -1)

    def abort(self, page: Page) -> None:
        """Frees a page whose writer has stopped."""
        self._act(page, PageAction.ABORT)
        self._count_uncharged(page, -1)
        if self._condemned.pop(page.generation, None) is None:
            del self._pages[page.tier][page.space, page.key]
        self._free(page)

    def use(self, pages: Iterable[Page]) -> None:
        """Records that a worker uses these pages now, all in one call (Page.used)."""
        self._uses += 1
        for page in pages:
            page.used = self._uses

    def pin(self, pages: Iterable[Page]) -> None:
        """Adds a reader's pin to each of these READY pages. A message of attention pins thousands."""
        ready = PageState.READY
        for page in pages:
            if page.state is not ready:
                raise IllegalTransition(f"pin of a page that is {page.state.value}")
            page.pins += 1

    def unpin(self, pages: Iterable[Page]) -> None:
        """Removes a reader's pin from each of these pages. Frees those that are condemned and have no reader left."""
        condemned = PageState.CONDEMNED
        for page in pages:
            assert page.pins > 0, "an unpin without its pin"
            page.pins -= 1
            if not page.pins and page.state is condemned:
                self._free_condemned(page)

    def give_back(self, lease: Lease) -> int:
        """Unpins or aborts the pages that a lease still holds, because its holder has stopped. Returns the number of
        aborted ones."""
        pages = [page for page in lease.pages if page is not None]
        if lease.kind is LeaseKind.READ:
            self.unpin(pages)
            return 0
        for page in pages:
            self.abort(page)
        return len(pages)

    def condemn(self, page: Page) -> None:
        """Admits no new readers. Frees the page at once if it has none."""
        self._act(page, PageAction.CONDEMN)
        del self._pages[page.tier][page.space, page.key]
        self._condemned[page.generation] = page
        self._count_uncharged(page, 1)
        if not page.pins:
            self._free_condemned(page)

    def check(self) -> None:
        """Asserts conservation: the bytes that the allocators have reserved are those that pages hold."""
        for tier, allocator in self.allocators.items():
            held = sum(allocator.size_class(page.nbytes) for page in self.everything() if page.tier is tier)
            assert held == allocator.used_bytes, f"pages hold {held}, the allocator gave {allocator.used_bytes}"
        for tier, nbytes in self.uncharged_bytes.items():
            pages = [page for page in self.everything() if page.tier is tier and page.state is not PageState.READY]
            uncharged = sum(self.allocators[tier].size_class(page.nbytes) for page in pages)
            assert uncharged == nbytes, f"pages that are not READY take {uncharged} bytes, and {nbytes} are counted"
        counted = sum(sum(held.values()) for held in self._held.values())
        assert counted == sum(1 for _ in self.everything()), "the number of pages by part is wrong"
        for page in self._condemned.values():
            assert page.pins or page.state is PageState.WRITING, "a condemned page without readers takes space"

    def _page(self, space: NamespaceId, new: NewPage, offset: int, nbytes: int, tier: Tier, codec: Codec) -> Page:
        self._generation += 1
        self.changes += 1
        held, part = self._held.setdefault(space, {}), new.key[1:]
        held[part] = held.get(part, 0) + 1
        page = Page(space, new, offset=offset, nbytes=nbytes, generation=self._generation, tier=tier, codec=codec)
        self.uncharged_bytes[tier] += self.allocators[tier].size_class(nbytes)
        return page

    def _count_uncharged(self, page: Page, sign: int) -> None:
        self.uncharged_bytes[page.tier] += sign * self.allocators[page.tier].size_class(page.nbytes)

    def _free_condemned(self, page: Page) -> None:
        self._act(page, PageAction.LAST_UNPIN)
        del self._condemned[page.generation]
        self._count_uncharged(page, -1)
        self._free(page)

    def _free(self, page: Page) -> None:
        held, part = self._held[page.space], page.key[1:]
        held[part] -= 1
        if not held[part]:
            del held[part]
        if not held:
            del self._held[page.space]
        self.allocators[page.tier].free(page.offset, page.nbytes)

    def _act(self, page: Page, action: PageAction) -> None:
        page.act(action)
        self.changes += 1
