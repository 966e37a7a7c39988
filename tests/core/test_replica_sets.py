from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator import replica_sets as module
from kvcluster.core.coordinator.replica_sets import Replica, ReplicaSet, ReplicaTable, Served
from kvcluster.core.groups import Part
from kvcluster.core.messages import Need, Source, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.tiers import READ_ORDER
from tests.core.build import WHOLE, address
from tests.core.oracle import cells, covered

LAYERS_0, LAYERS_1 = Part(0, 1, 0, 2), Part(1, 2, 0, 2)
HEADS_0, HEADS_1 = Part(0, 2, 0, 1), Part(0, 2, 1, 2)


@st.composite
def parts(draw: st.DrawFn, side: int = 3) -> Part:
    layers = sorted(draw(st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True)))
    heads = sorted(draw(st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True)))
    return Part(layers[0], layers[1], heads[0], heads[1])


def needs() -> st.SearchStrategy[Need]:
    """Of two groups, one at least."""
    wanted = st.tuples(st.none() | parts(), st.none() | parts()).filter(any)
    return st.builds(Need, wanted, st.sampled_from(Loss))


def held(book: ReplicaTable, *copies: Replica) -> ReplicaSet:
    out = book.none
    for copy in copies:
        out = book.add(out, copy)
    return out


def copy(slot: int, part: Part = WHOLE, loss: Loss = Loss.EXACT, group: int = 0) -> Replica:
    return Replica(slot, group, part, Tier.RAM, loss)


def book_of(slots: int) -> ReplicaTable:
    """A book with slots 1 to `slots`, whose shards have the same numbers."""
    book = ReplicaTable()
    assert [book.open_slot(address(number)) for number in range(1, slots + 1)] == list(range(1, slots + 1))
    return book


def sources(served: Served, group: int = 0) -> list[tuple[str, Part, Loss]]:
    assert served.complete
    found = served.plan[group]
    assert found is not None
    return [(source.shard.shard, source.part, source.loss) for source in found]


# ------------------------------------------------------------------------------------------ what serves


def assert_served_rightly(served: Served, need: Need, entries: list[Replica], alive: list[int]) -> None:
    """Compares with the cells of layers x heads, one by one."""
    assert len(served.plan) == len(need.parts)
    reasons: list[Miss | None] = []
    for group, part in enumerate(need.parts):
        plan = served.plan[group]
        if part is None:
            assert plan is None
            continue
        here = [c for c in entries if c.group == group and c.slot in alive]
        if not covered(part, [c.part for c in here if c.loss <= need.accept]):
            assert plan is None
            reasons.append(why_not(part, here, entries, alive))
            continue
        reasons.append(None)
        assert plan is not None
        missing = cells(part)
        for source in plan:
            at = next(c for c in here if (address(c.slot), c.part, c.loss) == (source.shard, source.part, source.loss))
            assert at.group == source.group == group and source.loss <= need.accept
            assert missing & cells(source.part), "each source adds something"
            missing -= cells(source.part)
        assert not missing
    assert served.complete == (not any(reasons))
    assert served.miss == next((reason for reason in reasons if reason is not None), None)


def why_not(part: Part, here: list[Replica], entries: list[Replica], alive: list[int]) -> Miss:
    if not entries:
        return Miss(MissReason.NEVER_SEEN)
    if not any(c.slot in alive for c in entries):
        return Miss(MissReason.SHARD_LOST)
    for loss in Loss:
        if covered(part, [c.part for c in here if c.loss <= loss]):
            return Miss(MissReason.LOSSY, f"only with {loss.name.lower()}")
    if covered(part, [c.part for c in entries]):
        return Miss(MissReason.SHARD_LOST)
    touching = sorted(
        (READ_ORDER[c.tier], c.loss, -len(cells(c.part) & cells(part)), c.slot, c.part)
        for c in here
        if c.part.intersect(part)
    )
    held_parts = ", ".join(str(entry[-1]) for entry in touching) or "nothing"
    return Miss(MissReason.PART, f"group {here[0].group if here else 0}: asked for {part}; held: {held_parts}")


@given(
    entries=st.lists(
        st.builds(Replica, st.integers(1, 4), st.just(0), parts(), st.sampled_from(Tier), st.sampled_from(Loss)),
        max_size=7,
    ),
    dead=st.lists(st.integers(1, 4), max_size=2),
    part=parts(),
    accept=st.sampled_from(Loss),
)
def test_a_need_is_served_exactly_when_live_copies_of_little_enough_loss_tile_it(
    entries: list[Replica], dead: list[int], part: Part, accept: Loss
) -> None:
    book = book_of(4)
    copies = held(book, *entries)
    for slot in dead:
        book.kill_slot(slot)
    need = Need((part,), accept)
    alive = [slot for slot in range(1, 5) if slot not in dead]
    assert_served_rightly(book.serve(copies, need), need, list(copies.entries), alive)


def test_one_page_that_holds_all_of_it_serves_alone() -> None:
    book = book_of(2)
    served = book.serve(held(book, copy(2), copy(1, HEADS_0)), Need((HEADS_0,)))
    assert served.plan == ((Source(0, HEADS_0, address(1), Tier.RAM, Loss.EXACT),),)
    half_of_it_better = held(book, copy(1, HEADS_0), copy(2, loss=Loss.Q8))
    assert sources(book.serve(half_of_it_better, Need((WHOLE,), Loss.Q8))) == [("shard-2", WHOLE, Loss.Q8)]


def test_a_need_narrower_than_the_stored_part_is_served_by_it() -> None:
    book = book_of(1)
    stored = Part(0, 4, 0, 8)
    served = book.serve(held(book, copy(1, stored)), Need((Part(1, 2, 3, 5),)))
    assert sources(served) == [("shard-1", stored, Loss.EXACT)]


def test_several_parts_tile_a_need() -> None:
    book = book_of(2)
    copies = held(book, copy(1, HEADS_0), copy(2, HEADS_1))
    assert sources(book.serve(copies, Need((WHOLE,)))) == [
        ("shard-1", HEADS_0, Loss.EXACT),
        ("shard-2", HEADS_1, Loss.EXACT),
    ]


def test_parts_that_overlap_tile_a_need_too() -> None:
    book = book_of(3)
    cross = held(book, copy(1, HEADS_0), copy(2, LAYERS_0), copy(3, LAYERS_1))
    assert {part for _, part, _ in sources(book.serve(cross, Need((WHOLE,))))} == {HEADS_0, LAYERS_0, LAYERS_1}
    assert sources(book.serve(cross, Need((LAYERS_1,)))) == [("shard-3", LAYERS_1, Loss.EXACT)]


def test_a_part_that_is_missing_is_named_beside_what_is_held() -> None:
    book = book_of(2)
    miss = book.serve(held(book, copy(1, HEADS_0)), Need((WHOLE,))).miss
    assert miss == Miss(MissReason.PART, "group 0: asked for layers 0:2, heads 0:2; held: layers 0:2, heads 0:1")
    miss = book.serve(held(book, copy(1, HEADS_0)), Need((HEADS_1,))).miss
    assert miss == Miss(MissReason.PART, "group 0: asked for layers 0:2, heads 1:2; held: nothing")


def test_the_first_group_that_lacks_something_says_why() -> None:
    book = book_of(1)
    served = book.serve(held(book, copy(1, group=0), copy(1, HEADS_0, group=1)), Need((WHOLE, HEADS_1, WHOLE)))
    assert not served.complete and served.plan[0] is not None and served.plan[1:] == (None, None)
    assert served.miss is not None and served.miss.detail.startswith("group 1: asked")


def test_a_group_that_is_not_needed_may_be_missing() -> None:
    book = book_of(1)
    served = book.serve(held(book, copy(1, group=1)), Need((None, WHOLE)))
    assert served.complete and served.plan[0] is None and sources(served, 1)


def test_nothing_held_was_never_seen() -> None:
    book = book_of(1)
    assert book.serve(book.none, Need((WHOLE,))) == Served((None,), False, Miss(MissReason.NEVER_SEEN))


def test_no_plan_names_a_shard_that_is_lost() -> None:
    book = book_of(2)
    copies = held(book, copy(1), copy(2))
    assert sources(book.serve(copies, Need((WHOLE,)))) == [("shard-1", WHOLE, Loss.EXACT)]
    book.kill_slot(1)
    assert sources(book.serve(copies, Need((WHOLE,)))) == [("shard-2", WHOLE, Loss.EXACT)]
    book.kill_slot(2)
    assert book.serve(copies, Need((WHOLE,))) == Served((None,), False, Miss(MissReason.SHARD_LOST))
    assert book.serve(copies, Need((Part(0, 9, 0, 9),))).miss == Miss(MissReason.SHARD_LOST)


def test_a_part_that_went_with_its_shard_is_not_said_to_have_never_been_there() -> None:
    book = book_of(2)
    copies = held(book, copy(1, HEADS_0), copy(2, HEADS_1))
    book.kill_slot(2)
    assert book.serve(copies, Need((HEADS_0,))).complete
    assert book.serve(copies, Need((WHOLE,))).miss == Miss(MissReason.SHARD_LOST)
    miss = book.serve(book.remaining(copies), Need((WHOLE,))).miss
    assert miss is not None and miss.reason is MissReason.PART, "once it is swept, the lost copies are forgotten"


def test_a_shard_that_comes_back_gets_a_slot_of_its_own() -> None:
    book = book_of(1)
    copies = held(book, copy(1))
    book.kill_slot(1)
    book.kill_slot(1)
    assert book.open_slot(address(1)) == 2
    assert not book.alive(1) and book.alive(2)
    assert book.serve(copies, Need((WHOLE,))).miss == Miss(MissReason.SHARD_LOST)


def test_a_copy_with_more_loss_than_accepted_is_a_miss_that_says_with_which_loss_it_were_a_hit() -> None:
    book = book_of(3)
    q4 = held(book, copy(1, loss=Loss.Q4))
    assert book.serve(q4, Need((WHOLE,))).miss == Miss(MissReason.LOSSY, "only with q4")
    assert book.serve(q4, Need((WHOLE,), Loss.Q8)).miss == Miss(MissReason.LOSSY, "only with q4")
    assert book.serve(q4, Need((WHOLE,), Loss.Q4)).complete
    halves = held(book, copy(1, loss=Loss.Q4), copy(2, HEADS_0, Loss.Q8), copy(3, HEADS_1, Loss.Q8))
    assert book.serve(halves, Need((WHOLE,))).miss == Miss(MissReason.LOSSY, "only with q8")
    assert book.serve(halves, Need((WHOLE,), Loss.Q8)).complete


def test_little_loss_comes_first_then_the_larger_part_then_the_older_shard() -> None:
    book = book_of(4)
    q8_then_exact = held(book, copy(1, loss=Loss.Q8), copy(2))
    assert sources(book.serve(q8_then_exact, Need((WHOLE,), Loss.Q4))) == [("shard-2", WHOLE, Loss.EXACT)]
    wide = Part(0, 2, 0, 3)
    tiles = held(book, copy(4, Part(0, 2, 0, 1)), copy(3, wide), copy(2, Part(0, 2, 3, 4)))
    assert sources(book.serve(tiles, Need((Part(0, 2, 0, 4),)))) == [
        ("shard-3", wide, Loss.EXACT),
        ("shard-2", Part(0, 2, 3, 4), Loss.EXACT),
    ]
    alike = held(book, copy(4), copy(3))
    assert sources(book.serve(alike, Need((WHOLE,)))) == [("shard-3", WHOLE, Loss.EXACT)]
    assert sources(book.serve(alike, Need((WHOLE,)), youngest=True)) == [("shard-4", WHOLE, Loss.EXACT)]


@given(wanted=st.lists(needs(), min_size=1, max_size=6))
def test_an_answer_does_not_depend_on_what_was_asked_before(wanted: list[Need]) -> None:
    used, entries = book_of(3), [copy(1, HEADS_0), copy(2, HEADS_1, Loss.Q8), copy(3, group=1)]
    for need in wanted:
        fresh = book_of(3)
        assert used.serve(held(used, *entries), need) == fresh.serve(held(fresh, *entries), need)


def test_answers_are_worked_out_once_and_not_kept_without_bound() -> None:
    book = book_of(1)
    copies = held(book, copy(1, Part(0, 1, 0, 500)))
    first = book.serve(copies, Need((Part(0, 1, 0, 1),)))
    assert book.serve(copies, Need((Part(0, 1, 0, 1),))) is first
    for at in range(500):
        assert book.serve(copies, Need((Part(0, 1, at, at + 1),))).complete
    again = book.serve(copies, Need((Part(0, 1, 0, 1),)))
    assert again == first and again is not first


# ------------------------------------------------------------------------------------------- sets of copies

COPIES = st.builds(
    Replica,
    st.integers(1, 6),
    st.integers(0, 1),
    st.sampled_from([WHOLE, HEADS_0, HEADS_1]),
    st.sampled_from(Tier),
    st.sampled_from(Loss),
    st.sampled_from(Codec),
)


class SetsAgainstDicts(RuleBasedStateMachine):
    """The model of a set: (slot, group, part, tier) -> the copy there. Some sets are kept and grown further."""

    @initialize(interned=st.sampled_from([2, module.INTERNED]))
    def begin(self, interned: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "INTERNED", interned)
        self.book = book_of(6)
        self.dead: list[int] = []
        self.sets: list[tuple[ReplicaSet, dict[tuple[int, int, Part, Tier], Replica]]] = [(self.book.none, {})]

    def teardown(self) -> None:
        self.patch.undo()

    @rule(data=st.data(), new=COPIES)
    def add(self, data: st.DataObject, new: Replica) -> None:
        old, model = data.draw(st.sampled_from(self.sets))
        self.sets.append((self.book.add(old, new), {**model, new[:4]: new}))

    @rule(data=st.data(), other=COPIES)
    def remove(self, data: st.DataObject, other: Replica) -> None:
        old, model = data.draw(st.sampled_from(self.sets))
        name = data.draw(st.sampled_from([*model, other[:4]]))
        less = self.book.remove(old, *name)
        self.sets.append((less, {n: c for n, c in model.items() if n != name}))

    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        old, model = data.draw(st.sampled_from(self.sets))
        left = self.book.remaining(old)
        self.sets.append((left, {n: c for n, c in model.items() if c.slot not in self.dead}))

    @precondition(lambda self: len(self.dead) < 5)
    @rule(slot=st.integers(1, 6))
    def lose(self, slot: int) -> None:
        self.book.kill_slot(slot)
        self.dead.append(slot)

    @rule(data=st.data(), need=needs())
    def serve(self, data: st.DataObject, need: Need) -> None:
        some, model = data.draw(st.sampled_from(self.sets))
        alive = [slot for slot in range(1, 7) if slot not in self.dead]
        served = self.book.serve(some, need)
        assert served.complete == all(
            covered(p, [c.part for c in model.values() if c.group == g and c.slot in alive and c.loss <= need.accept])
            for g, p in enumerate(need.parts)
            if p is not None
        )
        assert all(s.shard in map(address, alive) for plan in served.plan if plan for s in plan)

    @invariant()
    def the_newest_set_is_what_the_model_says_and_no_older_one_changed(self) -> None:
        for some, model in (self.sets[-1], self.sets[len(self.sets) // 2], self.sets[0]):
            assert list(some.entries) == sorted(model.values())
            held = list(model.values())
            for slot in range(1, 7):
                assert some.on(slot) == any(c.slot == slot for c in held)
                assert all(some.on(slot, tier) == any((c.slot, c.tier) == (slot, tier) for c in held) for tier in Tier)
                assert some.holds(slot, 0, WHOLE) == any(c[:3] == (slot, 0, WHOLE) for c in held)

    @invariant()
    def equal_sets_are_one_object_while_they_are_remembered(self) -> None:
        if module.INTERNED > 2:
            assert len({id(some) for some, _ in self.sets}) == len({some.entries for some, _ in self.sets})


TestSetsAgainstDicts = SetsAgainstDicts.TestCase


def test_a_part_stored_again_with_less_loss_replaces_the_copy_that_was_there() -> None:
    book = book_of(1)
    copies = held(book, copy(1, loss=Loss.Q8), copy(1))
    assert copies.entries == (copy(1),)


def test_twins_in_two_tiers_are_two_copies_of_which_the_upper_one_serves() -> None:
    book = book_of(1)
    twin = copy(1, loss=Loss.Q8)._replace(tier=Tier.HOST, codec=Codec.Q8)
    copies = held(book, twin, copy(1, loss=Loss.Q8))
    [source] = book.serve(copies, Need((WHOLE,), Loss.Q8)).plan[0] or ()
    assert (len(copies.entries), source.tier) == (2, Tier.RAM)
    [source] = book.serve(book.remove(copies, 1, 0, WHOLE, Tier.RAM), Need((WHOLE,), Loss.Q8)).plan[0] or ()
    assert source.tier is Tier.HOST


def test_removing_what_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERNED", 0)
    book = book_of(2)
    copies = held(book, copy(1))
    assert book.remove(copies, 2, 0, WHOLE, Tier.RAM) is copies
    assert book.remaining(copies) is copies


def test_blocks_that_lie_alike_share_one_set_whatever_the_order_of_events() -> None:
    book = book_of(2)
    assert held(book, copy(1), copy(2)) is held(book, copy(2), copy(1))
    assert book.remove(held(book, copy(1), copy(2)), 2, 0, WHOLE, Tier.RAM) is held(book, copy(1))


def test_sets_that_name_lost_shards_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERNED", 8)
    book = book_of(1)
    kept = held(book, copy(1))
    before = sets_in_memory()
    for number in range(2, 202):
        slot = book.open_slot(address(number))
        book.remove(book.add(kept, copy(slot)), slot, 0, WHOLE, Tier.RAM)
        book.kill_slot(slot)
    assert sets_in_memory() - before < 20


def sets_in_memory() -> int:
    gc.collect()
    # type(), not isinstance(): to ask every object of the process for its __class__ wakes torch's deprecated ones.
    return sum(type(thing) is ReplicaSet for thing in gc.get_objects())
