"""A shard's pages on their way between its tiers: demoted by being encoded below, promoted by being decoded above. The
tier that a page comes into says in which codec it lies there (tiers.Takes); into a store it goes as it is.

What is to move the coordinator has ordered (MoveOrder); the shell does it, a batch at a time, beside everything else,
and says what came of it. Meanwhile the source is read like before and the target is nobody's: a batch is a read lease
and a write lease of the shard's own, so that whatever ends leases ends it too. A source that was withdrawn or replaced
meanwhile takes its target with it.

What is demoted leaves its tier in any case. Where its twin lies below already it is not encoded again, and where there
is no room below, which the coordinator has tried to make, it is evicted, as it would be without a tier below; likewise
what cannot be written to a store. What was to stay raw goes encoded where only that has room. Where a store has
room, but none for pages of this kind, the pages that its allocator names are evicted (StoreAllocator.sparsest), once a
batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.leases import LeaseBook, LeaseKind, OwnAttempts
from kvcluster.core.messages import Effect, Move, Moved, MoveOrder, MovePages, PageKey, PageMove, Tier
from kvcluster.core.order_stream import OrderCursor
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.shard_namespaces import ShardNamespace, ShardNamespaces
from kvcluster.core.spec import Part
from kvcluster.core.tiers import Takes
from kvcluster.core.withdrawal import Withdrawal

BATCH_BYTES = 8 * 2**20
"""What one batch reads, about: some milliseconds of encoding, after which those who wait for room get it."""


@dataclass(frozen=True, slots=True)
class _MoveBatch:
    reading: Attempt
    writing: Attempt
    pairs: list[tuple[Page, Page]]  # source and target


class TierMover:
    """Carries out move orders, the first first."""

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
        """`sampled`: of what is encoded in q4, this share is looked at for what it loses. `committed` is told of each
        page that is READY in its new place, before it leaves its old one."""
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
        self._orders: list[MoveOrder] = []  # that have moves left, or in the batch
        self._left: deque[Move] = deque()
        self._batch: _MoveBatch | None = None
        self._gave_up = False  # in the batch that is being put together

    @property
    def attempts(self) -> list[Attempt]:
        """The leases of the batch that is under way."""
        return [self._batch.reading, self._batch.writing] if self._batch is not None else []

    def reset(self) -> None:
        """Another coordinator gives the orders. What the last one ordered ends with its batch."""
        self._orders.clear()
        self._left.clear()

    def samples(self) -> tuple[tuple[NamespaceId, int], ...]:
        """What was found since the last call, for the next report. One that is lost on its way is no loss."""
        samples, self._samples = self._samples, []
        return tuple(samples)

    def take(self, order: MoveOrder) -> None:
        """A new order."""
        self._orders.append(order)
        self._left.extend(order.moves)

    def begin(self, now: int) -> list[Effect]:
        """The next batch, if none is under way and anything is left to move."""
        if self._batch is not None:
            return []
        pairs: list[tuple[Page, Page]] = []
        nbytes = 0
        self._gave_up = False
        while self._left and nbytes < BATCH_BYTES and len(pairs) < limits.MOVED_PAGES:
            if pairs and self._left[0].to is not pairs[0][1].tier:
                break  # it may want the room that this batch makes at its end
            move = self._left.popleft()
            space = self._namespaces.known(move.namespace)
            if space is not None and move.to in self._pool.allocators:
                for group, part in space.parts:  # the parts of a block go together
                    pair = self._pair(move, space, group, part)
                    if pair is not None:
                        pairs.append(pair)
                        nbytes += pair[0].nbytes
        if not pairs:
            for order in self._orders:
                self._cursor.ended(order)
            self._orders.clear()
            return []
        batch = self._batch = _MoveBatch(self._own.next(), self._own.next(), pairs)
        for source, _ in pairs:
            self._pool.pin(source)
        self._leases.grant(batch.reading, LeaseKind.READ, [source for source, _ in pairs], now)
        self._leases.grant(batch.writing, LeaseKind.WRITE, [target for _, target in pairs], now)
        return [MovePages(batch.writing, tuple(map(self._page_move, pairs)))]

    def end(self, m: Moved, *, may_commit: bool) -> None:
        """The batch has come to its end."""
        batch, self._batch = self._batch, None
        assert batch is not None and batch.writing == m.attempt, "an end of what never began"
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
                    self._evict(source)
                elif alive and sums is None and target.tier > source.tier and not source.stays_raw:
                    source.stays_raw = True  # it goes as it is, by the next batch
                    self._left.appendleft(Move(source.space, source.key.hash, target.tier))
            self._pool.unpin(source)

    def _arrived(self, source: Page, target: Page, sums: bytes) -> None:
        self._pool.commit(target, sums)
        self._committed(target)
        target.stays_raw = source.stays_raw
        if target.tier > source.tier:
            self._counters["demoted"] += 1
            self._withdraw(source)
        else:
            target.decoded = source.codec is not Codec.RAW
            self._counters["promoted"] += 1

    def _pair(self, move: Move, space: ShardNamespace, group: int, part: Part) -> tuple[Page, Page] | None:
        """A page that is to be moved, and its target, reserved. What is done at once is done."""
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
        target = None
        for codec in self._codecs(move, source):
            target = target or self._reserve(source, space, move.to, space.fitting(group, part, codec))
        if target is None:
            if down:
                self._evict(source)
            return None
        return source, target

    def _codecs(self, move: Move, source: Page) -> list[Codec]:
        """In which it may go there, the best first."""
        takes = move.to.spec.takes
        if takes is Takes.UNCHANGED:
            return [source.codec]
        if takes is Takes.RAW or source.stays_raw:
            return [Codec.RAW]
        return list(dict.fromkeys((move.codec, Codec.Q8)))

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
        """What is READY of it where it comes from: in the tier that it leaves, or in the first below that has it."""
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
    """What the shell is to know of it."""
    return PageMove(space.id, space.tenant, space.spec, source.parent, source.depth, source.slot(), target.slot())
