"""One call looks at a bounded number of pieces and names a bounded number of sources; the blocks beyond are a miss."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator.need_planner import NeedPlanner
from kvcluster.core.coordinator.replica_sets import ReplicaSet, ReplicaTable
from kvcluster.core.groups import Part
from kvcluster.core.messages import Need
from kvcluster.core.miss import Loss, MissReason
from tests.core.lone_coordinator import LoneCoordinator
from tests.core.samples import LEFT, RIGHT, WHOLE, attempt, chain, pages, whole
from tests.core.test_replica_sets import book_of, copy, held

WIDE = Part(0, 2, 0, 8)
BLOCKS = chain(6)


def unlike(book: ReplicaTable, count: int) -> list[ReplicaSet]:
    """Sets that hold all of WIDE, each in two pieces of its own."""
    cuts = [(Part(0, 2, 0, at + 1), Part(0, 2, at + 1, 8)) for at in range(count)]
    return [held(book, copy(1, left), copy(2, right)) for left, right in cuts]


def test_sets_beyond_the_work_of_one_call_are_a_miss_that_the_next_call_gets_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, need = book_of(2), Need((WIDE,))
    sets = unlike(book, 4)
    monkeypatch.setattr(limits, "COVER_WORK", 40)
    first, second = NeedPlanner(book, need), NeedPlanner(book, need)
    assert [first.serve(some).complete for some in sets] == [True, True, False, False]
    miss = first.serve(sets[3]).miss
    assert miss is not None and miss.reason is MissReason.PART and "too many pieces" in miss.detail
    assert all(book.serve(some, need).complete for some in sets), "the bound is one of a call"
    assert [second.serve(some).complete for some in sets] == [True, True, True, True]


def test_sets_that_lie_alike_or_were_asked_before_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    book, need = book_of(2), Need((WIDE,))
    some = unlike(book, 1)[0]
    assert NeedPlanner(book, need).serve(some).complete
    monkeypatch.setattr(limits, "COVER_WORK", -1)
    assert NeedPlanner(book, need).serve(some).complete


def test_an_answer_names_no_more_sources_than_a_call_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGES_PER_CALL", 5)
    book = book_of(2)
    asking = NeedPlanner(book, Need((WIDE,)))
    sets = unlike(book, 3)
    assert [asking.serve(some).complete for some in (sets[0], sets[0], sets[1], sets[2])] == [True, True, True, False]


def test_a_page_that_is_stored_as_it_is_asked_for_is_complete_without_more_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "COVER_WORK", -1)
    book = book_of(2)
    there = held(book, copy(1), copy(2, loss=Loss.Q8))
    assert NeedPlanner(book, Need((WHOLE,))).complete(there)
    assert not NeedPlanner(book, Need((WHOLE,))).complete(held(book, copy(2, loss=Loss.Q8)))
    book.kill_slot(1)
    assert not NeedPlanner(book, Need((WHOLE,))).complete(there), "its shard is lost"


def test_a_block_is_not_served_from_more_sources_than_it_may_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTS_PER_BLOCK", 1)
    book = book_of(2)
    served = book.serve(unlike(book, 1)[0], Need((WIDE,)))
    assert served.miss is not None and served.miss.reason is MissReason.PART


def test_a_miss_names_a_few_of_many_parts() -> None:
    book = book_of(1)
    served = book.serve(held(book, *(copy(1, Part(0, 1, at, at + 1)) for at in range(8))), Need((WIDE,)))
    assert served.miss is not None and "more" not in served.miss.detail
    many = held(book, *(copy(1, Part(0, 1, at // 2, 8 - at % 2)) for at in range(10)))
    miss = book.serve(many, Need((WIDE,))).miss
    assert miss is not None and miss.detail.endswith("and 2 more")


def test_a_load_ends_where_the_work_of_one_call_does_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, voice = LoneCoordinator.serving()
    voice.report(*pages(BLOCKS[:3], LEFT), *pages(BLOCKS[:3], RIGHT), *pages(BLOCKS))
    monkeypatch.setattr(limits, "COVER_WORK", 0)
    first = coordinator.load(attempt(1), BLOCKS)
    assert first.blocks == 3 and first.miss is not None
    assert (first.miss.reason, first.miss.detail.split(";")[1]) == (MissReason.PART, " ask again, or for fewer")
    assert [fate.count for fate in coordinator.explain(BLOCKS)] == [6]
    assert coordinator.load(attempt(2), BLOCKS, whole()).blocks == 6
