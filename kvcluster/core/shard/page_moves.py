"""Moves of pages between a shard's tiers, one batch at a time: those that the coordinator orders (tier_mover.py), or
those that save pages at a stop (shutdown_saver.py).

The shell carries out a batch (MovePages) and reports the result (Moved). During the move a source can be read as
before, and a target cannot be read. The batch holds a read lease and a write lease of the shard's own, so that whatever
revokes leases revokes it too. A target that was not written, or whose source was withdrawn meanwhile, is aborted; a
source that does not verify is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Effect, Moved, MovePages, PageMove, Tier
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState

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
        return self._state.pool.reserve(
            source.space,
            source.key,
            nbytes,
            parent=source.parent,
            depth=source.depth,
            loss=max(source.loss, codec.loss),
            tier=to,
            codec=codec,
        )

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
