from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import ALIGN_BYTES, PageAllocator
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import HASH_BYTES, NamespaceId
from kvcluster.core.messages import NewPage, PageKey, PageSlot, Tier, TierUse, Written
from kvcluster.core.pool import TRANSITIONS, IllegalTransition, Page, PageAction, PagePool, PageState
from kvcluster.core.reasons import Loss, Miss, MissReason
from tests.core.build import SPACE, key, parent

OTHER_SPACE = NamespaceId(b"o" * HASH_BYTES)
SUMS = b"8 bytes."


def pool_of(pages: int) -> PagePool:
    return PagePool(PageAllocator(pages * ALIGN_BYTES, ALIGN_BYTES))


def reserve(pool: PagePool, number: int, *, nbytes: int = ALIGN_BYTES, space: NamespaceId = SPACE) -> Page | None:
    return pool.reserve(space, key(number), nbytes, parent=parent(number), depth=number, loss=Loss.EXACT)


def written(pool: PagePool, number: int) -> Page:
    page = reserve(pool, number)
    assert page is not None
    return page


def ready(pool: PagePool, number: int) -> Page:
    page = written(pool, number)
    pool.commit(page, SUMS)
    return page


class PoolAgainstLists(RuleBasedStateMachine):
    """The model: the live pages, each with the state and the number of pins that it should have."""

    @initialize(pages=st.integers(1, 6))
    def begin(self, pages: int) -> None:
        self.pool = pool_of(pages)
        self.state: dict[Page, PageState] = {}  # without those that are FREE again; in order of reservation
        self.pins: dict[Page, int] = {}
        self.generations: list[int] = []

    def in_state(self, data: st.DataObject, *states: PageState, pinned: bool = False) -> Page | None:
        pages = [p for p, state in self.state.items() if state in states and (self.pins[p] or not pinned)]
        return data.draw(st.sampled_from(pages)) if pages else None

    def findable(self, space: NamespaceId, name: PageKey) -> Page | None:
        named = [p for p, s in self.state.items() if (p.space, p.key) == (space, name) and s is not PageState.CONDEMNED]
        assert len(named) <= 1
        return named[0] if named else None

    @rule(
        number=st.integers(0, 3),
        space=st.sampled_from([SPACE, OTHER_SPACE]),
        nbytes=st.integers(1, 2 * ALIGN_BYTES),
        loss=st.sampled_from(Loss),
    )
    def reserve(self, number: int, space: NamespaceId, nbytes: int, loss: Loss) -> None:
        if self.findable(space, key(number)) is not None:
            return
        room = self.pool.allocator.room(nbytes)
        page = self.pool.reserve(space, key(number), nbytes, parent=parent(number), depth=number, loss=loss)
        assert (page is not None) == (room > 0)
        if page is not None:
            assert (page.space, page.key, page.nbytes, page.loss) == (space, key(number), nbytes, loss)
            assert (page.parent, page.depth, page.sums) == (parent(number), number, b"")
            assert not self.generations or page.generation > self.generations[-1]
            self.generations.append(page.generation)
            self.state[page], self.pins[page] = PageState.WRITING, 0

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.WRITING):
            self.pool.commit(page, SUMS)
            self.state[page] = PageState.READY

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.WRITING):
            self.pool.abort(page)
            self.free(page)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.READY):
            self.pool.pin(page)
            self.pins[page] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.READY, PageState.CONDEMNED, pinned=True):
            self.pins[page] -= 1
            freed = self.state[page] is PageState.CONDEMNED and not self.pins[page]
            assert self.pool.unpin(page) == freed
            if freed:
                self.free(page)

    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.READY):
            assert self.pool.condemn(page) == (not self.pins[page])
            self.state[page] = PageState.CONDEMNED
            if not self.pins[page]:
                self.free(page)

    @rule(
        data=st.data(),
        mistake=st.sampled_from(
            [
                (PagePool.pin, PageState.READY),
                (PagePool.abort, PageState.WRITING),
                (PagePool.condemn, PageState.READY),
            ]
        ),
    )
    def act_against_the_table(
        self, data: st.DataObject, mistake: tuple[Callable[[PagePool, Page], object], PageState]
    ) -> None:
        act, legal = mistake
        if page := self.in_state(data, *(state for state in PageState if state is not legal)):
            with pytest.raises(IllegalTransition):
                act(self.pool, page)

    def free(self, page: Page) -> None:
        assert page.state is PageState.FREE
        del self.state[page], self.pins[page]

    @invariant()
    def pages_are_as_the_model_says(self) -> None:
        assert {p.generation: p.state for p in self.pool.everything()} == {
            p.generation: state for p, state in self.state.items()
        }
        assert all(page.pins == pins for page, pins in self.pins.items())
        condemned = sum(state is PageState.CONDEMNED for state in self.state.values())
        assert (len(self.pool), self.pool.condemned) == (len(self.state) - condemned, condemned)
        assert list(self.pool.ready()) == [page for page, state in self.state.items() if state is PageState.READY]

    @invariant()
    def a_page_is_found_by_its_key_until_it_is_condemned(self) -> None:
        for space in (SPACE, OTHER_SPACE):
            for number in range(4):
                assert self.pool.get(space, key(number)) is self.findable(space, key(number))

    @invariant()
    def room_is_conserved_and_no_byte_belongs_to_two_pages(self) -> None:
        self.pool.check()
        self.pool.allocator.check()
        ranges = sorted((page.offset, page.offset + page.nbytes) for page in self.state)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
        if not self.state:
            assert self.pool.allocator.free_bytes == self.pool.allocator.capacity_bytes


TestPoolAgainstLists = PoolAgainstLists.TestCase


def page_in(state: PageState) -> tuple[PagePool, Page]:
    """A pool with one page in that state, condemned under one reader."""
    pool = pool_of(2)
    page = written(pool, 0)
    if state is PageState.FREE:
        pool.abort(page)
    elif state is not PageState.WRITING:
        pool.commit(page, SUMS)
        if state is PageState.CONDEMNED:
            pool.pin(page)
            pool.condemn(page)
    assert page.state is state
    return pool, page


ACTS: dict[PageAction, Callable[[PagePool, Page], object]] = {
    PageAction.COMMIT: lambda pool, page: pool.commit(page, b"other sums"),
    PageAction.ABORT: PagePool.abort,
    PageAction.CONDEMN: PagePool.condemn,
    PageAction.LAST_UNPIN: PagePool.unpin,
}
PAIRS = [(state, action) for state in PageState for action in PageAction]


def everything_of(pool: PagePool, page: Page) -> object:
    kept = [(p.generation, p.state) for p in pool.everything()]
    return kept, page.slot(), page.state, page.pins, len(pool), pool.condemned, pool.allocator.used_bytes


@pytest.mark.parametrize(("state", "action"), [pair for pair in PAIRS if pair in TRANSITIONS])
def test_a_page_does_what_its_state_allows(state: PageState, action: PageAction) -> None:
    pool, page = page_in(state)
    ACTS[action](pool, page)
    after = TRANSITIONS[state, action]
    # Without a reader a condemned page is free in the same call.
    assert page.state is (PageState.FREE if after is PageState.CONDEMNED else after)
    pool.check()


@pytest.mark.parametrize(("state", "action"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_what_its_state_does_not_allow_raises_and_changes_nothing(state: PageState, action: PageAction) -> None:
    pool, page = page_in(state)
    before = everything_of(pool, page)
    # An unpin without a pin is caught before the table is asked, with a sentence of its own.
    mistake = AssertionError if action is PageAction.LAST_UNPIN else IllegalTransition
    with pytest.raises(mistake, match="without its pin" if mistake is AssertionError else f"{action.value} of a page"):
        ACTS[action](pool, page)
    assert everything_of(pool, page) == before
    pool.check()


@pytest.mark.parametrize("state", [state for state in PageState if state is not PageState.READY])
def test_only_a_ready_page_gets_a_new_reader(state: PageState) -> None:
    pool, page = page_in(state)
    before = everything_of(pool, page)
    with pytest.raises(IllegalTransition, match=f"pin of a page that is {state.value}"):
        pool.pin(page)
    assert everything_of(pool, page) == before


def test_every_state_is_reached_and_left_by_the_table() -> None:
    assert set(TRANSITIONS.values()) | {PageState.WRITING} == set(PageState)
    assert {state for state, _ in TRANSITIONS} | {PageState.FREE} == set(PageState)


def test_a_condemned_page_keeps_its_bytes_for_the_readers_that_it_has() -> None:
    pool = pool_of(1)
    page = ready(pool, 0)
    pool.pin(page)
    pool.pin(page)
    assert not pool.condemn(page)
    assert pool.get(SPACE, key(0)) is None and reserve(pool, 1) is None
    assert not pool.unpin(page)
    assert pool.unpin(page)
    assert reserve(pool, 1) is not None


def test_a_key_may_be_written_again_while_its_condemned_page_is_still_read() -> None:
    pool = pool_of(2)
    old = ready(pool, 0)
    pool.pin(old)
    pool.condemn(old)
    new = ready(pool, 0)
    assert pool.get(SPACE, key(0)) is new
    assert new.offset != old.offset and new.generation > old.generation
    pool.unpin(old)
    assert pool.get(SPACE, key(0)) is new and list(pool.everything()) == [new]


def test_a_generation_is_never_used_again() -> None:
    pool = pool_of(1)
    generations = []
    for _ in range(5):
        page = ready(pool, 0)
        generations.append(page.generation)
        pool.condemn(page)
    assert generations == sorted(set(generations))


def test_tenants_with_equal_hashes_have_pages_of_their_own() -> None:
    pool = pool_of(2)
    mine, theirs = reserve(pool, 0), reserve(pool, 0, space=OTHER_SPACE)
    assert mine is not None and theirs is not None and mine.offset != theirs.offset


def test_a_page_has_one_writer() -> None:
    pool = pool_of(2)
    written(pool, 0)
    with pytest.raises(AssertionError, match="one writer a page"):
        reserve(pool, 0)


def test_a_reader_learns_where_the_page_lies_and_what_its_bytes_must_sum_to() -> None:
    pool = pool_of(1)
    page = ready(pool, 0)
    assert page.slot() == PageSlot(key(0), page.offset, ALIGN_BYTES, page.generation, Loss.EXACT, SUMS)


def test_the_check_finds_room_that_no_page_holds() -> None:
    pool = pool_of(2)
    pool.allocator.reserve(ALIGN_BYTES)
    with pytest.raises(AssertionError, match="pages hold 0, the allocator gave 64"):
        pool.check()


def test_the_check_finds_a_condemned_page_that_nobody_reads() -> None:
    pool, page = page_in(PageState.CONDEMNED)
    page.pins = 0
    with pytest.raises(AssertionError, match="without readers"):
        pool.check()


# -------------------------------------------------------------------------------------------------- tiers


def two_tiers(pages: int = 2, below: int = 2) -> PagePool:
    device = PageAllocator(pages * ALIGN_BYTES, ALIGN_BYTES)
    return PagePool(device, {Tier.HOST: PageAllocator(below * ALIGN_BYTES, ALIGN_BYTES, start=device.capacity_bytes)})


def written_in(pool: PagePool, tier: Tier, number: int = 0, loss: Loss = Loss.EXACT) -> Page:
    codec = Codec.Q8 if loss and tier is Tier.HOST else Codec.RAW
    page = pool.reserve(
        SPACE, key(number), ALIGN_BYTES, parent=parent(number), depth=number, loss=loss, tier=tier, codec=codec
    )
    assert page is not None
    return page


def ready_in(pool: PagePool, tier: Tier, number: int = 0, loss: Loss = Loss.EXACT) -> Page:
    page = written_in(pool, tier, number, loss)
    pool.commit(page, SUMS)
    return page


def wish(loss: Loss) -> NewPage:
    return NewPage(key(0), parent(0), 0, loss)


def test_the_tiers_lie_one_behind_the_other_in_one_arena() -> None:
    pool = PagePool.of(ShardConfig(device_bytes=1_024, host_bytes=2_048, extent_bytes=ALIGN_BYTES))
    assert list(pool.allocators) == [Tier.DEVICE, Tier.HOST]
    assert pool.arena_bytes == 3_072
    above, below = written_in(pool, Tier.DEVICE), written_in(pool, Tier.HOST)
    assert above.offset + above.nbytes <= 1_024 <= below.offset
    assert pool.below() == (TierUse(Tier.HOST, 2_048, 2_048 - ALIGN_BYTES, 1),)
    assert (pool.count(Tier.DEVICE), pool.count(Tier.HOST), len(pool)) == (1, 1, 2)


def test_without_host_bytes_there_is_one_tier() -> None:
    pool = PagePool.of(ShardConfig(device_bytes=1_024, extent_bytes=ALIGN_BYTES))
    assert (list(pool.allocators), pool.below(), pool.arena_bytes) == ([Tier.DEVICE], (), 1_024)


def test_of_twins_the_upper_is_found_and_each_by_its_tier() -> None:
    pool = two_tiers()
    below = ready_in(pool, Tier.HOST, loss=Loss.Q8)
    assert pool.get(SPACE, key(0)) is below
    above = written_in(pool, Tier.DEVICE, loss=Loss.Q8)
    assert pool.get(SPACE, key(0)) is below, "the other is not there yet"
    pool.commit(above, SUMS)
    assert pool.get(SPACE, key(0)) is above
    assert (pool.on(Tier.DEVICE, SPACE, key(0)), pool.on(Tier.HOST, SPACE, key(0))) == (above, below)
    assert list(pool.ready()) == [above, below]
    pool.condemn(above)
    assert pool.get(SPACE, key(0)) is below


@pytest.mark.parametrize("tier", Tier)
def test_what_is_being_written_in_any_tier_is_pending(tier: Tier) -> None:
    pool = two_tiers()
    page = written_in(pool, tier)
    assert pool.get(SPACE, key(0)) is page
    miss = pool.find(SPACE, key(0), Loss.Q4)
    assert isinstance(miss, Miss) and miss.reason is MissReason.PENDING
    assert pool.taken(SPACE, wish(Loss.EXACT)) is pool.taken(SPACE, wish(Loss.Q4)) is Written.PENDING


@pytest.mark.parametrize("accept", Loss)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("tier", Tier)
def test_a_reader_gets_what_has_lost_no_more_than_he_accepts(tier: Tier, loss: Loss, accept: Loss) -> None:
    pool = two_tiers()
    page = ready_in(pool, tier, loss=loss)
    if loss <= accept:
        assert pool.find(SPACE, key(0), accept) is page
    else:
        assert pool.find(SPACE, key(0), accept) == Miss(MissReason.LOSSY, f"only with {loss.name.lower()}")
    missing = pool.find(SPACE, key(1), accept)
    assert isinstance(missing, Miss) and missing.reason is MissReason.EVICTED


@pytest.mark.parametrize("there", Loss)
@pytest.mark.parametrize("new", Loss)
@pytest.mark.parametrize("tier", Tier)
def test_what_is_there_with_no_more_loss_is_not_written_again(tier: Tier, there: Loss, new: Loss) -> None:
    pool = two_tiers()
    ready_in(pool, tier, loss=there)
    assert pool.taken(SPACE, wish(new)) is (Written.DUPLICATE if there <= new else None)


def test_a_better_page_that_is_being_written_beside_a_worse_one_is_pending_for_who_wants_it_better() -> None:
    pool = two_tiers()
    ready_in(pool, Tier.HOST, loss=Loss.Q8)
    written_in(pool, Tier.DEVICE)
    assert pool.taken(SPACE, wish(Loss.EXACT)) is Written.PENDING
    assert pool.taken(SPACE, wish(Loss.Q8)) is Written.DUPLICATE


def test_each_tier_has_room_of_its_own() -> None:
    pool = two_tiers(pages=1, below=1)
    above, below = ready_in(pool, Tier.DEVICE), ready_in(pool, Tier.HOST)
    assert pool.reserve(SPACE, key(1), 1, parent=parent(1), depth=1, loss=Loss.EXACT, tier=Tier.HOST) is None
    pool.pin(below)
    pool.condemn(below)
    pool.condemn(above)
    assert pool.allocator.free_bytes == ALIGN_BYTES
    assert (pool.below()[0].free_bytes, pool.below()[0].pages) == (0, 0)
    assert pool.unpin(below)
    assert pool.below()[0].free_bytes == ALIGN_BYTES
    pool.check()


def test_what_a_page_is_told_with_names_its_tier_and_its_codec() -> None:
    page = ready_in(two_tiers(), Tier.HOST, loss=Loss.Q8)
    slot, event = page.slot(), page.event()
    assert (slot.tier, slot.codec, slot.loss) == (event.tier, event.codec, event.loss) == (Tier.HOST, Codec.Q8, Loss.Q8)


class TwinsAgainstLists(RuleBasedStateMachine):
    """The model: the state of each page by tier and number, of which there is at most one that is not condemned."""

    @initialize(pages=st.integers(1, 3), below=st.integers(1, 3))
    def begin(self, pages: int, below: int) -> None:
        self.pool = two_tiers(pages, below)
        self.room = {Tier.DEVICE: pages, Tier.HOST: below}
        self.live: dict[tuple[Tier, int], Page] = {}
        self.condemned: list[Page] = []

    @rule(tier=st.sampled_from(Tier), number=st.integers(0, 2), loss=st.sampled_from(Loss))
    def reserve(self, tier: Tier, number: int, loss: Loss) -> None:
        if (tier, number) in self.live:
            return
        page = self.pool.reserve(
            SPACE, key(number), ALIGN_BYTES, parent=parent(number), depth=number, loss=loss, tier=tier
        )
        assert (page is not None) == (self.used(tier) < self.room[tier])
        if page is not None:
            self.live[tier, number] = page

    @rule(data=st.data(), act=st.sampled_from(["commit", "abort", "pin", "unpin", "condemn"]))
    def act(self, data: st.DataObject, act: str) -> None:
        if not self.live:
            return
        at = data.draw(st.sampled_from(list(self.live)))
        page = self.live[at]
        writing = page.state is PageState.WRITING
        if act == "commit" and writing:
            self.pool.commit(page, SUMS)
        elif act == "abort" and writing:
            self.pool.abort(page)
            del self.live[at]
        elif act == "pin" and not writing:
            self.pool.pin(page)
        elif act == "unpin" and page.pins:
            assert not self.pool.unpin(page)
        elif act == "condemn" and not writing:
            del self.live[at]
            if not self.pool.condemn(page):
                self.condemned.append(page)

    @rule()
    def readers_end(self) -> None:
        for page in self.condemned:
            while not self.pool.unpin(page):
                pass
        self.condemned.clear()

    def used(self, tier: Tier) -> int:
        return sum(page.tier is tier for page in (*self.live.values(), *self.condemned))

    @invariant()
    def each_tier_holds_what_it_should(self) -> None:
        self.pool.check()
        for tier in Tier:
            here = [page for (at, _), page in self.live.items() if at is tier]
            assert self.pool.count(tier) == len(here)
            free = (self.room[tier] - self.used(tier)) * ALIGN_BYTES
            assert self.pool.allocators[tier].free_bytes == free

    @invariant()
    def readers_find_the_upper_twin_that_is_ready(self) -> None:
        for number in range(3):
            twins = [page for tier in Tier if (page := self.live.get((tier, number))) is not None]
            found = [page for page in twins if page.state is PageState.READY] or twins
            assert self.pool.get(SPACE, key(number)) is (found[0] if found else None)


TestTwinsAgainstLists = TwinsAgainstLists.TestCase
