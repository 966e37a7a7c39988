"""Pages between a shard's host tier and its files: unchanged on their way down, decoded on their way up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    Move,
    NewPage,
    PageKey,
    Pin,
    PurgedEvent,
    Reserve,
    Tier,
    Tombstone,
)
from kvcluster.core.miss import Loss
from kvcluster.core.shard import tier_mover
from kvcluster.core.shard.disk_recovery import RecoveredPage
from tests.core.lone_shard import BLOCKS, A, B, C, D, LoneShard, counters, is_done, moves, pinned, running, slots
from tests.core.moving import (
    BELOW,
    DECODED,
    IN_RAM,
    INTERRUPTIONS,
    ON_DISK,
    Q8,
    RAW,
    arrived,
    disk,
    free,
    holding,
    interrupt,
    left,
    lies,
    lowered,
    on_disk,
    one_page,
    sources,
    tiered,
)
from tests.core.samples import CODED, LEFT, OURS, RIGHT, SECOND, SUMS, attempt, key, ours, root

E = BLOCKS[4]
RAW_ON_DISK = (Tier.DISK, Codec.RAW, Loss.EXACT)
Q4_ON_DISK = (Tier.DISK, Codec.Q4, Loss.Q4)


def doubled_over_disk(block: BlockHash) -> LoneShard:
    """A shard that has demoted this, has promoted it again, and has a disk tier below it."""
    shard = lowered(block, found=disk())
    shard.promote(block)
    shard.move()
    shard.settle()
    return shard


def bring_to_disk(shard: LoneShard, block: BlockHash, codec: Codec) -> None:
    """Stores it, has it demoted in that codec, and then to disk as far as there is room."""
    shard.store(attempt(9), block)
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(block, codec=codec, to=to)
        shard.move_all()
    shard.settle()


# --------------------------------------------------------------------------------------------- the way down


@pytest.mark.parametrize("codec", Codec)
def test_what_goes_to_disk_goes_as_it_is_and_is_told_of_there_before_it_leaves_the_host_tier(codec: Codec) -> None:
    shard = lowered(A, codec=codec, found=disk())
    shard.demote(A, codec=Codec.Q4, to=Tier.DISK)
    assert shard.moving is not None
    [(namespace, tenant, spec, parent, depth, source, target, sampled)] = shard.moving.pages
    assert (namespace, tenant, spec, parent, depth) == (shard.space, OURS, CODED, root(), 0)
    assert (source.tier, source.codec, source.loss, source.sums) == (Tier.HOST, codec, codec.loss, SUMS)
    assert (target.tier, target.codec, target.loss, target.nbytes) == (Tier.DISK, codec, codec.loss, source.nbytes)
    assert (target.key, target.offset) == (key(A), HEAD_BYTES + SECTOR_BYTES)
    assert not sampled
    assert shard.settle() == [], "nothing has happened yet"
    shard.move()
    assert shard.settle() == [arrived(A, Tier.DISK, codec, codec.loss), left(A, Tier.HOST)]
    [page] = shard.core.pool.ready()
    assert (page.tier, page.codec, page.loss, page.sums) == (Tier.DISK, codec, codec.loss, SUMS)
    assert free(shard, Tier.HOST) == 8 * RAW
    assert (counters(shard)["demoted"], counters(shard)["evicted"]) == (2, 0)


def test_what_had_lost_more_than_its_codec_loses_has_on_disk_too() -> None:
    shard = holding(A, loss=Loss.Q4, found=disk())
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(A, to=to)
        shard.move()
    assert lies(shard) == [(Tier.DISK, Codec.Q8, Loss.Q4)]


def test_only_what_is_encoded_on_its_way_is_sampled() -> None:
    shard = holding(A, found=disk(), q4_sampled=1)
    sampled: list[bool] = []
    for to in (Tier.HOST, Tier.DISK):
        shard.demote(A, codec=Codec.Q4, to=to)
        assert shard.moving is not None
        sampled += [page.sampled for page in shard.moving.pages]
        shard.move()
    assert sampled == [True, False]


def test_what_no_codec_encodes_goes_to_disk_raw_and_is_still_not_tried_again_when_it_was_up() -> None:
    shard = holding(A, found=disk())
    shard.demote(A)
    shard.move(unfit=[0])
    shard.move()
    shard.demote(A, to=Tier.DISK)
    shard.move()
    assert lies(shard) == [RAW_ON_DISK]
    shard.promote(A)
    shard.move()
    shard.evict(A, tier=Tier.DISK)
    assert lies(shard) == [IN_RAM], "a page that was not decoded needs no twin"
    shard.demote(A, codec=Codec.Q4)
    assert shard.moving is not None
    assert [page.target.codec for page in shard.moving.pages] == [Codec.RAW]


def test_who_reads_in_the_host_tier_reads_on_while_a_page_goes_to_disk_and_after() -> None:
    shard = lowered(A, found=disk())
    pinned(shard.pin(attempt(2), A, accept=Loss.Q8))
    shard.demote(A, to=Tier.DISK)
    [during] = pinned(shard.pin(attempt(3), A, accept=Loss.Q8))
    assert (during.tier, during.codec, during.loss) == BELOW
    shard.move()
    assert lies(shard) == [ON_DISK]
    assert free(shard, Tier.HOST) == 8 * RAW - Q8, "two still read it there"


def test_what_cannot_be_written_to_disk_is_evicted_and_told_of() -> None:
    shard = lowered(A, B, found=disk())
    shard.demote(A, B, to=Tier.DISK)
    shard.move(unfit=[0])
    assert shard.settle() == [left(A, Tier.HOST), arrived(B, *ON_DISK), left(B, Tier.HOST)]
    assert (lies(shard, A), lies(shard, B)) == ([], [ON_DISK])
    assert shard.moving is None, "it is not tried again, as what cannot be encoded is"
    assert (counters(shard)["evicted"], counters(shard)["corrupt"]) == (1, 0)
    assert running(shard) == ()


def test_what_cannot_be_written_to_disk_stays_if_its_move_keeps_it() -> None:
    shard = lowered(A, B, found=disk())
    shard.demote(A, B, to=Tier.DISK, keeps=True)
    shard.move(unfit=[0])
    assert shard.settle() == [arrived(B, *ON_DISK), left(B, Tier.HOST)]
    assert counters(shard)["evicted"] == 0


def test_what_cannot_be_written_to_disk_takes_what_was_decoded_from_it_along() -> None:
    shard = doubled_over_disk(A)
    shard.demote(A, to=Tier.DISK)
    shard.move(unfit=[0])
    assert shard.settle() == [left(A, Tier.HOST), left(A, Tier.RAM)]
    assert free(shard, Tier.DISK) == disk().capacity_bytes


@pytest.mark.parametrize("unfit", [(), (0,)], ids=["written", "not written"])
def test_a_page_found_corrupt_on_its_way_to_disk_is_condemned_and_comes_nowhere(unfit: tuple[int, ...]) -> None:
    shard = lowered(A, B, found=disk())
    shard.demote(A, B, to=Tier.DISK)
    shard.move(unfit=unfit, corrupt=[0])
    assert shard.settle() == [left(A, Tier.HOST, corrupt=True), arrived(B, *ON_DISK), left(B, Tier.HOST)]
    assert lies(shard) == []
    assert shard.moving is None
    assert (counters(shard)["evicted"], counters(shard)["corrupt"]) == (0, 1)


def test_an_order_to_disk_moves_what_lies_in_the_host_tier_and_nothing_else() -> None:
    for shard in (holding(A, found=disk()), on_disk(A), tiered(found=disk())):
        before = lies(shard)
        shard.demote(A, to=Tier.DISK)
        assert shard.moving is None and is_done(shard)
        assert shard.settle() == [] and lies(shard) == before


def test_an_order_to_disk_does_nothing_at_a_shard_without_a_disk_tier() -> None:
    shard = lowered(A)
    shard.demote(A, to=Tier.DISK)
    assert shard.moving is None and is_done(shard), "it is said at once"
    assert shard.settle() == []
    assert lies(shard) == [BELOW]
    assert counters(shard)["evicted"] == 0


def test_a_shard_without_a_host_tier_has_no_disk_tier_either() -> None:
    shard = LoneShard.joined(found=disk(), spec=CODED)
    shard.store(attempt(1), A)
    for to in (Tier.DISK, Tier.HOST):
        shard.demote(A, to=to)
        assert shard.moving is None and running(shard) == ()
    assert lies(shard) == [IN_RAM]


def test_the_parts_of_a_block_go_to_disk_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", 1)
    shard = tiered(found=disk())
    for at, block in enumerate((A, B)):
        shard.store(attempt(at), key(block, LEFT), key(block, RIGHT))
    shard.demote(A, B)
    shard.move_all()
    shard.demote(A, B, to=Tier.DISK)
    assert sources(shard) == [A, A]
    shard.move()
    assert sources(shard) == [B, B]
    assert running(shard) == (shard.ordered,)
    shard.move()
    assert [len(lies(shard, block)) for block in (A, B)] == [2, 2]
    assert running(shard) == ()


def test_a_batch_goes_one_way_so_that_the_next_finds_the_room_that_it_makes() -> None:
    shard = lowered(A, B, found=disk(), host_bytes=2 * Q8)
    shard.store(attempt(2), C, D)
    down = [Move(shard.space, block, Tier.DISK) for block in (A, B)]
    down += [Move(shard.space, block, Tier.HOST, Codec.Q8) for block in (C, D)]
    shard.order(moves(*down))
    assert sources(shard) == [A, B]
    shard.move()
    assert sources(shard) == [C, D]
    assert running(shard) == (shard.ordered,)
    shard.move()
    assert [lies(shard, block) for block in (A, B, C, D)] == [[ON_DISK]] * 2 + [[BELOW]] * 2
    assert running(shard) == ()
    assert counters(shard)["evicted"] == 0


def test_one_order_may_take_a_page_from_the_host_tier_and_then_from_ram_what_was_decoded_from_it() -> None:
    shard = doubled_over_disk(A)
    down = (Move(shard.space, A, Tier.DISK), Move(shard.space, A, Tier.HOST, Codec.Q4))
    shard.order(moves(*down))
    assert sources(shard) == [A], "it is written once and not encoded"
    shard.move()
    assert lies(shard) == [ON_DISK]
    assert running(shard) == ()


# ------------------------------------------------------------------------------------- twins and the way up


def test_what_was_decoded_stays_when_its_encoded_page_goes_to_disk_and_goes_when_that_is_evicted() -> None:
    shard = doubled_over_disk(A)
    shard.demote(A, to=Tier.DISK)
    shard.move()
    assert shard.settle() == [arrived(A, *ON_DISK), left(A, Tier.HOST)]
    assert lies(shard) == [DECODED, ON_DISK]
    shard.evict(A, tier=Tier.DISK)
    assert shard.settle() == [left(A, Tier.DISK), left(A, Tier.RAM)]
    assert lies(shard) == []
    assert (free(shard), free(shard, Tier.DISK)) == (8 * RAW, disk().capacity_bytes)


def test_a_page_comes_up_from_disk_straight_to_ram_and_stays_where_it_was_as_well() -> None:
    shard = on_disk(A)
    shard.promote(A)
    assert shard.moving is not None
    [page] = shard.moving.pages
    assert (page.tenant, page.source.tier, page.source.codec, page.source.nbytes) == (OURS, *ON_DISK[:2], Q8)
    assert (page.target.tier, page.target.codec, page.target.nbytes, page.target.loss) == (*DECODED[:2], RAW, Loss.Q8)
    shard.move()
    assert shard.settle() == [arrived(A, *DECODED)]
    assert lies(shard) == [DECODED, ON_DISK]
    assert free(shard, Tier.HOST) == 8 * RAW, "it took no room on its way"
    assert counters(shard)["promoted"] == 1


def test_what_came_up_from_disk_goes_down_by_leaving_ram() -> None:
    shard = on_disk(A)
    shard.promote(A)
    shard.move()
    shard.settle()
    shard.demote(A, codec=Codec.Q4)
    assert shard.moving is None and is_done(shard)
    assert shard.settle() == [left(A, Tier.RAM)]
    assert lies(shard) == [ON_DISK]
    assert free(shard, Tier.HOST) == 8 * RAW


def test_what_is_raw_on_disk_stays_above_when_it_is_evicted_there() -> None:
    shard = on_disk(A, codec=Codec.RAW)
    shard.promote(A)
    shard.move()
    assert lies(shard) == [IN_RAM, RAW_ON_DISK]
    shard.evict(A, tier=Tier.DISK)
    assert lies(shard) == [IN_RAM]


def test_a_page_found_corrupt_on_its_way_up_from_disk_is_condemned_there() -> None:
    shard = on_disk(A)
    shard.promote(A)
    shard.move(unfit=[0], corrupt=[0])
    assert shard.settle() == [left(A, Tier.DISK, corrupt=True)]
    assert lies(shard) == [] and free(shard) == 8 * RAW
    assert counters(shard)["corrupt"] == 1


def test_an_exact_store_takes_the_place_of_what_lies_on_disk_with_a_loss() -> None:
    shard = on_disk(A)
    slots(shard.reserve(attempt(2), A))
    assert lies(shard) == [ON_DISK], "until there is a better one"
    shard.commit(attempt(2), 0)
    assert shard.settle() == [arrived(A, *IN_RAM), left(A, Tier.DISK)]


def test_what_lies_on_disk_is_read_by_no_round_of_the_verifier() -> None:
    shard = lowered(A, B, found=disk(), scrub_bytes=2**20)
    shard.demote(A, to=Tier.DISK)
    shard.move()
    read: list[BlockHash] = []
    for _ in range(8):
        shard.settle()
        shard.later(SECOND)
        if shard.reading is not None:
            read += [slot.key.hash for slot in shard.reading.slots if slot.tier is not Tier.RAM]
            shard.verdict()
    assert B in read and A not in read


# ------------------------------------------------------------------------------------------ room in files


def test_where_no_file_is_left_for_pages_of_a_kind_the_emptiest_is_given_up() -> None:
    shard = on_disk(A, B, found=disk(files=2))
    bring_to_disk(shard, C, Codec.Q4)
    bring_to_disk(shard, D, Codec.RAW)
    assert (lies(shard, A), lies(shard, B)) == ([ON_DISK], [ON_DISK]), "in a file with more in it"
    assert (lies(shard, C), lies(shard, D)) == ([], [RAW_ON_DISK])
    assert counters(shard)["evicted"] == 1


def test_what_a_given_up_file_held_is_told_of_before_its_room_is_taken_with_what_was_decoded_from_it() -> None:
    shard = on_disk(A, found=disk(files=1))
    shard.promote(A)
    shard.move()
    shard.store(attempt(2), B)
    shard.demote(B, codec=Codec.Q4)
    shard.move()
    shard.settle()
    shard.demote(B, to=Tier.DISK)
    assert shard.settle() == [left(A, Tier.DISK), left(A, Tier.RAM)]
    shard.move()
    assert shard.settle() == [arrived(B, *Q4_ON_DISK), left(B, Tier.HOST)]


@pytest.mark.parametrize(("batch_bytes", "left_on_disk"), [(tier_mover.BATCH_BYTES, [B, C, D]), (1, [C, D, E])])
def test_one_batch_gives_up_one_file_and_what_would_have_needed_another_is_evicted(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int, left_on_disk: list[BlockHash]
) -> None:
    shard = on_disk(A, found=disk(files=2))
    bring_to_disk(shard, B, Codec.Q4)
    shard.store(attempt(1), C, D)
    shard.store(attempt(2), key(E, LEFT))
    shard.demote(C, D, codec=Codec.RAW)
    shard.demote(E)
    shard.move_all()
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", batch_bytes)
    shard.demote(C, D, E, to=Tier.DISK)
    shard.move_all()
    assert [block for block in (A, B, C, D, E) if lies(shard, block)] == left_on_disk
    assert counters(shard)["evicted"] == 2


def test_a_file_that_is_given_up_while_a_reader_uses_it_has_no_room_yet() -> None:
    shard = on_disk(A, found=disk(files=1))
    shard.call(ours(Pin(attempt(2), shard.epoch, (key(A),), Loss.Q8), shard.space))
    bring_to_disk(shard, B, Codec.Q4)
    assert (lies(shard, A), lies(shard, B)) == ([], [])
    assert counters(shard)["evicted"] == 2


def test_no_file_is_given_up_where_one_for_pages_of_that_kind_has_room() -> None:
    shard = on_disk(A, found=disk(files=2))
    bring_to_disk(shard, B, Codec.Q4)
    for block in (C, D):
        bring_to_disk(shard, block, Codec.Q8)
    assert [len(lies(shard, block)) for block in (A, B, C, D)] == [1] * 4
    assert counters(shard)["evicted"] == 0


# ------------------------------------------------------------------------------------ what comes between


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_whatever_comes_in_the_middle_of_a_move_to_disk_nothing_leaks_and_its_source_stays(how: str) -> None:
    shard = lowered(A, found=disk(), lease_ttl_ms=1_000 if how == "its lease expires" else 8_000)
    shard.demote(A, to=Tier.DISK)
    interrupt(shard, how)
    shard.move()
    assert lies(shard) == [ON_DISK if how == "a drain" else BELOW]
    assert not len(shard.core.leases)
    held = disk().capacity_bytes - free(shard, Tier.DISK)
    assert held == (HEAD_BYTES + 2 * SECTOR_BYTES if how == "a drain" else 0)


def test_a_purge_in_the_middle_of_a_move_to_disk_takes_both_and_is_erased_after_it() -> None:
    shard = lowered(A, found=disk())
    shard.demote(A, to=Tier.DISK)
    assert shard.moving is not None
    shard.hear(tombstones=(Tombstone(5, OURS),))
    assert shard.revoked == [shard.moving.attempt]
    assert [erase.purged for erase in shard.erased] == [(Tombstone(5, OURS),)]
    assert shard.settle() == [PurgedEvent(5)]
    shard.move()
    assert shard.settle() == [] and lies(shard) == []
    assert (free(shard, Tier.HOST), free(shard, Tier.DISK)) == (8 * RAW, disk().capacity_bytes)


@pytest.mark.parametrize("how", ["evicted", "replaced by a better one"])
def test_a_source_that_was_withdrawn_on_its_way_to_disk_takes_its_target_with_it(how: str) -> None:
    shard = lowered(A, found=disk())
    shard.demote(A, to=Tier.DISK)
    if how == "evicted":
        shard.evict(A, tier=Tier.HOST)
    else:
        shard.order(one_page(NewPage(key(A), root(), 0), Codec.RAW, Tier.HOST))
        shard.commit(shard.fetching[0].attempt, 0)
    shard.settle()
    shard.move()
    assert shard.settle() == []
    assert lies(shard) == ([] if how == "evicted" else [(Tier.HOST, Codec.RAW, Loss.EXACT)])
    assert free(shard, Tier.DISK) == disk().capacity_bytes


def test_nothing_is_pulled_onto_disk() -> None:
    shard = tiered(found=disk())
    shard.order(one_page(NewPage(key(A), root(), 0), Codec.Q8, Tier.DISK))
    assert shard.fetching == [] and is_done(shard)


def test_a_purge_takes_what_was_found_of_namespaces_beyond_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 2)
    specs = [replace(CODED, weights=f"sha256:{number}") for number in range(3)]
    first = HEAD_BYTES + SECTOR_BYTES
    pages = tuple(
        RecoveredPage(
            *(spec.namespace(OURS), key(A), root(), 0, Loss.Q8, Codec.Q8, 192, b"s" * 16),
            offset=number * disk().file_bytes + first,
        )
        for number, spec in enumerate(specs)
    )
    found = replace(disk(files=3), specs=tuple((OURS, spec) for spec in specs), pages=pages)
    shard = LoneShard.joined(host_pages=8, found=found, spec=specs[2], extent_bytes=64)
    shard.hear(tombstones=(Tombstone(5, OURS),))
    assert list(shard.core.pool.ready()) == []


def test_nothing_is_given_up_for_a_page_that_no_file_can_hold() -> None:
    shard = LoneShard.joined(1024, host_pages=1024, found=disk(files=1), spec=CODED, extent_bytes=64)
    bring_to_disk(shard, A, Codec.Q8)
    wide = replace(CODED, block_tokens=256)  # a raw page is 64 KiB, a file 36 KiB
    shard.attach(wide)
    space, whole = wide.namespace(OURS), wide.whole(0)
    new = NewPage(PageKey(B, 0, whole), root(), 0)
    shard.call(ours(Reserve(attempt(2), shard.epoch, (new,)), space))
    shard.commit(attempt(2), 0)
    shard.settle()
    for to in (Tier.HOST, Tier.DISK):
        move = Move(space, B, to, Codec.RAW)
        shard.order(moves(move))
        shard.move_all()
    assert lies(shard) == [ON_DISK]


def test_a_disk_without_any_room_gives_up_no_file_for_one_page() -> None:
    shard = on_disk(A, B, found=disk(files=1, pages=2))
    bring_to_disk(shard, C, Codec.Q8)
    assert [len(lies(shard, block)) for block in (A, B, C)] == [1, 1, 0]
