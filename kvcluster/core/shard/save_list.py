"""The blocks of a stopping shard, in the order in which their pages are to be saved: the last used first, and chains
from their roots on, so that what does not fit, or not in time, is what would be missed least.

A block was used when a worker last pinned or committed any of its pages (Page.used); one that another block follows
counts as used as late as that one, since the other is useless without it. So no block comes before the one that it
follows. The pages that lie in the store already are listed from the other end: the coldest leaf first, for each kind of
page by itself, since the room of one is used again only for another of its kind.

A pool of millions is neither searched nor sorted in one step (docs/adr/0034): first its pages are grouped by block,
then blocks are put on heaps from the deepest on, some in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvcluster.core.file_allocator import Owner, Shape
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.page_key import PageKey
from kvcluster.core.shard.page import Page, PageState

LISTED_PAGES = 4_096
"""Pages or blocks that one step lists: some milliseconds."""

Kind = tuple[NamespaceId, Shape]
"""Pages that can take the room of one another."""


class ListedBlock:
    """One block. `pages`: in all tiers, the fastest tier first; `skipped`: it is not saved, so none that follows it
    is."""

    __slots__ = ("depth", "hash", "pages", "parent", "skipped", "space", "used")

    def __init__(self, page: Page) -> None:
        self.space = page.space
        self.hash = page.key.hash
        self.parent = page.parent
        self.depth = page.depth
        self.used = page.used
        self.pages = [page]
        self.skipped = False

    def unsaved(self) -> list[Page]:
        """Returns the pages to save: of each part that is READY in memory and in no durable tier, the one in the lowest
        tier, which needs no encoding any more."""
        pages: dict[PageKey, Page] = {}
        for page in self.pages:
            if page.state is PageState.READY:
                pages[page.key] = page
        return [page for page in pages.values() if not page.tier.spec.durable]


class SaveList:
    """The list for these READY pages, the fastest tier first, of one pool. Pages of a namespace that `is_private` are
    not saved, and are the first to give way."""

    def __init__(self, pages: Sequence[Page], is_private: Callable[[NamespaceId], bool]) -> None:
        self._pages = pages
        self._is_private = is_private
        self._grouped = 0  # pages
        self._blocks: dict[tuple[NamespaceId, BlockHash], ListedBlock] = {}
        self._by_depth: dict[int, list[ListedBlock]] = {}
        self._depths: list[int] | None = None  # those whose blocks are not listed yet, ascending
        self._entries = 0  # numbers the entries of the heaps, the last one first, so that blocks are never compared
        self._hottest: list[tuple[int, int, int, ListedBlock]] = []
        self._coldest: dict[Kind, list[tuple[int, int, int, Page]]] = {}
        self._left_pages = self._left_bytes = 0  # of the blocks in `_hottest`

    @property
    def complete(self) -> bool:
        """Whether every page has been listed."""
        return self._depths is not None and not self._depths

    def list_some(self) -> None:
        """Does one step of the work."""
        some = self._pages[self._grouped : self._grouped + LISTED_PAGES]
        for page in some:
            self._group(page)
        self._grouped += len(some)
        if some:
            return
        if self._depths is None:
            self._depths = sorted(self._by_depth)
        left = LISTED_PAGES
        while self._depths and left > 0:
            blocks = self._by_depth[self._depths[-1]]
            while blocks and left > 0:
                left -= 1
                self._list(blocks.pop())
            if not blocks:
                self._depths.pop()

    def pop(self) -> ListedBlock | None:
        """Takes the hottest block off the list, once it is complete; None if none is left."""
        if not self._hottest:
            return None
        block = heappop(self._hottest)[-1]
        self._count(block, -1)
        parent = self._blocks.get((block.space, block.parent))
        block.skipped = parent is not None and parent.skipped
        return block

    def put_back(self, block: ListedBlock) -> None:
        """Puts a block on the list again."""
        self._push(block)

    def colder(self, block: ListedBlock, kind: Kind) -> Page | None:
        """Takes off the list the coldest page of that kind that no reader holds, and returns it; None if none is colder
        than the block."""
        pages = self._coldest.get(kind, [])
        while pages and pages[0][:2] < (block.used, -block.depth):
            page = heappop(pages)[-1]
            if page.state is PageState.READY and not page.pins:
                return page
        return None

    def coldest(self) -> Page | None:
        """Returns the coldest of all listed pages in the store; None if there is none."""
        for pages in self._coldest.values():
            while pages and pages[0][-1].state is not PageState.READY:
                heappop(pages)
        tops = [pages[0] for pages in self._coldest.values() if pages]
        return min(tops)[-1] if tops else None

    def is_colder(self, owner: Owner, block: ListedBlock) -> bool:
        """Whether that page in the store is colder than the block."""
        other = self._blocks.get((owner[0], owner[1].hash))
        return other is None or (other.used, -other.depth) < (block.used, -block.depth)

    def left(self) -> tuple[int, int]:
        """Returns how many pages are on the list to be saved, and their bytes."""
        if self.complete:
            return self._left_pages, self._left_bytes
        # The deadline came before the list was complete: this is the shard's last step of work.
        saved = {(page.space, page.key) for page in self._pages if page.tier.spec.durable}
        left = {(page.space, page.key): page.nbytes for page in self._pages if not self._is_private(page.space)}
        sizes = [nbytes for name, nbytes in left.items() if name not in saved]
        return len(sizes), sum(sizes)

    def _group(self, page: Page) -> None:
        name = (page.space, page.key.hash)
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = ListedBlock(page)
            self._by_depth.setdefault(block.depth, []).append(block)
        else:
            block.pages.append(page)
            block.used = max(block.used, page.used)
        if self._is_private(page.space):
            block.used, block.skipped = -1, True

    def _list(self, block: ListedBlock) -> None:
        """Lists a block that no unlisted block follows."""
        parent = self._blocks.get((block.space, block.parent))
        if parent is not None:
            parent.used = max(parent.used, block.used)
        for page in block.pages:
            if page.tier.spec.durable:
                self._entries -= 1
                kind = page.space, Shape(page.nbytes, page.key.part.layers)
                heappush(self._coldest.setdefault(kind, []), (block.used, -block.depth, self._entries, page))
        if not block.skipped:
            self._push(block)

    def _push(self, block: ListedBlock) -> None:
        self._entries -= 1
        heappush(self._hottest, (-block.used, block.depth, self._entries, block))
        self._count(block, 1)

    def _count(self, block: ListedBlock, sign: int) -> None:
        for page in block.unsaved():
            self._left_pages += sign
            self._left_bytes += sign * page.nbytes
