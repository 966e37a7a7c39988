"""Reservations that find no room: which of them wait, for how long, and which is served first."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.messages import (
    Abort,
    PageSlot,
    Written,
)
from kvcluster.core.miss import MissReason
from tests.core.lone_shard import (
    BLOCKS,
    A,
    B,
    C,
    D,
    LoneShard,
    counters,
    end,
    granted,
    misses,
    pinned,
    report,
    slots,
)
from tests.core.samples import (
    OURS,
    PAGE,
    SECOND,
    attempt,
)


def test_a_reservation_without_room_waits_and_says_how_much_it_wants() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, C, D, wait_ns=SECOND)
    assert waiting not in shard.replies
    assert report(shard).pressure == ((OURS, PAGE),), "two of the three fit the whole pool, and there is room for one"


def test_a_waiting_reservation_is_served_when_an_order_makes_room() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A, B)
    waiting = shard.reserving(attempt(2), C, wait_ns=SECOND)
    shard.evict(B)
    assert slots(granted(shard, waiting))
    assert misses(shard.pin(attempt(3), B)) == [MissReason.EVICTED]
    assert pinned(shard.pin(attempt(4), A))


def test_a_shard_reports_at_once_that_no_writer_waits_for_room_any_more() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, C, wait_ns=SECOND)
    assert report(shard).pressure == ((OURS, PAGE),)
    shard.settle()
    shard.later(SECOND)
    assert Written.FULL in granted(shard, waiting), "it has waited long enough"
    assert report(shard).pressure == ()


def test_reservations_are_served_in_order_of_arrival() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A, B)
    large = shard.reserving(attempt(2), C, D, wait_ns=SECOND)
    small = shard.reserving(attempt(3), BLOCKS[4], wait_ns=SECOND)
    shard.evict(A)
    assert large not in shard.replies
    assert small not in shard.replies, "there is room for it, but it came later"
    shard.evict(B)
    assert slots(granted(shard, large))
    assert small not in shard.replies
    assert end(shard, attempt(2), Abort)
    assert slots(granted(shard, small))


def test_who_waited_long_enough_gets_what_fits_and_full_for_the_rest() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), A, B, C, wait_ns=SECOND)
    shard.settle()
    shard.later(SECOND - 1)
    assert waiting not in shard.replies
    shard.later(1)
    duplicate, slot, full = granted(shard, waiting)
    assert duplicate is Written.DUPLICATE
    assert isinstance(slot, PageSlot)
    assert full is Written.FULL
    assert counters(shard)["full"] == 1


def test_a_short_wait_ends_behind_a_long_one() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    patient = shard.reserving(attempt(2), B, wait_ns=5 * SECOND)
    hasty = shard.reserving(attempt(3), C, wait_ns=SECOND)
    shard.settle()
    shard.later(SECOND)
    assert granted(shard, hasty) == (Written.FULL,)
    assert patient not in shard.replies
    deadline = shard.core.next_deadline()
    assert deadline is None or deadline > shard.now, "nothing that is over asks for another Tick"


def test_no_writer_waits_longer_than_a_lease_runs() -> None:
    shard = LoneShard.joined(pages=1, lease_ttl_ms=1_000)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=3_600 * SECOND)
    shard.settle()
    shard.later(SECOND)
    assert granted(shard, waiting) == (Written.FULL,)


def test_a_bounded_number_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING_WRITES", 1)
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    shard.reserving(attempt(2), B, wait_ns=SECOND)
    assert granted(shard, shard.reserving(attempt(3), C, wait_ns=SECOND)) == (Written.FULL,)


def test_a_writer_that_gives_up_waits_no_more_and_is_answered() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    gives_up = shard.reserving(attempt(2), B, wait_ns=SECOND)
    stays = shard.reserving(attempt(3), C, wait_ns=SECOND)
    assert end(shard, attempt(2), Abort)
    assert granted(shard, gives_up) == (Written.LOST,)
    shard.evict(A)
    assert slots(granted(shard, stays))


def test_a_page_that_another_worker_writes_meanwhile_is_not_waited_for() -> None:
    shard = LoneShard.joined(pages=2)
    shard.reserve(attempt(1), A)
    shard.reserve(attempt(2), B)
    waiting = shard.reserving(attempt(3), A, C, wait_ns=SECOND)
    shard.commit(attempt(1), 0)
    assert waiting not in shard.replies
    assert end(shard, attempt(2), Abort)
    duplicate, slot = granted(shard, waiting)
    assert duplicate is Written.DUPLICATE
    assert isinstance(slot, PageSlot)


def test_reservations_that_wait_have_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING_PAGES", 6)
    shard = LoneShard.joined(pages=4)
    shard.store(attempt(1), *BLOCKS[:4])
    first = shard.reserving(attempt(2), *BLOCKS[4:6], wait_ns=SECOND)
    second = shard.reserving(attempt(3), *BLOCKS[6:8], wait_ns=SECOND)
    assert first not in shard.replies and granted(shard, second) == (Written.FULL, Written.FULL)
    assert end(shard, attempt(2), Abort)
    assert shard.reserving(attempt(4), *BLOCKS[6:8], wait_ns=SECOND) not in shard.replies, "those have gone"
