"""The store plan: what one store does next, from its blocks to their outcome. Pure: `step(event, now) -> effects`.

The coordinator decides which blocks to write, and where. All shards are written at once, each by one exchange, or by a
few if its transport is faster that way; every exchange has whole blocks, and reports their outcome. The source is free
when every exchange has taken its last byte, ended or stopped, long before the shards have committed.

    NEW --Begin--> ASKING --StoreGranted--> WRITING --every exchange has ended--> CLOSING --the ticket is ended--> OVER

The outcome is reported once. If a block was not written, the ticket is ended first, so that other clients, and a retry
of this caller, can write it as soon as the outcome is known. If every block is stored, an open ticket blocks no other
client, and the outcome is reported before the ticket is ended. After a Cancel the outcome is reported as soon as no
exchange reads the source. The next store of this client begins when this one is OVER: it may be of the same blocks, and
would otherwise find them pending. Events of exchanges that are over change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import ShardAddress, StoreGrant, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.pieces import split_among_exchanges
from kvcluster.transfers.plan_messages import (
    NEVER_BEGUN,
    AskStore,
    Begin,
    Cancel,
    CloseTicket,
    FinishStore,
    FreeSource,
    NotGranted,
    PlanTick,
    SourceDrained,
    StartWrite,
    StopWrite,
    StoreEffect,
    StoreEvent,
    StoreGranted,
    StoreOver,
    TicketEnded,
    WriteEnded,
    WriteStopped,
)
from kvcluster.transfers.shard_health import AskAgain, Permit, ShardHealth
from kvcluster.transfers.store_executor import PagesToStore, StoreProgress, StoreTerms, pages_of
from kvcluster.transport.base import PathLost, Streams, Unavailable

PAUSES_NS = (10_000_000, 20_000_000, 40_000_000, 80_000_000, 160_000_000)
"""Pauses before asking again for a page that a broken attempt of this store may still hold. Its shard aborts that
attempt when it sees the connection close; a shard that takes longer than all of these is not worth waiting for."""

WRITERS = 32
"""Exchanges by which a client writes at once: sixteen shards with two streams each. Further exchanges wait."""

_LATE = Miss(MissReason.DEADLINE)


class _StoreState(Enum):
    NEW = "new"
    ASKING = "asking"
    WRITING = "writing"
    CLOSING = "closing"  # the ticket is being ended
    OVER = "over"


@dataclass(eq=False, slots=True)
class _WriteExchange:
    """One write that is under way, of the pages `items`. `reads`: whether it may still read the source."""

    of: PagesToStore
    items: Sequence[int]
    permit: Permit
    reattached: bool
    reads: bool = True


class StorePlan:
    """Plans one store. `streams` and `next_attempt` as in LoadPlan."""

    def __init__(
        self,
        terms: StoreTerms,
        progress: StoreProgress,
        health: ShardHealth,
        *,
        streams: Callable[[ShardAddress], Streams],
        next_attempt: Callable[[], Attempt],
        deadline_ns: int,
    ) -> None:
        self._terms = terms
        self._progress = progress
        self._health = health
        self._streams = streams
        self._next_attempt = next_attempt
        self._deadline_ns = deadline_ns
        self._numbers = itertools.count(1)
        self._exchanges: dict[int, _WriteExchange] = {}
        self._paused: list[tuple[int, PagesToStore]] = []  # when to ask again for pending pages
        self._namespace: NamespaceId | None = None
        self._state = _StoreState.NEW
        self._ticket: Attempt | None = None  # the ticket to end at the coordinator, None if there is none
        self._all_there = True
        self._source_free = self._reported = False
        self._cancelled: Miss | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._state is _StoreState.OVER

    def next_deadline(self) -> int | None:
        """Returns when the next PlanTick is due; None if none would change anything."""
        if self._reported or self._cancelled is not None:
            return None
        return min([self._deadline_ns, *(when for when, _ in self._paused)])

    def step(self, event: StoreEvent, now: int) -> list[StoreEffect]:
        """Applies an event, and returns the effects to carry out. `now` never decreases."""
        if self._state is _StoreState.OVER:
            return []
        effects: list[StoreEffect] = []
        match event:
            case Begin():
                effects += self._begin(now)
            case StoreGranted(namespace, grant):
                effects += self._granted(namespace, grant, now)
            case NotGranted():
                self._not_granted(event)
            case SourceDrained(number):
                exchange = self._exchanges.get(number)
                # A path rarely takes every byte and then breaks; then its pages are not sent again. Pages that were
                # sent again already may have to be sent once more, so their source stays in use.
                if exchange is not None and not exchange.of.doubtful:
                    exchange.reads = False
            case WriteStopped(number):
                if number in self._exchanges:
                    self._exchanges[number].reads = False
            case WriteEnded():
                effects += self._write_ended(event, now)
            case TicketEnded():
                self._ticket = None
            case Cancel(why):
                effects += self._cancel(why)
            case PlanTick():
                effects += self._cancel(_LATE) if now >= self._deadline_ns else self._go_on(now)
        return effects + self._settle()

    def _begin(self, now: int) -> list[StoreEffect]:
        assert self._state is _StoreState.NEW, "a store begins once"
        if not self._terms.new or self._cancelled is not None or now >= self._deadline_ns:
            self._state = _StoreState.WRITING  # with no pages
            self._cancelled = self._cancelled or (_LATE if self._terms.new else None)
            return []
        self._state = _StoreState.ASKING
        self._ticket = self._terms.attempt  # from now on the coordinator may have a grant whose answer is lost
        return [AskStore()]

    def _not_granted(self, event: NotGranted) -> None:
        self._state = _StoreState.WRITING  # with no pages
        self._all_there = False
        if not event.asked:
            self._ticket = None
        if isinstance(event.error, Unavailable):
            self._progress.missed(event.error.miss, 0)
        else:
            self._error = event.error

    def _granted(self, namespace: NamespaceId, grant: StoreGrant, now: int) -> list[StoreEffect]:
        self._state = _StoreState.WRITING
        self._namespace = namespace
        if self._cancelled is not None:
            self._all_there = False
            return []
        by_shard = self._progress.sort(grant)
        if not by_shard:
            self._ticket = None  # the coordinator keeps no ticket if nothing is to be written
        effects: list[StoreEffect] = []
        block_bytes = sum(self._terms.spec.page_bytes(group, part) for group, part in self._terms.parts)
        longest = max(1, limits.WRITE_PAGES // len(self._terms.parts))
        for shard, blocks in by_shard.items():
            most = min(self._streams(shard).stores, WRITERS // len(by_shard))
            for run in split_among_exchanges([block_bytes] * len(blocks), most, longest):
                pages, of_block = pages_of(self._terms, blocks[run.start : run.stop])
                effects += self._start(PagesToStore(shard, pages, of_block, [None] * len(pages)), now)
        return effects

    def _start(self, of: PagesToStore, now: int, *, reattached: bool = False) -> list[StoreEffect]:
        """Starts an exchange of the pages without an outcome. No two exchanges have pages of one block, so that each
        one determines the outcome of its blocks."""
        permit = self._health.permit(of.shard, now)
        if isinstance(permit, Miss):
            self._without_answer(of, permit)
            return []
        assert self._namespace is not None
        number, items = next(self._numbers), of.open()
        pages = of.pages.select(items)
        wait_ns = min(self._terms.wait_ns, max(0, self._deadline_ns - now))
        request = WriteRequest(self._namespace, self._next_attempt(), of.shard.epoch, pages, wait_ns)
        self._exchanges[number] = _WriteExchange(of, items, permit, reattached)
        return [StartWrite(number, of.shard, request, [of.blocks[at] for at in items])]

    def _write_ended(self, event: WriteEnded, now: int) -> list[StoreEffect]:
        exchange = self._exchanges.pop(event.exchange, None)
        if exchange is None:
            return []
        of = exchange.of
        of.nbytes += event.nbytes
        verdict = self._health.ended(exchange.permit, event.error, now, reattached=exchange.reattached)
        if verdict is None:
            of.ended(exchange.items, event.outcome)
            if not self._pause(of, now):
                self._count(of)
        elif isinstance(verdict, AskAgain) and exchange.reads and self._cancelled is None:
            if isinstance(event.error, PathLost):
                of.broke_off(exchange.items, event.taken)
            return self._start(of, now, reattached=verdict.reattached)
        elif isinstance(verdict, BaseException):
            self._error = self._error or verdict
            self._all_there = False
        else:
            self._without_answer(of, self._cancelled or _why(event.error, verdict, of.shard))
        return []

    def _pause(self, of: PagesToStore, now: int) -> bool:
        """Plans to ask again for pending pages after a pause. False if there are none, or no pause or time is left."""
        if not of.open() or of.pauses == len(PAUSES_NS) or self._cancelled is not None:
            return False
        when = now + PAUSES_NS[of.pauses]
        if when >= self._deadline_ns:
            return False
        of.pauses += 1
        self._paused.append((when, of))
        return True

    def _go_on(self, now: int) -> list[StoreEffect]:
        due = [of for when, of in self._paused if when <= now]
        self._paused = [(when, of) for when, of in self._paused if when > now]
        return [effect for of in due for effect in self._start(of, now)]

    def _count(self, of: PagesToStore) -> None:
        """Counts pages that all have an outcome."""
        outcome = [written for written in of.known if written is not None]
        self._progress.count(of.blocks, outcome, of.nbytes)
        there = all(written in (Written.COMMITTED, Written.DUPLICATE) for written in outcome)
        self._all_there = self._all_there and there

    def _without_answer(self, of: PagesToStore, why: Miss) -> None:
        """The last exchange of these pages had no outcome. Counts earlier outcomes if all pages have one, otherwise the
        miss."""
        if None in of.known:
            self._missed(why, of.nbytes)
        else:
            self._count(of)

    def _missed(self, miss: Miss, nbytes: int) -> None:
        self._all_there = False
        self._progress.missed(miss, nbytes)

    def _cancel(self, why: Miss) -> list[StoreEffect]:
        if self._cancelled is not None or self._reported:
            return []
        self._all_there = False
        if self._state is _StoreState.NEW:
            self._cancelled = Miss(why.reason, NEVER_BEGUN)
        else:
            self._cancelled = why
        for _, of in self._paused:
            self._count(of)
        self._paused.clear()
        return [StopWrite(number) for number, exchange in self._exchanges.items() if exchange.reads]

    # ------------------------------------------------------------------------------------------- the end

    def _settle(self) -> list[StoreEffect]:
        """Returns the effects that are now due: freeing the source, reporting the outcome, ending the ticket, being
        over."""
        effects: list[StoreEffect] = []
        asking = self._state is _StoreState.ASKING
        reads = bool(self._paused) or any(exchange.reads for exchange in self._exchanges.values())
        moved = self._state in (_StoreState.WRITING, _StoreState.CLOSING) and not self._exchanges and not self._paused
        if not self._source_free and not reads and (self._cancelled is not None or not asking) and self._begun:
            self._source_free = True
            effects.append(FreeSource())
        reports_early = self._cancelled is not None and not reads
        if not self._reported and (reports_early or (moved and (self._all_there or self._ticket is None))):
            self._reported = True
            effects.append(self._outcome())
        if moved and self._state is _StoreState.WRITING:
            self._state = _StoreState.CLOSING
            if self._ticket is not None:
                effects.append(CloseTicket(self._ticket))
        if moved and self._ticket is None:
            self._state = _StoreState.OVER
            effects.append(StoreOver())
        return effects

    @property
    def _begun(self) -> bool:
        return self._state is not _StoreState.NEW or self._cancelled is not None

    def _outcome(self) -> FinishStore:
        if self._error is not None:
            return FinishStore(None, self._error)
        return FinishStore(self._progress.stored(self._cancelled))


def _why(error: BaseException | None, verdict: Miss | AskAgain, shard: ShardAddress) -> Miss:
    """Returns why there is no answer of a shard that cannot be asked again because the source may be free."""
    if isinstance(verdict, Miss):
        return verdict
    if isinstance(error, PathLost):
        return error.miss
    return Miss(MissReason.SHARD_LOST, f"{shard.shard} forgot the namespace")
