"""The load plan, stepped by hand: which shard is read, what is asked elsewhere, who owns memory, and when the load
ends."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import BlockFate, Explained, RefusedKind, ShardAddress, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transfers.failover import ASKING_SHARE, ROUNDS
from kvcluster.transfers.load_plan import READERS
from kvcluster.transfers.plan_messages import (
    Answered,
    Begin,
    Cancel,
    FindReplicas,
    FinishLoad,
    PlanTick,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Cancelled, Streams, Unavailable
from tests.client.build import HEADS, LAYERS, PAGE_BYTES
from tests.client.stepping import (
    DEADLINE,
    EVICTED,
    GIVEN_UP,
    HASHES,
    LATE,
    LOST,
    A,
    B,
    C,
    D,
    SteppedLoad,
    answer,
    one,
    outcome_of,
    policy,
    refused,
    source,
)

ON_A, ON_B = [source(A)], [source(B)]


def blocks_of(start: StartRead) -> list[tuple[int, int, int]]:
    """The blocks of its pieces, and of each its layers."""
    return [(piece.block, piece.want.layer_start, piece.want.layer_stop) for piece in start.ranges.pieces]


def avoided(ask: FindReplicas) -> tuple[ShardId, ...]:
    (question,) = ask.questions
    return question.need.avoid


# --------------------------------------------------------------------------------------------- starting


def test_each_shard_gets_one_exchange_with_all_its_pieces() -> None:
    load = SteppedLoad(ON_A, ON_B, ON_A)
    first, second = load.begin()
    assert (first.shard, blocks_of(first)) == (A, [(0, 0, LAYERS), (2, 0, LAYERS)])
    assert (second.shard, blocks_of(second)) == (B, [(1, 0, LAYERS)])
    assert first.attempt != second.attempt and first.exchange != second.exchange
    assert first.accept is Loss.EXACT


@pytest.mark.parametrize(
    ("loss", "tier", "exchanges"),
    [(Loss.EXACT, Tier.RAM, 2), (Loss.Q4, Tier.RAM, 2), (Loss.Q8, Tier.HOST, 2), (Loss.Q4, Tier.HOST, 3)],
)
def test_a_shard_gets_as_many_exchanges_as_its_way_is_fastest_by(
    monkeypatch: pytest.MonkeyPatch, loss: Loss, tier: Tier, exchanges: int
) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", PAGE_BYTES)
    load = SteppedLoad(*[[source(A, loss=loss, tier=tier)]] * 6, accept=loss, streams=Streams(1, 2, 3))
    starts = load.begin()
    assert len(starts) == exchanges
    assert [start.accept for start in starts] == [loss] * exchanges
    assert [block for start in starts for block, _, _ in blocks_of(start)] == list(range(6))


@pytest.mark.parametrize("loss", [Loss.EXACT, Loss.Q4])
def test_a_device_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch, loss: Loss) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    load = SteppedLoad(*[[source(A, loss=loss)]] * 6, accept=loss, streams=Streams(1, 2, 2, device=1), on_device=True)
    assert len(load.begin()) == 1


def test_many_shards_share_the_exchanges_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", PAGE_BYTES)
    shards = [ShardAddress(ShardId(f"s{number}"), Epoch(1), "") for number in range(READERS // 2)]
    load = SteppedLoad(*[[source(shard)] for shard in shards * 3], streams=Streams(1, 3, 3))
    assert len(load.begin()) == READERS


def test_a_load_that_begins_too_late_starts_nothing() -> None:
    load = SteppedLoad(ON_A)
    loaded = outcome_of(load.step(Begin(), DEADLINE))
    assert loaded == Loaded(0, 0, LATE, {0: LATE})
    assert loaded.took_ns == 0


# -------------------------------------------------------------------------------------------- all comes


def test_when_all_has_come_the_outcome_is_told_with_how_long_it_took() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    load.now = 30
    assert load.finish(second) == []
    load.now = 50
    loaded = outcome_of(load.finish(first))
    assert loaded == Loaded(2, 2 * LAYERS) and loaded.took_ns == 50
    assert load.plan.ended and load.plan.next_deadline() is None


def test_an_outcome_at_once_took_some_time_all_the_same() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    assert outcome_of(load.finish(start)).took_ns == 1


def test_after_the_outcome_every_event_is_too_late() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.finish(start)
    for event in (Begin(), PlanTick(), Cancel(GIVEN_UP), ReadEnded(1), ReadStopped(1, None), Answered(1, ())):
        assert load.step(event, DEADLINE) == []


# ------------------------------------------------------------------------------------- what did not come


def test_what_a_failed_exchange_has_not_brought_is_read_elsewhere_and_never_again() -> None:
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    load.bring(start, 0)
    load.bring(start, 1, stop=1)
    load.now = 100
    ask = one(load.fail(start), FindReplicas)
    (question,) = ask.questions
    assert (question.blocks, question.hashes, avoided(ask)) == ((1,), (HASHES[1],), ("a",))
    assert ask.until_ns == 100 + (DEADLINE - 100) // ASKING_SHARE
    other = one(load.step(answer(ask, A, B)), StartRead)
    assert (other.shard, blocks_of(other)) == (B, [(1, 1, LAYERS)])
    assert load.step(answer(ask, C)) == [], "it was answered"
    assert outcome_of(load.finish(other)) == Loaded(2, 2 * LAYERS)


def test_no_shard_that_failed_is_asked_again_and_after_some_rounds_none_is() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    for failed, shard in zip(("a", "ab", "abc"), (B, C, D), strict=True):
        ask = one(load.fail(start), FindReplicas)
        assert avoided(ask) == tuple(failed)
        start = one(load.step(answer(ask, shard)), StartRead)
        assert start.shard == shard
    assert ROUNDS == 3
    assert outcome_of(load.fail(start, Unavailable(EVICTED))) == Loaded(0, 0, LOST, {0: LOST}), (
        "the first reason is told"
    )


def test_the_outcome_waits_for_the_answer_and_tells_why_nothing_came() -> None:
    load = SteppedLoad(ON_A, ON_B)
    first, second = load.begin()
    ask = one(load.finish(first, EVICTED), FindReplicas)
    assert load.finish(second) == []
    assert outcome_of(load.step(answer(ask))) == Loaded(0, LAYERS, EVICTED, {0: EVICTED})


def test_without_an_answer_nothing_is_known_of_other_shards() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = one(load.fail(start), FindReplicas)
    assert outcome_of(load.step(Answered(ask.number, ()))).miss == LOST


def test_a_shard_that_sends_less_than_it_promised_has_failed() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = one(load.finish(start, None), FindReplicas)
    assert avoided(ask) == ("a",)
    miss = outcome_of(load.step(answer(ask))).miss
    assert miss == Miss(MissReason.SHARD_LOST, "the shard sent less than it promised")


def test_halves_of_two_shards_take_the_place_of_a_whole() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = one(load.fail(start), FindReplicas)
    halves = source(B, Part(0, LAYERS, 0, 2)), source(C, Part(0, LAYERS, 2, HEADS))
    first, second = load.step(Answered(ask.number, [Explained((BlockFate(1, (halves,), None),))]))
    assert isinstance(first, StartRead) and isinstance(second, StartRead)
    assert load.finish(first) == [], "no layer is whole by a half"
    assert load.progress.layer_left(0) == 1
    assert outcome_of(load.finish(second)).blocks == 1


def test_what_has_become_lossier_is_asked_for_without_avoiding_its_shard() -> None:
    load = SteppedLoad(ON_A, accept=Loss.Q8)
    (start,) = load.begin()
    ask = one(load.finish(start, Miss(MissReason.LOSSY)), FindReplicas)
    assert avoided(ask) == ()
    lossier = (source(A, loss=Loss.Q8),)
    again = one(load.step(Answered(ask.number, [Explained((BlockFate(1, (lossier,), None),))])), StartRead)
    assert (start.accept, again.shard, again.accept) == (Loss.EXACT, A, Loss.Q8)
    assert outcome_of(load.finish(again)).loss is Loss.Q8


def test_after_the_deadline_nothing_is_asked() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.now = DEADLINE
    assert outcome_of(load.fail(start, Cancelled(LATE))).miss == LATE


# --------------------------------------------------------------------------------------- corrupt layers


def test_layers_that_did_not_match_are_reported_and_read_elsewhere() -> None:
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    load.bring(start, 0)
    load.bring(start, 1, corrupt=[1])
    report, ask = load.finish(start, None, None)
    assert report == ReportCorrupt(A, (start.ranges.pieces[1].want.key,))
    assert isinstance(ask, FindReplicas) and avoided(ask) == ("a",)
    other = one(load.step(answer(ask, B)), StartRead)
    assert blocks_of(other) == [(1, 1, 2)]
    assert outcome_of(load.finish(other)).blocks == 2


def test_what_stays_corrupt_is_told_as_such() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    load.bring(start, 0, corrupt=[0])
    _, ask = load.fail(start)
    assert isinstance(ask, FindReplicas)
    assert outcome_of(load.step(answer(ask))).miss == Miss(MissReason.CORRUPT)


def test_what_cannot_be_decoded_here_is_read_elsewhere_and_not_reported() -> None:
    load, why = SteppedLoad(ON_A), Miss(MissReason.CORRUPT, "codec 9 is not known here")
    (start,) = load.begin()
    load.bring(start, 0, corrupt=[0, 1, 2])
    start.ranges.unreadable[0] = why
    ask = one(load.finish(start, None), FindReplicas)
    assert outcome_of(load.step(answer(ask))).miss == why


def test_a_report_has_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUSPECTS_PER_CALL", 1)
    load = SteppedLoad(ON_A, ON_A)
    (start,) = load.begin()
    load.bring(start, 0, corrupt=[0])
    load.bring(start, 1, corrupt=[0])
    report, _ = load.finish(start, None, None)
    assert isinstance(report, ReportCorrupt) and len(report.keys) == 1


# --------------------------------------------------------------------------------------------- refusals


def test_a_forgotten_namespace_is_named_once_more_to_the_same_shard() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    again = one(load.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE)), StartRead)
    assert again.shard == A and again.ranges.pieces == start.ranges.pieces
    assert again.attempt != start.attempt
    assert outcome_of(load.finish(again)) == Loaded(1, LAYERS)


def test_a_namespace_that_is_forgotten_twice_is_a_miss() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    again = one(load.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE)), StartRead)
    ask = one(load.fail(again, refused(RefusedKind.UNKNOWN_NAMESPACE)), FindReplicas)
    assert avoided(ask) == ("a",)
    miss = outcome_of(load.step(answer(ask))).miss
    assert miss == Miss(MissReason.SHARD_LOST, "a forgets the namespace: in these words")


def test_a_shard_that_has_restarted_is_a_miss() -> None:
    load = SteppedLoad(ON_A)
    (start,) = load.begin()
    ask = one(load.fail(start, refused(RefusedKind.STALE)), FindReplicas)
    assert outcome_of(load.step(answer(ask))).miss == Miss(MissReason.SHARD_LOST, "a has restarted")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (refused(RefusedKind.LIMIT), LimitError),
        (refused(RefusedKind.BAD), CallerError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_a_mistake_stops_all_other_exchanges_and_is_what_the_load_ends_in(
    error: BaseException, kind: type[BaseException]
) -> None:
    load = SteppedLoad(ON_A, ON_B, [source(C)])
    first, second, third = load.begin()
    stops = load.fail(second, error)
    assert stops == [StopRead(first.exchange, None), StopRead(third.exchange, None)]
    assert load.fail(third, Unavailable(LOST)) == [], "the end of another exchange changes nothing"
    finished = one(load.step(ReadStopped(first.exchange, None)), FinishLoad)
    assert finished.loaded is None and isinstance(finished.error, kind)


# --------------------------------------------------------------------------------------- open breakers


def test_a_shard_whose_breaker_is_open_is_not_asked_and_others_are() -> None:
    shards = policy(failures=1)
    load = SteppedLoad(ON_A, shards=shards)
    permit = shards.permit(A, 0)
    assert not isinstance(permit, Miss)
    shards.failed(permit, LOST, 0)
    ask = one(load.step(Begin()), FindReplicas)
    assert avoided(ask) == ("a",)
    assert outcome_of(load.finish(one(load.step(answer(ask, B)), StartRead))).blocks == 1


def test_a_shard_found_elsewhere_may_have_an_open_breaker_too() -> None:
    shards = policy(failures=1)
    load = SteppedLoad(ON_A, shards=shards)
    (start,) = load.begin()
    permit = shards.permit(B, 0)
    assert not isinstance(permit, Miss)
    shards.failed(permit, LOST, 0)
    ask = one(load.fail(start), FindReplicas)
    ask = one(load.step(answer(ask, B)), FindReplicas)
    assert avoided(ask) == ("a", "b")
    assert outcome_of(load.finish(one(load.step(answer(ask, C)), StartRead))) == Loaded(1, LAYERS)
