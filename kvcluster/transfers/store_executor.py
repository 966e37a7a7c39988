"""Carries out a store's plan (store_plan.py): the question what to write, exchanges with shards, and the outcome.

One thread drives each exchange, and gathers its pages from the caller's memory (store_source.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event

from kvcluster.core import limits, messages
from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Attached, Decision, Done, PrepareStore, StoreGrant, StoreRun
from kvcluster.core.miss import PURGING
from kvcluster.core.placement import run_start
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.memory import BoundMemory
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
from kvcluster.transfers.results import Stored
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.store_pages import StoreTerms
from kvcluster.transfers.store_source import StoreSource
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.here import here

_PURGE_PAUSE_S = 0.05
"""Between two questions while shards carry out a purge, which takes until their next report."""

_END_TICKET_MS = 1_000
"""Time for ending a ticket, independent of the store's deadline: the ticket of a store that ran out of time must be
ended too. Only the next store waits for it."""


def prepare_store(
    terms: StoreTerms, attached: Attached, tokens: Sequence[int], host: str, *, at: int = 0
) -> PrepareStore:
    """Returns the question of a store, about its new blocks from index `at` on, as many as one message may name.
    `attached` says how the cluster places runs and whether it wants token ids."""
    step = len(tokens) // max(1, len(terms.new)) if attached.wants_tokens else 0
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
        host=host,
        tokens=tuple(tokens[at * step : (at + len(hashes)) * step]),
    )


class StoreExecutor:
    """Executes one store. `deliver` takes events from any thread. Calls `drained` when the source is free, `finish`
    with the outcome, and `over` when the next store may begin."""

    def __init__(
        self,
        control: CoordinatorClient,
        shards: ShardConnections,
        spec: KVSpec,
        terms: StoreTerms,
        tokens: Sequence[int],
        source: BoundMemory,
        deadline: Deadline,
        deliver: Callable[[StoreEvent], object],
        drained: Callable[[], object],
        finish: Callable[[Stored | None, BaseException | None], object],
        over: Callable[[], object],
        next_attempt: Callable[[], Attempt],
    ) -> None:
        self._control = control
        self._shards = shards
        self._spec = spec
        self._terms = terms
        self._tokens = tokens
        self._source = source
        self._deadline = deadline
        self._deliver = deliver
        self._drained = drained
        self._finish = finish
        self._over = over
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
                    self._spec,
                    request.namespace,
                    request.pages,
                    blocks,
                    self._source,
                    self._deadline,
                    lambda: self._deliver(SourceDrained(exchange)),
                )
                self._sources[exchange] = source
                jobs.append(partial(self._write, effect, source))
            case StopWrite(exchange):
                self._sources[exchange].stop()
                return WriteStopped(exchange)
            case FreeSource():
                self._drained()
            case CloseTicket():
                jobs.append(self._end_tickets)
            case FinishStore(stored, error):
                self._ended.set()
                self._finish(stored, error)
            case StoreOver():
                self._sources.clear()
                self._over()
        return None

    def _ask(self) -> StoreEvent:
        """Asks about all blocks, in as many messages as it takes, each with a ticket of its own."""
        asked = False
        try:
            attached = self._control.attach(self._spec, self._deadline)
            asked = True
            runs = list(self._ask_at(attached, 0, self._terms.attempt))
            while (at := sum(run.count for run in runs)) < len(self._terms.new):
                runs += self._ask_further(attached, at)
            return StoreGranted(self._control.namespace(self._spec, self._deadline), StoreGrant(tuple(runs)))
        except BaseException as error:
            return NotGranted(error, asked)

    def _ask_at(self, attached: Attached, at: int, attempt: Attempt) -> Sequence[StoreRun]:
        """Asks about the blocks from `at` on that one message may name; again for a while if the shards are carrying
        out a purge, as after `clear`."""
        prepare = prepare_store(self._terms, attached, self._tokens, here(), at=at)
        wait = Deadline.after_ms(min(self._terms.wait_ns / 1e6, self._deadline.remaining_s() * 1e3))
        while True:
            self._tickets.append(attempt)
            grant = self._control.ask(StoreGrant, self._spec, replace(prepare, attempt=attempt), self._deadline)
            if all(run.decision is not Decision.WRITE for run in grant.runs):
                self._tickets.remove(attempt)  # the coordinator keeps none
            purging = attempt not in self._tickets and any(run.miss == PURGING for run in grant.runs)
            if not purging or not wait.remaining_s() or self._ended.wait(_PURGE_PAUSE_S):
                return grant.runs
            attempt = self._next_attempt()

    def _ask_further(self, attached: Attached, at: int) -> Sequence[StoreRun]:
        """As `_ask_at`; if the coordinator does not answer, all the rest is refused, and what lies before is stored."""
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
            outcome = self._shards.write(start.shard, self._spec, start.request, source, self._deadline)
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
