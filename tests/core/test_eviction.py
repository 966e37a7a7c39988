from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import limits
from kvcluster.core.eviction import LRU, LRU_DEPTH_BITS, ColdQueue, EvictionPolicy, Verdict


class Record:
    """What a queue sees of a block, and what a caller would say of it."""

    __slots__ = ("depth", "fate", "stamp")

    def __init__(self, stamp: int = 0, depth: int = 0, fate: Verdict = Verdict.TAKE) -> None:
        self.stamp = stamp
        self.depth = depth
        self.fate = fate


class DeepestFirst:
    """A policy whose scores are negative and do not grow."""

    def score(self, *, stamp: int, depth: int) -> int:
        return -depth


def judge(record: Record) -> Verdict:
    return record.fate


class QueueAgainstSorting(RuleBasedStateMachine):
    """The model is a list of what is queued; its coldest are found by sorting."""

    @initialize(policy=st.sampled_from([LRU(), DeepestFirst()]))
    def begin(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.queue: ColdQueue[Record] = ColdQueue(policy)
        self.queued: list[Record] = []
        self.now = 0

    def score(self, record: Record) -> int:
        return self.policy.score(stamp=record.stamp, depth=record.depth)

    @rule(depths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def push(self, depths: list[int]) -> None:
        for depth in depths:
            record = Record(self.now, depth)
            self.queue.push(record)
            self.queued.append(record)

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), later=st.integers(0, 3))
    def touch(self, data: st.DataObject, later: int) -> None:
        self.now += later
        for record in data.draw(st.lists(st.sampled_from(self.queued), max_size=8)):
            record.stamp = self.now

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), fate=st.sampled_from(Verdict))
    def judge_otherwise(self, data: st.DataObject, fate: Verdict) -> None:
        record = data.draw(st.sampled_from(self.queued))
        if record.fate is not Verdict.GONE:
            record.fate = fate

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        before = len(self.queue)
        evictable = sorted(self.score(record) for record in self.queued if record.fate is Verdict.TAKE)
        taken = self.queue.coldest(count, judge)
        assert [self.score(record) for record in taken] == evictable[:count]
        assert all(record.fate is Verdict.TAKE and record in self.queued for record in taken)
        self.queued = [record for record in self.queued if record not in taken]
        gone = before - len(taken) - len(self.queue)
        assert 0 <= gone <= sum(record.fate is Verdict.GONE for record in self.queued)

    @rule()
    def drain(self) -> None:
        drained = self.queue.drain()
        assert len(self.queue) == 0
        assert [record for record in self.queued if record not in drained and record.fate is not Verdict.GONE] == []
        self.queued = drained
        for record in drained:
            self.queue.push(record)

    @invariant()
    def nothing_that_is_here_is_lost(self) -> None:
        present = sum(record.fate is not Verdict.GONE for record in self.queued)
        assert present <= len(self.queue) <= len(self.queued)


TestQueueAgainstSorting = QueueAgainstSorting.TestCase


@given(*[st.tuples(st.integers(0, 2**63 - 1), st.integers(0, limits.TOKENS_PER_SEQUENCE - 1))] * 2)
def test_lru_orders_by_recency_and_then_tails_before_roots(one: tuple[int, int], other: tuple[int, int]) -> None:
    scores = [LRU().score(stamp=stamp, depth=depth) for stamp, depth in (one, other)]
    assert (scores[0] < scores[1]) == ((one[0], -one[1]) < (other[0], -other[1]))
    assert all(0 <= score < 2**87 for score in scores)


def test_lru_lets_no_depth_run_over_into_recency() -> None:
    assert LRU().score(stamp=7, depth=2**40) == LRU().score(stamp=7, depth=2**LRU_DEPTH_BITS - 1)
    assert LRU().score(stamp=6, depth=0) < LRU().score(stamp=7, depth=2**40)


def queue_of(records: list[Record]) -> ColdQueue[Record]:
    queue: ColdQueue[Record] = ColdQueue(LRU())
    for record in records:
        queue.push(record)
    return queue


def test_a_chain_used_as_a_whole_goes_from_its_tail() -> None:
    chain = [Record(stamp=5, depth=depth) for depth in range(4)]
    assert queue_of(chain).coldest(2, judge) == [chain[3], chain[2]]


def test_what_is_spared_comes_back_by_the_next_search() -> None:
    held, free = Record(1, fate=Verdict.SPARE), Record(2)
    queue = queue_of([held, free])
    assert queue.coldest(2, judge) == [free]
    held.fate = Verdict.TAKE
    assert queue.coldest(2, judge) == [held]


def test_what_a_caller_does_not_want_after_all_is_pushed_again() -> None:
    first, second = Record(1), Record(2)
    queue = queue_of([first, second])
    assert queue.coldest(2, judge) == [first, second]
    queue.push(first)
    assert queue.coldest(2, judge) == [first]


def test_a_record_pushed_twice_is_taken_once_by_a_search() -> None:
    record = Record(1)
    queue = queue_of([record, record])
    record.stamp = 2
    assert queue.coldest(2, judge) == [record]
    assert len(queue) == 0


def test_a_search_looks_at_so_many_entries_and_no_more() -> None:
    looked: list[Record] = []

    def spare(record: Record) -> Verdict:
        looked.append(record)
        return Verdict.SPARE

    queue = queue_of([Record(stamp) for stamp in range(100)])
    assert queue.coldest(5, spare, max_inspected=30) == []
    assert queue.cut_short
    assert len(looked) == 30
    assert len(queue) == 100


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_search_that_ends_by_itself_is_not_cut_short(count: int) -> None:
    queue = queue_of([Record(1), Record(2)])
    assert len(queue.coldest(count, judge, max_inspected=3)) == min(count, 2)
    assert not queue.cut_short


def test_touched_records_are_looked_at_too_and_counted() -> None:
    records = [Record(1) for _ in range(100)]
    queue = queue_of(records)
    for record in records[:-1]:
        record.stamp = 2
    found = [queue.coldest(1, judge, max_inspected=40) for _ in range(3)]
    assert found == [[], [], [records[-1]]]


def test_a_crowd_of_pinned_records_delays_eviction_but_never_stops_it() -> None:
    pinned = [Record(stamp, fate=Verdict.SPARE) for stamp in range(1_000)]
    victim = Record(5_000)
    queue = queue_of([*pinned, victim])
    searches = [queue.coldest(1, judge, max_inspected=64) for _ in range(1_000 // 32 + 1)]
    assert [found for found in searches if found] == [[victim]]
    for record in pinned:
        record.fate = Verdict.TAKE
    unpinned = [record for _ in range(1_000) for record in queue.coldest(64, judge, max_inspected=64)]
    assert sorted(record.stamp for record in unpinned) == list(range(1_000))


def test_what_is_gone_is_forgotten_when_it_comes_up() -> None:
    gone, here = Record(1, fate=Verdict.GONE), Record(2)
    queue = queue_of([gone, here])
    assert queue.coldest(1, judge) == [here]
    assert len(queue) == 0


def test_compaction_forgets_what_is_gone_and_what_is_there_twice() -> None:
    gone = [Record(stamp, fate=Verdict.GONE) for stamp in range(5_000)]
    spared, late, early = Record(10, fate=Verdict.SPARE), Record(9), Record(8)
    queue = queue_of([spared])
    assert queue.coldest(1, judge) == []  # and it steps aside
    for record in (late, *gone, early, late):
        queue.push(record)
    queue.compact(3, judge)
    assert len(queue) == 3
    spared.fate = Verdict.TAKE
    assert queue.coldest(3, judge) == [early, late, spared]


def test_compaction_waits_until_twice_the_live_records_are_queued() -> None:
    queue = queue_of([Record(stamp, fate=Verdict.GONE) for stamp in range(5_000)])
    queue.compact(2_500, judge)
    assert len(queue) == 5_000


def test_a_drained_queue_gives_every_record_even_those_aside() -> None:
    records = [Record(stamp, fate=Verdict.SPARE) for stamp in range(3)]
    queue = queue_of(records)
    assert queue.coldest(1, judge, max_inspected=2) == []
    assert queue.drain() == records
    assert len(queue) == 0
    assert queue.coldest(1, judge) == []


def test_a_score_that_falls_is_our_mistake() -> None:
    record = Record(stamp=5)
    queue = queue_of([record])
    record.stamp = 4
    with pytest.raises(AssertionError, match="score fell"):
        queue.coldest(1, judge)


def test_a_queued_record_costs_at_most_120_bytes() -> None:
    records = [Record(1_700_000_000_000_000_000 + i, i) for i in range(10_000)]
    tracemalloc.start()
    try:
        queue = queue_of(records)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(queue) == 10_000
    assert nbytes <= 120 * len(queue)
