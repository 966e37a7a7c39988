"""How the load plan stops exchanges: silent ones whose ranges other shards have, and all of them when the load ends."""

from __future__ import annotations

from kvcluster.core.groups import Part
from kvcluster.core.messages import BlockFate, Explained, RefusedKind
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.breaker import LEAST_WAIT_NS
from kvcluster.transfers.failover import ASKING_SHARE
from kvcluster.transfers.plan_messages import (
    NEVER_BEGUN,
    Answered,
    Begin,
    Cancel,
    FindReplicas,
    PlanTick,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Cancelled, Unavailable
from tests.client.build import HEADS, LAYERS
from tests.client.stepping import (
    DEADLINE,
    GIVEN_UP,
    LATE,
    LOST,
    PATIENCE,
    A,
    B,
    C,
    SteppedLoad,
    answer,
    one,
    outcome_of,
    policy,
    refused,
    source,
)

ON_A, ON_B = [source(A)], [source(B)]
SILENT = Miss(MissReason.DEADLINE, "a is silent")


def spans(start: StartRead) -> list[tuple[int, int, int]]:
    return [(piece.block, piece.want.layer_start, piece.want.layer_stop) for piece in start.ranges.pieces]


def silent(load: SteppedLoad) -> FindReplicas:
    """The question about exchanges that were silent until PATIENCE."""
    return one(load.step(PlanTick(), PATIENCE), FindReplicas)


def only_the_first(ask: FindReplicas) -> Answered:
    """Of two blocks, the first is on B too, and the second is on no other shard."""
    return Answered(ask.number, [Explained((BlockFate(1, ((source(B),),), None), BlockFate(1, None, LOST)))])


# --------------------------------------------------------------------------------------- silent shards


def test_a_silent_exchange_is_asked_about_once_after_its_share_of_the_time() -> None:
    load = SteppedLoad(ON_A)
    load.begin()
    assert load.plan.next_deadline() == PATIENCE
    assert load.step(PlanTick(), PATIENCE - 1) == []
    ask = silent(load)
    assert ask.questions[0].need.avoid == ("a",)
    assert ask.until_ns == PATIENCE + (DEADLINE - PATIENCE) // ASKING_SHARE
    assert load.plan.next_deadline() == DEADLINE
    assert load.step(PlanTick(), DEADLINE - 1) == []


def test_an_exchange_from_which_something_came_is_waited_for_from_then_on() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.now = 60
    load.bring(start, 0, stop=1)
    assert load.step(PlanTick(), PATIENCE) == []
    assert load.plan.next_deadline() == 60 + PATIENCE
    assert one(load.step(PlanTick(), 60 + PATIENCE), FindReplicas).questions[0].blocks == (0,)


def test_no_other_exchange_gets_its_ranges_before_it_has_stopped() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    stop = one(load.step(answer(silent(load), B)), StopRead)
    assert stop == StopRead(start.exchange, None)
    assert load.step(PlanTick()) == []
    load.bring(start, 0, stop=2)  # between the order and its execution
    other = one(load.stopped(stop), StartRead)
    assert (other.shard, spans(other)) == (B, [(0, 2, LAYERS)]), "layers that arrived meanwhile are not read again"
    assert outcome_of(load.finish(other)) == Loaded(1, LAYERS)


def test_a_shard_that_was_silent_to_its_end_has_failed() -> None:
    shards = policy(failures=1)
    load = SteppedLoad(ON_A, shards=shards)
    load.begin()
    stop = one(load.step(answer(silent(load), B)), StopRead)
    load.now = LEAST_WAIT_NS
    load.stopped(stop)
    assert shards.status(load.now)["a"]["state"] == "open"


def test_only_what_others_have_is_taken_away_from_it() -> None:
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    ask = silent(load)
    stop = one(load.step(only_the_first(ask)), StopRead)
    assert stop == StopRead(start.exchange, (0,))
    other = one(load.stopped(stop), StartRead)
    assert (other.shard, spans(other)) == (B, [(0, 0, LAYERS)])
    start.ranges.stop([0])
    load.bring(start, 1)
    assert load.finish(start, None, None) == [], "block 0 is awaited from the other alone"
    assert outcome_of(load.finish(other)) == Loaded(2, 2 * LAYERS)


def test_a_piece_is_taken_away_only_where_others_have_all_that_is_left_of_it() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.bring(start, 0, corrupt=[0], stop=1)
    ask = silent(load)
    first_layer = (source(B, Part(0, 1, 0, HEADS)),)
    assert load.step(Answered(ask.number, [Explained((BlockFate(1, (first_layer,), None),))])) == []


def test_where_no_other_shard_has_it_a_silent_exchange_goes_on() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    assert load.step(answer(silent(load))) == []
    load.now = DEADLINE - 1
    assert outcome_of(load.finish(start)) == Loaded(1, LAYERS)


def test_an_exchange_that_has_brought_all_meanwhile_is_not_stopped() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = silent(load)
    load.bring(start, 0)
    assert load.step(answer(ask, B)) == []
    assert outcome_of(load.finish(start, None)) == Loaded(1, LAYERS)


def test_an_answer_about_an_exchange_that_has_ended_is_not_needed() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = silent(load)
    assert load.finish(start) == [], "the plan waits for the answer"
    assert outcome_of(load.step(answer(ask, B))) == Loaded(1, LAYERS)


def test_an_exchange_that_ends_by_itself_while_it_is_told_to_stop_hands_over_all_the_same() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    stop = one(load.step(answer(silent(load), B)), StopRead)
    load.bring(start, 0, stop=1)
    other = one(load.fail(start), StartRead)
    assert (other.shard, spans(other)) == (B, [(0, 1, LAYERS)])
    assert load.stopped(stop) == [], "it is over"
    assert outcome_of(load.finish(other)) == Loaded(1, LAYERS)


def test_one_that_was_told_to_stop_some_and_fails_is_asked_about_for_the_others_alone() -> None:
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    ask = silent(load)
    one(load.step(only_the_first(ask)), StopRead)
    other, again = load.fail(start)
    assert isinstance(other, StartRead) and spans(other) == [(0, 0, LAYERS)]
    assert isinstance(again, FindReplicas) and again.questions[0].blocks == (1,)


def test_one_whose_namespace_was_forgotten_begins_again_without_what_others_bring() -> None:
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    ask = silent(load)
    one(load.step(only_the_first(ask)), StopRead)
    other, again = load.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE))
    assert isinstance(other, StartRead) and (other.shard, spans(other)) == (B, [(0, 0, LAYERS)])
    assert isinstance(again, StartRead) and (again.shard, spans(again)) == (A, [(1, 0, LAYERS)])


def test_what_was_corrupt_of_an_exchange_that_is_stopped_is_reported_and_read_elsewhere() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = silent(load)
    load.bring(start, 0, corrupt=[0], stop=2)
    stop = one(load.step(answer(ask, B)), StopRead)
    report, other = load.stopped(stop)
    assert isinstance(report, ReportCorrupt) and report.shard == A
    assert isinstance(other, StartRead) and spans(other) == [(0, 0, 1), (0, 2, LAYERS)]


def test_what_the_others_do_not_bring_either_is_told_as_silent() -> None:
    load = SteppedLoad(ON_A)
    load.begin()
    other = one(load.stopped(one(load.step(answer(silent(load), B)), StopRead)), StartRead)
    ask = one(load.fail(other), FindReplicas)
    assert ask.questions[0].need.avoid == ("a", "b")
    assert outcome_of(load.step(answer(ask))).miss == SILENT


# ------------------------------------------------------------------------------------------ being stopped


def test_a_cancel_before_the_load_began_ends_it_at_once() -> None:
    load = SteppedLoad(ON_A, ON_B)
    never = Miss(MissReason.DEADLINE, NEVER_BEGUN)
    assert outcome_of(load.step(Cancel(GIVEN_UP))) == Loaded(0, 0, never, {0: never, 1: never})
    assert load.step(Begin()) == []


def test_a_cancel_is_over_when_every_exchange_has_stopped() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    stops = load.step(Cancel(GIVEN_UP))
    assert stops == [StopRead(first.exchange, None), StopRead(second.exchange, None)]
    assert load.stopped(StopRead(first.exchange, None)) == []
    load.bring(second, 0)  # before it stops
    loaded = outcome_of(load.stopped(StopRead(second.exchange, None)))
    assert loaded == Loaded(0, LAYERS, GIVEN_UP, {0: GIVEN_UP})
    assert loaded.took_ns == 0


def test_a_cancel_waits_for_the_others_where_an_exchange_ends_meanwhile() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    load.step(Cancel(GIVEN_UP))
    assert load.fail(first, Cancelled(GIVEN_UP)) == []
    assert load.stopped(StopRead(first.exchange, None)) == [], "heard of twice"
    assert outcome_of(load.stopped(StopRead(second.exchange, None))).miss == GIVEN_UP


def test_a_cancel_says_nothing_of_the_shards() -> None:
    shards = policy(failures=1)
    load = SteppedLoad(ON_A, ON_B, shards=shards)
    first, second = load.begin()
    load.step(Cancel(GIVEN_UP))
    load.fail(first, Cancelled(GIVEN_UP))
    load.stopped(StopRead(second.exchange, None))
    assert [breaker["state"] for breaker in shards.status(0).values()] == ["closed", "closed"]


def test_a_second_cancel_changes_nothing() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.step(Cancel(GIVEN_UP))
    assert load.step(Cancel(LOST)) == []
    assert load.step(PlanTick(), DEADLINE) == []
    assert outcome_of(load.stopped(StopRead(start.exchange, None))).miss == GIVEN_UP


def test_a_cancel_waits_for_no_answer_and_a_late_one_starts_nothing() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    ask = one(load.fail(first), FindReplicas)
    stop = one(load.step(Cancel(GIVEN_UP)), StopRead)
    assert load.step(answer(ask, C)) == []
    loaded = outcome_of(load.stopped(stop))
    assert stop.exchange == second.exchange
    assert loaded.failed == {0: LOST, 1: GIVEN_UP}


def test_a_cancel_while_a_question_alone_is_open_is_over_at_once() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    one(load.fail(start), FindReplicas)
    assert outcome_of(load.step(Cancel(GIVEN_UP))).miss == LOST


def test_what_was_to_be_handed_over_stays_where_it_is_after_a_cancel() -> None:
    load = SteppedLoad(ON_A, ON_A)
    load.begin()
    ask = silent(load)
    some = one(load.step(only_the_first(ask)), StopRead)
    every = one(load.step(Cancel(GIVEN_UP)), StopRead)
    assert load.stopped(some) == [], "nothing else is started, and its other items are still its own"
    assert outcome_of(load.stopped(every)).miss == GIVEN_UP


def test_what_was_corrupt_is_reported_after_a_cancel_too() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    load.bring(first, 0, corrupt=[0])
    load.bring(second, 0, corrupt=[0])
    load.step(Cancel(GIVEN_UP))
    assert isinstance(one(load.step(ReadEnded(first.exchange, (None,))), ReportCorrupt), ReportCorrupt)
    report, _ = load.step(ReadStopped(second.exchange, None))
    assert isinstance(report, ReportCorrupt) and report.shard == B


def test_the_deadline_is_a_cancel() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    stop = one(load.step(PlanTick(), DEADLINE), StopRead)
    assert stop == StopRead(start.exchange, None)
    loaded = outcome_of(load.stopped(stop))
    assert (loaded.miss, loaded.took_ns) == (LATE, 0)


def test_a_load_that_is_being_stopped_wants_no_more_ticks() -> None:
    load = SteppedLoad(ON_A)
    load.begin()
    load.step(PlanTick(), DEADLINE)
    assert load.plan.next_deadline() is None, "one that is due already would wake its timer without end"


def test_a_load_in_line_wants_to_be_woken_by_its_deadline() -> None:
    assert SteppedLoad(ON_A).plan.next_deadline() == DEADLINE


def test_events_of_what_never_was_change_nothing() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    for event in (ReadEnded(99), ReadStopped(99, None), ReadStopped(start.exchange, (0,))):
        assert load.step(event) == []
    assert load.step(ReadEnded(99, error=Unavailable(LOST))) == []
    assert outcome_of(load.finish(start)) == Loaded(1, LAYERS)
