"""Moves a shard's pages between its tiers: demotion encodes a page into a lower tier, promotion decodes it into a
faster one. The target tier determines the codec (tiers.Takes); a page moves into a store unchanged.

The coordinator orders the moves (MoveOrder). They are carried out one batch at a time, concurrently with all
other work.

A page that cannot be promoted stays where it is. A demoted page always leaves its tier, unless its move keeps it. If
its twin already lies below, it is not encoded again. If there is no room below, although the coordinator has tried to
make some, or if it cannot be written to a store, it is evicted, as it would be without a tier below; if its move keeps
it, it stays where it is. A page that was to stay raw is encoded if only an encoded page finds room. If a store has
room, but none for pages of this kind, the pages that its allocator names are evicted (StoreAllocator.sparsest), once
per batch.

Batches (PageMoves) are of moves that the coordinator orders, or of those that save pages at a stop (shutdown_saver.py).
The shell carries out a batch (MovePages) and reports the result (Moved). During the move a source can be read as
before, and a target cannot be read. The batch holds a read lease and a write lease of the shard's own, so that whatever
revokes leases revokes it too. A target that was not written, or whose source was withdrawn meanwhile, is aborted; a
source that does not verify is withdrawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import Effect, Move, Moved, MoveOrder, MovePages, PageKey, PageMove, Tier
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.tiers import Takes, above

BATCH_BYTES = 8 * 2**20
"""Approximate bytes read per batch: some milliseconds of encoding, after which callers that wait for space get it."""


class _MoveBatch(NamedTuple):
    reading: Attempt
    writing: Attempt
    pairs: Sequence[tuple[Page, Page]]  # source and target


class EndedMove(NamedTuple):
    """A move that has ended, the one at index `at` of its batch. `arrived`: the target is READY. Otherwise it was
    aborted; the source is READY all the same, and not known to be corrupt."""

    at: int
    source: Page
    target: Page
    arrived: bool


class PageMoves:
    """At most one batch of moves. `committed` is called with each target that has become READY."""

    def __init__(self, state: ShardState, committed: Callable[[Page], None]) -> None:
        self._state = state
        self._committed = committed
        self._batch: _MoveBatch | None = None

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the two leases of the batch under way."""
        return [self._batch.reading, self._batch.writing] if self._batch is not None else []

    @property
    def sources(self) -> list[Page]:
        """The pages that the batch under way moves."""
        return [source for source, _ in self._batch.pairs] if self._batch is not None else []

    @property
    def revoked(self) -> bool:
        """Whether the write lease of the batch under way was revoked: none of its targets may be committed."""
        return self._batch is not None and not self._state.leases.running(self._batch.writing)

    def reserve(self, source: Page, to: Tier, codec: Codec, nbytes: int) -> Page | None:
        """Reserves the target of a move; None if there is no room."""
        new = source.new()._replace(loss=max(source.loss, codec.loss))
        return self._state.pool.reserve(source.space, new, nbytes, tier=to, codec=codec)

    def evict(self, page: Page) -> None:
        """Withdraws a page to make room, or because there is none for it."""
        self._state.counters["evicted"] += 1
        self._state.withdraw(page)

    def begin(self, pairs: Sequence[tuple[Page, Page]], now: int, *, sampled: float = 0.0) -> list[Effect]:
        """Begins a batch: pairs of a READY source and its reserved target. `sampled`: the fraction of pages encoded in
        q4 whose error is measured."""
        assert self._batch is None, "one batch at a time"
        batch = self._batch = _MoveBatch(self._state.own.next(), self._state.own.next(), pairs)
        sources = self.sources
        self._state.pool.pin(sources)
        self._state.leases.grant(batch.reading, LeaseKind.READ, [*sources], now)
        self._state.leases.grant(batch.writing, LeaseKind.WRITE, [target for _, target in pairs], now)
        return [MovePages(batch.writing, tuple(self._page_move(*pair, sampled) for pair in pairs))]

    def end(self, m: Moved, *, may_commit: bool = True) -> Iterator[EndedMove]:
        """Ends the batch, and yields the moves of it that arrived or that may be tried again, each as soon as its
        target is committed or aborted; its source stays pinned until the next is asked for. To be consumed to the
        end."""
        commits = may_commit and not self.revoked
        batch, self._batch = self._batch, None
        assert batch is not None and batch.writing == m.attempt, "the end of a batch that is not under way"
        self._state.leases.end(batch.reading)
        self._state.leases.end(batch.writing)
        for index, ((source, target), sums) in enumerate(zip(batch.pairs, m.sums, strict=True)):
            alive, corrupt = source.state is PageState.READY, index in m.corrupt
            arrived = commits and alive and not corrupt and sums is not None
            if arrived and sums is not None:
                self._state.pool.commit(target, sums)
                target.used, target.stays_raw = source.used, source.stays_raw
                self._committed(target)
            else:
                self._state.pool.abort(target)
                if alive and corrupt:
                    self._state.counters["corrupt"] += 1
                    self._state.withdraw(source, corrupt=True)
            if alive and not corrupt:
                yield EndedMove(index, source, target, arrived)
            self._state.pool.unpin([source])

    def _page_move(self, source: Page, target: Page, sampled: float) -> PageMove:
        space = self._state.namespaces.known(source.space)
        assert space is not None, "a page of a namespace that is not known"
        coded = target.codec is Codec.Q4 and source.codec is not Codec.Q4
        measured = coded and int.from_bytes(source.key.hash[:4], "big") < int(sampled * 2**32)
        return page_move(space, source, target)._replace(sampled=measured)


def page_move(space: ShardNamespace, source: Page, target: Page) -> PageMove:
    """Returns what the shell needs to move a page from `source` to `target`."""
    return PageMove(space.id, space.tenant, space.spec, source.parent, source.depth, source.slot(), target.slot())


BlockName = tuple[NamespaceId, BlockHash]


class TierMover:
    """Carries out move orders in the order of arrival."""

    def __init__(self, state: ShardState, moves: PageMoves, *, sampled: float) -> None:
        """`sampled`: the fraction of pages encoded in q4 whose error is measured."""
        self._state = state
        self._moves = moves
        self._sampled = sampled
        self._samples: list[tuple[NamespaceId, int]] = []
        self._orders: list[MoveOrder] = []  # with moves that are left or in the batch
        self._left: deque[Move] = deque()
        self._kept: dict[BlockName, None] = {}  # blocks of the batch that stay where they are if they cannot be moved
        self._gave_up = False  # pages of a store were evicted for the batch being built

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
        """Begins the next batch if none is under way, unless the shard is no member or stopping. Ends the orders if
        nothing is left to move."""
        if self._moves.attempts or not self._state.member(now) or self._state.stopping:
            return []
        pairs: list[tuple[Page, Page]] = []
        nbytes = 0
        self._kept, self._gave_up = {}, False
        while self._left and nbytes < BATCH_BYTES and len(pairs) < limits.MOVED_PAGES:
            if pairs and self._left[0].to is not pairs[0][1].tier:
                break  # it may need the space that the end of this batch frees
            move = self._left.popleft()
            space = self._state.namespaces.known(move.namespace)
            if space is not None and move.to in self._state.pool.allocators:
                for group, part in space.parts:  # all parts of a block move together
                    pair = self._pair(move, space, group, part)
                    if pair is not None:
                        pairs.append(pair)
                        nbytes += pair[0].nbytes
                if move.keeps:
                    self._kept[move.namespace, move.hash] = None
        if not pairs:
            for order in self._orders:
                self._state.order_cursor.ended(order)
            self._orders.clear()
            return []
        return self._moves.begin(pairs, now, sampled=self._sampled)

    def end(self, m: Moved, now: int) -> None:
        """Ends the batch: commits the targets that were written and verified, and aborts the others."""
        sources = self._moves.sources
        for index, error in m.errors[: limits.SAMPLES - len(self._samples)]:
            self._samples.append((sources[index].space, error))
        for at, source, target, arrived in self._moves.end(m, may_commit=self._state.member(now)):
            if arrived:
                self._arrived(source, target)
            elif m.sums[at] is None and target.tier > source.tier:
                keeps = (source.space, source.key.hash) in self._kept
                if not target.tier.spec.addressable:
                    self._cannot_move(source, keeps)
                elif not source.stays_raw:
                    source.stays_raw = True  # it cannot be encoded: the next batch moves it raw
                    self._left.appendleft(Move(source.space, source.key.hash, target.tier, keeps=keeps))

    def _arrived(self, source: Page, target: Page) -> None:
        if target.tier > source.tier:
            self._state.counters["demoted"] += 1
            self._state.withdraw(source)
        else:
            target.decoded = source.decoded or source.codec is not Codec.RAW
            self._state.counters["promoted"] += 1

    def _pair(self, move: Move, space: ShardNamespace, group: int, part: Part) -> tuple[Page, Page] | None:
        """Returns the page to move and its reserved target. Returns None if there is nothing to move, or if the page
        was withdrawn or evicted instead."""
        key = PageKey(move.hash, group, part)
        leaves = None if move.up else above(move.to, self._state.pool.tiers)
        down = leaves is not None
        source = self._source(move, leaves, space.id, key)
        if source is None:
            return None
        if down and self._state.pool.below_of(source) is not None:
            self._state.withdraw(source)
            return None
        if self._state.pool.on(move.to, space.id, key) is not None:
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
            self._moves.evict(source)

    def _reserve(self, source: Page, space: ShardNamespace, to: Tier, codec: Codec) -> Page | None:
        nbytes = space.page_bytes(source.key.group, source.key.part, codec)
        target = self._moves.reserve(source, to, codec, nbytes)
        store = self._state.pool.stores.get(to)
        if target is None and store is not None and not self._gave_up:
            self._gave_up = True
            for owner, offset in store.sparsest(nbytes, (space.id, source.key)):
                page = self._state.pool.ready_at(to, owner, offset)
                if page is not None:
                    self._moves.evict(page)
            target = self._moves.reserve(source, to, codec, nbytes)
        return target

    def _source(self, move: Move, leaves: Tier | None, space: NamespaceId, key: PageKey) -> Page | None:
        """Returns the READY page to move: in the tier that a demotion leaves, or in the first tier below that has
        it."""
        below = [tier for tier in self._state.pool.allocators if tier > move.to]
        for tier in [leaves] if leaves is not None else below:
            page = self._state.pool.on(tier, space, key)
            if page is not None and page.state is PageState.READY:
                return page
        return None
