"""Moves a shard's pages between its tiers: demotion encodes a page into a lower tier, promotion decodes it into a
faster one. The target tier determines the codec (tiers.Takes); a page moves into a store unchanged.

The coordinator orders the moves (MoveOrder). They are carried out one batch at a time (page_moves.py), concurrently
with all other work.

A page that cannot be promoted stays where it is. A demoted page leaves its tier in any case, unless its move keeps it.
If its twin already lies below, it is not encoded again. If there is no room below, although the coordinator has tried
to make some, or if it cannot be written to a store, it is evicted, as it would be without a tier below; one whose move
keeps it stays where it is. A page that was to stay raw is encoded if only an encoded page finds room. If a store has
room, but none for pages of this kind, the pages that its allocator names are evicted (StoreAllocator.sparsest), once
per batch.
"""

from __future__ import annotations

from collections import deque

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Effect, Move, Moved, MoveOrder, PageKey, Tier
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.page_moves import BATCH_BYTES, PageMoves
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.tiers import Takes, above

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
            target.decoded = source.codec is not Codec.RAW
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
