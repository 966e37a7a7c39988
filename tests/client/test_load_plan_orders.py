"""Loads in any order of events: hypothesis draws every move of the executor and the time at which each event arrives.

The simulator's oracle judges which exchange owns a place, which writes it, and what may be reported of it.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.groups import Part
from kvcluster.core.messages import BlockFate, Explained, RefusedKind, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.pieces import each
from kvcluster.transfers.plan_messages import (
    Answered,
    Begin,
    Cancel,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    PlanTick,
    ReadEnded,
    ReadStopped,
    StartRead,
    StopRead,
)
from kvcluster.transport.base import Cancelled, Unavailable
from tests.client.build import HEADS, LAYERS, SPEC
from tests.client.stepping import DEADLINE, EVICTED, GIVEN_UP, LOST, PATIENCE, A, B, C, D, SteppedLoad, refused, source
from tests.sim.destination import Destination

SHARDS = (A, B, C, D)
HALVES = Part(0, LAYERS, 0, 2), Part(0, LAYERS, 2, HEADS)
ENDS: list[BaseException] = [
    Unavailable(LOST),
    Unavailable(Miss(MissReason.DEADLINE)),
    Cancelled(GIVEN_UP),
    refused(RefusedKind.UNKNOWN_NAMESPACE),
    refused(RefusedKind.STALE),
    refused(RefusedKind.BAD),
]
ROUNDS_AT_MOST = 200
"""Of events until a load is over to whose every exchange and question nothing but failures are told."""

which = st.integers(0, 9)


class LoadsInAnyOrder(RuleBasedStateMachine):
    """The executor: `running` are the exchanges that may write, `stops` orders that are not executed yet, `asked`
    questions that have no answer, and `unheard` events that the plan has yet to hear."""

    @initialize(
        on=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=4), halves=st.booleans(), patience=st.integers(3, 60)
    )
    def prepare(self, on: list[ShardAddress], halves: bool, patience: int) -> None:
        blocks = [[source(shard)] for shard in on]
        if halves:
            blocks.append([source(A, HALVES[0]), source(B, HALVES[1])])
        self.load = SteppedLoad(*blocks)
        self.destination = Destination(SPEC, each(self.load.pieces), self.load.progress)
        self.blocks = len(blocks)
        self.begun = self.cancelled = False
        self.patience = patience  # moves until the caller may give up
        self.running: dict[int, StartRead] = {}
        self.stops: list[StopRead] = []
        self.asked: list[FindReplicas] = []
        self.unheard: list[LoadEvent] = []
        self.finished: list[FinishLoad] = []

    # ------------------------------------------------------------------------------------ what it is told

    @precondition(lambda self: not self.begun)
    @rule()
    def begin(self) -> None:
        self.begun = True
        self.deliver(Begin())

    @precondition(lambda self: self.begun)
    @rule(later=st.sampled_from([1, PATIENCE // 2, PATIENCE]))
    def time_passes(self, later: int) -> None:
        self.load.now += later

    @precondition(lambda self: self.patience <= 0 and not self.cancelled)
    @rule()
    def give_up(self) -> None:
        self.cancelled = True
        self.deliver(Cancel(GIVEN_UP))

    @precondition(lambda self: self.unheard)
    @rule(at=which)
    def hear(self, at: int) -> None:
        self.deliver(self.unheard.pop(at % len(self.unheard)))

    def deliver(self, event: LoadEvent) -> None:
        for effect in self.load.step(event):
            self.perform(effect)
        assert self.load.plan.ended == bool(self.finished)

    def perform(self, effect: LoadEffect) -> None:
        assert not self.finished, "nothing follows the outcome"
        match effect:
            case StartRead(exchange, _, _, ranges):
                self.destination.take(exchange, ranges.pieces)
                self.running[exchange] = effect
            case StopRead():
                self.stops.append(effect)
            case FindReplicas():
                assert self.load.now <= effect.until_ns <= DEADLINE
                self.asked.append(effect)
            case FinishLoad(loaded, error):
                self.finished.append(effect)
                assert (loaded is None) != (error is None)
                if loaded is not None:
                    self.destination.tell(loaded)
                    assert set(loaded.failed) == self.not_right(), "and what has come is told"

    def not_right(self) -> set[int]:
        return {place[0] for place, right in self.destination._right.items() if not right}

    # ---------------------------------------------------------------------------------- what exchanges do

    @precondition(lambda self: self.running)
    @rule(at=which, item=which, right=st.sampled_from([True, True, True, False]))
    def bring(self, at: int, item: int, right: bool) -> None:
        """A chunk, as load_sink.py takes it: to its place and then verified."""
        start = list(self.running.values())[at % len(self.running)]
        ranges, item = start.ranges, item % len(start.ranges.pieces)
        piece, layer = ranges.pieces[item], ranges._next[item]
        if layer == piece.want.layer_stop:
            return
        try:
            if not ranges.may_write(item, layer, self.load.now):
                return
        except Cancelled as cancelled:
            self.end(start, cancelled)
            return
        self.destination.write(start.exchange, piece, layer, right=right)
        if not right:
            ranges.did_not_match(item, layer, layer + 1)
            return
        ranges.arrived(item, layer + 1)
        layers = piece.cut(layer, layer + 1).model_layers(SPEC)
        if self.load.progress.arrived({layers: [piece.block]}, 1):
            self.destination.check_layers(layers)

    @precondition(lambda self: self.running)
    @rule(at=which, error=st.sampled_from(ENDS))
    def break_off(self, at: int, error: BaseException) -> None:
        self.end(list(self.running.values())[at % len(self.running)], error)

    @precondition(lambda self: self.running)
    @rule(at=which, misses=st.booleans())
    def end_well(self, at: int, misses: bool) -> None:
        """An answer for each piece: what has not come has a miss, or was promised and not sent."""
        start = list(self.running.values())[at % len(self.running)]
        untouched = [start.ranges.left(item) == [piece] for item, piece in enumerate(start.ranges.pieces)]
        self.end(start, None, tuple(EVICTED if misses and none else None for none in untouched))

    def end(self, start: StartRead, error: BaseException | None, outcome: tuple[Miss | None, ...] = ()) -> None:
        del self.running[start.exchange]
        self.destination.give_back(start.exchange, start.ranges.pieces)
        self.unheard.append(ReadEnded(start.exchange, outcome, error))

    @precondition(lambda self: self.stops)
    @rule(at=which)
    def stop(self, at: int) -> None:
        """An exchange that has ended meanwhile stops as well; one that has stopped ends by itself, or sends no
        event."""
        stop = self.stops.pop(at % len(self.stops))
        start = self.running.get(stop.exchange)
        if start is not None:
            start.ranges.stop(stop.items)
            items = range(len(start.ranges.pieces)) if stop.items is None else stop.items
            self.destination.give_back(stop.exchange, [start.ranges.pieces[item] for item in items])
        self.unheard.append(ReadStopped(stop.exchange, stop.items))

    @precondition(lambda self: self.asked and not self.load.plan.ended)
    @rule(at=which, data=st.data())
    def answer(self, at: int, data: st.DataObject) -> None:
        ask = self.asked.pop(at % len(self.asked))
        answers = []
        for question in ask.questions[: data.draw(st.integers(0, 9)) or None]:
            fates = []
            for _ in question.blocks:
                found = data.draw(st.sampled_from([[A], [B], [C], [D], [A, B], [C, D], []]))
                sources = tuple(map(source, found))
                if len(found) == 2 and data.draw(st.booleans()):
                    sources = tuple(source(shard, part) for shard, part in zip(found, HALVES, strict=True))
                fates.append(BlockFate(1, (sources,), None) if found else BlockFate(1, None, EVICTED))
            answers.append(Explained(tuple(fates)))
        self.unheard.append(Answered(ask.number, answers))

    # ------------------------------------------------------------------------------------------ what holds

    @invariant()
    def the_outcome_is_told_once_and_after_every_owner_is_gone(self) -> None:
        assert len(self.finished) <= 1
        assert not self.finished or not self.destination._owners

    @invariant()
    def no_layer_is_told_to_be_there_that_is_not(self) -> None:
        self.destination.check_layers(range(LAYERS))
        assert all(self.load.progress.layer_left(layer) >= 0 for layer in range(LAYERS))

    @invariant()
    def a_tick_that_is_due_is_one_that_does_something(self) -> None:
        self.patience -= 1
        due = self.load.plan.next_deadline()
        if self.begun and due is not None and due <= self.load.now:
            self.deliver(PlanTick())
            due = self.load.plan.next_deadline()
            assert due is None or due > self.load.now

    def teardown(self) -> None:
        """Every load ends: by its deadline, or before it where everything fails that is under way."""
        if not hasattr(self, "load"):
            return
        by_deadline = len(self.unheard) % 2 == 0
        if not self.begun:
            self.begin()
        if by_deadline:
            self.load.now = max(self.load.now, DEADLINE)
            self.deliver(PlanTick())
        for _ in range(ROUNDS_AT_MOST):
            if self.finished:
                break
            self.fail_all(by_deadline)
        assert len(self.finished) == 1 and self.load.plan.ended

    def fail_all(self, by_deadline: bool) -> None:
        """Exchanges under way fail; at the deadline they stop, and no other event arrives."""
        while self.stops:
            self.stop(0)
        if not by_deadline:
            for start in list(self.running.values()):
                self.end(start, Unavailable(LOST))
            self.unheard += [Answered(ask.number, ()) for ask in self.asked]
            self.asked.clear()
        events = deque(self.unheard)
        self.unheard.clear()
        while events:
            event = events.popleft()
            if not by_deadline or isinstance(event, ReadStopped):
                self.deliver(event)


TestLoadsInAnyOrder = LoadsInAnyOrder.TestCase
TestLoadsInAnyOrder.settings = settings(
    max_examples=4 * settings().max_examples
)  # orders are many, and each takes no time
