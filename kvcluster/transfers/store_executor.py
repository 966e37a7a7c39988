"""Carries out a store's plan (store_plan.py): the question what to write, exchanges with shards, and the outcome.

`StoreTerms` is what a store writes, `PagesToStore` the pages of one shard with the outcome of each, and `StoreProgress`
the outcomes of its blocks so far. One thread drives each exchange, and gathers its pages from the caller's memory
(store_source.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event

from kvcluster.core import limits, messages
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import (
    Attached,
    Decision,
    Done,
    NewPages,
    PrepareStore,
    ShardAddress,
    StoreGrant,
    StoreRun,
    Written,
)
from kvcluster.core.miss import PURGING, Loss, Miss, MissReason
from kvcluster.core.placement import run_start
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.plan_messages import (
    AskStore,
    CloseTicket,
    FinishStore,
    FreeSource,
    NotGranted,
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
from kvcluster.transfers.plan_runner import Job
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.store_source import StoreSource
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Deadline, Unavailable


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """What a store writes: these `parts` of the blocks of a chain from index `first` on. `hashes[0]` is the hash of the
    block at index `start`. Unless it is 0, the block before `first` and all of the placement run of `first` are among
    `hashes`. `loss` is that of the prefix over which the blocks were computed. `tokens`: the token ids of the new
    blocks, for clusters that want them. `attempt` names the ticket. A shard that is full waits up to `wait_ns` for
    room. `host`: where the worker runs, near which the blocks are to lie (core/placement.py)."""

    spec: KVSpec
    hashes: Sequence[BlockHash]
    first: int
    parts: tuple[tuple[int, Part], ...]
    loss: Loss
    tokens: Sequence[int]
    attempt: Attempt
    wait_ns: int
    start: int = 0
    host: str = ""

    @property
    def new(self) -> tuple[BlockHash, ...]:
        return tuple(self.hashes[self.first - self.start :])

    def before(self, block: int) -> BlockHash:
        """Returns the parent of a block, which is counted from the beginning of the chain."""
        return self.hashes[block - 1 - self.start] if block else BlockHash(bytes(HASH_BYTES))


@dataclass(eq=False, slots=True)
class PagesToStore:
    """Pages that are written to one shard by one exchange, or by several if a path breaks, with the outcome of each. An
    attempt that ended without an outcome may still hold its pages (`doubtful`), or may have committed those that it had
    `taken`."""

    shard: ShardAddress
    pages: NewPages
    blocks: Sequence[int]
    known: list[Written | None]
    doubtful: dict[int, None] = field(default_factory=dict)
    taken: dict[int, None] = field(default_factory=dict)
    nbytes: int = 0
    pauses: int = 0

    def open(self) -> list[int]:
        """Returns the pages without an outcome, and the pending ones that an attempt of this store may still hold."""
        return [
            at
            for at, written in enumerate(self.known)
            if written is None or (written is Written.PENDING and at in self.doubtful)
        ]

    def ended(self, items: Sequence[int], outcome: Sequence[Written]) -> None:
        """Records the outcome of an exchange of these pages."""
        for at, written in zip(items, outcome, strict=True):
            ours = written is Written.DUPLICATE and at in self.taken
            self.known[at] = Written.COMMITTED if ours else written

    def broke_off(self, items: Sequence[int], taken: Collection[int]) -> None:
        """Records that an exchange of these pages ended without an outcome. `taken` are indices into `items`."""
        self.doubtful.update(dict.fromkeys(items))
        self.taken.update(dict.fromkeys(items[at] for at in taken))


def pages_of(terms: StoreTerms, blocks: Sequence[int]) -> tuple[NewPages, Sequence[int]]:
    """Returns the pages of these new blocks, and the block of each page."""
    parts = len(terms.parts)
    of_block = [block for block in blocks for _ in range(parts)]
    depths = [terms.first + block for block in of_block]
    hashes, parents = [terms.hashes[depth - terms.start] for depth in depths], [terms.before(depth) for depth in depths]
    places, losses = list(range(parts)) * len(blocks), [terms.loss] * len(depths)
    return NewPages(hashes, places, terms.parts, parents, depths, losses), of_block


_PURGE_PAUSE_S = 0.05
"""The pause between two questions while shards carry out a purge, which takes until their next report."""

_END_TICKET_MS = 1_000
"""Time for ending a ticket, independent of the store's deadline: the ticket of a store that ran out of time must be
ended too. Only the next store waits for it."""


def prepare_store(terms: StoreTerms, attached: Attached, *, at: int = 0) -> PrepareStore:
    """Returns the question of a store, about its new blocks from index `at` on, as many as one message may name.
    `attached` has how the cluster places runs and whether it wants token ids."""
    step = len(terms.tokens) // max(1, len(terms.new)) if attached.wants_tokens else 0
    most = max(1, min(limits.BLOCKS_PER_CALL, limits.STORE_TOKENS // max(1, step)))
    first, hashes = terms.first + at, terms.new[at : at + most]
    return PrepareStore(
        attempt=terms.attempt,
        first=first,
        parent=terms.before(first),
        run=terms.hashes[run_start(first, attached.run_blocks) - terms.start],
        hashes=hashes,
        parts=terms.parts,
        loss=terms.loss,
        host=terms.host,
        tokens=tuple(terms.tokens[at * step : (at + len(hashes)) * step]),
    )


@dataclass(frozen=True, slots=True)
class StoreCallbacks:
    """What an executor calls: `deliver` takes events from any thread; `drained` when the source is free, `finish` with
    the outcome, and `over` when the next store may begin."""

    deliver: Callable[[StoreEvent], object]
    drained: Callable[[], object]
    finish: Callable[[Stored | None, BaseException | None], object]
    over: Callable[[], object]


class StoreExecutor:
    """Executes one store, from `source`."""

    def __init__(
        self,
        control: CoordinatorClient,
        shards: ShardConnections,
        terms: StoreTerms,
        source: BoundMemory,
        deadline: Deadline,
        callbacks: StoreCallbacks,
        *,
        next_attempt: Callable[[], Attempt],
    ) -> None:
        self._control = control
        self._shards = shards
        self._terms = terms
        self._source = source
        self._deadline = deadline
        self._callbacks = callbacks
        self._next_attempt = next_attempt
        self._sources: dict[int, StoreSource] = {}
        self._tickets: list[Attempt] = []  # those that the coordinator has, or may have
        self._ended = Event()

    def perform(self, effect: StoreEffect, jobs: list[Job[StoreEvent]]) -> StoreEvent | None:
        """As PlanExecutor."""
        match effect:
            case AskStore():
                jobs.append(self._ask)
            case StartWrite(exchange, _, request, blocks):
                source = StoreSource(
                    self._terms.spec,
                    request.namespace,
                    request.pages,
                    blocks,
                    self._source,
                    self._deadline,
                    lambda: self._callbacks.deliver(SourceDrained(exchange)),
                )
                self._sources[exchange] = source
                jobs.append(partial(self._write, effect, source))
            case StopWrite(exchange):
                self._sources[exchange].stop()
                return WriteStopped(exchange)
            case FreeSource():
                self._callbacks.drained()
            case CloseTicket():
                jobs.append(self._end_tickets)
            case FinishStore(stored, error):
                self._ended.set()
                self._callbacks.finish(stored, error)
            case StoreOver():
                self._sources.clear()
                self._callbacks.over()
        return None

    def _ask(self) -> StoreEvent:
        """Asks about all blocks, in as many messages as it takes, each with a ticket of its own."""
        asked = False
        try:
            attached = self._control.attach(self._terms.spec, self._deadline)
            asked = True
            runs = list(self._ask_at(attached, 0, self._terms.attempt))
            while (at := sum(run.count for run in runs)) < len(self._terms.new):
                runs += self._ask_further(attached, at)
            return StoreGranted(self._control.namespace(self._terms.spec, self._deadline), StoreGrant(tuple(runs)))
        except BaseException as error:
            return NotGranted(error, asked)

    def _ask_at(self, attached: Attached, at: int, attempt: Attempt) -> Sequence[StoreRun]:
        """Asks about the blocks from `at` on that one message may name; again for a while if the shards are carrying
        out a purge, as after `clear`."""
        prepare = prepare_store(self._terms, attached, at=at)
        wait = Deadline.after_ms(min(self._terms.wait_ns / 1e6, self._deadline.remaining_s() * 1e3))
        while True:
            self._tickets.append(attempt)
            grant = self._control.ask(StoreGrant, self._terms.spec, replace(prepare, attempt=attempt), self._deadline)
            if all(run.decision is not Decision.WRITE for run in grant.runs):
                self._tickets.remove(attempt)  # the coordinator keeps none
            purging = attempt not in self._tickets and any(run.miss == PURGING for run in grant.runs)
            if not purging or not wait.remaining_s() or self._ended.wait(_PURGE_PAUSE_S):
                return grant.runs
            attempt = self._next_attempt()

    def _ask_further(self, attached: Attached, at: int) -> Sequence[StoreRun]:
        """As `_ask_at`; if the coordinator does not answer, the remaining blocks are refused, and those before `at` are
        stored."""
        attempt = self._next_attempt()
        try:
            return self._ask_at(attached, at, attempt)
        except Unavailable as trouble:
            self._end_ticket(attempt)
            self._tickets.remove(attempt)
            return (StoreRun(len(self._terms.new) - at, Decision.REFUSED, miss=trouble.miss),)

    def _write(self, start: StartWrite, source: StoreSource) -> StoreEvent:
        """Runs one exchange, from its reservation to its outcome."""
        try:
            outcome = self._shards.write(start.shard, self._terms.spec, start.request, source, self._deadline)
            return WriteEnded(start.exchange, source.nbytes, outcome)
        except Unavailable as trouble:
            error = trouble.with_traceback(None)
            return WriteEnded(start.exchange, source.nbytes, error=error, taken=source.taken)
        except BaseException as error:
            return WriteEnded(start.exchange, source.nbytes, error=error)

    def _end_tickets(self) -> StoreEvent:
        for attempt in self._tickets:
            self._end_ticket(attempt)
        return TicketEnded()

    def _end_ticket(self, attempt: Attempt) -> None:
        with suppress(Unavailable, KVClusterError):
            self._control.request(Done, messages.EndTicket(attempt), Deadline.after_ms(_END_TICKET_MS))


_MISSES = {
    Written.CORRUPT: Miss(MissReason.CORRUPT, "what arrived did not match its checksum"),
    Written.FULL: Miss(MissReason.FULL),
    Written.LOST: Miss(MissReason.SHARD_LOST, "the shard could not commit"),
}


class StoreProgress:
    """The counts of one store. Thread-safe; they are correct at every moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = self._deduplicated = self._pending = self._nbytes = 0
        self._miss: Miss | None = None

    def missed(self, miss: Miss, nbytes: int) -> None:
        """Records that an exchange which moved `nbytes` ended without an answer. The first reason is reported."""
        with self._lock:
            self._nbytes += nbytes
            self._miss = self._miss or miss

    def count(self, of_block: Sequence[int], outcome: Sequence[Written], nbytes: int) -> None:
        """Records the outcome of an exchange that moved `nbytes`. A block counts by the worst outcome of its pages."""
        fates: dict[int, set[Written]] = {}
        for block, written in zip(of_block, outcome, strict=True):
            fates.setdefault(block, set()).add(written)
        with self._lock:
            self._nbytes += nbytes
            for fate in fates.values():
                failed = next((written for written in _MISSES if written in fate), None)
                if failed is not None:
                    self._miss = self._miss or _MISSES[failed]
                elif Written.PENDING in fate:
                    self._pending += 1
                elif Written.COMMITTED in fate:
                    self._blocks += 1
                else:
                    self._deduplicated += 1

    def sort(self, grant: StoreGrant) -> dict[ShardAddress, list[int]]:
        """Returns the blocks to write to each shard, and counts the others."""
        by_shard: dict[ShardAddress, list[int]] = {}
        at = 0
        with self._lock:
            for run in grant.runs:
                if run.decision is Decision.WRITE:
                    assert run.shard is not None
                    by_shard.setdefault(run.shard, []).extend(range(at, at + run.count))
                elif run.decision is Decision.COMMITTED:
                    self._deduplicated += run.count
                elif run.decision is Decision.PENDING:
                    self._pending += run.count
                elif run.miss is not None:
                    self._miss = self._miss or run.miss
                at += run.count
        return by_shard

    def stored(self, why: Miss | None = None) -> Stored:
        """Returns the outcome. `why`: the miss of a store that ends early, unless an earlier one was recorded."""
        with self._lock:
            return Stored(self._blocks, self._deduplicated, self._pending, self._nbytes, self._miss or why)
