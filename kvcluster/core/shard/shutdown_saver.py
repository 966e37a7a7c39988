"""Saves a shard's pages when it is asked to stop: writes the hottest pages of its memory to its durable store, until a
deadline, so that the next incarnation finds them there.

The shard decides alone, since its coordinator may have ended: a SaveList orders the pages by what the shard knows. The
shell writes one batch after another (MovePages), encoded as the tier policy requires unless they are encoded already. A
page stays where it lies, for readers, and gets a twin in the store. Where the store is full, colder pages give way.

If the leases of a batch (tier_mover.py) are revoked by a purge that arrives meanwhile, the pages that the purge left
are tried again. Nothing is saved twice: a second request gets the result of the first. When all is saved or time is up,
the shard goes on to serve loads until its process ends.

A SaveList has the blocks of the shard in the order in which their pages are to be saved: the last used first, and
chains from their roots on, so that what does not fit, or not in time, is what would be missed least. A block was used
when a worker last pinned or committed any of its pages (Page.used); one that another block follows counts as used as
late as that one, since the other is useless without it. So no block precedes the one that it follows. The pages that
lie in the store already are listed from the other end: the coldest leaf first, for each kind of page by itself, since
the room of one is used again only for another of its kind.

A pool of millions is neither searched nor sorted in one step (docs/adr/0034): first its pages are grouped by block,
then blocks are put on heaps from the deepest on, some in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import Owner, Shape
from kvcluster.core.groups import PageKey
from kvcluster.core.ids import BlockHash, CallId, NamespaceId
from kvcluster.core.messages import Answer, Effect, Moved, PagesSaved, SavePages, Tier
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.tier_mover import BATCH_BYTES, PageMoves
from kvcluster.core.tiers import Takes

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
        # The deadline passed before the list was complete: this is the shard's last step of work.
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


class ShutdownSaver:
    """Saves once, from `start` on."""

    def __init__(self, state: ShardState, moves: PageMoves) -> None:
        self._state = state
        self._moves = moves
        self._into: Tier | None = next((tier for tier in state.pool.stores if tier.spec.durable), None)
        self._calls: list[CallId] = []
        self._until: int | None = None
        self._codec = Codec.RAW
        self._raw_blocks = 0
        self._list: SaveList | None = None
        self._blocks: list[ListedBlock] = []  # of the moves under way, if they are its own
        self._file_tried = False  # a file of another kind was examined for the batch being built
        self._saved_pages = self._saved_bytes = 0
        self._lost_pages = self._lost_bytes = 0
        self._result: PagesSaved | None = None

    @property
    def saving(self) -> bool:
        """Whether the batch of moves under way, if there is one, is its own."""
        return bool(self._blocks)

    @property
    def next_deadline(self) -> int | None:
        """When the next step is due: at once while pages are listed or searched, else when time is up."""
        if self._until is None or self._result is not None:
            return None
        return 0 if self._list is not None and not self.saving else self._until

    def start(self, m: SavePages) -> None:
        """Begins to save. If saving has begun already, the caller gets its result too, and the earlier deadline
        holds."""
        self._state.stopping = True
        self._calls.append(m.call)
        if self._until is None:
            self._codec, self._raw_blocks = m.codec, m.raw_blocks
        self._until = m.until if self._until is None else min(self._until, m.until)

    def serve(self, now: int) -> list[Effect]:
        """Does the next step of the work, if there is any: lists some pages, begins a batch, or answers the callers at
        the end. Lists nothing while other moves are under way, whose pages have not arrived."""
        if self._until is None:
            return []
        if self._result is None and (self._into is None or now >= self._until):
            return self.end()
        if self._result is not None:
            return self._answers(self._result)
        if self._moves.attempts:
            return []
        if self._list is None:
            self._list = SaveList(list(self._state.pool.ready()), self._is_private)
        if not self._list.complete:
            self._list.list_some()
            return []
        return self._begin(self._list, now)

    def moved(self, m: Moved) -> None:
        """Ends the batch: commits the pages that were written, and aborts the others."""
        revoked = self._moves.revoked
        again: dict[tuple[NamespaceId, BlockHash], ListedBlock] = {}
        for at, source, target, arrived in self._moves.end(m):
            block = self._blocks[at]
            if arrived:
                block.pages.append(target)
                self._saved_pages += 1
                self._saved_bytes += target.nbytes
            elif revoked or target.codec is not source.codec:
                source.stays_raw = not revoked  # it cannot be encoded: the next batch saves it raw
                again[block.space, block.hash] = block
            else:
                self._lose(source, block)
        self._blocks = []
        assert self._list is not None
        for block in again.values() if self._result is None else ():
            self._list.put_back(block)

    def end(self) -> list[Effect]:
        """Ends the work, whatever is left, and answers the callers. A batch under way ends by itself; its pages count
        as left."""
        if self._until is None:
            return []
        if self._result is None:
            pages = self._list or SaveList(list(self._state.pool.ready()), self._is_private)
            left_pages, left_bytes = pages.left()
            under_way = self._moves.sources if self.saving else []
            self._result = PagesSaved(
                *(self._saved_pages, self._saved_bytes),
                self._lost_pages + left_pages + len(under_way),
                self._lost_bytes + left_bytes + sum(page.nbytes for page in under_way),
            )
        return self._answers(self._result)

    def _answers(self, result: PagesSaved) -> list[Effect]:
        calls, self._calls = self._calls, []
        return [Answer(call, result) for call in calls]

    def _is_private(self, space: NamespaceId) -> bool:
        known = self._state.namespaces.known(space)
        return known is not None and known.spec.private

    def _begin(self, pages: SaveList, now: int) -> list[Effect]:
        """Begins the next batch; ends the work if nothing is left to save."""
        pairs: list[tuple[Page, Page]] = []
        nbytes, looked_at = 0, 0
        self._blocks, self._file_tried = [], False
        while nbytes < BATCH_BYTES and len(pairs) < limits.MOVED_PAGES and looked_at < LISTED_PAGES:
            block = pages.pop()
            if block is None:
                break
            looked_at += 1
            found = self._pairs(block, pages)
            pairs += found
            self._blocks += [block] * len(found)
            nbytes += sum(source.nbytes for source, _ in found)
        if not pairs:
            return [] if looked_at == LISTED_PAGES else self.end()
        return self._moves.begin(pairs, now)

    def _pairs(self, block: ListedBlock, pages: SaveList) -> list[tuple[Page, Page]]:
        """Returns the pages of the block that are to be saved, each with its reserved target: all of them or none."""
        space, sources = self._state.namespaces.known(block.space), block.unsaved()
        pairs: list[tuple[Page, Page]] = []
        for source in sources:
            target = self._reserve(source, space, block, pages) if space is not None and not block.skipped else None
            if target is None:
                for _, reserved in pairs:
                    self._state.pool.abort(reserved)
                for page in sources:
                    self._lose(page, block)
                return []
            pairs.append((source, target))
        return pairs

    def _reserve(self, source: Page, space: ShardNamespace, block: ListedBlock, pages: SaveList) -> Page | None:
        assert self._into is not None
        for codec in self._codecs(source, space):
            fitting = space.fitting(source.key.group, source.key.part, codec)
            nbytes = space.page_bytes(source.key.group, source.key.part, fitting)
            target = self._moves.reserve(source, self._into, fitting, nbytes)
            if target is None and self._make_room(source, nbytes, block, pages):
                target = self._moves.reserve(source, self._into, fitting, nbytes)
            if target is not None:
                return target
        return None

    def _codecs(self, source: Page, space: ShardNamespace) -> list[Codec]:
        """Returns the codecs in which the page may be saved, the preferred one first. An encoded one is saved as it is;
        others as the coordinator last ordered for their namespace, or as SavePages states."""
        if source.codec is not Codec.RAW or source.stays_raw or source.tier.spec.takes is not Takes.RAW:
            return [source.codec]
        codec = Codec.RAW if source.depth < self._raw_blocks else space.ordered_codec or self._codec
        return list(dict.fromkeys((codec, Codec.Q8)))

    def _make_room(self, source: Page, nbytes: int, block: ListedBlock, pages: SaveList) -> bool:
        """Evicts a page of the same kind that is colder than the block; if there is none, all pages of the file of the
        coldest page, if all are colder. Looks at one such file a batch. Returns whether anything was evicted."""
        page = pages.colder(block, (source.space, Shape(nbytes, source.key.part.layers)))
        if page is not None:
            self._moves.evict(page)
            return True
        coldest = pages.coldest() if not self._file_tried else None
        if coldest is None or self._into is None:
            return False
        self._file_tried = True
        named = self._state.pool.stores[self._into].neighbours(coldest.offset)
        colder = [(owner, offset) for owner, offset in named if pages.is_colder(owner, block)]
        there = [self._state.pool.ready_at(self._into, owner, offset) for owner, offset in colder]
        free = [page for page in there if page is not None and not page.pins]
        if not free or len(free) < len(named):
            return False
        for page in free:
            self._moves.evict(page)
        return True

    def _lose(self, page: Page, block: ListedBlock) -> None:
        block.skipped = True
        self._lost_pages += 1
        self._lost_bytes += page.nbytes
