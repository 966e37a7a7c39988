"""What a shard reports to the coordinator, when, and how long it may consider itself a member."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, CallId, Epoch
from kvcluster.core.messages import (
    AttachedShard,
    Done,
    EvictOrder,
    Flush,
    Inventory,
    LeaveReason,
    OrderProgress,
    PageEvent,
    RemovedEvent,
    ReportAck,
    Tick,
    Written,
)
from kvcluster.core.miss import MissReason
from tests.core.lone_shard import (
    BLOCKS,
    OTHER,
    A,
    B,
    C,
    D,
    LoneShard,
    counters,
    end,
    granted,
    inventory,
    misses,
    pinned,
    renew,
    report,
)
from tests.core.samples import MEMBERSHIP_MS, MS, OURS, PAGE, SECOND, SPEC, attempt, key, ours

# ---------------------------------------------------------------------------------------- membership


def test_without_a_coordinator_nothing_is_pinned_reserved_or_committed() -> None:
    shard = LoneShard()
    shard.attach()
    assert misses(shard.pin(attempt(1), A, B)) == [MissReason.SHARD_LOST] * 2
    assert shard.reserve(attempt(1), A, B) == (Written.LOST,) * 2
    assert not len(shard.core.leases)


def test_the_term_is_counted_from_before_it_asked_less_what_clocks_drift() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.later(SECOND)
    asked_at = shard.now
    shard.later(3 * SECOND)
    shard.answer()
    shard.later(asked_at + MEMBERSHIP_MS * MS * 98 // 100 - 1 - shard.now)
    assert pinned(shard.pin(attempt(3), A))
    shard.later(1)
    assert misses(shard.pin(attempt(4), A)) == [MissReason.SHARD_LOST]
    assert shard.reserve(attempt(4), C) == (Written.LOST,)
    assert shard.commit(attempt(2), 0) == (Written.LOST,)
    assert counters(shard)["late"] == 1


def test_a_pin_granted_before_the_term_ended_may_be_read_to_its_end() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.pin(attempt(2), A)
    shard.later(6 * SECOND)
    assert not shard.core.state.member(shard.now)
    assert renew(shard, attempt(2))


def test_who_waits_for_room_when_the_term_ends_is_told_that_it_is_lost() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=9 * SECOND)
    shard.fail()
    shard.later(5 * SECOND)
    assert granted(shard, waiting) == (Written.LOST,)
    assert attempt(2) not in shard.core.leases


def test_a_newer_incarnation_ends_this_one() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=SECOND)
    flush = shard.call(ours(Flush(SECOND)))
    assert flush in shard.replies
    shard.settle()
    shard.commit(attempt(1), 0)
    shard.pin(attempt(3), A)
    flush = shard.call(ours(Flush(SECOND)))
    later = shard.reserving(attempt(4), C, wait_ns=SECOND)
    shard.answer(ReportAck(Epoch(1), 0, leave=LeaveReason.REPLACED))
    assert shard.left
    assert shard.revoked == [attempt(3)]
    assert granted(shard, waiting) == granted(shard, later) == (Written.LOST,)
    assert shard.replies[flush] == Done(False)
    assert misses(shard.pin(attempt(5), A)) == [MissReason.SHARD_LOST]
    assert not shard.core.state.member(shard.now)
    assert end(shard, attempt(3))
    assert (shard.sent, shard.core.next_deadline()) == (None, None), "it has nothing more to say"


def test_a_higher_coordinator_epoch_is_adopted_and_owed_an_inventory() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A, B)
    shard.evict(B)
    shard.settle()
    shard.later(SECOND)
    shard.coordinator = Epoch(200)
    shard.answer(ReportAck(Epoch(200), 0, inventory=True))
    told = inventory(shard)
    assert (told.coordinator, told.upto, told.chunk, told.last) == (200, 0, 0, True)
    assert [page.key for page in told.pages] == [key(A)]
    shard.settle()
    shard.evict(A)
    assert misses(shard.pin(attempt(2), A)) == [MissReason.EVICTED], "orders are counted by each coordinator"


def test_a_lower_coordinator_epoch_is_not_heard() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.later(SECOND)
    asked_at = shard.now
    shard.answer(ReportAck(Epoch(99), 10**6, orders=(EvictOrder(9, ((shard.space, A),)),)))
    assert shard.sent is None
    assert shard.core.next_deadline() == asked_at + 250 * MS, "the right one may be back by then"
    assert pinned(shard.pin(attempt(2), A))
    shard.later(4 * SECOND)
    assert misses(shard.pin(attempt(3), A)) == [MissReason.SHARD_LOST], "it does not make this shard a member either"


# ------------------------------------------------------------------------------------------- reports


def test_the_first_word_is_an_inventory() -> None:
    shard = LoneShard()
    shard.attach()
    assert (inventory(shard).coordinator, inventory(shard).pages) == (Epoch(0), ())
    shard.answer()
    assert (inventory(shard).coordinator, inventory(shard).last) == (Epoch(100), True), "now it knows its coordinator"
    shard.answer()
    assert report(shard).events == (), "it says that it has the answer"
    shard.answer()
    assert shard.sent is None


def test_every_message_carries_the_specs_of_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 1)
    shard = LoneShard.joined()
    shard.reserve(attempt(1), A, B)
    shard.commit(attempt(1), 0, 1)
    assert report(shard).specs == ((OURS, SPEC),)
    shard.settle()
    shard.later(SECOND)
    assert report(shard).specs == (), "a heartbeat has nothing to explain"
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    for _ in range(2):
        assert inventory(shard).specs == ((OURS, SPEC),)
        shard.answer()


def test_a_page_whose_namespace_is_forgotten_is_told_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined()
    shard.later(SECOND)
    commit_one(shard, 1, A)
    shard.evict(A)
    assert isinstance(shard.attach(OTHER), AttachedShard)
    shard.fail()
    shard.later(SECOND)
    told = report(shard)
    assert [type(event) for event in told.events] == [PageEvent, RemovedEvent]
    assert told.specs == ()


def test_an_inventory_lists_what_is_ready_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 2)
    shard = LoneShard.joined()
    shard.store(attempt(1), *BLOCKS[:5])
    shard.reserve(attempt(2), BLOCKS[5])
    shard.evict(B)
    shard.settle()
    shard.later(SECOND)
    assert report(shard).events == ()
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    chunks: list[tuple[int, bool, list[BlockHash]]] = []
    while isinstance(shard.sent, Inventory):
        chunks.append((shard.sent.chunk, shard.sent.last, [page.key.hash for page in shard.sent.pages]))
        shard.answer()
    assert chunks == [(0, False, [A, C]), (1, True, [D, BLOCKS[4]])]


def test_a_refused_inventory_is_not_repeated_in_haste() -> None:
    shard = LoneShard()
    shard.attach()
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    assert inventory(shard).coordinator == shard.coordinator, "the first answer named its coordinator"
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    assert shard.sent is None
    assert shard.later(249 * MS) == []
    shard.later(MS)
    assert inventory(shard).chunk == 0


def test_a_report_says_what_the_shard_is_and_has() -> None:
    shard = LoneShard.joined(pages=4)
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.later(SECOND)
    told = report(shard).info
    assert (told.shard, told.epoch, told.address, told.host) == ("a", 7, "a:1", "here")
    assert (told.capacity_bytes, told.free_bytes, told.pages, told.leases) == (4 * PAGE, 2 * PAGE, 2, 1)
    assert dict(told.counters)["commits"] == 1
    said = report(shard)
    assert (said.events, said.specs, said.pressure, said.orders) == ((), (), (), OrderProgress())


def test_news_are_told_at_once_and_else_a_heartbeat_when_it_is_due() -> None:
    shard = LoneShard.joined()
    assert shard.sent is None
    assert shard.later(499 * MS) == []
    shard.later(MS)
    assert report(shard).events == ()
    shard.settle()
    shard.reserve(attempt(1), A)
    shard.commit(attempt(1), 0)
    assert [event.key for event in report(shard).events] == [key(A)]


def test_after_an_answer_that_came_late_the_next_heartbeat_does_not() -> None:
    shard = LoneShard.joined()
    shard.later(500 * MS)
    assert shard.sent is not None
    shard.later(MEMBERSHIP_MS * MS * 9 // 10)
    shard.answer()
    shard.later(0)
    assert report(shard).events == (), "or its term would end before it is due"


def test_what_failed_is_sent_again_no_sooner_than_the_retry_however_urgent() -> None:
    shard = LoneShard.joined()
    shard.reserve(attempt(1), A, B)
    shard.commit(attempt(1), 0)
    first = report(shard)
    shard.fail()
    shard.reserve(attempt(2), B)
    shard.commit(attempt(2), 0)
    assert shard.sent is None
    shard.later(249 * MS)
    assert shard.sent is None
    shard.later(MS)
    assert report(shard).first == first.first
    assert [event.key for event in report(shard).events] == [key(A), key(B)]


@pytest.mark.parametrize("coordinator", ["answers", "fails", "is over", "refuses"])
def test_a_shard_that_is_left_alone_sends_a_bounded_number_of_messages_a_second(coordinator: str) -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    shard.reserving(attempt(2), B, wait_ns=9 * SECOND)
    shard.commit(attempt(1), 0)
    sent = ticks = 0
    until = shard.now + 10 * SECOND
    while shard.now < until:
        if shard.sent is not None:
            sent += 1
            match coordinator:
                case "answers":
                    shard.answer()
                case "fails":
                    shard.fail()
                case "is over":
                    shard.answer(ReportAck(Epoch(99), 0))
                case _:
                    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
            continue
        deadline = shard.core.next_deadline()
        assert deadline is not None
        shard.now = max(shard.now, deadline)
        shard.step(Tick())
        ticks += 1
    assert sent <= 10 * (1_000 // 250) + 3
    assert ticks <= sent + 4, "a Tick for each message, and one for each thing that came to its end"


# --------------------------------------------------------------------------------------------- flushes


def flushing(shard: LoneShard, wait_ns: int = SECOND) -> CallId:
    return shard.call(ours(Flush(wait_ns)))


def commit_one(shard: LoneShard, counter: int, block: BlockHash) -> None:
    shard.reserve(attempt(counter), block)
    shard.commit(attempt(counter), 0)


def test_a_flush_of_nothing_is_done() -> None:
    shard = LoneShard.joined()
    assert shard.replies[flushing(shard)] == Done()


def test_a_flush_is_answered_when_all_that_came_before_is_acknowledged() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    commit_one(shard, 2, B)
    flush = flushing(shard)
    commit_one(shard, 3, C)
    shard.answer()
    assert flush not in shard.replies, "only the first was under way"
    shard.answer()
    assert shard.replies[flush] == Done()


def test_a_flush_that_may_not_wait_says_how_it_stands() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    assert shard.replies[flushing(shard, 0)] == Done(False)
    shard.settle()
    assert shard.replies[flushing(shard, 0)] == Done()


def test_a_flush_ends_when_its_wait_does() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    flush = flushing(shard)
    shard.later(SECOND - 1)
    assert flush not in shard.replies
    shard.later(1)
    assert shard.replies[flush] == Done(False)


@pytest.mark.parametrize("coordinator", ["the same", "another"])
def test_a_flush_across_an_inventory_ends_with_it(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 1)
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    commit_one(shard, 2, B)
    flush = flushing(shard)
    if coordinator == "another":
        shard.coordinator = Epoch(200)
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    commit_one(shard, 3, C)
    late = flushing(shard)
    assert inventory(shard).chunk == 0
    shard.answer()
    assert inventory(shard).last
    assert flush not in shard.replies
    shard.answer()
    assert shard.replies[flush] == Done()
    assert late not in shard.replies, "the commit that it waits for is not in the inventory"
    shard.answer()
    assert shard.replies[late] == Done()


def test_more_than_the_backlog_holds_becomes_an_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BACKLOG", 2)
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    for counter, block in enumerate((B, C, D), 2):
        commit_one(shard, counter, block)
    flush = flushing(shard)
    shard.answer()
    assert [page.key.hash for page in inventory(shard).pages] == [A, B, C, D]
    shard.answer()
    assert shard.replies[flush] == Done()


def test_a_flush_at_a_shard_that_is_over_is_answered() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    shard.answer(ReportAck(shard.coordinator, 0, leave=LeaveReason.REPLACED))
    assert shard.replies[flushing(shard)] == Done(False)
    assert shard.core.next_deadline() is None


def test_a_bounded_number_of_flushes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FLUSHES", 1)
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    first, second = flushing(shard), flushing(shard)
    assert first not in shard.replies and shard.replies[second] == Done(False)
