"""Moves a shard's pages between its tiers: demotion encodes a page into a lower tier, promotion decodes it into the
first. The target tier determines the codec (tiers.Takes); a page moves into a store unchanged.

The coordinator orders the moves (MoveOrder). The shell carries them out, one batch at a time, concurrently with all
other work, and reports the result (Moved). During the move the source can be read as before, and the target cannot be
read. A batch holds a read lease and a write lease of the shard's own, so that whatever revokes leases revokes it too.
If the source was withdrawn or replaced during the move, the target is aborted.

A demoted page leaves its tier in any case, unless its move keeps it. If its twin already lies below, it is not encoded
again. If there is no room below, although the coordinator has tried to make some, or if it cannot be written to a
store, it is evicted, as it would be without a tier below; one whose move keeps it stays where it is. A page that was to
stay raw is encoded if only an encoded page finds room. If a store has room, but none for pages of this kind, the pages
that its allocator names are evicted (StoreAllocator.sparsest), once per batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId
from kvcluster.core.leases import LeaseBook, LeaseKind, OwnAttempts
from kvcluster.core.messages import Effect, Move, Moved, MoveOrder, MovePages, PageKey, PageMove, Tier
from kvcluster.core.order_stream import OrderCursor
from kvcluster.core.page import Page, PageState
from kvcluster.core.pool import PagePool
from kvcluster.core.shard_namespaces import ShardNamespace, ShardNamespaces
from kvcluster.core.spec import Part
from kvcluster.core.tiers import Takes
from kvcluster.core.withdrawal import Withdrawal

BlockName = tuple[NamespaceId, BlockHash]
BATCH_BYTES = 8 * 2**20
"""Approximate bytes read per batch: some milliseconds of encoding, after which callers that wait for space get it."""


@dataclass(frozen=True, slots=True)
class _MoveBatch:
    reading: Attempt
    writing: Attempt
    pairs: list[tuple[Page, Page]]  # source and target
    kept: dict[BlockName, None]  # blocks that stay where they are if they cannot be moved


class TierMover:
    """Carries out move orders in the order of arrival."""

    def __init__(
        self,
        pool: PagePool,
        leases: LeaseBook,
        spaces: ShardNamespaces,
        own: OwnAttempts,
        withdraw: Withdrawal,
        committed: Callable[[Page], None],
        cursor: OrderCursor,
        counters: dict[str, int],
        *,
        sampled: float,
    ) -> None:
        """`sampled`: the fraction of pages encoded in q4 whose error is measured. `committed` is called with each page
        that is READY in its new tier, before it is withdrawn from its old one."""
        self._pool = pool
        self._leases = leases
        self._namespaces = spaces
        self._own = own
        self._withdraw = withdraw
        self._committed = committed
        self._cursor = cursor
        self._counters = counters
        self._sampled = int(sampled * 2**32)
        self._samples: list[tuple[NamespaceId, int]] = []
        self._orders: list[MoveOrder] = []  # with moves that are left or in the batch
        self._left: deque[Move] = deque()
        self._batch: _MoveBatch | None = None
        self._gave_up = False  # pages of a store were evicted for the batch being built

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the two leases of the batch under way."""
        return [self._batch.reading, self._batch.writing] if self._batch is not None else []

    def reset(self) -> None:
        """Drops all orders, because another coordinator gives them now. The batch under way ends by itself."""
        self._orders.clear()
        self._left.clear()

    def samples(self) -> tuple[tuple[NamespaceId, int], ...]:
        """Returns the errors measured since the last call, for the next report. Losing a report of them does no
        harm."""
        samples, self._samples = self._samples, []
        return tuple(samples)

    def take(self, order: MoveOrder) -> None:
        """Queues a new order."""
        self._orders.append(order)
        self._left.extend(order.moves)

    def begin(self, now: int) -> list[Effect]:
        """Begins the next batch if none is under way. Ends the orders if nothing is left to move."""
        if self._batch is not None:
            return []
        pairs: list[tuple[Page, Page]] = []
        kept: dict[BlockName, None] = {}
        nbytes = 0
        self._gave_up = False
        while self._left and nbytes < BATCH_BYTES and len(pairs) < limits.MOVED_PAGES:
            if pairs and self._left[0].to is not pairs[0][1].tier:
                break  # it may need the space that the end of this batch frees
            move = self._left.popleft()
            space = self._namespaces.known(move.namespace)
            if space is not None and move.to in self._pool.allocators:
                for group, part in space.parts:  # all parts of a block move together
                    pair = self._pair(move, space, group, part)
                    if pair is not None:
                        pairs.append(pair)
                        nbytes += pair[0].nbytes
                if move.keeps:
                    kept[move.namespace, move.hash] = None
        if not pairs:
            for order in self._orders:
                self._cursor.ended(order)
            self._orders.clear()
            return []
        batch = self._batch = _MoveBatch(self._own.next(), self._own.next(), pairs, kept)
        for source, _ in pairs:
            self._pool.pin(source)
        self._leases.grant(batch.reading, LeaseKind.READ, [source for source, _ in pairs], now)
        self._leases.grant(batch.writing, LeaseKind.WRITE, [target for _, target in pairs], now)
        return [MovePages(batch.writing, tuple(map(self._page_move, pairs)))]

    def end(self, m: Moved, *, may_commit: bool) -> None:
        """Ends the batch: commits the targets that were written and verified, and aborts the others."""
        batch, self._batch = self._batch, None
        assert batch is not None and batch.writing == m.attempt, "the end of a batch that is not under way"
        for index, error in m.errors[: limits.SAMPLES - len(self._samples)]:
            self._samples.append((batch.pairs[index][0].space, error))
        commits = may_commit and self._leases.running(batch.writing)
        self._leases.end(batch.reading)
        self._leases.end(batch.writing)
        for index, ((source, target), sums) in enumerate(zip(batch.pairs, m.sums, strict=True)):
            alive = source.state is PageState.READY
            if commits and alive and sums is not None and index not in m.corrupt:
                self._arrived(source, target, sums)
            else:
                self._pool.abort(target)
                if alive and index in m.corrupt:
                    self._counters["corrupt"] += 1
                    self._withdraw(source, corrupt=True)
                elif alive and sums is None and not target.tier.spec.addressable:
                    self._cannot_move(source, (source.space, source.key.hash) in batch.kept)
                elif alive and sums is None and target.tier > source.tier and not source.stays_raw:
                    source.stays_raw = True  # it cannot be encoded: the next batch moves it raw
                    keeps = (source.space, source.key.hash) in batch.kept
                    self._left.appendleft(Move(source.space, source.key.hash, target.tier, keeps=keeps))
            self._pool.unpin(source)

    def _arrived(self, source: Page, target: Page, sums: bytes) -> None:
        self._pool.commit(target, sums)
        self._committed(target)
        target.used, target.stays_raw = source.used, source.stays_raw
        if target.tier > source.tier:
            self._counters["demoted"] += 1
            self._withdraw(source)
        else:
            target.decoded = source.codec is not Codec.RAW
            self._counters["promoted"] += 1

    def _pair(self, move: Move, space: ShardNamespace, group: int, part: Part) -> tuple[Page, Page] | None:
        """Returns the page to move and its reserved target. Returns None if there is nothing to move, or if the page
        was withdrawn or evicted instead."""
        key = PageKey(move.hash, group, part)
        leaves = self._pool.above(move.to)
        down = leaves is not None
        source = self._source(move, leaves, space.id, key)
        if source is None:
            return None
        if down and self._pool.below_of(source) is not None:
            self._withdraw(source)
            return None
        if self._pool.on(move.to, space.id, key) is not None:
            return None
        if down and move.codec is not Codec.RAW:
            space.ordered_codec = move.codec
        target = None
        for codec in self._codecs(move, source):
            target = target or self._reserve(source, space, move.to, space.fitting(group, part, codec))
        if target is None:
            if down:
                self._cannot_move(source, move.keeps)
            return None
        return source, target

    def _codecs(self, move: Move, source: Page) -> list[Codec]:
        """Returns the codecs in which the page may lie in the target tier, the preferred one first."""
        takes = move.to.spec.takes
        if takes is Takes.UNCHANGED:
            return [source.codec]
        if takes is Takes.RAW or source.stays_raw:
            return [Codec.RAW]
        return list(dict.fromkeys((move.codec, Codec.Q8)))

    def _cannot_move(self, source: Page, keeps: bool) -> None:
        """Handles a page to demote for which there is no room below, or that cannot be written there."""
        if not keeps:
            self._evict(source)

    def _evict(self, page: Page) -> None:
        self._counters["evicted"] += 1
        self._withdraw(page)

    def _reserve(self, source: Page, space: ShardNamespace, to: Tier, codec: Codec) -> Page | None:
        target = self._reserve_once(source, space, to, codec)
        store = self._pool.stores.get(to)
        if target is None and store is not None and not self._gave_up:
            self._gave_up = True
            wanted = space.page_bytes(source.key.group, source.key.part, codec)
            for owner, offset in store.sparsest(wanted, (space.id, source.key)):
                page = self._pool.on(to, *owner)
                if page is not None and page.state is PageState.READY and page.offset == offset:
                    self._evict(page)
            target = self._reserve_once(source, space, to, codec)
        return target

    def _reserve_once(self, source: Page, space: ShardNamespace, to: Tier, codec: Codec) -> Page | None:
        return self._pool.reserve(
            space.id,
            source.key,
            space.page_bytes(source.key.group, source.key.part, codec),
            parent=source.parent,
            depth=source.depth,
            loss=max(source.loss, codec.loss),
            tier=to,
            codec=codec,
        )

    def _source(self, move: Move, leaves: Tier | None, space: NamespaceId, key: PageKey) -> Page | None:
        """Returns the READY page to move: in the tier that a demotion leaves, or in the first tier below that has
        it."""
        below = [tier for tier in self._pool.allocators if tier > move.to]
        for tier in [leaves] if leaves is not None else below:
            page = self._pool.on(tier, space, key)
            if page is not None and page.state is PageState.READY:
                return page
        return None

    def _page_move(self, pair: tuple[Page, Page]) -> PageMove:
        source, target = pair
        space = self._namespaces.known(source.space)
        assert space is not None, "a page of a namespace that is not known"
        coded = target.codec is Codec.Q4 and source.codec is not Codec.Q4
        sampled = coded and int.from_bytes(source.key.hash[:4], "big") < self._sampled
        return page_move(space, source, target)._replace(sampled=sampled)


def page_move(space: ShardNamespace, source: Page, target: Page) -> PageMove:
    """Returns what the shell needs to move a page from `source` to `target`."""
    return PageMove(space.id, space.tenant, space.spec, source.parent, source.depth, source.slot(), target.slot())
