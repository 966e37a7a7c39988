"""The pages of one shard: which block each holds, and in what state.

    FREE -reserve-> WRITING -commit-> READY -condemn-> CONDEMNED -last unpin-> FREE
                    WRITING -abort--> FREE

A free page is no object here: it is room in the allocator. The invariant that matters: bytes of a page are
given to a reader only in READY, are written only in WRITING, and are given back only when no pin is left.
A condemned page keeps its bytes for the readers that it has and is found by no new one. Each reservation
gets a generation that no other ever had. This module owns no bytes and knows no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kvcluster.core.allocator import PageAllocator
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import NewPage, PageKey, PageSlot, Written
from kvcluster.core.reasons import Loss


class PageState(Enum):
    """Where a page stands; see the module's drawing."""

    WRITING = "writing"
    READY = "ready"
    CONDEMNED = "condemned"
    FREE = "free"


class PageAction(Enum):
    """What can be done to a page."""

    COMMIT = "commit"
    ABORT = "abort"
    CONDEMN = "condemn"
    LAST_UNPIN = "last_unpin"


TRANSITIONS: dict[tuple[PageState, PageAction], PageState] = {
    (PageState.WRITING, PageAction.COMMIT): PageState.READY,
    (PageState.WRITING, PageAction.ABORT): PageState.FREE,
    (PageState.READY, PageAction.CONDEMN): PageState.CONDEMNED,
    (PageState.CONDEMNED, PageAction.LAST_UNPIN): PageState.FREE,
}


class IllegalTransition(AssertionError):
    """A page was told to do what its state does not allow: our own mistake, never a caller's."""


class PoolKey(NamedTuple):
    """A page's name within a shard."""

    space: NamespaceId
    key: PageKey


class Page:
    """A reservation: where it lies and what it holds."""

    __slots__ = ("depth", "generation", "key", "loss", "nbytes", "offset", "parent", "pins", "space", "state", "sums")

    def __init__(
        self,
        space: NamespaceId,
        key: PageKey,
        *,
        offset: int,
        nbytes: int,
        generation: int,
        parent: BlockHash,
        depth: int,
        loss: Loss,
    ) -> None:
        self.space = space
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self.generation = generation
        self.parent = parent
        self.depth = depth
        self.loss = loss
        self.state = PageState.WRITING
        self.pins = 0
        self.sums = b""

    def slot(self) -> PageSlot:
        """What a holder of a lease gets to know."""
        return PageSlot(self.key, self.offset, self.nbytes, self.generation, self.loss, self.sums)


class PagePool:
    """Pages by key, over an allocator."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._pages: dict[PoolKey, Page] = {}
        self._condemned: dict[int, Page] = {}  # by generation: their keys may be taken again
        self._generation = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def condemned(self) -> int:
        return len(self._condemned)

    def get(self, space: NamespaceId, key: PageKey) -> Page | None:
        """The page that is WRITING or READY for this key."""
        return self._pages.get(PoolKey(space, key))

    def ready(self) -> Iterator[Page]:
        """Every READY page, oldest reservation first."""
        return (page for page in self._pages.values() if page.state is PageState.READY)

    def everything(self) -> Iterator[Page]:
        """Every page that takes room, for whoever checks that nothing leaks."""
        yield from self._pages.values()
        yield from self._condemned.values()

    def offer(self, space: NamespaceId, new: NewPage, nbytes: int) -> Page | Written:
        """A page to write, or what became of the wish for one: somebody has it, writes it, or there is no room."""
        existing = self._pages.get(PoolKey(space, new.key))
        if existing is not None:
            return Written.DUPLICATE if existing.state is PageState.READY else Written.PENDING
        page = self.reserve(space, new.key, nbytes, parent=new.parent, depth=new.depth, loss=new.loss)
        return Written.FULL if page is None else page

    def reserve(
        self, space: NamespaceId, key: PageKey, nbytes: int, *, parent: BlockHash, depth: int, loss: Loss
    ) -> Page | None:
        """A page to write, or None where there is no room for it."""
        pool_key = PoolKey(space, key)
        assert pool_key not in self._pages, "one writer a page"
        offset = self.allocator.reserve(nbytes)
        if offset is None:
            return None
        self._generation += 1
        page = Page(
            space,
            key,
            offset=offset,
            nbytes=nbytes,
            generation=self._generation,
            parent=parent,
            depth=depth,
            loss=loss,
        )
        self._pages[pool_key] = page
        return page

    def commit(self, page: Page, sums: bytes) -> None:
        """The bytes are whole and verified: readers may have them."""
        self._act(page, PageAction.COMMIT)
        page.sums = sums

    def abort(self, page: Page) -> None:
        """Its writer has stopped: the room is free."""
        self._act(page, PageAction.ABORT)
        del self._pages[PoolKey(page.space, page.key)]
        self.allocator.free(page.offset, page.nbytes)

    def pin(self, page: Page) -> None:
        if page.state is not PageState.READY:
            raise IllegalTransition(f"pin of a page that is {page.state.value}")
        page.pins += 1

    def unpin(self, page: Page) -> bool:
        """One reader less. True where that gave the room back."""
        assert page.pins > 0, "an unpin without its pin"
        page.pins -= 1
        return self._free_if_unread(page)

    def condemn(self, page: Page) -> bool:
        """No new readers. True where the room is free at once."""
        self._act(page, PageAction.CONDEMN)
        del self._pages[PoolKey(page.space, page.key)]
        self._condemned[page.generation] = page
        return self._free_if_unread(page)

    def check(self) -> None:
        """Conservation: what the allocator gave out is what pages hold."""
        held = sum(self.allocator.size_class(page.nbytes) for page in self.everything())
        assert held == self.allocator.used_bytes, f"pages hold {held}, the allocator gave {self.allocator.used_bytes}"
        assert all(page.pins > 0 for page in self._condemned.values()), "a condemned page without readers takes room"

    def _free_if_unread(self, page: Page) -> bool:
        if page.state is not PageState.CONDEMNED or page.pins:
            return False
        self._act(page, PageAction.LAST_UNPIN)
        del self._condemned[page.generation]
        self.allocator.free(page.offset, page.nbytes)
        return True

    def _act(self, page: Page, action: PageAction) -> None:
        after = TRANSITIONS.get((page.state, action))
        if after is None:
            raise IllegalTransition(f"{action.value} of a page that is {page.state.value}")
        page.state = after
