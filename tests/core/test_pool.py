from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import ALIGN_BYTES, PageAllocator
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES, FileAllocator
from kvcluster.core.ids import HASH_BYTES, NamespaceId
from kvcluster.core.messages import NewPage, PageEvent, PageKey, PageSlot, Tier, TierUse, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.disk_recovery import RecoveredPage, RecoveredPages
from kvcluster.core.shard.page import TRANSITIONS, IllegalTransition, Page, PageAction, PageState
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.tiers import INGEST
from tests.core.build import SPACE, key, parent

OTHER_SPACE = NamespaceId(b"o" * HASH_BYTES)
SUMS = b"8 bytes."


def pool_of(pages: int) -> PagePool:
    return PagePool(PageAllocator(pages * ALIGN_BYTES, ALIGN_BYTES))


def reserve(pool: PagePool, number: int, *, nbytes: int = ALIGN_BYTES, space: NamespaceId = SPACE) -> Page | None:
    return pool.reserve(space, NewPage(key(number), parent(number), number, Loss.EXACT), nbytes)


def written(pool: PagePool, number: int) -> Page:
    page = reserve(pool, number)
    assert page is not None
    return page


def ready(pool: PagePool, number: int) -> Page:
    page = written(pool, number)
    pool.commit(page, SUMS)
    return page


def pin_one(pool: PagePool, page: Page) -> None:
    pool.pin([page])


def unpin_one(pool: PagePool, page: Page) -> bool:
    """Whether that freed the page."""
    pool.unpin([page])
    return page.state is PageState.FREE


def condemn_one(pool: PagePool, page: Page) -> bool:
    """Whether that freed the page."""
    pool.condemn(page)
    return page.state is PageState.FREE


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
        page = self.pool.reserve(space, NewPage(key(number), parent(number), number, loss), nbytes)
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
            self.pool.pin([page])
            self.pins[page] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.READY, PageState.CONDEMNED, pinned=True):
            self.pins[page] -= 1
            freed = self.state[page] is PageState.CONDEMNED and not self.pins[page]
            assert unpin_one(self.pool, page) == freed
            if freed:
                self.free(page)

    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        if page := self.in_state(data, PageState.READY):
            assert condemn_one(self.pool, page) == (not self.pins[page])
            self.state[page] = PageState.CONDEMNED
            if not self.pins[page]:
                self.free(page)

    @rule(
        data=st.data(),
        mistake=st.sampled_from(
            [
                (pin_one, PageState.READY),
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
            pool.pin([page])
            pool.condemn(page)
    assert page.state is state
    return pool, page


def copy_in(state: PageState) -> tuple[PagePool, Page]:
    """A pool with one private copy in that state, which is never READY: its one reader has it condemned."""
    pool = tiers_of()
    copy = pool.private(ready_in(pool, Tier.DISK))
    assert copy is not None
    if state is PageState.FREE:
        pool.abort(copy)
    elif state is PageState.CONDEMNED:
        pool.lend(copy, SUMS)
    assert copy.state is state
    return pool, copy


ACTS: dict[PageAction, Callable[[PagePool, Page], object]] = {
    PageAction.COMMIT: lambda pool, page: pool.commit(page, b"other sums"),
    PageAction.ABORT: PagePool.abort,
    PageAction.LEND: lambda pool, page: pool.lend(page, b"other sums"),
    PageAction.CONDEMN: PagePool.condemn,
    PageAction.LAST_UNPIN: unpin_one,
}
PAGES = [(page_in, state, action) for state in PageState for action in PageAction]
COPIES = [(copy_in, state, action) for state in PageState for action in PageAction if state is not PageState.READY]
IN_STATE = "in_state", "state", "action"
InState = Callable[[PageState], tuple[PagePool, Page]]


def everything_of(pool: PagePool, page: Page) -> object:
    kept = [(p.generation, p.state) for p in pool.everything()]
    used = [allocator.used_bytes for allocator in pool.allocators.values()]
    return kept, page.slot(), page.state, page.pins, len(pool), pool.condemned, used


@pytest.mark.parametrize(
    IN_STATE,
    [
        *(case for case in PAGES if case[1:] in TRANSITIONS and case[2] is not PageAction.LEND),
        *(case for case in COPIES if case[1:] in TRANSITIONS and case[2] is not PageAction.COMMIT),
    ],
)
def test_a_page_does_what_its_state_allows(in_state: InState, state: PageState, action: PageAction) -> None:
    pool, page = in_state(state)
    ACTS[action](pool, page)
    after = TRANSITIONS[state, action]
    # Without a reader a condemned page is free in the same call.
    assert page.state is (PageState.FREE if action is PageAction.CONDEMN else after)
    assert page.pins == (action is PageAction.LEND)
    pool.check()


@pytest.mark.parametrize(IN_STATE, [case for case in (*PAGES, *COPIES) if case[1:] not in TRANSITIONS])
def test_what_its_state_does_not_allow_raises_and_changes_nothing(
    in_state: InState, state: PageState, action: PageAction
) -> None:
    pool, page = in_state(state)
    before = everything_of(pool, page)
    # An unpin without a pin is caught before the table is asked, with a sentence of its own.
    mistake = AssertionError if action is PageAction.LAST_UNPIN else IllegalTransition
    with pytest.raises(mistake, match="without its pin" if mistake is AssertionError else f"{action.value} of a page"):
        ACTS[action](pool, page)
    assert everything_of(pool, page) == before
    pool.check()


@pytest.mark.parametrize("in_state", [page_in, copy_in])
@pytest.mark.parametrize("state", [state for state in PageState if state is not PageState.READY])
def test_only_a_ready_page_gets_a_new_reader(in_state: InState, state: PageState) -> None:
    pool, page = in_state(state)
    before = everything_of(pool, page)
    with pytest.raises(IllegalTransition, match=f"pin of a page that is {state.value}"):
        pool.pin([page])
    assert everything_of(pool, page) == before


def test_every_state_is_reached_and_left_by_the_table() -> None:
    assert set(TRANSITIONS.values()) | {PageState.WRITING} == set(PageState)
    assert {state for state, _ in TRANSITIONS} | {PageState.FREE} == set(PageState)


def test_a_condemned_page_keeps_its_bytes_for_the_readers_that_it_has() -> None:
    pool = pool_of(1)
    page = ready(pool, 0)
    pool.pin([page])
    pool.pin([page])
    assert not condemn_one(pool, page)
    assert pool.get(SPACE, key(0)) is None and reserve(pool, 1) is None
    assert not unpin_one(pool, page)
    assert unpin_one(pool, page)
    assert reserve(pool, 1) is not None


def test_what_readers_keep_of_condemned_pages_is_charged_to_no_tenant() -> None:
    """Else the floors of tenants shrink with each page that is evicted while it is read (tenant_floors.py)."""
    pool = pool_of(2)
    page, _ = ready(pool, 0), ready(pool, 1)
    pool.pin([page])
    assert pool.uncharged_bytes[Tier.RAM] == 0
    assert not condemn_one(pool, page)
    assert pool.uncharged_bytes[Tier.RAM] == pool.allocator.size_class(page.nbytes)
    assert unpin_one(pool, page)
    assert pool.uncharged_bytes[Tier.RAM] == 0
    pool.check()


def test_a_key_may_be_written_again_while_its_condemned_page_is_still_read() -> None:
    pool = pool_of(2)
    old = ready(pool, 0)
    pool.pin([old])
    pool.condemn(old)
    new = ready(pool, 0)
    assert pool.get(SPACE, key(0)) is new
    assert new.offset != old.offset and new.generation > old.generation
    pool.unpin([old])
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


def test_the_check_finds_a_condemned_page_without_readers() -> None:
    pool, page = page_in(PageState.CONDEMNED)
    page.pins = 0
    with pytest.raises(AssertionError, match="without readers"):
        pool.check()


# -------------------------------------------------------------------------------------------------- tiers


FIRST = HEAD_BYTES + SECTOR_BYTES
"""Where the slots of a file begin here."""


TIERS = (Tier.RAM, Tier.HOST, Tier.DISK)


def tiers_of(pages: int = 2, below: int = 2, slots: int = 2) -> PagePool:
    """All three of them, with room for so many small pages; on disk in one file."""
    ram = PageAllocator(pages * ALIGN_BYTES, ALIGN_BYTES)
    host = PageAllocator(below * ALIGN_BYTES, ALIGN_BYTES)
    file_bytes = FIRST + slots * SECTOR_BYTES
    return PagePool(ram, {Tier.HOST: host}, {Tier.DISK: FileAllocator(file_bytes, file_bytes)})


def written_in(pool: PagePool, tier: Tier, number: int = 0, loss: Loss = Loss.EXACT) -> Page:
    codec = Codec.Q8 if loss and tier is not Tier.RAM else Codec.RAW
    page = pool.reserve(SPACE, NewPage(key(number), parent(number), number, loss), ALIGN_BYTES, tier=tier, codec=codec)
    assert page is not None
    return page


def ready_in(pool: PagePool, tier: Tier, number: int = 0, loss: Loss = Loss.EXACT) -> Page:
    page = written_in(pool, tier, number, loss)
    pool.commit(page, SUMS)
    return page


def decoded_in(pool: PagePool, number: int = 0, loss: Loss = Loss.Q8) -> Page:
    """In the RAM tier."""
    page = ready_in(pool, Tier.RAM, number, loss)
    page.decoded = True
    return page


def found_page(
    number: int = 0, slot: int = 0, *, space: NamespaceId = SPACE, nbytes: int = ALIGN_BYTES
) -> RecoveredPage:
    """One of Q8 in that slot of the one file."""
    place = FIRST + slot * SECTOR_BYTES
    return RecoveredPage(space, key(number), parent(number), number, Loss.Q8, Codec.Q8, nbytes, SUMS, place)


def used(pool: PagePool) -> list[int]:
    """Bytes by tier."""
    pool.check()
    return [allocator.used_bytes for allocator in pool.allocators.values()]


def taken(pool: PagePool, loss: Loss, into: Tier = INGEST) -> Written | None:
    """Why page 0 need not be written with that loss."""
    return pool.taken(pool.there(SPACE, key(0)), loss, into)


def test_each_tier_in_memory_has_a_region_of_its_own() -> None:
    pool = PagePool.of(ShardConfig(ram_bytes=1_024, host_bytes=2_048, extent_bytes=ALIGN_BYTES))
    assert list(pool.allocators) == [Tier.RAM, Tier.HOST]
    assert pool.memory_bytes == {Tier.RAM: 1_024, Tier.HOST: 2_048}
    above, below = written_in(pool, Tier.RAM), written_in(pool, Tier.HOST)
    assert above.offset == below.offset == 0
    assert pool.others() == (TierUse(Tier.HOST, 2_048, 2_048 - ALIGN_BYTES, 1, writing_bytes=ALIGN_BYTES),)
    assert (pool.count(Tier.RAM), pool.count(Tier.HOST), len(pool)) == (1, 1, 2)


def test_without_host_bytes_there_is_one_tier() -> None:
    pool = PagePool.of(ShardConfig(ram_bytes=1_024, extent_bytes=ALIGN_BYTES))
    assert (list(pool.allocators), pool.others(), pool.memory_bytes) == ([Tier.RAM], (), {Tier.RAM: 1_024})


def test_the_disk_tier_lies_below_all_others_and_not_in_memory() -> None:
    file_bytes = FIRST + 2 * SECTOR_BYTES
    found = RecoveredPages(capacity_bytes=3 * file_bytes, file_bytes=file_bytes)
    pool = PagePool.of(ShardConfig(ram_bytes=1_024, host_bytes=2_048, extent_bytes=ALIGN_BYTES), {Tier.DISK: found})
    assert list(pool.allocators) == list(TIERS) and list(pool.memory) == [Tier.RAM, Tier.HOST]
    assert list(pool.memory_bytes) == [Tier.RAM, Tier.HOST]
    below = written_in(pool, Tier.DISK)
    assert below.offset == FIRST, "an offset of its own kind"
    assert pool.others() == (
        TierUse(Tier.HOST, 2_048, 2_048, 0),
        TierUse(Tier.DISK, 3 * file_bytes, 2 * file_bytes + SECTOR_BYTES, 1, writing_bytes=SECTOR_BYTES),
    )
    assert (pool.count(Tier.DISK), len(pool)) == (1, 1)


def test_without_room_found_on_disk_there_is_no_disk_tier() -> None:
    config = ShardConfig(ram_bytes=1_024, host_bytes=2_048, extent_bytes=ALIGN_BYTES)
    pool = PagePool.of(config, {Tier.DISK: RecoveredPages()})
    assert list(pool.allocators) == [Tier.RAM, Tier.HOST] and not pool.stores
    assert pool.on(Tier.DISK, SPACE, key(0)) is None


TWINS = [(Tier.RAM, Tier.HOST), (Tier.RAM, Tier.DISK), (Tier.HOST, Tier.DISK)]


@pytest.mark.parametrize(("upper", "lower"), TWINS)
def test_of_twins_the_upper_is_found_and_each_by_its_tier(upper: Tier, lower: Tier) -> None:
    pool = tiers_of()
    below = ready_in(pool, lower, loss=Loss.Q8)
    assert pool.get(SPACE, key(0)) is below
    above = written_in(pool, upper, loss=Loss.Q8)
    assert pool.get(SPACE, key(0)) is below, "the other is not there yet"
    pool.commit(above, SUMS)
    assert pool.get(SPACE, key(0)) is above
    assert (pool.on(upper, SPACE, key(0)), pool.on(lower, SPACE, key(0))) == (above, below)
    assert list(pool.ready()) == [above, below]
    pool.condemn(above)
    assert pool.get(SPACE, key(0)) is below


@pytest.mark.parametrize(("upper", "lower"), TWINS)
def test_a_twin_below_counts_once_it_is_ready(upper: Tier, lower: Tier) -> None:
    pool = tiers_of()
    above = ready_in(pool, upper)
    assert pool.below_of(above) is None
    below = written_in(pool, lower)
    ready_in(pool, lower, 1)
    assert pool.below_of(above) is None
    pool.commit(below, SUMS)
    assert pool.below_of(above) is below
    assert pool.below_of(below) is None, "a page in the upper tier is not a twin in the lower"
    pool.condemn(below)
    assert pool.below_of(above) is None


def test_of_two_twins_below_the_upper_counts() -> None:
    pool = tiers_of()
    above, host, disk = (ready_in(pool, tier) for tier in TIERS)
    assert pool.below_of(above) is host
    assert pool.below_of(host) is disk
    pool.condemn(host)
    assert pool.below_of(above) is disk


@pytest.mark.parametrize("lower", [Tier.HOST, Tier.DISK])
def test_who_wants_it_encoded_gets_the_twin_from_which_it_was_decoded(lower: Tier) -> None:
    pool = tiers_of()
    above, below = decoded_in(pool), ready_in(pool, lower, loss=Loss.Q8)
    assert pool.find(SPACE, key(0), Loss.Q8, encoded=True) is below
    assert pool.find(SPACE, key(0), Loss.Q8) is above
    raw = ready_in(pool, Tier.RAM, 1)
    ready_in(pool, lower, 1)
    assert pool.find(SPACE, key(1), Loss.Q8, encoded=True) is raw, "it was not decoded"


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_being_written_in_any_tier_is_pending(tier: Tier) -> None:
    pool = tiers_of()
    page = written_in(pool, tier)
    assert pool.get(SPACE, key(0)) is page
    miss = pool.find(SPACE, key(0), Loss.Q4)
    assert isinstance(miss, Miss) and miss.reason is MissReason.PENDING
    assert taken(pool, Loss.EXACT) is taken(pool, Loss.Q4) is Written.PENDING


@pytest.mark.parametrize("accept", Loss)
@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("tier", TIERS)
def test_a_reader_gets_what_has_lost_no_more_than_he_accepts(tier: Tier, loss: Loss, accept: Loss) -> None:
    pool = tiers_of()
    page = ready_in(pool, tier, loss=loss)
    if loss <= accept:
        assert pool.find(SPACE, key(0), accept) is page
    else:
        assert pool.find(SPACE, key(0), accept) == Miss(MissReason.LOSSY, f"only with {loss.name.lower()}")
    missing = pool.find(SPACE, key(1), accept)
    assert isinstance(missing, Miss) and missing.reason is MissReason.EVICTED


@pytest.mark.parametrize("into", TIERS)
@pytest.mark.parametrize("tier", TIERS)
def test_what_loses_more_and_is_being_written_elsewhere_gives_way(tier: Tier, into: Tier) -> None:
    pool = tiers_of()
    written_in(pool, tier, loss=Loss.Q8)
    assert taken(pool, Loss.EXACT, into) is (Written.PENDING if into is tier else None)


@pytest.mark.parametrize("there", Loss)
@pytest.mark.parametrize("new", Loss)
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_there_with_no_more_loss_is_not_written_again(tier: Tier, there: Loss, new: Loss) -> None:
    pool = tiers_of()
    ready_in(pool, tier, loss=there)
    assert taken(pool, new) is (Written.DUPLICATE if there <= new else None)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_better_page_that_is_being_written_beside_a_worse_one_is_pending_for_who_wants_it_better(tier: Tier) -> None:
    pool = tiers_of()
    ready_in(pool, tier, loss=Loss.Q8)
    written_in(pool, Tier.RAM)
    assert taken(pool, Loss.EXACT) is Written.PENDING
    assert taken(pool, Loss.Q8) is Written.DUPLICATE


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_each_tier_has_room_of_its_own(tier: Tier) -> None:
    pool = tiers_of(1, 1, 1)
    above, below = ready_in(pool, Tier.RAM), ready_in(pool, tier)
    at = [use.tier for use in pool.others()].index(tier)
    capacity = pool.others()[at].capacity_bytes
    assert pool.reserve(SPACE, NewPage(key(1), parent(1), 1, Loss.EXACT), 1, tier=tier) is None
    pool.pin([below])
    pool.condemn(below)
    pool.condemn(above)
    assert pool.allocator.free_bytes == ALIGN_BYTES
    assert (pool.others()[at].free_bytes, pool.others()[at].pages) == (0, 0)
    assert unpin_one(pool, below)
    assert pool.others()[at].free_bytes == capacity
    pool.check()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_a_page_is_told_with_names_its_tier_and_its_codec(tier: Tier) -> None:
    page = ready_in(tiers_of(), tier, loss=Loss.Q8)
    slot, event = page.slot(), page.event()
    assert (slot.tier, slot.codec, slot.loss) == (event.tier, event.codec, event.loss) == (tier, Codec.Q8, Loss.Q8)


def test_the_check_finds_room_in_a_file_that_no_page_holds() -> None:
    pool = tiers_of()
    pool.stores[Tier.DISK].reserve(ALIGN_BYTES, (SPACE, key(0)))
    with pytest.raises(AssertionError, match="pages hold 0, the allocator gave 4096"):
        pool.check()


# ----------------------------------------------------------------------------- what was there before the pool


def test_what_is_adopted_is_ready_where_it_lay() -> None:
    pool = tiers_of()
    assert pool.adopt(Tier.DISK, found_page(5, slot=1))
    page = pool.on(Tier.DISK, SPACE, key(5))
    assert page is not None and page is pool.find(SPACE, key(5), Loss.Q8)
    place = FIRST + SECTOR_BYTES
    assert page.slot() == PageSlot(
        key(5), place, ALIGN_BYTES, page.generation, Loss.Q8, SUMS, codec=Codec.Q8, tier=Tier.DISK
    )
    assert page.event() == PageEvent(SPACE, key(5), parent(5), 5, Tier.DISK, Loss.Q8, Codec.Q8)
    assert (page.state, page.pins, page.decoded) == (PageState.READY, 0, False)
    assert used(pool) == [0, 0, SECTOR_BYTES]


def test_what_is_adopted_has_a_generation_of_its_own() -> None:
    pool = tiers_of()
    assert pool.adopt(Tier.DISK, found_page(0, slot=0)) and pool.adopt(Tier.DISK, found_page(1, slot=1))
    generations = [page.generation for page in pool.ready()] + [ready_in(pool, Tier.RAM).generation]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize(
    "again",
    [
        found_page(0, slot=1),
        found_page(1, slot=0),
        found_page(1, slot=1, space=OTHER_SPACE),
        found_page(1, slot=1, nbytes=ALIGN_BYTES + 1),
        found_page(1, slot=2),
        found_page(1, slot=-1),
    ],
    ids=["its key is there", "its slot is taken", "another's file", "pages of other bytes", "beyond", "no slot"],
)
def test_what_cannot_be_there_is_not_adopted_and_leaves_nothing_behind(again: RecoveredPage) -> None:
    pool = tiers_of()
    assert pool.adopt(Tier.DISK, found_page(0, slot=0))
    assert not pool.adopt(Tier.DISK, again)
    assert [page.key for page in pool.everything()] == [key(0)]
    assert used(pool) == [0, 0, SECTOR_BYTES]


def test_what_was_adopted_goes_like_any_other_page() -> None:
    pool = tiers_of()
    assert pool.adopt(Tier.DISK, found_page())
    page = pool.get(SPACE, key(0))
    assert page is not None
    pool.pin([page])
    assert not condemn_one(pool, page)
    assert unpin_one(pool, page)
    assert used(pool) == [0, 0, 0]
    assert pool.adopt(Tier.DISK, found_page(0, slot=1)), "its key may be taken again"


# ---------------------------------------------------------------------------------------------- private copies


def copied(pool: PagePool, page: Page) -> Page:
    copy = pool.private(page)
    assert copy is not None
    return copy


def test_a_private_copy_is_to_be_what_its_page_is_in_the_host_tier() -> None:
    pool = tiers_of()
    page = ready_in(pool, Tier.DISK, 3, Loss.Q8)
    copy = copied(pool, page)
    assert copy.state is PageState.WRITING
    assert (copy.space, copy.key, copy.nbytes, copy.parent, copy.depth) == (SPACE, key(3), ALIGN_BYTES, parent(3), 3)
    assert (copy.tier, copy.codec, copy.loss) == (Tier.HOST, page.codec, page.loss)
    assert copy.generation > page.generation and copy.sums == b"", "nothing is in it yet"
    assert used(pool) == [0, ALIGN_BYTES, SECTOR_BYTES]


def test_a_private_copy_cannot_be_found_and_is_no_page_of_its_tier() -> None:
    pool = tiers_of()
    page = ready_in(pool, Tier.DISK)
    copy = copied(pool, page)
    for lent in (False, True):
        if lent:
            pool.lend(copy, SUMS)
        assert pool.find(SPACE, key(0), Loss.EXACT) is pool.get(SPACE, key(0)) is page
        assert pool.on(Tier.HOST, SPACE, key(0)) is None and list(pool.ready()) == [page]
        assert (pool.count(Tier.HOST), len(pool)) == (0, 1)
        assert taken(pool, Loss.EXACT, Tier.HOST) is Written.DUPLICATE, "by its page alone"
        assert list(pool.everything()) == [page, copy], "it takes room"
    pool.condemn(page)
    assert pool.get(SPACE, key(0)) is None and taken(pool, Loss.EXACT, Tier.HOST) is None


def test_a_page_of_its_tier_may_be_written_beside_a_private_copy_of_the_same_key() -> None:
    pool = tiers_of()
    page = ready_in(pool, Tier.DISK)
    copy = copied(pool, page)
    host = ready_in(pool, Tier.HOST)
    assert pool.get(SPACE, key(0)) is host and host.offset != copy.offset
    pool.lend(copy, SUMS)
    assert unpin_one(pool, copy)
    assert pool.get(SPACE, key(0)) is host
    assert used(pool) == [0, ALIGN_BYTES, SECTOR_BYTES]


def test_a_private_copy_is_lent_to_one_reader_and_its_room_is_free_with_him() -> None:
    pool = tiers_of()
    copy = copied(pool, ready_in(pool, Tier.DISK))
    pool.lend(copy, SUMS)
    assert (copy.state, copy.pins, copy.sums) == (PageState.CONDEMNED, 1, SUMS)
    assert copy.slot().tier is Tier.HOST
    assert unpin_one(pool, copy)
    assert used(pool) == [0, 0, SECTOR_BYTES]


def test_a_private_copy_that_nothing_is_read_into_is_given_back() -> None:
    pool = tiers_of()
    page = ready_in(pool, Tier.DISK)
    copy = copied(pool, page)
    pool.abort(copy)
    assert list(pool.everything()) == [page] and pool.condemned == 0
    assert used(pool) == [0, 0, SECTOR_BYTES]


def test_each_reader_has_a_copy_of_his_own_as_long_as_there_is_room() -> None:
    pool = tiers_of(below=2)
    page = ready_in(pool, Tier.DISK)
    one, other = copied(pool, page), copied(pool, page)
    assert one.offset != other.offset and one.generation != other.generation
    assert pool.private(page) is None
    assert used(pool) == [0, 2 * ALIGN_BYTES, SECTOR_BYTES]
    pool.abort(one)
    assert copied(pool, page).offset == one.offset


class TwinsAgainstLists(RuleBasedStateMachine):
    """The model: the state of each page by tier and number, of which there is at most one that is not condemned; and
    the private copies, with whether they are lent."""

    @initialize(pages=st.integers(1, 3), below=st.integers(1, 3), slots=st.integers(1, 3))
    def begin(self, pages: int, below: int, slots: int) -> None:
        self.pool = tiers_of(pages, below, slots)
        self.room = {Tier.RAM: pages, Tier.HOST: below, Tier.DISK: slots}
        self.live: dict[tuple[Tier, int], Page] = {}
        self.condemned: list[Page] = []
        self.copies: dict[Page, bool] = {}

    @rule(tier=st.sampled_from(TIERS), number=st.integers(0, 2), loss=st.sampled_from(Loss))
    def reserve(self, tier: Tier, number: int, loss: Loss) -> None:
        if (tier, number) in self.live:
            return
        page = self.pool.reserve(SPACE, NewPage(key(number), parent(number), number, loss), ALIGN_BYTES, tier=tier)
        assert (page is not None) == (self.used(tier) < self.room[tier])
        if page is not None:
            self.live[tier, number] = page

    @rule(number=st.integers(0, 2), slot=st.integers(-1, 3))
    def adopt(self, number: int, slot: int) -> None:
        found = found_page(number, slot)
        held = [page.offset for page in self.pages() if page.tier is Tier.DISK]
        fits = 0 <= slot < self.room[Tier.DISK] and found.offset not in held and (Tier.DISK, number) not in self.live
        assert self.pool.adopt(Tier.DISK, found) == fits
        if fits:
            page = self.pool.on(Tier.DISK, SPACE, key(number))
            assert page is not None and (page.state, page.offset) == (PageState.READY, found.offset)
            self.live[Tier.DISK, number] = page

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
            self.pool.pin([page])
        elif act == "unpin" and page.pins:
            assert not unpin_one(self.pool, page)
        elif act == "condemn" and not writing:
            del self.live[at]
            if not condemn_one(self.pool, page):
                self.condemned.append(page)

    @rule(number=st.integers(0, 2))
    def copy(self, number: int) -> None:
        page = self.live.get((Tier.DISK, number))
        if page is None or page.state is not PageState.READY:
            return
        copy = self.pool.private(page)
        assert (copy is not None) == (self.used(Tier.HOST) < self.room[Tier.HOST])
        if copy is not None:
            self.copies[copy] = False

    @rule(data=st.data(), sound=st.booleans())
    def end_a_copy(self, data: st.DataObject, sound: bool) -> None:
        if not self.copies:
            return
        copy = data.draw(st.sampled_from(list(self.copies)))
        if not self.copies[copy] and sound:
            self.pool.lend(copy, SUMS)
            self.copies[copy] = True
            return
        if self.copies.pop(copy):
            assert unpin_one(self.pool, copy)
        else:
            self.pool.abort(copy)

    @rule()
    def readers_end(self) -> None:
        for page in self.condemned:
            while not unpin_one(self.pool, page):
                pass
        self.condemned.clear()

    def pages(self) -> list[Page]:
        return [*self.live.values(), *self.condemned, *self.copies]

    def used(self, tier: Tier) -> int:
        return sum(page.tier is tier for page in self.pages())

    @invariant()
    def each_tier_holds_what_it_should(self) -> None:
        self.pool.check()
        assert {page.generation for page in self.pool.everything()} == {page.generation for page in self.pages()}
        assert self.pool.condemned == len(self.condemned) + len(self.copies)
        for tier, allocator in self.pool.allocators.items():
            here = [page for (at, _), page in self.live.items() if at is tier]
            assert self.pool.count(tier) == len(here)
            unit = allocator.size_class(ALIGN_BYTES)
            assert allocator.used_bytes == self.used(tier) * unit
            free = (self.room[tier] - self.used(tier)) * unit
            assert allocator.free_bytes == (free if self.used(tier) else allocator.capacity_bytes)

    @invariant()
    def no_byte_belongs_to_two_pages(self) -> None:
        for tier in TIERS:
            ranges = sorted((page.offset, page.offset + page.nbytes) for page in self.pages() if page.tier is tier)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))

    @invariant()
    def readers_find_the_upper_twin_that_is_ready(self) -> None:
        for number in range(3):
            twins = [page for tier in TIERS if (page := self.live.get((tier, number))) is not None]
            found = [page for page in twins if page.state is PageState.READY] or twins
            assert self.pool.get(SPACE, key(number)) is (found[0] if found else None)
            for page in twins:
                ready = [twin for twin in twins if twin.tier > page.tier and twin.state is PageState.READY]
                assert self.pool.below_of(page) is (ready[0] if ready else None)


TestTwinsAgainstLists = TwinsAgainstLists.TestCase
