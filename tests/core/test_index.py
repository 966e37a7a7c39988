from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.coordinator.index import PrefixIndex, PrefixMatch
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.groups import LAST, PREFIX, Part, Reuse, chunk, window
from kvcluster.core.ids import HASH_BYTES, BlockHash
from kvcluster.core.messages import Need, Plan, Run, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.eviction import USES
from tests.core.build import SPACE, WHOLE, address, block, chain, page, parent
from tests.core.oracle import covered, longest_boundary

HEADS_0, HEADS_1 = Part(0, 2, 0, 1), Part(0, 2, 1, 2)
REUSES = st.one_of(st.just(PREFIX), st.just(LAST), st.builds(window, st.integers(1, 14)))

Lies = tuple[int, int, Part, Tier]
"""A slot, a group, a part and a tier: what one page of a block is known by."""

Model = Mapping[int, Mapping[Lies, Loss]]
"""What the index was told: block number -> page -> its loss."""


def index_of(*reuses: Reuse, block_tokens: int = 4, shards: int = 3) -> tuple[ReplicaTable, PrefixIndex]:
    """An empty index, with slots 1 to `shards` open."""
    book = ReplicaTable()
    for number in range(1, shards + 1):
        book.open_slot(address(number))
    return book, PrefixIndex(SPACE, reuses, block_tokens, book, counts_uses=True)


def filled(*reuses: Reuse, held: Sequence[str], block_tokens: int = 4) -> PrefixIndex:
    """Block i has on shard 1 the groups whose numbers `held[i]` names; "" is a block that no shard has."""
    _, index = index_of(*reuses, block_tokens=block_tokens)
    for number, groups in enumerate(held):
        for group in groups:
            index.add(page(number, int(group)), slot=1, now=0)
    return index


def plans(found: PrefixMatch) -> list[Plan]:
    """The plan of each block, out of the runs."""
    assert all(run.count > 0 for run in found.runs)
    assert all(one.plan != next_one.plan for one, next_one in zip(found.runs, found.runs[1:], strict=False))
    return [run.plan for run in found.runs for _ in range(run.count)]


def assert_found_rightly(
    found: PrefixMatch,
    model: Model,
    *,
    reuses: Sequence[Reuse],
    tokens: int,
    need: Need,
    alive: Sequence[int],
    asked: int,
) -> None:
    """Against every boundary in turn, the longest first; and each block's plan against what lies where."""
    needed = [group for group, part in enumerate(need.parts) if part is not None]

    def has(number: int, group: int) -> bool:
        part = need.parts[group]
        pages = model.get(number, {}).items()
        live = [p for (slot, g, p, _), loss in pages if g == group and slot in alive and loss <= need.accept]
        return part is not None and covered(part, live)

    assert found.blocks == longest_boundary(asked, tokens, reuses, needed, has)
    assert len(plans(found)) == found.blocks
    for number, plan in enumerate(plans(found)):
        assert [group for group, sources in enumerate(plan) if sources is not None] == [
            group for group in needed if has(number, group)
        ]
        for group, sources in enumerate(plan):
            part = need.parts[group]
            for source in sources or ():
                slot = next(slot for slot in alive if address(slot) == source.shard)
                there = [model[number].get((slot, group, source.part, tier)) for tier in told_as(source.tier)]
                assert source.loss in there and source.loss <= need.accept
            assert sources is None or (part is not None and covered(part, [source.part for source in sources]))
    at_the_boundary = model.get(found.blocks) if found.blocks < asked else None
    assert (found.miss is None) == (at_the_boundary is None)
    if at_the_boundary is not None and not any(slot in alive for slot, _, _, _ in at_the_boundary):
        assert found.miss == Miss(MissReason.SHARD_LOST)


def told_as(tier: Tier) -> tuple[Tier, ...]:
    """The tiers that readers are told of by this one's name."""
    return (Tier.RAM, Tier.GPU) if tier is Tier.RAM else (tier,)


# --------------------------------------------------------------------------------------------- the lookup rule


class World(NamedTuple):
    """Which blocks are on which shards, and the need that is asked for."""

    reuses: tuple[Reuse, ...]
    tokens: int
    blocks: list[dict[Lies, Loss]]
    need: Need


LIES: list[list[tuple[int, Part, Loss]]] = [
    [(1, WHOLE, Loss.EXACT)],
    [(2, WHOLE, Loss.EXACT)],
    [(1, HEADS_0, Loss.EXACT), (2, HEADS_1, Loss.EXACT)],
    [(1, WHOLE, Loss.Q8)],
    [(1, HEADS_0, Loss.EXACT)],
    [(3, WHOLE, Loss.EXACT)],  # of the shard that is lost
    [],
]
"""How a group of a block may lie: the first three serve, the last is nowhere."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    reuses = draw(st.lists(REUSES, min_size=1, max_size=3))
    blocks: list[dict[Lies, Loss]] = []
    for _ in range(draw(st.integers(0, 10))):
        how = draw(st.sampled_from([LIES[:3], LIES, LIES[-1:]]))
        lies = [draw(st.sampled_from(how)) for _ in reuses]
        tier = draw(st.sampled_from(Tier))
        blocks.append({(slot, g, part, tier): loss for g, pages in enumerate(lies) for slot, part, loss in pages})
    wanted = st.lists(st.sampled_from([WHOLE, WHOLE, HEADS_0, None]), min_size=len(reuses), max_size=len(reuses))
    parts = draw(wanted.filter(any))
    need = Need(tuple(parts), draw(st.sampled_from([Loss.EXACT, Loss.Q8])))
    return World(tuple(reuses), draw(st.integers(1, 5)), blocks, need)


def told(world: World) -> PrefixIndex:
    book, index = index_of(*world.reuses, block_tokens=world.tokens)
    for number, pages in enumerate(world.blocks):
        for (slot, group, part, tier), loss in pages.items():
            index.add(page(number, group, part, loss)._replace(tier=tier), slot, now=0)
    book.kill_slot(3)
    return index


@given(world=worlds())
def test_a_lookup_finds_the_longest_boundary_that_every_group_can_go_on_from(world: World) -> None:
    found = told(world).find(chain(len(world.blocks)), world.need)
    model = {number: pages for number, pages in enumerate(world.blocks) if pages}
    assert_found_rightly(
        found,
        model,
        reuses=world.reuses,
        tokens=world.tokens,
        need=world.need,
        alive=[1, 2],
        asked=len(world.blocks),
    )


@given(world=worlds(), asked=st.integers(0, 10))
def test_a_shorter_question_never_finds_more(world: World, asked: int) -> None:
    index = told(world)
    all_asked = index.find(chain(len(world.blocks)), world.need)
    fewer_asked = index.find(chain(len(world.blocks))[:asked], world.need)
    assert fewer_asked.blocks <= min(all_asked.blocks, asked)
    assert fewer_asked.blocks == all_asked.blocks or all_asked.blocks > asked
    assert plans(fewer_asked) == plans(all_asked)[: fewer_asked.blocks]


def test_every_block_of_a_prefix_is_needed() -> None:
    index = filled(PREFIX, held=["0", "0", "", "0"])
    found = index.find(chain(4), Need((WHOLE,)))
    assert found.blocks == 2 and found.miss is None
    assert index.find((), Need((WHOLE,))) == PrefixMatch(0, (), None)


def test_a_window_needs_the_last_tokens_before_the_boundary_only() -> None:
    # The token that follows sees itself and five before it: two blocks of four.
    index = filled(window(6), held=["", "", "0", "0", "", "0", "0"])
    assert index.find(chain(7), Need((WHOLE,))).blocks == 7
    assert index.find(chain(6), Need((WHOLE,))).blocks == 4
    assert index.find(chain(3), Need((WHOLE,))).blocks == 0, "block 1 is in the window"


def test_a_window_that_ends_with_a_block_needs_no_token_of_the_one_before() -> None:
    assert filled(window(5), held=["", "0"]).find(chain(2), Need((WHOLE,))).blocks == 2
    assert filled(window(6), held=["", "0"]).find(chain(2), Need((WHOLE,))).blocks == 0


def test_a_sequence_shorter_than_the_window_needs_all_of_it() -> None:
    assert filled(window(100), held=["0", "0"]).find(chain(2), Need((WHOLE,))).blocks == 2
    assert filled(window(100), held=["", "0"]).find(chain(2), Need((WHOLE,))).blocks == 0


def test_a_window_of_one_token_needs_nothing_of_the_past() -> None:
    assert filled(window(1), held=["", "", ""]).find(chain(3), Need((WHOLE,))).blocks == 3


def test_a_chunk_needs_its_own_tokens_before_the_boundary_only() -> None:
    # Chunks of three blocks: one begins behind block 2, and needs nothing there; behind block 4 it needs 3 and 4.
    index = filled(chunk(12), held=["", "", "", "0", "0", "", "", "0"])
    found = [index.find(chain(blocks), Need((WHOLE,))).blocks for blocks in range(9)]
    assert found == [0, 0, 0, 3, 4, 5, 6, 6, 6]


def test_a_recurrent_state_needs_the_last_block_only() -> None:
    index = filled(LAST, held=["", "0", ""])
    assert index.find(chain(3), Need((WHOLE,))).blocks == 2
    assert index.find(chain(1), Need((WHOLE,))).blocks == 0


def test_of_mixed_groups_the_one_that_reaches_least_far_decides() -> None:
    # 0 is a prefix, 1 a window over two blocks, 2 a state kept with every third block.
    index = filled(PREFIX, window(8), LAST, held=["0", "01", "012", "01", "0", "012"])
    need = Need((WHOLE, WHOLE, WHOLE))
    assert index.find(chain(6), need).blocks == 3
    assert index.find(chain(6), Need((WHOLE, WHOLE, None))).blocks == 4
    assert index.find(chain(6), Need((WHOLE, None, WHOLE))).blocks == 6
    assert index.find(chain(6), Need((None, WHOLE, None))).blocks == 4
    assert index.find(chain(2), need).blocks == 0


def test_nothing_beyond_a_gap_in_a_prefix_is_restored_however_much_the_other_groups_have() -> None:
    index = filled(PREFIX, LAST, held=["01", "1", "01", "01"])
    assert index.find(chain(4), Need((WHOLE, WHOLE))).blocks == 1


def test_the_miss_is_that_of_the_block_at_the_boundary_not_of_where_the_walk_ended() -> None:
    # No state at all: the boundary is 0. That block 2 has no prefix either is not why.
    need = Need((WHOLE, WHOLE))
    lacks_state = Miss(MissReason.PART, "group 1: asked for layers 0:2, heads 0:2; held: nothing")
    assert filled(PREFIX, LAST, held=["0", "0", ""]).find(chain(3), need) == PrefixMatch(0, (), lacks_state)
    assert filled(PREFIX, LAST, held=["0", "0", "1"]).find(chain(3), need) == PrefixMatch(0, (), lacks_state)
    assert filled(PREFIX, LAST, held=["01", "0", ""]).find(chain(3), need).miss == lacks_state


def test_at_the_end_of_the_chain_and_where_there_is_no_record_the_index_knows_no_reason() -> None:
    need = Need((WHOLE, WHOLE))
    assert filled(PREFIX, LAST, held=["01"]).find(chain(1), need).miss is None
    assert filled(PREFIX, LAST, held=["01", ""]).find(chain(2), need).miss is None
    assert filled(PREFIX, PREFIX, held=["01", ""]).find(chain(2), need).miss is None
    assert filled(PREFIX, PREFIX, held=["01", "0"]).find(chain(2), need).miss is not None


def test_blocks_that_lie_alike_make_one_run() -> None:
    _, index = index_of(PREFIX)
    for number, slot in enumerate([1, 1, 2, 2, 2, 1]):
        index.add(page(number), slot, now=0)
    found = index.find(chain(6), Need((WHOLE,)))
    assert [(run.count, run.plan[0][0].shard.shard) for run in found.runs if run.plan[0]] == [
        (2, "shard-1"),
        (3, "shard-2"),
        (1, "shard-1"),
    ]


def test_blocks_that_lie_otherwise_but_are_served_alike_make_one_run() -> None:
    _, index = index_of(PREFIX)
    for number in range(3):
        index.add(page(number), slot=1, now=0)
    index.add(page(1), slot=2, now=0)
    found = index.find(chain(3), Need((WHOLE,)))
    assert [run.count for run in found.runs] == [3]


def test_a_gap_in_a_window_is_a_run_without_sources() -> None:
    found = filled(window(5), held=["0", "", "0"]).find(chain(3), Need((WHOLE,)))
    assert [run.count for run in found.runs] == [1, 1, 1] and found.runs[1] == Run(1, (None,))


def test_a_need_of_nothing_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="a need that names no group"):
        filled(PREFIX, held=["0"]).find(chain(1), Need((None,)))


# ------------------------------------------------------------------------------------------------ the records


class IndexAgainstDicts(RuleBasedStateMachine):
    """The model: block -> pages, last use, end of its hold. Shards are lost, and what they held is swept later."""

    SPAN = 8

    @initialize(reuses=st.lists(REUSES, min_size=2, max_size=2), tokens=st.integers(1, 4))
    def begin(self, reuses: list[Reuse], tokens: int) -> None:
        self.reuses, self.tokens = reuses, tokens
        self.book, self.index = index_of(*reuses, block_tokens=tokens)
        self.alive = [1, 2, 3]
        self.next_slot = 4
        self.pages: dict[int, dict[Lies, Loss]] = {}
        self.stamps: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        self.now = 1

    def forget_if_bare(self, number: int) -> bool:
        if self.pages[number]:
            return False
        del self.pages[number], self.stamps[number], self.holds[number]
        return True

    @rule(later=st.integers(1, 5))
    def let_time_pass(self, later: int) -> None:
        self.now += later

    @rule(
        data=st.data(),
        numbers=st.lists(st.integers(0, SPAN - 1), min_size=1, max_size=5),
        group=st.integers(0, 1),
        part=st.sampled_from([WHOLE, HEADS_0, HEADS_1]),
        loss=st.sampled_from([Loss.EXACT, Loss.Q8]),
        tier=st.sampled_from(Tier),
    )
    def add(self, data: st.DataObject, numbers: list[int], group: int, part: Part, loss: Loss, tier: Tier) -> None:
        slot = data.draw(st.sampled_from(self.alive))
        for number in numbers:
            known = any((lies[0], lies[3]) == (slot, tier) for lies in self.pages.get(number, {}))
            record = self.index.add(page(number, group, part, loss)._replace(tier=tier), slot, self.now)
            assert record is (None if known else self.index.get(block(number)))
            self.pages.setdefault(number, {})[slot, group, part, tier] = loss
            self.stamps.setdefault(number, self.now)
            self.holds.setdefault(number, 0)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pages)))
        slot, group, part, tier = data.draw(st.sampled_from(sorted(self.pages[number])))
        del self.pages[number][slot, group, part, tier]
        assert self.index.remove(block(number), slot, group, part, tier) == self.forget_if_bare(number)

    @rule(number=st.integers(0, SPAN), slot=st.integers(1, 3), part=st.sampled_from([HEADS_0, Part(0, 1, 0, 1)]))
    def remove_what_may_not_be_there(self, number: int, slot: int, part: Part) -> None:
        if (slot, 1, part, Tier.HOST) not in self.pages.get(number, {}):
            assert not self.index.remove(block(number), slot, 1, part, Tier.HOST)

    @rule(data=st.data())
    def lose_a_shard(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from(self.alive))
        self.book.kill_slot(lost)
        self.alive.remove(lost)
        self.alive.append(self.book.open_slot(address(self.next_slot)))
        self.next_slot += 1

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        for number in data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True)):
            record = self.index.get(block(number))
            assert record is not None
            self.pages[number] = {lies: loss for lies, loss in self.pages[number].items() if lies[0] in self.alive}
            assert self.index.sweep(record) == self.forget_if_bare(number)

    @rule(numbers=st.lists(st.integers(0, SPAN), max_size=5), hold=st.integers(0, 9))
    def touch(self, numbers: list[int], hold: int) -> None:
        self.index.touch([block(number) for number in numbers], self.now, self.now + hold)
        for number in self.pages.keys() & numbers:
            self.stamps[number], self.holds[number] = self.now, self.now + hold

    @rule(data=st.data(), numbers=st.lists(st.integers(0, SPAN), max_size=5))
    def release(self, data: st.DataObject, numbers: list[int]) -> None:
        until = data.draw(st.sampled_from([*sorted(set(self.holds.values())), self.now + 10]))
        self.index.release([block(number) for number in numbers], until)
        for number in self.pages.keys() & numbers:
            if self.holds[number] == until:
                self.holds[number] = 0

    @rule(number=st.integers(0, SPAN), age=st.integers(0, 6))
    def touch_ancestors(self, number: int, age: int) -> None:
        self.index.touch_ancestors(block(number), self.now, self.now - age)
        if number in self.pages and self.stamps[number] < self.now - age:
            while number in self.pages and self.stamps[number] < self.now:
                self.stamps[number] = self.now
                number -= 1

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.pages, self.stamps, self.holds = {}, {}, {}

    @rule(
        parts=st.tuples(*[st.sampled_from([WHOLE, WHOLE, HEADS_0, None])] * 2).filter(any),
        accept=st.sampled_from([Loss.EXACT, Loss.Q8]),
        asked=st.integers(0, SPAN),
    )
    def find(self, parts: tuple[Part | None, ...], accept: Loss, asked: int) -> None:
        need = Need(parts, accept)
        before = [(record, record.copies) for record in self.index]
        found = self.index.find(chain(asked), need)
        # That it wrote no stamp and no hold, the invariant below sees.
        assert [(record, record.copies) for record in self.index] == before
        # Slot numbers and shard numbers are equal here, so that a source tells its slot.
        assert_found_rightly(
            found, self.pages, reuses=self.reuses, tokens=self.tokens, need=need, alive=self.alive, asked=asked
        )

    @invariant()
    def records_are_what_was_told_of_them(self) -> None:
        assert len(self.index) == len(self.pages)
        assert [record.hash for record in self.index] == [block(number) for number in self.pages]
        for number, pages in self.pages.items():
            record = self.index.get(block(number))
            assert record is not None
            assert {(c.slot, c.group, c.part, c.tier): c.loss for c in record.copies.entries} == pages
            assert (record.space, record.depth, record.parent) == (SPACE, number, parent(number))
            assert (record.stamp, record.held_until) == (self.stamps[number], self.holds[number])


TestIndexAgainstDicts = IndexAgainstDicts.TestCase


def test_a_block_is_announced_once_a_tier_of_a_shard_and_not_once_a_page() -> None:
    _, index = index_of(PREFIX)
    first = index.add(page(0, part=HEADS_0), slot=1, now=5)
    assert first is not None and first.stamp == 5
    assert index.add(page(0, part=HEADS_1), slot=1, now=6) is None
    assert index.add(page(0), slot=2, now=7) is first
    assert index.add(page(0)._replace(tier=Tier.HOST), slot=2, now=7) is first
    assert first.stamp == 5, "a store of it elsewhere is not a use"


def test_a_block_is_gone_with_its_last_page() -> None:
    _, index = index_of(PREFIX)
    index.add(page(0, part=HEADS_0), slot=1, now=0)
    index.add(page(0), slot=2, now=0)
    assert not index.remove(block(0), 1, 0, HEADS_0, Tier.RAM)
    assert index.remove(block(0), 2, 0, WHOLE, Tier.RAM)
    assert index.get(block(0)) is None and not index.remove(block(0), 2, 0, WHOLE, Tier.RAM)


def test_a_release_ends_its_own_hold_and_not_a_later_one() -> None:
    index = filled(PREFIX, held=["0", "0"])
    index.touch(chain(2), now=10, held_until=30)
    index.touch(chain(1), now=20, held_until=40)
    index.release(chain(3), held_until=30)
    assert [record.held_until for record in index] == [40, 0]
    assert [record.stamp for record in index] == [20, 10], "its uses are kept"


def test_each_load_is_a_use_and_its_renewals_are_not() -> None:
    index = filled(PREFIX, held=["0", "0"])
    index.touch(chain(2), now=10, held_until=30)
    index.touch(chain(1), now=20, held_until=40)
    index.renew(chain(3), now=30, held_until=50)
    assert [(record.stamp, record.held_until, record.uses) for record in index] == [(30, 50, 2), (30, 50, 1)]
    index.touch_ancestors(block(1), now=60, older_than=50)
    assert [record.uses for record in index] == [2, 1]
    for _ in range(2 * USES):
        index.touch(chain(1), now=70, held_until=0)
    assert [record.uses for record in index] == [USES, 1], "it is counted no further"


def test_a_growing_sequence_keeps_its_roots_as_hot_as_its_tail() -> None:
    index = filled(PREFIX, held=["0", "0", "0", "0"])
    index.touch_ancestors(block(2), now=50, older_than=1)
    assert [record.stamp for record in index] == [50, 50, 50, 0]


def test_a_chain_is_walked_once_in_a_while_only() -> None:
    index = filled(PREFIX, held=["0", "0"])
    index.touch([block(1)], now=50, held_until=0)
    index.touch_ancestors(block(1), now=60, older_than=50)
    assert [record.stamp for record in index] == [0, 50]
    index.touch_ancestors(block(1), now=61, older_than=51)
    assert [record.stamp for record in index] == [61, 61]


def test_an_unknown_or_evicted_ancestor_ends_the_walk() -> None:
    index = filled(PREFIX, held=["0", "", "0"])
    index.touch_ancestors(block(2), now=50, older_than=1)
    index.touch_ancestors(block(9), now=60, older_than=60)
    assert [record.stamp for record in index] == [0, 50]


def test_a_chain_that_names_itself_as_its_parent_is_walked_once() -> None:
    _, index = index_of(PREFIX)
    index.add(page(0)._replace(parent=block(0)), slot=1, now=0)
    index.touch_ancestors(block(0), now=9, older_than=9)
    assert [record.stamp for record in index] == [9]


def test_a_chain_keeps_each_hash_once() -> None:
    _, index = index_of(PREFIX)
    index.add(page(0), slot=1, now=0)
    told_again = BlockHash(bytes(bytearray(block(0))))
    child = index.add(page(1)._replace(parent=told_again), slot=1, now=0)
    first = index.get(block(0))
    assert len(told_again) == HASH_BYTES and first is not None and child is not None
    assert child.parent is first.hash and child.parent is not told_again


def test_uses_are_counted_only_for_policies_that_look_at_them() -> None:
    book = ReplicaTable()
    book.open_slot(address(1))
    index = PrefixIndex(SPACE, [PREFIX], 4, book)
    index.add(page(0, 0), slot=1, now=0)
    index.touch(chain(1), now=20, held_until=40)
    assert [(record.stamp, record.held_until, record.uses) for record in index] == [(20, 40, 0)]
