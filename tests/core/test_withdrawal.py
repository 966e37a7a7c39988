"""Withdrawing a page, and with it what was decoded from it; and what a shard tells of its tiers."""

from __future__ import annotations

import pytest

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import GoneEvent, PageEvent, PurgedEvent, Suspect, Tier, TierUse, Tombstone
from kvcluster.core.reasons import Loss, MissReason
from tests.core.lone_shard import A, B, LoneShard, counters, end, inventory, misses, pinned, report
from tests.core.moving import Q8, RAW, doubled, left, tiered
from tests.core.world import OURS, SECOND, attempt, key


def with_twins(codec: Codec = Codec.Q8, **config: int) -> LoneShard:
    """A shard that holds A in both of its tiers, and B in the upper."""
    shard = doubled(A, codec=codec, **config)
    shard.store(attempt(2), B)
    return shard


def tiers(shard: LoneShard) -> list[Tier]:
    """Where A is to be read."""
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
    shard.order(1, A, B, tier=Tier.HOST)
    assert shard.settle() == [left(A, Tier.HOST), left(A, Tier.DEVICE)]
    assert misses(shard.pin(attempt(12), A, accept=Loss.Q4)) == [MissReason.EVICTED]
    assert pinned(shard.pin(attempt(13), B)), "which lies in the tier above alone"
    assert counters(shard)["evicted"] == 1


def test_an_order_for_the_device_tier_leaves_the_twin_below() -> None:
    shard = with_twins()
    shard.order(1, A)
    assert shard.settle() == [left(A, Tier.DEVICE)]
    assert tiers(shard) == [Tier.HOST]


def test_an_order_for_a_tier_that_a_shard_does_not_have_is_done() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.order(1, A, tier=Tier.HOST)
    assert report(shard).order == 1
    assert shard.settle() == []
    assert pinned(shard.pin(attempt(12), A))


def test_what_was_not_decoded_stays_without_its_twin() -> None:
    shard = with_twins(Codec.RAW)
    shard.order(1, A, tier=Tier.HOST)
    assert shard.settle() == [left(A, Tier.HOST)]
    assert [page.loss for page in pinned(shard.pin(attempt(12), A))] == [Loss.EXACT]


def test_a_twin_found_corrupt_takes_what_was_decoded_from_it_along() -> None:
    shard = with_twins(scrub_bytes=2**20)
    shard.verdict(scrubbed(shard).index(Tier.HOST))
    told = [event for event in shard.settle() if isinstance(event, GoneEvent)]
    assert told == [left(A, Tier.HOST, corrupt=True), left(A, Tier.DEVICE)]
    assert counters(shard)["corrupt"] == 1


def test_both_twins_found_corrupt_at_once_are_told_of_once_each() -> None:
    shard = with_twins(scrub_bytes=2**20)
    assert sorted(scrubbed(shard)) == [Tier.DEVICE, Tier.DEVICE, Tier.HOST]
    shard.verdict(0, 1, 2)
    told = [event for event in shard.settle() if isinstance(event, GoneEvent) and event.key == key(A)]
    assert sorted(event.tier for event in told) == [Tier.DEVICE, Tier.HOST]
    assert list(shard.core.pool.everything()) == []


def test_the_upper_of_twins_is_condemned_alone_when_it_is_found_corrupt() -> None:
    shard = with_twins()
    shard.call(lambda call: Suspect(call, OURS, shard.space, shard.epoch, (key(A),)))
    assert shard.reading is not None
    read = [slot.tier for slot in shard.reading.slots]
    assert sorted(read) == [Tier.DEVICE, Tier.HOST], "which of them the reader had, he does not know"
    shard.verdict(read.index(Tier.DEVICE))
    assert shard.settle() == [left(A, Tier.DEVICE, corrupt=True)]
    assert tiers(shard) == [Tier.HOST]


def test_a_purge_takes_both_twins() -> None:
    shard = with_twins()
    shard.hear(tombstones=(Tombstone(3, OURS),))
    assert shard.settle() == [PurgedEvent(3)]
    assert list(shard.core.pool.everything()) == []
    assert counters(shard)["purged"] == 3


def test_the_readers_of_either_twin_read_on_when_both_are_withdrawn() -> None:
    shard = with_twins()
    assert [page.tier for page in pinned(shard.pin(attempt(12), A, accept=Loss.Q8))] == [Tier.DEVICE]
    shard.order(1, A)
    assert [page.tier for page in pinned(shard.pin(attempt(13), A, accept=Loss.Q8))] == [Tier.HOST]
    shard.order(2, A, tier=Tier.HOST)
    allocators = shard.core.pool.allocators
    assert [allocators[tier].used_bytes for tier in Tier] == [2 * RAW, Q8]
    assert end(shard, attempt(12)) and end(shard, attempt(13))
    assert [allocators[tier].used_bytes for tier in Tier] == [RAW, 0]


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_shard_tells_of_each_tier_that_it_has(host_pages: int) -> None:
    shard = tiered(host_pages=host_pages)
    shard.store(attempt(1), A, B)
    shard.demote(A)
    shard.move_all()
    shard.settle()
    shard.later(SECOND)
    info = report(shard).info
    if host_pages:
        assert info.below == (TierUse(Tier.HOST, 8 * RAW, 8 * RAW - Q8, 1),)
        assert (info.lowest, info.use(Tier.HOST)) == (Tier.HOST, info.below[0])
        assert info.use(Tier.DEVICE) == TierUse(Tier.DEVICE, 8 * RAW, 7 * RAW, 1)
    else:
        assert info.below == ()
        assert (info.lowest, info.use(Tier.HOST)) == (Tier.DEVICE, TierUse(Tier.HOST, 0, 0, 0))
        assert info.use(Tier.DEVICE) == TierUse(Tier.DEVICE, 8 * RAW, 6 * RAW, 2)


def test_an_inventory_tells_of_both_twins() -> None:
    shard = with_twins()
    shard.hear(inventory=True)
    told = [(page.tier, page.codec, page.loss) for page in inventory(shard).pages if page.key == key(A)]
    assert told == [(Tier.DEVICE, Codec.RAW, Loss.Q8), (Tier.HOST, Codec.Q8, Loss.Q8)]


def test_an_inventory_tells_of_no_page_that_is_on_its_way_and_the_stream_tells_of_it_then() -> None:
    shard = with_twins()
    shard.demote(B)
    shard.hear(inventory=True)
    assert [(page.key, page.tier) for page in inventory(shard).pages if page.key == key(B)] == [(key(B), Tier.DEVICE)]
    shard.move()
    told = [(event.key.hash, event.tier) for event in shard.settle()[3:] if isinstance(event, PageEvent | GoneEvent)]
    assert told == [(B, Tier.HOST), (B, Tier.DEVICE)]
