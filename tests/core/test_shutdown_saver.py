"""A shard that is told to stop writes the hottest pages in its memory to disk, alone, until its deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, CallId
from kvcluster.core.messages import (
    Commit,
    CommitGrant,
    LeaveReason,
    MovePages,
    NewPage,
    PageSlot,
    PagesSaved,
    Pin,
    PurgedEvent,
    Reserve,
    SavePages,
    Tier,
    Tombstone,
    WriteGrant,
    Written,
)
from kvcluster.core.miss import Loss
from kvcluster.core.shard import shutdown_saver
from tests.core.lone_shard import A, B, C, LoneShard, granted, inventory, pinned, report
from tests.core.moving import BELOW, IN_RAM, ON_DISK, Q8, RAW, arrived, disk, holding, lies, lowered, on_disk, tiered
from tests.core.samples import CODED, MIXED, OURS, SECOND, SUMS, attempt, chain, key, ours, root

FAR = 1_000 * SECOND
RAW_ON_DISK = (Tier.DISK, Codec.RAW, Loss.EXACT)


def save(shard: LoneShard, *, within: int = FAR, codec: Codec = Codec.Q8, raw_blocks: int = 0) -> CallId:
    """Tells it to stop. Returns the call, which `result` reads."""
    until = shard.now + within
    return shard.call(lambda call: SavePages(call, until, codec, raw_blocks))


def result(shard: LoneShard, call: CallId) -> PagesSaved | None:
    reply = shard.replies.get(call)
    assert reply is None or isinstance(reply, PagesSaved)
    return reply


def work(shard: LoneShard, *, batches: int = 1_000) -> list[MovePages]:
    """Lets it work until it has nothing to do at once, or has begun so many batches. Returns them."""
    begun: list[MovePages] = []
    while True:
        if shard.moving is not None:
            begun.append(shard.moving)
            if len(begun) == batches:
                return begun
            shard.move()
        deadline = shard.core.next_deadline()
        if shard.moving is None and (deadline is None or deadline > shard.now):
            return begun
        shard.later(0)


def saved(shard: LoneShard, *, codec: Codec = Codec.Q8, raw_blocks: int = 0) -> PagesSaved:
    """Saves everything that fits."""
    call = save(shard, codec=codec, raw_blocks=raw_blocks)
    work(shard)
    found = result(shard, call)
    assert found is not None, "it has not ended"
    return found


def store_chain(shard: LoneShard, blocks: Sequence[BlockHash], number: int, first: int = 0) -> None:
    """Stores blocks of a chain that begins with `blocks`, from the block `first` on."""
    parents = (root(CODED), *blocks)
    new = tuple(NewPage(key(blocks[at]), parents[at], at) for at in range(first, len(blocks)))
    grant = shard.ask(WriteGrant, ours(Reserve(attempt(number), shard.epoch, new), shard.space))
    assert all(isinstance(page, PageSlot) for page in grant.pages)
    sums = (SUMS,) * len(new)
    shard.ask(CommitGrant, ours(Commit(attempt(number), tuple(range(len(new))), sums)))
    shard.settle()


def on_drive(shard: LoneShard) -> list[BlockHash]:
    return [page.key.hash for page in shard.core.pool.ready() if page.tier is Tier.DISK]


def use(shard: LoneShard, number: int, *blocks: BlockHash) -> None:
    """A worker loads these."""
    pinned(shard.pin(attempt(number), *blocks, accept=Loss.Q4))
    shard.core.leases.end(attempt(number))
    for block in blocks:
        for page in shard.core.pool.there(shard.space, key(block)):
            page.pins = 0


# ----------------------------------------------------------------------------------------- what is saved


def test_every_page_in_memory_is_saved_encoded_and_stays_readable_where_it_lies() -> None:
    shard = holding(A, B, found=disk())
    assert saved(shard) == PagesSaved(2, 2 * Q8, 0, 0)
    assert lies(shard) == [IN_RAM, ON_DISK]
    assert shard.settle() == [arrived(block, Tier.DISK, Codec.Q8, Loss.Q8) for block in (A, B)]
    [slot] = pinned(shard.pin(attempt(2), A))
    assert slot.tier is Tier.RAM


def test_pages_of_the_host_tier_are_saved_as_they_are() -> None:
    shard = lowered(A, found=disk())
    assert saved(shard, codec=Codec.Q4) == PagesSaved(1, Q8, 0, 0)
    assert lies(shard) == [BELOW, ON_DISK]


def test_the_first_blocks_of_a_sequence_are_saved_raw() -> None:
    blocks = chain(3, spec=CODED)
    shard = tiered(found=disk())
    store_chain(shard, blocks, 1)
    assert saved(shard, raw_blocks=1).pages == 3
    assert [lies(shard, block)[-1] for block in blocks] == [RAW_ON_DISK, ON_DISK, ON_DISK]


def test_pages_are_encoded_as_was_last_ordered_for_their_namespace() -> None:
    shard = holding(A, B, found=disk())
    shard.demote(A, codec=Codec.Q8)
    shard.move()
    assert saved(shard, codec=Codec.Q4).pages == 2
    assert [lies(shard, block)[-1] for block in (A, B)] == [ON_DISK, ON_DISK]


def test_a_namespace_for_which_nothing_was_ordered_is_encoded_as_it_is_told() -> None:
    shard = holding(A, found=disk())
    assert saved(shard, codec=Codec.Q4).pages == 1
    assert lies(shard) == [IN_RAM, (Tier.DISK, Codec.Q4, Loss.Q4)]


def test_what_cannot_be_encoded_is_saved_raw() -> None:
    shard = holding(A, found=disk())
    call = save(shard)
    work(shard, batches=1)
    shard.move(unfit=[0])
    work(shard)
    assert result(shard, call) == PagesSaved(1, RAW, 0, 0)
    assert lies(shard) == [IN_RAM, RAW_ON_DISK]


def test_what_lies_on_disk_already_is_not_written_again() -> None:
    shard = on_disk(A)
    call = save(shard)
    assert work(shard) == []
    assert result(shard, call) == PagesSaved(0, 0, 0, 0)


def test_a_promoted_page_is_saved_as_it_lies_below_and_never_encoded_twice() -> None:
    shard = lowered(A, found=disk())
    shard.promote(A)
    shard.move_all()
    shard.settle()
    save(shard, codec=Codec.Q4)
    [batch] = work(shard, batches=1)
    assert [(page.source.tier, page.target.codec) for page in batch.pages] == [(Tier.HOST, Codec.Q8)]


def test_what_could_not_be_written_counts_as_left() -> None:
    shard = lowered(A, B, found=disk())
    call = save(shard)
    work(shard, batches=1)
    shard.move(unfit=[1])
    work(shard)
    assert result(shard, call) == PagesSaved(1, Q8, 1, Q8)


def test_corrupt_pages_are_withdrawn_and_not_saved() -> None:
    shard = holding(A, B, found=disk())
    call = save(shard)
    work(shard, batches=1)
    shard.move(corrupt=[0])
    work(shard)
    assert result(shard, call) == PagesSaved(1, Q8, 0, 0)
    assert lies(shard, A) == []


def test_pages_that_are_being_written_are_not_saved() -> None:
    shard = holding(A, found=disk())
    shard.reserve(attempt(2), B)
    assert saved(shard) == PagesSaved(1, Q8, 0, 0)
    assert shard.commit(attempt(2), 0) == (Written.COMMITTED,)


def test_private_pages_are_not_saved() -> None:
    spec = replace(CODED, private=True)
    shard = tiered(spec=spec, found=disk())
    shard.store(attempt(1), A)
    assert saved(shard) == PagesSaved(0, 0, 0, 0)
    assert on_drive(shard) == []


def test_purged_pages_are_not_saved_even_if_they_were_being_written() -> None:
    shard = holding(A, found=disk())
    call = save(shard)
    work(shard, batches=1)
    stone = Tombstone(1, OURS)
    shard.hear(tombstones=(stone,))
    assert shard.erased[0].purged == (stone,)
    shard.move()
    work(shard)
    assert result(shard, call) == PagesSaved(0, 0, 0, 0)
    assert lies(shard) == []
    assert PurgedEvent(1) in shard.settle()


def test_the_pages_of_a_batch_that_was_revoked_are_tried_again() -> None:
    shard = holding(A, found=disk(), lease_ttl_ms=1_000)
    call = save(shard)
    work(shard, batches=1)
    shard.settle()
    shard.later(SECOND)
    shard.settle()
    shard.move()
    assert on_drive(shard) == []
    work(shard)
    assert result(shard, call) == PagesSaved(1, Q8, 0, 0)


# -------------------------------------------------------------------------------------- in which order


def test_the_last_used_come_first_and_of_a_chain_its_root() -> None:
    shard = tiered(pages=16, found=disk(files=8))
    one, two = chain(3, 0, CODED), chain(3, 2, CODED)
    store_chain(shard, one, 1)
    store_chain(shard, two, 2)
    use(shard, 3, *one[:2])
    save(shard)
    [batch] = work(shard, batches=1)
    assert [page.source.key.hash for page in batch.pages] == [*one[:2], *two, one[2]]


def test_a_block_is_as_hot_as_what_follows_it() -> None:
    shard = tiered(pages=16, found=disk(files=8))
    one, two = chain(3, 0, CODED), chain(3, 2, CODED)
    store_chain(shard, one[:1], 1)
    store_chain(shard, two, 2)
    store_chain(shard, one, 3, first=1)
    save(shard)
    [batch] = work(shard, batches=1)
    assert [page.source.key.hash for page in batch.pages] == [*one, *two]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    uses=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6),
    room=st.integers(0, 3),
    batches=st.integers(0, 4),
    listed=st.sampled_from((1, 3, 4_096)),
)
def test_whatever_is_cut_off_no_block_is_saved_without_the_one_that_it_follows(
    lengths: list[int], uses: list[tuple[int, int]], room: int, batches: int, listed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (shutdown_saver, shutdown_saver):
            patch.setattr(module, "LISTED_PAGES", listed)
        patch.setattr(limits, "MOVED_PAGES", 2)
        shard = tiered(pages=32, found=disk(files=room, pages=2) if room else disk(files=1, pages=1))
        chains = [chain(length, 2 * number, CODED) for number, length in enumerate(lengths)]
        for number, blocks in enumerate(chains):
            store_chain(shard, blocks, number + 1)
        hottest = {number: number for number in range(len(chains))}
        for at, (number, length) in enumerate(uses):
            if number < len(chains):
                use(shard, 100 + at, *chains[number][:length])
                hottest[number] = 100 + at
        call = save(shard)
        work(shard, batches=batches + 1)
        if batches < 4:
            shard.settle()
            shard.later(FAR)
            while shard.moving is not None:
                shard.move()
        else:
            work(shard)
        answer = result(shard, call)
        assert answer is not None
        kept = on_drive(shard)
        for blocks in chains:
            there = [block in kept for block in blocks]
            assert there == sorted(there, reverse=True), "a leaf without its root"
        total = sum(lengths)
        assert answer.pages + answer.left_pages == total
        assert batches < 4 or answer.pages == len(kept) == min(total, 2 * room or 1)


# ---------------------------------------------------------------------------------- where the disk is full


def test_colder_pages_on_disk_give_way() -> None:
    found = disk(files=1, pages=2)
    shard = tiered(pages=16, found=found)
    old, new = chain(2, 0, CODED), chain(2, 2, CODED)
    store_chain(shard, old, 1)
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(*old, to=to)
        shard.move_all()
    shard.settle()
    store_chain(shard, new, 2)
    assert saved(shard) == PagesSaved(2, 2 * Q8, 0, 0)
    assert sorted(on_drive(shard)) == sorted(new)


def test_hotter_pages_on_disk_stay() -> None:
    shard = tiered(pages=16, found=disk(files=1, pages=2))
    hot, cold = chain(2, 0, CODED), chain(2, 2, CODED)
    store_chain(shard, cold, 1)
    store_chain(shard, hot, 2)
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(*hot, to=to)
        shard.move_all()
    shard.settle()
    assert saved(shard) == PagesSaved(0, 0, 2, 2 * RAW)
    assert sorted(on_drive(shard)) == sorted(hot)


def test_a_file_of_colder_pages_of_another_kind_gives_way() -> None:
    shard = tiered(pages=16, found=disk(files=1, pages=2))
    old, new = chain(2, 0, CODED), chain(2, 2, CODED)
    store_chain(shard, old, 1)
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(*old, codec=Codec.Q4, to=to)
        shard.move_all()
    shard.settle()
    store_chain(shard, new, 2)
    assert saved(shard, raw_blocks=2).pages == 2
    assert sorted(on_drive(shard)) == sorted(new)


def test_pages_that_are_read_from_disk_do_not_give_way() -> None:
    shard = on_disk(A, found=disk(files=1, pages=1))
    shard.store(attempt(8), B)
    [page] = [page for page in shard.core.pool.ready() if page.tier is Tier.DISK]
    shard.call(ours(Pin(attempt(9), shard.epoch, (key(A),), Loss.Q4), shard.space))
    assert page.pins == 1
    page.used = 0
    assert saved(shard) == PagesSaved(0, 0, 1, RAW)
    assert on_drive(shard) == [A]


def test_a_file_in_which_readers_hold_an_older_page_of_the_same_block_does_not_give_way() -> None:
    shard = on_disk(A, found=disk(files=1, pages=2))
    shard.call(ours(Pin(attempt(9), shard.epoch, (key(A),), Loss.Q4), shard.space))
    shard.evict(A, tier=Tier.DISK)
    shard.store(attempt(8), A)
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(A, to=to)
        shard.move_all()
    shard.settle()
    assert len(list(shard.core.pool.everything())) > len(on_drive(shard)) == 1, "one is withdrawn, and read"
    shard.store(attempt(7), B)
    assert saved(shard, raw_blocks=1) == PagesSaved(1, Q8, 0, 0), "encoded, in the place of the newer one"
    assert on_drive(shard) == [B]
    shard.core.pool.check()


# --------------------------------------------------------------------------------- deadlines and callers


def test_without_time_nothing_is_saved_and_it_says_so_at_once() -> None:
    shard = holding(A, B, found=disk())
    call = save(shard, within=0)
    assert result(shard, call) == PagesSaved(0, 0, 2, 2 * RAW)
    assert shard.moving is None


def test_at_its_deadline_it_says_what_is_left_and_the_batch_under_way_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MOVED_PAGES", 1)
    shard = holding(A, B, C, found=disk())
    call = save(shard, within=SECOND)
    work(shard, batches=2)
    shard.settle()
    assert result(shard, call) is None
    shard.later(SECOND)
    assert result(shard, call) == PagesSaved(1, Q8, 2, 2 * RAW)
    shard.move()
    assert shard.moving is None
    assert len(on_drive(shard)) == 2


def test_a_second_request_joins_the_first_and_a_late_one_gets_its_result() -> None:
    shard = holding(A, found=disk())
    first, second = save(shard), save(shard, within=2 * FAR)
    work(shard)
    assert result(shard, first) == result(shard, second) == PagesSaved(1, Q8, 0, 0)
    assert result(shard, save(shard)) == PagesSaved(1, Q8, 0, 0)


def test_a_shard_without_a_disk_says_that_nothing_is_saved() -> None:
    shard = holding(A)
    assert result(shard, save(shard)) == PagesSaved(0, 0, 1, RAW)


def test_a_shard_without_a_coordinator_saves() -> None:
    shard = holding(A, found=disk())
    shard.settle()
    shard.later(6 * SECOND)
    assert not shard.core.state.member(shard.now)
    call = save(shard)
    while shard.moving is None:
        shard.later(0)
    shard.move()
    assert lies(shard)[-1] == ON_DISK
    work(shard)
    assert result(shard, call) == PagesSaved(1, Q8, 0, 0)


def test_a_shard_that_is_told_to_leave_answers_at_once() -> None:
    shard = holding(A, found=disk())
    call = save(shard)
    work(shard, batches=1)
    shard.hear(leave=LeaveReason.REPLACED)
    assert result(shard, call) == PagesSaved(0, 0, 1, RAW)
    shard.move()
    assert on_drive(shard) == []


def test_a_shard_that_has_been_replaced_saves_nothing_any_more() -> None:
    shard = holding(A, found=disk())
    shard.hear(leave=LeaveReason.REPLACED)
    call = save(shard)
    assert result(shard, call) == PagesSaved(0, 0, 1, RAW)
    assert work(shard) == []


def test_a_drained_shard_saves_what_it_still_holds() -> None:
    shard = holding(A, B, found=disk())
    shard.hear(leave=LeaveReason.DRAINED)
    assert saved(shard) == PagesSaved(2, 2 * Q8, 0, 0)
    assert len(on_drive(shard)) == 2


def test_a_shard_that_is_drained_while_it_saves_goes_on() -> None:
    shard = holding(A, B, found=disk())
    call = save(shard)
    work(shard, batches=1)
    shard.hear(leave=LeaveReason.DRAINED)
    assert result(shard, call) is None
    shard.move()
    work(shard)
    assert result(shard, call) == PagesSaved(2, 2 * Q8, 0, 0)
    assert len(on_drive(shard)) == 2


# ----------------------------------------------------------------------------- what else it does meanwhile


def test_a_stopping_shard_tells_its_coordinator_and_stores_nothing_but_serves_loads() -> None:
    shard = holding(A, found=disk())
    save(shard)
    assert report(shard).info.stopping
    shard.settle()
    assert shard.reserve(attempt(2), B) == (Written.LOST,)
    assert len(pinned(shard.pin(attempt(3), A))) == 1


def test_reservations_that_wait_for_room_are_lost_when_it_stops() -> None:
    shard = tiered(pages=1, found=disk())
    shard.store(attempt(1), A)
    waits = shard.reserving(attempt(2), B, wait_ns=SECOND)
    save(shard)
    assert granted(shard, waits) == (Written.LOST,)


def test_a_stopping_shard_accepts_no_order_and_ends_the_move_under_way_first() -> None:
    shard = holding(A, B, found=disk())
    shard.demote(A)
    call = save(shard)
    assert shard.moving is not None
    assert [page.target.tier for page in shard.moving.pages] == [Tier.HOST]
    shard.move()
    assert [batch.pages[0].target.tier for batch in work(shard)] == [Tier.DISK]
    assert result(shard, call) == PagesSaved(2, 2 * Q8, 0, 0)
    shard.evict(B)
    assert lies(shard, B) == [IN_RAM, ON_DISK], "the order was not accepted"


def test_a_new_coordinator_learns_that_it_stops() -> None:
    shard = holding(A, found=disk())
    save(shard)
    shard.settle()
    shard.hear(inventory=True)
    assert inventory(shard).info.stopping


def test_blocks_with_several_pages_are_saved_whole_or_not_at_all() -> None:
    spec = MIXED
    shard = LoneShard.joined(8, host_pages=8, found=disk(files=1, pages=4), spec=spec, extent_bytes=64)
    shard.store(attempt(1), key(A, spec.whole(0), 0), key(A, spec.whole(1), 1))
    left = shard.core.pool.count(Tier.RAM)
    answer = saved(shard)
    assert (answer.pages, answer.left_pages) == (0, left), "the second page needs a file of its own"
    assert on_drive(shard) == []
