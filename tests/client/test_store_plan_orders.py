"""Stores in any order of events: hypothesis draws every move of the executor and the time at which each event
arrives."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import limits
from kvcluster.core.messages import Decision, RefusedKind, StoreGrant, StoreRun, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError
from kvcluster.transfers.plan_messages import (
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
from kvcluster.transport.base import Cancelled, RefusedByShard, Unavailable
from tests.client.build import PAGE_BYTES
from tests.client.stepping import DEADLINE, GIVEN_UP, LOST, SPACE, A, B, C, policy, refused
from tests.client.test_store_plan import TICKET, SteppedStore

ENDS: list[BaseException] = [
    Unavailable(LOST),
    Cancelled(GIVEN_UP),
    refused(RefusedKind.UNKNOWN_NAMESPACE),
    refused(RefusedKind.UNKNOWN_NAMESPACE),
    refused(RefusedKind.STALE),
    refused(RefusedKind.BAD),
]
which = st.integers(0, 9)
runs = st.lists(
    st.one_of(
        st.sampled_from([StoreRun(1, Decision.WRITE, shard) for shard in (A, B, C)]),
        st.sampled_from([StoreRun(1, Decision.COMMITTED), StoreRun(1, Decision.PENDING)]),
        st.just(StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.FULL))),
    ),
    min_size=1,
    max_size=5,
)


class StoresInAnyOrder(RuleBasedStateMachine):
    """The executor: `running` are the exchanges and whether each reads the source, `stops` orders that are not executed
    yet, and `unheard` events that the plan has yet to hear."""

    @initialize(runs=runs, streams=st.integers(1, 2), failures=st.integers(1, 3), patience=st.integers(3, 60))
    def prepare(self, runs: list[StoreRun], streams: int, failures: int, patience: int) -> None:
        self.store = SteppedStore(len(runs), streams=streams, shards=policy(failures))
        self.runs = tuple(runs)
        self.begun = self.asking = self.closing = self.cancelled = self.may_have_ticket = self.ticket_ended = False
        self.free = self.over = False
        self.patience = patience  # moves until the caller may give up
        self.running: dict[int, StartWrite] = {}
        self.reading: dict[int, None] = {}
        self.stops: list[StopWrite] = []
        self.unheard: list[StoreEvent] = []
        self.told: FinishStore | None = None
        self.unwritten = 0  # exchanges that did not bring all there
        self.committed = 0  # blocks of which the plan has heard it

    # ------------------------------------------------------------------------------------ what it is told

    @precondition(lambda self: not self.begun)
    @rule()
    def begin(self) -> None:
        self.begun = True
        self.deliver(Begin())

    @precondition(lambda self: self.begun)
    @rule(later=st.integers(1, DEADLINE // 8))
    def time_passes(self, later: int) -> None:
        self.store.now += later

    @precondition(lambda self: self.patience <= 0 and not self.cancelled)
    @rule()
    def give_up(self) -> None:
        self.cancelled = True
        self.deliver(Cancel(GIVEN_UP))

    @precondition(lambda self: self.unheard)
    @rule(at=which)
    def hear(self, at: int) -> None:
        self.deliver(self.unheard.pop(at % len(self.unheard)))

    def deliver(self, event: StoreEvent) -> None:
        if isinstance(event, WriteEnded) and event.error is None:
            self.committed += sum(written is Written.COMMITTED for written in event.outcome)
        with patch.object(limits, "STREAM_BYTES", PAGE_BYTES):
            effects = self.store.step(event)
        for effect in effects:
            self.perform(effect)
        assert self.store.plan.ended == self.over

    def perform(self, effect: StoreEffect) -> None:
        assert not self.over, "nothing follows the end"
        match effect:
            case AskStore():
                assert not self.asking
                self.asking = True
            case StartWrite(exchange):
                assert not self.free, "a free source is not read again"
                assert self.told is None
                self.running[exchange] = effect
                self.reading[exchange] = None
            case StopWrite():
                self.stops.append(effect)
            case FreeSource():
                assert not self.free and not self.reading
                self.free = True
            case CloseTicket(attempt):
                assert attempt == TICKET and self.may_have_ticket and not self.running
                assert not self.closing, "once"
                self.closing = True
            case FinishStore():
                self.tell(effect)
            case StoreOver():
                assert self.free and self.told is not None and not self.running
                assert self.ticket_ended == self.may_have_ticket, "a ticket is ended where there may be one"
                self.over = True

    def tell(self, told: FinishStore) -> None:
        assert self.told is None and self.free
        self.told = told
        late = self.store.now >= DEADLINE
        if self.may_have_ticket and not self.ticket_ended:
            assert self.cancelled or late or not self.unwritten, "others may write what was not"
        if told.stored is not None:
            stored = told.stored
            assert stored.blocks == self.committed
            assert stored.blocks + stored.deduplicated + stored.pending <= len(self.runs)

    # ---------------------------------------------------------------------------------- the coordinator

    @precondition(lambda self: self.asking)
    @rule()
    def grant(self) -> None:
        self.asking = False
        writes = any(run.decision is Decision.WRITE for run in self.runs)
        # The grant of a store that was given up is not looked at: its ticket is ended in any case.
        self.may_have_ticket = writes or self.told is not None
        self.deliver(StoreGranted(SPACE, StoreGrant(self.runs)))

    @precondition(lambda self: self.asking and self.patience % 3 == 0)
    @rule(asked=st.booleans(), error=st.sampled_from([CallerError("no"), Unavailable(LOST)]))
    def fail_to_ask(self, asked: bool, error: Exception) -> None:
        self.asking = False
        self.may_have_ticket = asked
        self.unwritten += asked
        self.deliver(NotGranted(error, asked))

    @precondition(lambda self: self.closing and not self.ticket_ended)
    @rule()
    def end_ticket(self) -> None:
        self.ticket_ended = True
        self.deliver(TicketEnded())

    # ---------------------------------------------------------------------------------- what exchanges do

    @precondition(lambda self: self.reading)
    @rule(at=which)
    def drain(self, at: int) -> None:
        exchange = list(self.reading)[at % len(self.reading)]
        del self.reading[exchange]
        self.unheard.append(SourceDrained(exchange))

    @precondition(lambda self: self.running)
    @rule(at=which, error=st.sampled_from(ENDS))
    def break_off(self, at: int, error: BaseException) -> None:
        """Also after its last byte."""
        self.end(list(self.running.values())[at % len(self.running)], error)

    def end(self, start: StartWrite, error: BaseException) -> None:
        del self.running[start.exchange]
        self.reading.pop(start.exchange, None)
        again = isinstance(error, RefusedByShard) and error.refused.kind is RefusedKind.UNKNOWN_NAMESPACE
        self.unwritten += not again
        self.unheard.append(WriteEnded(start.exchange, 0, error=error))

    @precondition(lambda self: any(exchange not in self.reading for exchange in self.running))
    @rule(at=which, written=st.sampled_from([Written.COMMITTED, Written.COMMITTED, Written.PENDING, Written.FULL]))
    def end_well(self, at: int, written: Written) -> None:
        drained = [start for exchange, start in self.running.items() if exchange not in self.reading]
        start = drained[at % len(drained)]
        del self.running[start.exchange]
        self.unwritten += written is not Written.COMMITTED
        nbytes = PAGE_BYTES * len(start.blocks)
        self.unheard.append(WriteEnded(start.exchange, nbytes, (written,) * len(start.blocks)))

    @precondition(lambda self: self.stops)
    @rule(at=which)
    def stop(self, at: int) -> None:
        stop = self.stops.pop(at % len(self.stops))
        self.reading.pop(stop.exchange, None)
        self.unheard.append(WriteStopped(stop.exchange))

    # ------------------------------------------------------------------------------------------ what holds

    @invariant()
    def a_tick_that_is_due_is_one_that_does_something(self) -> None:
        self.patience -= 1
        due = self.store.plan.next_deadline()
        if self.begun and due is not None and due <= self.store.now:
            self.deliver(PlanTick())
            assert self.store.plan.next_deadline() is None

    def teardown(self) -> None:
        """Every store has ended when all exchanges have, in whatever order their events arrive."""
        if not hasattr(self, "store"):
            return
        if not self.begun:
            self.begin()
        while not self.over:
            if self.asking:
                self.fail_to_ask(True, Unavailable(LOST))
            for start in list(self.running.values()):
                self.end(start, Unavailable(LOST))
            while self.stops:
                self.stop(0)
            while self.unheard:
                self.deliver(self.unheard.pop())
            if self.closing and not self.ticket_ended:
                self.end_ticket()
        assert self.told is not None


TestStoresInAnyOrder = StoresInAnyOrder.TestCase
TestStoresInAnyOrder.settings = settings(
    max_examples=4 * settings().max_examples
)  # orders are many, and each takes no time
