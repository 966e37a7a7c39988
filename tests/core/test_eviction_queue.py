"""Which records are evicted first under any policy: leaves before the blocks they follow, and the lowest score among
them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Container, Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.coordinator import eviction_queue
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId
from kvcluster.eviction import POLICIES, Block, EvictionPolicy
from kvcluster.eviction.lru import LRU

SPACE, OTHER = NamespaceId(b"one" * 11), NamespaceId(b"two" * 11)
NOWHERE = BlockHash(b"?" * HASH_BYTES)


class Record:
    """What a queue sees of a block; it is spared while `held`."""

    __slots__ = ("depth", "hash", "held", "parent", "space", "stamp", "uses", "worth")
    _numbers = count()

    def __init__(
        self,
        stamp: int = 0,
        after: Record | None = None,
        *,
        held: bool = False,
        worth: int = 0,
        space: NamespaceId = SPACE,
    ) -> None:
        self.space = space if after is None else after.space
        self.hash = BlockHash(next(self._numbers).to_bytes(HASH_BYTES, "little"))
        self.parent = NOWHERE if after is None else after.hash
        self.depth = 0 if after is None else after.depth + 1
        self.stamp = stamp
        self.uses = 0
        self.held = held
        self.worth = worth


class Index:
    """Records by hash, as the prefix index has them, and a queue of all of them."""

    def __init__(self, policy: EvictionPolicy, records: Iterable[Record] = ()) -> None:
        self.records: dict[BlockHash, Record] = {}
        self.queue: EvictionQueue[Record] = EvictionQueue(policy, lambda _, block: self.records.get(block))
        for record in records:
            self.push(record)

    def push(self, record: Record) -> None:
        self.records[record.hash] = record
        self.queue.push(record)

    def lose(self, record: Record) -> None:
        self.queue.remove(record)
        self.records.pop(record.hash, None)

    def coldest(self, most: int, now: int = 0, closed: Container[NamespaceId] = (), **bound: int) -> list[Record]:
        return self.queue.pop_coldest(most, lambda record: record.held, now, lambda space: space in closed, **bound)


class Worth:
    """A policy whose scores are drawn: they rise and fall as they like."""

    scores_fall = True

    def score(self, block: Block, now: int) -> int:
        assert isinstance(block, Record)
        return block.worth

    def evicted(self, score: int, now: int) -> None:
        pass


class SizesOfTheirOwn:
    """Facts of which no two blocks share one, so that a policy that looks at them orders by them."""

    def nbytes(self, block: Block) -> int:
        return 1 + block.depth % 3

    def recompute(self, block: Block) -> int:
        return 1_000 + 100 * block.depth

    def tenant(self, block: Block) -> str:
        return "alice"


def chain(length: int, stamp: int = 0, after: Record | None = None, space: NamespaceId = SPACE) -> list[Record]:
    records: list[Record] = []
    for _ in range(length):
        after = Record(stamp, after, space=space)
        records.append(after)
    return records


# ------------------------------------------------------------------------------------- against plain lists

FACTS = SizesOfTheirOwn()
EVERY_POLICY: list[Callable[[], EvictionPolicy]] = [Worth, *(lambda p=p: p.make(FACTS) for p in POLICIES.values())]  # type: ignore[misc]


class QueueAgainstLists(RuleBasedStateMachine):
    """The model is a list of what is queued. Blocks come in any order, gaps included, and go in any."""

    @initialize(policy=st.sampled_from(EVERY_POLICY))
    def begin(self, policy: Callable[[], EvictionPolicy]) -> None:
        self.policy = policy()
        self.index = Index(self.policy)
        self.known = chain(1)  # every block there ever was: those that are not queued may come again
        self.queued: dict[BlockHash, Record] = {}
        self.now = 0

    def leaves(self) -> list[Record]:
        followed = {record.parent for record in self.queued.values()}
        return [record for record in self.queued.values() if record.hash not in followed]

    @rule(data=st.data(), length=st.integers(1, 5), backwards=st.booleans(), space=st.sampled_from([SPACE, OTHER]))
    def grow(self, data: st.DataObject, length: int, backwards: bool, space: NamespaceId) -> None:
        after = data.draw(st.sampled_from([None, *self.known]))
        made = chain(length, self.now if after is None else after.stamp, after, space)
        for record in made:
            record.worth = data.draw(st.integers(-3, 3))
        self.known += made
        for record in reversed(made) if backwards else made:
            self.push(record)

    @rule(data=st.data())
    def push_one(self, data: st.DataObject) -> None:
        self.push(data.draw(st.sampled_from(self.known)))

    def push(self, record: Record) -> None:
        self.index.push(record)
        self.queued[record.hash] = record

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(list(self.queued.values())))
        self.index.lose(record)
        del self.queued[record.hash]

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), later=st.integers(0, 2 * 10**12))
    def touch(self, data: st.DataObject, later: int) -> None:
        """A load: of a block, and of the chain before it."""
        self.now += later
        record: Record | None = data.draw(st.sampled_from(list(self.queued.values())))
        by_hash = {known.hash: known for known in self.known}
        while record is not None:
            record.stamp = self.now
            record.uses += 1
            record = by_hash.get(record.parent)

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), worth=st.integers(-3, 3), held=st.booleans())
    def change(self, data: st.DataObject, worth: int, held: bool) -> None:
        record = data.draw(st.sampled_from(list(self.queued.values())))
        record.worth, record.held = worth, held

    @rule(most=st.integers(0, 6), bound=st.sampled_from([2, 4_096]), closed=st.sets(st.sampled_from([SPACE, OTHER])))
    def evict(self, most: int, bound: int, closed: set[NamespaceId]) -> None:
        taken = self.index.coldest(most, self.now, closed, max_inspected=bound)
        for record in taken:
            free = [leaf for leaf in self.leaves() if not leaf.held and leaf.space not in closed]
            assert record in free, "a block is evicted after its followers, and a held or closed one never"
            if not self.policy.scores_fall:
                assert bound == 2 or self.score(record) == min(map(self.score, free))
            del self.queued[record.hash]
        if not self.index.queue.cut_short and len(taken) < most:
            aside = (leaf.held or leaf.space in closed for leaf in self.leaves())
            assert all(aside), "a leaf was passed over"

    def score(self, record: Record) -> int:
        return self.policy.score(record, self.now)

    @rule()
    def drain(self) -> None:
        names = list(self.index.queue.drain())
        assert sorted(names) == sorted((record.space, record.hash) for record in self.queued.values())
        assert len(self.index.queue) == 0
        for record in self.queued.values():
            self.index.push(record)

    @rule(space=st.sampled_from([SPACE, OTHER]))
    def purge(self, space: NamespaceId) -> None:
        self.index.queue.forget(space)
        self.queued = {block: record for block, record in self.queued.items() if record.space != space}
        self.index.records = dict(self.queued)
        assert len(self.index.queue) == len(self.queued)

    @invariant()
    def they_agree(self) -> None:
        self.index.queue.check()
        assert len(self.index.queue) == len(self.queued)
        assert all(record in self.index.queue for record in self.queued.values())


TestQueueAgainstLists = QueueAgainstLists.TestCase


@given(st.data())
def test_a_victim_scores_no_higher_than_any_leaf_did_within_one_round_of_the_hand(data: st.DataObject) -> None:
    count, rescored = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    rounds = -(-count // rescored)
    records = [Record(worth=data.draw(st.integers(-9, 9))) for _ in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction_queue, "RESCORED", rescored)
        index = Index(Worth(), records)
        seen: dict[BlockHash, list[int]] = {record.hash: [] for record in records}  # its worth at each search
        for _ in range(data.draw(st.integers(1, 12))):
            for record in data.draw(st.lists(st.sampled_from(records), max_size=6)):
                record.worth = data.draw(st.integers(-9, 9))
            for record in records:
                seen[record.hash].append(record.worth)
            for victim in index.coldest(1):
                for other in records:
                    assert victim.worth <= max(seen[other.hash][-rounds:]) or len(seen[other.hash]) < rounds
                index.push(victim)  # it stays, so that there are as many


# ------------------------------------------------------------------------------------------------ one by one


def test_a_chain_goes_from_its_tail_even_if_its_root_scores_lowest() -> None:
    records = chain(4)
    for record in records:
        record.worth = record.depth
    index = Index(Worth(), records)
    assert index.coldest(3) == records[:0:-1]
    assert index.coldest(9) == records[:1]


def test_a_block_goes_when_all_that_follow_it_are_gone() -> None:
    [root] = chain(1)
    one, two = Record(5, root), Record(9, root)
    index = Index(LRU(), [root, one, two])
    assert index.coldest(1) == [one]
    index.lose(two)
    assert index.coldest(9) == [root]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["roots first", "tails first"])
def test_it_does_not_matter_in_which_order_a_chain_comes(order: slice) -> None:
    records = chain(200)
    assert Index(LRU(), records[order]).coldest(200) == records[::-1]


def test_what_follows_comes_too_late_for_its_parent_to_go_before_it() -> None:
    [root] = chain(1)
    index = Index(LRU(), [root])
    assert index.coldest(0) == []  # it has its place
    late = Record(5, root)
    index.push(late)
    assert index.coldest(9) == [late, root]


def test_a_block_across_a_gap_is_no_follower() -> None:
    one, two, three = chain(3)
    one.worth, three.worth = 1, 2
    index = Index(Worth(), [one, three])
    assert index.coldest(1) == [one]
    index.push(one)
    index.push(two)
    assert index.coldest(9) == [three, two, one]


def test_what_is_held_keeps_what_it_follows() -> None:
    records = chain(3)
    records[-1].held = True
    index = Index(LRU(), records)
    assert index.coldest(9) == []
    records[-1].held = False
    assert index.coldest(9) == records[::-1]


def test_records_of_a_closed_namespace_cost_no_later_search_and_come_back_in_order() -> None:
    closed = [Record(stamp, space=OTHER) for stamp in range(100)]
    records = [Record(stamp) for stamp in range(100, 110)]
    index = Index(LRU(), [*closed, *records])
    assert index.coldest(1, closed=[OTHER]) == records[:1]
    assert index.coldest(9, closed=[OTHER], max_inspected=10) == records[1:], "the hundred were set aside once"
    assert index.coldest(200) == closed


def test_a_record_is_queued_once_however_often_it_is_pushed() -> None:
    record = Record(1)
    index = Index(LRU(), [record, record])
    assert len(index.queue) == 1
    record.stamp = 2
    assert index.coldest(2) == [record]
    assert index.coldest(2) == []
    index.push(record)
    assert index.coldest(2) == [record]


def test_what_has_gone_and_come_back_is_judged_as_what_it_is_now() -> None:
    old, other = Record(9), Record(5)
    index = Index(LRU(), [old, other])
    assert index.coldest(0) == []
    index.lose(old)
    new = Record(10)
    new.hash = old.hash
    index.push(new)
    assert index.coldest(9) == [other, new]


def test_a_search_looks_at_so_many_entries_and_no_more() -> None:
    index = Index(LRU(), [Record(stamp, held=True) for stamp in range(100)])
    looked: list[Record] = []
    assert index.queue.pop_coldest(5, lambda record: not looked.append(record), 0, max_inspected=30) == []
    assert index.queue.cut_short
    assert len(looked) == 30
    assert len(index.queue) == 100


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_search_that_ends_by_itself_is_not_cut_short(most: int) -> None:
    index = Index(LRU(), [Record(1), Record(2)])
    assert len(index.coldest(most, max_inspected=3)) == min(most, 2)
    assert not index.queue.cut_short


def test_touched_records_are_looked_at_too_and_counted() -> None:
    records = [Record(1) for _ in range(100)]
    index = Index(LRU(), records)
    assert index.coldest(0) == []
    for record in records[:-1]:
        record.stamp = 2
    assert [index.coldest(1, max_inspected=40) for _ in range(3)] == [[], [], [records[-1]]]


def test_a_crowd_of_pinned_records_delays_eviction_but_never_stops_it() -> None:
    pinned = [Record(stamp, held=True) for stamp in range(1_000)]
    victim = Record(5_000)
    index = Index(LRU(), [*pinned, victim])
    searches = [index.coldest(1, max_inspected=64) for _ in range(1_000 // 32 + 1)]
    assert [found for found in searches if found] == [[victim]]
    for record in pinned:
        record.held = False
    unpinned = [record for _ in range(1_000) for record in index.coldest(64, max_inspected=64)]
    assert sorted(record.stamp for record in unpinned) == list(range(1_000))


def test_cells_of_what_is_no_leaf_any_more_are_given_back() -> None:
    index = Index(LRU(), [Record(1)])
    for record in chain(5_000):
        index.push(record)
        assert index.coldest(0) == []  # each has its place before the next comes
    for record in [Record(2) for _ in range(5_000)]:
        index.push(record)
        assert index.coldest(0) == []
        index.lose(record)
    index.queue.check()
    assert len(index.queue) == 5_001
    assert len(index.queue._cells) <= 2 * 5_001 + 1_025


def test_entries_of_scores_that_fell_are_given_back() -> None:
    records = [Record(worth=1) for _ in range(100)]
    index = Index(Worth(), records)
    for worth in range(0, -100, -1):
        for record in records:
            record.worth = worth
        assert index.coldest(0) == []
    assert len(index.queue._heap) <= 2 * 100 + 1_024 + 100
    assert len(index.coldest(100)) == 100


def test_a_purged_namespace_leaves_nothing_and_what_comes_back_is_counted_from_zero() -> None:
    records = chain(10)
    other = Record(3)
    other.space = OTHER
    index = Index(LRU(), [*records, other])
    index.coldest(0)
    index.queue.forget(SPACE)
    index.queue.forget(SPACE)
    assert len(index.queue) == 1
    index.push(records[3])
    assert index.coldest(9) == [records[3], other]


@pytest.mark.parametrize("held", [False, True])
def test_blocks_that_come_back_after_their_namespace_was_forgotten_are_found_once(held: bool) -> None:
    records = [Record(stamp, held=held) for stamp in range(3)]
    index = Index(LRU(), records)
    index.coldest(0)
    assert index.coldest(9, max_inspected=6) == ([] if held else records)
    for record in records:
        record.held = False
        index.push(record)
    index.coldest(0)
    index.queue.forget(SPACE)
    for record in records[1:]:
        index.push(record)
    index.queue.check()
    assert len(index.queue) == 2
    assert index.coldest(9) == records[1:]
    index.queue.check()
    assert (len(index.queue), index.coldest(9)) == (0, [])


@pytest.mark.parametrize("length", [1, 100])
def test_a_queued_record_costs_at_most_120_bytes(length: int) -> None:
    records = [record for _ in range(10_000 // length) for record in chain(length, 1_700_000_000_000_000_000)]
    index = Index(LRU())
    index.records = {record.hash: record for record in records}
    tracemalloc.start()
    try:
        for record in records:
            index.queue.push(record)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index.queue) == 10_000
    assert nbytes <= (120 if length == 1 else 60) * len(index.queue)
