"""The properties of each tier, and how a shard with any combination of tiers uses them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pkgutil import resolve_name

import pytest

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import ALIGN_BYTES
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import ShardInfo, TierUse, Tombstone
from kvcluster.core.shard.disk_recovery import RecoveredPages, applied_tombstones
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.tiers import ADDRESSABLE, INGEST, READ_ORDER, STAGING, STORED, Takes, Tier, above
from kvcluster.wire import common
from tests.core.lone_shard import LoneShard, report
from tests.core.samples import SECOND

FILE = HEAD_BYTES + 16 * SECTOR_BYTES
OPENED = RecoveredPages(4 * FILE, FILE)
OLD, NEW = Tombstone(1, Tenant("t")), Tombstone(2, Tenant("t"))


def everything() -> ShardConfig:
    return ShardConfig(ram_bytes=1_024, host_bytes=2_048, disk_bytes=4 * FILE, extent_bytes=ALIGN_BYTES)


def test_ranks_rise_from_the_fastest_tier_to_the_slowest() -> None:
    assert [tier.value for tier in Tier] == list(range(len(Tier)))
    assert [Tier(rank) for rank in range(len(Tier))] == list(Tier)


def test_readers_prefer_tiers_that_they_read_in_place() -> None:
    assert sorted(Tier, key=READ_ORDER.__getitem__) == [*ADDRESSABLE, *STORED]
    assert ADDRESSABLE[0] is INGEST and STAGING is ADDRESSABLE[-1]


def test_the_fastest_tier_takes_raw_pages_and_the_staging_tier_takes_any() -> None:
    assert INGEST.spec.takes is Takes.RAW and STAGING.spec.takes is Takes.ENCODED


@pytest.mark.parametrize("tier", STORED)
def test_a_tier_that_is_not_addressable_names_its_allocator_and_what_opens_its_store(tier: Tier) -> None:
    assert tier.spec.allocator is not None and callable(resolve_name(tier.spec.store))


@pytest.mark.parametrize("tier", STORED)
def test_nothing_is_encoded_into_a_store(tier: Tier) -> None:
    assert tier.spec.takes in (Takes.UNCHANGED, Takes.RAW)


@pytest.mark.parametrize("tier", ADDRESSABLE)
def test_an_addressable_tier_lies_in_the_arena_and_ends_with_the_process(tier: Tier) -> None:
    assert (tier.spec.allocator, tier.spec.store, tier.spec.durable) == (None, "", False)


def test_no_two_tiers_are_one_medium_to_those_who_listen_to_events() -> None:
    assert len(dict.fromkeys(tier.spec.medium for tier in Tier)) == len(Tier)


def test_each_tier_has_a_number_on_the_wire() -> None:
    assert common.TIER.decode_all(common.TIER.encode(tier) for tier in Tier) == list(Tier)


def test_a_tier_stays_itself_where_it_is_pickled() -> None:
    assert [pickle.loads(pickle.dumps(tier)) for tier in Tier] == list(Tier)


def test_pages_are_demoted_from_each_tier_into_the_next_that_the_shard_has() -> None:
    assert [above(lower, tuple(Tier)) for _, lower in pairwise(Tier)] == list(Tier)[:-1]
    assert above(Tier.DISK, (Tier.RAM, Tier.DISK)) is Tier.RAM, "it has none between"
    assert above(Tier.GPU, tuple(Tier)) is None, "pages are promoted into it"
    assert above(INGEST, (INGEST, Tier.HOST)) is None, "and into this where there is no other"
    assert above(Tier.DISK, (Tier.RAM, Tier.HOST)) is None, "it has no such tier"


def test_a_shards_own_words_tell_its_neighbours() -> None:
    shard = LoneShard.joined()
    shard.later(SECOND)
    info = report(shard).info
    assert (info.above(Tier.HOST), info.next_below(INGEST)) == (None, TierUse(INGEST, 0, 0, 0))
    host, disk = TierUse(Tier.HOST, 9, 5, 1), TierUse(Tier.DISK, 20, 6, 2)
    whole: ShardInfo = replace(info, others=(host, disk))
    assert (whole.above(Tier.DISK), whole.above(Tier.HOST)) == (Tier.HOST, INGEST)
    assert (whole.next_below(INGEST), whole.next_below(STAGING)) == (host, disk)
    gpu = TierUse(Tier.GPU, 7, 3, 1)
    on_gpu = replace(info, others=(gpu, host))
    assert (on_gpu.tiers, on_gpu.above(INGEST)) == ((Tier.GPU, Tier.RAM, Tier.HOST), Tier.GPU)
    assert (on_gpu.next_below(Tier.GPU), on_gpu.next_below(INGEST)) == (on_gpu.use(INGEST), host)


def test_a_pool_has_the_tiers_that_are_configured_and_opened() -> None:
    assert PagePool.of(everything(), {Tier.DISK: OPENED}).tiers == (Tier.RAM, Tier.HOST, Tier.DISK)
    assert PagePool.of(everything(), {Tier.DISK: RecoveredPages(trouble="no drive")}).tiers == (Tier.RAM, Tier.HOST)
    assert PagePool.of(replace(everything(), host_bytes=0), {Tier.DISK: OPENED}).tiers == (Tier.RAM,)
    assert PagePool.of(everything(), {Tier.DISK: OPENED, Tier.GPU: OPENED}).tiers == tuple(Tier)


def test_only_what_every_store_has_carried_out_counts_as_carried_out() -> None:
    assert applied_tombstones([]) == ()
    assert applied_tombstones([replace(OPENED, tombstones=(OLD, NEW))]) == (OLD, NEW)
    one, other = replace(OPENED, tombstones=(OLD, NEW)), replace(OPENED, tombstones=(OLD,))
    assert applied_tombstones([one, other]) == applied_tombstones([other, one]) == (OLD,)
    assert applied_tombstones([one, RecoveredPages(trouble="no drive")]) == (OLD, NEW), (
        "a store that could not be opened holds nothing"
    )
