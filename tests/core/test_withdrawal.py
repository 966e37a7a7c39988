"""Withdrawing a page together with the pages that were decoded from it, and what a shard reports of its tiers."""

from __future__ import annotations

from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import SECTOR_BYTES
from kvcluster.core.ids import CLUSTER
from kvcluster.core.messages import (
    NewPage,
    PageEvent,
    PurgedEvent,
    RemovedEvent,
    ShardInfo,
    Suspect,
    Tier,
    TierUse,
    Tombstone,
    Written,
)
from kvcluster.core.miss import Loss, MissReason
from tests.core.lone_shard import A, B, C, D, LoneShard, counters, end, inventory, is_done, misses, pinned, report
from tests.core.moving import Q8, RAW, arrived, doubled, left, one_page, tiered
from tests.core.samples import CODED, OURS, SECOND, attempt, key, ours, root
from tests.core.test_disk_recovery import FILE, DiskShard, found, lying

TIERS = (Tier.RAM, Tier.HOST, Tier.DISK)


def with_twins(codec: Codec = Codec.Q8, **config: int) -> LoneShard:
    """A shard that holds A in both of its tiers, and B in the upper."""
    shard = doubled(A, codec=codec, **config)
    shard.store(attempt(2), B)
    return shard


def tiers(shard: LoneShard) -> list[Tier]:
    """Returns the tiers from which A can be read."""
    return [page.tier for page in shard.core.pool.ready() if page.key == key(A)]


def scrubbed(shard: LoneShard) -> list[Tier]:
    """Has it read all that it holds again; where that lies."""
    for _ in range(3):
        if shard.reading is not None:
            shard.verdict()
        shard.settle()
        shard.later(20 * SECOND)
        shard.settle()
    assert shard.reading is not None
    return [slot.tier for slot in shard.reading.slots]


def test_an_order_for_the_tier_below_takes_what_was_decoded_from_it_too_and_nothing_else() -> None:
    shard = with_twins()
    shard.evict(A, B, tier=Tier.HOST)
    assert shard.settle() == [left(A, Tier.HOST), left(A, Tier.RAM)]
    assert misses(shard.pin(attempt(12), A, accept=Loss.Q4)) == [MissReason.EVICTED]
    assert pinned(shard.pin(attempt(13), B)), "which lies in the tier above alone"
    assert counters(shard)["evicted"] == 1


def test_an_order_for_the_ram_tier_leaves_the_twin_below() -> None:
    shard = with_twins()
    shard.evict(A)
    assert shard.settle() == [left(A, Tier.RAM)]
    assert tiers(shard) == [Tier.HOST]


def test_an_order_for_a_tier_that_a_shard_does_not_have_is_done() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.evict(A, tier=Tier.HOST)
    assert is_done(shard)
    assert shard.settle() == []
    assert pinned(shard.pin(attempt(12), A))


def test_what_was_not_decoded_stays_without_its_twin() -> None:
    shard = with_twins(Codec.RAW)
    shard.evict(A, tier=Tier.HOST)
    assert shard.settle() == [left(A, Tier.HOST)]
    assert [page.loss for page in pinned(shard.pin(attempt(12), A))] == [Loss.EXACT]


def test_a_twin_found_corrupt_takes_what_was_decoded_from_it_along() -> None:
    shard = with_twins(scrub_bytes=2**20)
    shard.verdict(scrubbed(shard).index(Tier.HOST))
    told = [event for event in shard.settle() if isinstance(event, RemovedEvent)]
    assert told == [left(A, Tier.HOST, corrupt=True), left(A, Tier.RAM)]
    assert counters(shard)["corrupt"] == 1


def test_both_twins_found_corrupt_at_once_are_told_of_once_each() -> None:
    shard = with_twins(scrub_bytes=2**20)
    assert sorted(scrubbed(shard)) == [Tier.RAM, Tier.RAM, Tier.HOST]
    shard.verdict(0, 1, 2)
    told = [event for event in shard.settle() if isinstance(event, RemovedEvent) and event.key == key(A)]
    assert sorted(event.tier for event in told) == [Tier.RAM, Tier.HOST]
    assert list(shard.core.pool.everything()) == []


def test_the_upper_of_twins_is_condemned_alone_when_it_is_found_corrupt() -> None:
    shard = with_twins()
    shard.call(ours(Suspect(shard.epoch, (key(A),)), shard.space))
    assert shard.reading is not None
    read = [slot.tier for slot in shard.reading.slots]
    assert sorted(read) == [Tier.RAM, Tier.HOST], "the reader does not know which of them it had"
    shard.verdict(read.index(Tier.RAM))
    assert shard.settle() == [left(A, Tier.RAM, corrupt=True)]
    assert tiers(shard) == [Tier.HOST]


def test_a_purge_takes_both_twins() -> None:
    shard = with_twins()
    shard.hear(tombstones=(Tombstone(3, OURS),))
    assert shard.settle() == [PurgedEvent(3)]
    assert list(shard.core.pool.everything()) == []
    assert counters(shard)["purged"] == 3


def test_the_readers_of_either_twin_read_on_when_both_are_withdrawn() -> None:
    shard = with_twins()
    assert [page.tier for page in pinned(shard.pin(attempt(12), A, accept=Loss.Q8))] == [Tier.RAM]
    shard.evict(A)
    assert [page.tier for page in pinned(shard.pin(attempt(13), A, accept=Loss.Q8))] == [Tier.HOST]
    shard.evict(A, tier=Tier.HOST)
    allocators = shard.core.pool.allocators
    assert [allocator.used_bytes for allocator in allocators.values()] == [2 * RAW, Q8]
    assert end(shard, attempt(12)) and end(shard, attempt(13))
    assert [allocator.used_bytes for allocator in allocators.values()] == [RAW, 0]


def info_of(shard: LoneShard) -> ShardInfo:
    """After A and B were stored and A was demoted."""
    shard.store(attempt(1), A, B)
    shard.demote(A)
    shard.move_all()
    shard.settle()
    shard.later(SECOND)
    return report(shard).info


def test_a_shard_without_tiers_below_tells_of_none() -> None:
    info = info_of(tiered(host_pages=0))
    assert (info.others, info.tiers) == ((), (Tier.RAM,))
    assert [info.use(tier) for tier in TIERS] == [
        TierUse(Tier.RAM, 8 * RAW, 6 * RAW, 2),
        TierUse(Tier.HOST, 0, 0, 0),
        TierUse(Tier.DISK, 0, 0, 0),
    ]


def test_a_shard_tells_of_each_tier_that_it_has() -> None:
    info = info_of(tiered())
    assert info.others == (TierUse(Tier.HOST, 8 * RAW, 8 * RAW - Q8, 1),)
    assert info.tiers == (Tier.RAM, Tier.HOST)
    assert [info.use(tier) for tier in TIERS] == [
        TierUse(Tier.RAM, 8 * RAW, 7 * RAW, 1),
        info.others[0],
        TierUse(Tier.DISK, 0, 0, 0),
    ]


def test_a_shard_tells_of_its_disk_tier_last() -> None:
    info = info_of(DiskShard.knowing(found(*lying(C, D), files=2)))
    disk = TierUse(Tier.DISK, 2 * FILE, FILE + 2 * SECTOR_BYTES, 2)
    assert info.others == (TierUse(Tier.HOST, 8 * RAW, 8 * RAW - Q8, 1), disk)
    assert (info.tiers, info.use(Tier.DISK)) == (TIERS, disk)


# ------------------------------------------------------------------------------------------------ on disk


def decoded_from_disk(**config: int) -> DiskShard:
    """A shard that holds A on disk and, decoded from that, in RAM."""
    shard = DiskShard.knowing(found(*lying(A)), spec=CODED, **config)
    shard.order_moves(Tier.RAM, A)
    shard.move_all()
    shard.settle()
    assert tiers(shard) == [Tier.RAM, Tier.DISK]
    return shard


def test_an_order_for_the_disk_tier_takes_what_was_decoded_from_it_too() -> None:
    shard = decoded_from_disk()
    shard.evict(A, tier=Tier.DISK)
    assert shard.settle() == [left(A, Tier.DISK), left(A, Tier.RAM)]
    assert counters(shard)["evicted"] == 1


def test_an_order_for_the_ram_tier_leaves_the_twin_on_disk() -> None:
    shard = decoded_from_disk()
    shard.evict(A)
    assert shard.settle() == [left(A, Tier.RAM)]
    assert tiers(shard) == [Tier.DISK]


def test_what_was_decoded_stays_while_its_twin_goes_down_to_disk_and_goes_with_it_there() -> None:
    shard = DiskShard.knowing(found())
    shard.store(attempt(1), A)
    for tier in (Tier.HOST, Tier.RAM):
        shard.order_moves(tier, A)
        shard.move_all()
    shard.settle()
    assert tiers(shard) == [Tier.RAM, Tier.HOST]
    shard.order_moves(Tier.DISK, A)
    shard.move_all()
    assert shard.settle() == [arrived(A, Tier.DISK, Codec.Q8, Loss.Q8), left(A, Tier.HOST)]
    assert tiers(shard) == [Tier.RAM, Tier.DISK]
    shard.evict(A, tier=Tier.DISK)
    assert shard.settle() == [left(A, Tier.DISK), left(A, Tier.RAM)]


def test_what_was_decoded_goes_with_a_page_on_disk_that_its_reader_finds_corrupt() -> None:
    shard = decoded_from_disk()
    reader = shard.pinning(attempt(1), A)
    assert pinned(shard.replies[reader])
    shard.pinning(attempt(2), A, tenant=CLUSTER)
    shard.read(0)
    assert shard.settle() == [left(A, Tier.DISK, corrupt=True), left(A, Tier.RAM)]
    ram, host, disk = shard.core.pool.allocators.values()
    assert (ram.used_bytes, host.used_bytes, disk.used_bytes) == (RAW, 0, 0), "one is still being read"
    assert end(shard, attempt(1)) and end(shard, attempt(2))
    assert (ram.used_bytes, ram.free_bytes) == (0, 8 * RAW)


def test_what_was_decoded_is_withdrawn_alone_when_it_is_found_corrupt() -> None:
    shard = decoded_from_disk(scrub_bytes=2**20)
    while shard.reading is None:
        shard.later(20 * SECOND)
        shard.settle()
    assert [slot.tier for slot in shard.reading.slots] == [Tier.RAM]
    shard.verdict(0)
    assert shard.settle() == [left(A, Tier.RAM, corrupt=True)]
    assert tiers(shard) == [Tier.DISK]


def test_a_purge_takes_what_lies_on_disk_and_what_was_decoded_from_it() -> None:
    shard = decoded_from_disk()
    shard.hear(tombstones=(Tombstone(3, OURS),))
    assert shard.settle() == [PurgedEvent(3)]
    assert list(shard.core.pool.everything()) == []
    assert counters(shard)["purged"] == 2


def test_an_inventory_tells_of_both_twins() -> None:
    shard = with_twins()
    shard.hear(inventory=True)
    told = [(page.tier, page.codec, page.loss) for page in inventory(shard).pages if page.key == key(A)]
    assert told == [(Tier.RAM, Codec.RAW, Loss.Q8), (Tier.HOST, Codec.Q8, Loss.Q8)]


def test_an_inventory_tells_of_no_page_that_is_on_its_way_and_the_stream_tells_of_it_then() -> None:
    shard = with_twins()
    shard.demote(B)
    shard.hear(inventory=True)
    assert [(page.key, page.tier) for page in inventory(shard).pages if page.key == key(B)] == [(key(B), Tier.RAM)]
    shard.move()
    told = [(event.key.hash, event.tier) for event in shard.settle()[3:] if isinstance(event, PageEvent | RemovedEvent)]
    assert told == [(B, Tier.HOST), (B, Tier.RAM)]


def test_a_page_that_is_committed_after_one_that_has_lost_less_gives_way() -> None:
    shard = tiered()
    shard.reserve(attempt(1), A, loss=Loss.Q4)
    better = NewPage(key(A), root(), 0, Loss.Q8)
    shard.order(one_page(better, Codec.Q8, Tier.HOST))
    shard.commit(shard.fetching[0].attempt, 0)
    assert list(shard.commit(attempt(1), 0)) == [Written.DUPLICATE]
    shard.settle()
    assert [page.loss for page in pinned(shard.pin(attempt(2), A, accept=Loss.Q8))] == [Loss.Q8]
