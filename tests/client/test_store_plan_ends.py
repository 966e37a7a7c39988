"""How the store plan ends: pages that were not granted or not needed, and a cancel in each of its states."""

from __future__ import annotations

import pytest

from kvcluster.core.messages import Decision, RefusedKind, StoreGrant, StoreRun, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError
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
    StopWrite,
    StoreGranted,
    StoreOver,
    TicketEnded,
    WriteEnded,
    WriteStopped,
)
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Cancelled, Unavailable
from tests.client.build import PAGE_BYTES
from tests.client.stepping import DEADLINE, GIVEN_UP, LATE, LOST, SPACE, A, B, policy, refused
from tests.client.test_store_plan import DONE, FULL, TICKET, SteppedStore, closing, to

NOTHING = Stored(0, 0, 0, 0)


# --------------------------------------------------------------------------------------- nothing to write


def test_a_store_of_nothing_asks_nothing() -> None:
    assert SteppedStore(0).step(Begin()) == [FreeSource(), FinishStore(NOTHING), StoreOver()]


def test_where_all_is_there_already_no_ticket_is_ended() -> None:
    runs = (
        StoreRun(1, Decision.COMMITTED),
        StoreRun(2, Decision.PENDING),
        StoreRun(1, Decision.REFUSED, miss=FULL),
    )
    assert SteppedStore(4).grant(*runs) == [FreeSource(), FinishStore(Stored(0, 1, 2, 0, FULL)), StoreOver()]


def test_blocks_that_are_not_to_be_written_keep_their_place() -> None:
    (start,) = SteppedStore(4).writes(StoreRun(2, Decision.COMMITTED), to(A), StoreRun(1, Decision.PENDING))
    assert start.blocks == [2]


def test_a_store_that_was_never_asked_for_has_no_ticket() -> None:
    store = SteppedStore(1)
    assert store.step(Begin()) == [AskStore()]
    effects = store.step(NotGranted(Unavailable(LOST), asked=False))
    assert effects == [FreeSource(), FinishStore(Stored(0, 0, 0, 0, LOST)), StoreOver()]


def test_where_the_answer_alone_was_lost_the_ticket_is_ended() -> None:
    store = SteppedStore(1)
    store.step(Begin())
    effects = store.step(NotGranted(Unavailable(LOST), asked=True))
    assert effects == [FreeSource(), CloseTicket(TICKET)]
    assert closing(store, effects) == FinishStore(Stored(0, 0, 0, 0, LOST))


def test_a_mistake_in_the_question_is_what_the_store_ends_in() -> None:
    store, error = SteppedStore(1), CallerError("no such namespace")
    store.step(Begin())
    effects = store.step(NotGranted(error, asked=False))
    assert effects == [FreeSource(), FinishStore(None, error), StoreOver()]


def test_a_store_that_begins_too_late_asks_nothing() -> None:
    effects = SteppedStore(1).step(Begin(), DEADLINE)
    assert effects == [FreeSource(), FinishStore(Stored(0, 0, 0, 0, LATE)), StoreOver()]


# ------------------------------------------------------------------------------------------------ cancels


def test_a_cancel_in_line_is_told_at_once_and_over_when_its_turn_has_come() -> None:
    store = SteppedStore(1)
    never = Miss(MissReason.DEADLINE, NEVER_BEGUN)
    assert store.step(Cancel(GIVEN_UP)) == [FreeSource(), FinishStore(Stored(0, 0, 0, 0, never))]
    assert not store.plan.ended and store.plan.next_deadline() is None
    assert store.step(Begin()) == [StoreOver()]


@pytest.mark.parametrize("asked", [True, False])
def test_a_cancel_while_asking_is_told_at_once_and_the_ticket_ended_where_there_may_be_one(asked: bool) -> None:
    store = SteppedStore(1)
    store.step(Begin())
    assert store.step(Cancel(GIVEN_UP)) == [FreeSource(), FinishStore(Stored(0, 0, 0, 0, GIVEN_UP))]
    if asked:
        assert store.step(NotGranted(Unavailable(LOST), asked=True)) == [CloseTicket(TICKET)]
        assert store.over() == [StoreOver()]
    else:
        assert store.step(NotGranted(Unavailable(LOST), asked=False)) == [StoreOver()]


def test_a_grant_that_comes_after_a_cancel_is_not_used() -> None:
    store = SteppedStore(1)
    store.step(Begin())
    store.step(Cancel(GIVEN_UP))
    assert store.step(StoreGranted(SPACE, StoreGrant((to(A),)))) == [CloseTicket(TICKET)]
    assert store.over() == [StoreOver()]


def test_a_cancel_while_writing_is_told_when_all_have_stopped_and_over_when_all_have_ended() -> None:
    store = SteppedStore(3)
    first, second, third = (*store.writes(to(A), to(B)), None)
    assert third is None
    assert store.step(Cancel(GIVEN_UP)) == [StopWrite(first.exchange), StopWrite(second.exchange)]
    assert store.plan.next_deadline() is None
    assert store.step(WriteStopped(first.exchange)) == []
    told = FinishStore(Stored(0, 0, 0, 0, GIVEN_UP))
    assert store.step(WriteStopped(second.exchange)) == [FreeSource(), told]
    assert store.fail(first, Cancelled(GIVEN_UP)) == []
    assert store.end(second, DONE) == [CloseTicket(TICKET)]
    assert store.over() == [StoreOver()]


def test_what_ended_before_a_cancel_is_told() -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    store.end(first, DONE)
    store.step(Cancel(GIVEN_UP))
    told = FinishStore(Stored(1, 0, 0, PAGE_BYTES, GIVEN_UP))
    assert store.step(WriteStopped(second.exchange)) == [FreeSource(), told]


def test_a_cancel_after_the_last_byte_was_read_is_told_at_once() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    assert store.drain(start) == [FreeSource()]
    assert store.step(Cancel(GIVEN_UP)) == [FinishStore(Stored(0, 0, 0, 0, GIVEN_UP))]
    assert store.end(start, DONE) == [CloseTicket(TICKET)]


def test_a_cancel_while_the_ticket_is_ended_is_told_at_once() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    assert store.fail(start) == [FreeSource(), CloseTicket(TICKET)]
    assert store.step(Cancel(GIVEN_UP)) == [FinishStore(Stored(0, 0, 0, 0, LOST))], "the first reason"
    assert store.over() == [StoreOver()]


def test_a_cancel_after_the_outcome_changes_nothing() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    store.end(start, DONE)
    assert store.step(Cancel(GIVEN_UP)) == []
    assert store.over() == [StoreOver()]


def test_a_second_cancel_changes_nothing() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    store.step(Cancel(GIVEN_UP))
    assert store.step(Cancel(LOST)) == []
    assert store.step(PlanTick(), DEADLINE) == []
    assert store.step(WriteStopped(start.exchange))[1] == FinishStore(Stored(0, 0, 0, 0, GIVEN_UP))


def test_a_cancelled_store_does_not_begin_again_where_the_namespace_was_forgotten() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    store.step(Cancel(GIVEN_UP))
    told = FinishStore(Stored(0, 0, 0, 0, GIVEN_UP))
    effects = store.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE))
    assert effects == [FreeSource(), told, CloseTicket(TICKET)]


def test_a_mistake_that_was_seen_before_a_cancel_is_told() -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    store.fail(first, ZeroDivisionError())
    store.step(Cancel(GIVEN_UP))
    _, told = store.step(WriteStopped(second.exchange))
    assert isinstance(told, FinishStore) and isinstance(told.error, ZeroDivisionError)


def test_a_cancel_says_nothing_of_the_shards() -> None:
    shards = policy(failures=1)
    store = SteppedStore(1, shards=shards)
    (start,) = store.writes(to(A))
    store.step(Cancel(GIVEN_UP))
    store.fail(start, Cancelled(GIVEN_UP))
    assert shards.status(0)["a"]["state"] == "closed"


def test_the_deadline_is_a_cancel() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    assert store.plan.next_deadline() == DEADLINE
    assert store.step(PlanTick(), DEADLINE - 1) == []
    assert store.step(PlanTick(), DEADLINE) == [StopWrite(start.exchange)]
    assert store.step(WriteStopped(start.exchange)) == [FreeSource(), FinishStore(Stored(0, 0, 0, 0, LATE))]


def test_events_of_what_is_over_or_never_was_change_nothing() -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    store.end(first, DONE)
    late = (WriteEnded(first.exchange, 9, (DONE,)), SourceDrained(first.exchange), WriteStopped(99))
    assert [store.step(event) for event in late] == [[], [], []]
    assert store.end(second, Written.DUPLICATE)[1] == FinishStore(Stored(1, 1, 0, 2 * PAGE_BYTES))
    store.over()
    for event in (TicketEnded(), Cancel(GIVEN_UP), PlanTick(), Begin(), *late):
        assert store.step(event, DEADLINE) == []
