"""The interface to the bytes of every tier: what is written is read, an addressable tier gives views, and a durable one
erases purged pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcluster.config import ShardConfig
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES, FileAllocator
from kvcluster.core.ids import HASH_BYTES, BlockHash, ShardId, Tenant
from kvcluster.core.messages import Erase, PageKey, PageMove, PageSlot, Tier, Tombstone
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import NO_STORE
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import ADDRESSABLE, STORED
from kvcluster.memory.arena import Arena
from kvcluster.memory.region import HostRegion
from kvcluster.runtime.tier_store import TierStores, open_stores
from kvcluster.transport.base import Unavailable

SHARD, TENANT = ShardId("shard-0"), Tenant("t")
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=8
)
SPACE, WHOLE = SPEC.namespace(TENANT), SPEC.whole(0)
NBYTES = SPEC.page_bytes(0, WHOLE)
FILE_BYTES = HEAD_BYTES + 16 * SECTOR_BYTES
ARENA_BYTES = 64 * NBYTES


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    return ShardConfig(disk_bytes=2 * FILE_BYTES, disk_file_bytes=FILE_BYTES, disk_dir=str(tmp_path))


def regions() -> dict[Tier, HostRegion]:
    return Arena(2 * ARENA_BYTES).regions(dict.fromkeys(ADDRESSABLE, ARENA_BYTES))


@pytest.fixture
def stores(config: ShardConfig) -> Iterator[TierStores]:
    opened, _ = open_stores(config, SHARD)
    stores = TierStores(regions(), opened)
    yield stores
    stores.close()


def slot_in(tier: Tier, offset: int, number: int = 1) -> PageSlot:
    key = PageKey(BlockHash(bytes([number]) * HASH_BYTES), 0, WHOLE)
    return PageSlot(key, offset, NBYTES, number, Loss.EXACT, bytes(8 * WHOLE.layers), Codec.RAW, tier)


def place_in(tier: Tier, config: ShardConfig) -> PageSlot:
    """One that the tier's allocator gives out."""
    if tier in ADDRESSABLE:
        return slot_in(tier, 3 * NBYTES)
    key = slot_in(tier, 0).key
    offset = FileAllocator(tier.spec.nbytes(config), config.disk_file_bytes).reserve(NBYTES, (SPACE, key))
    assert offset is not None
    return slot_in(tier, offset)


def to(target: PageSlot) -> PageMove:
    return PageMove(SPACE, TENANT, SPEC, BlockHash(bytes(HASH_BYTES)), 0, slot_in(Tier.HOST, 0), target)


def data(seed: int = 7) -> bytes:
    return bytes((seed + 31 * at) % 256 for at in range(NBYTES))


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.HOST, Tier.DISK])
def test_what_is_written_to_a_tier_is_read_there(tier: Tier, stores: TierStores, config: ShardConfig) -> None:
    target, into = place_in(tier, config), memoryview(bytearray(NBYTES))
    stores.write(to(target), memoryview(data()))
    stores.read_into(target, into)
    assert bytes(into) == data() == bytes(stores.read(target))


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.HOST, Tier.DISK])
def test_a_page_is_shown_where_it_lies_in_addressable_tiers_alone(
    tier: Tier, stores: TierStores, config: ShardConfig
) -> None:
    target = place_in(tier, config)
    stores.write(to(target), memoryview(data()))
    read = stores.read(target)
    stores.write(to(target), memoryview(data(8)))
    assert bytes(read) == data(8 if tier in ADDRESSABLE else 7), "of a page in a file there is a copy"


@pytest.mark.parametrize("tier", ADDRESSABLE)
def test_what_is_filled_is_read_and_nothing_beside_it(tier: Tier, stores: TierStores, config: ShardConfig) -> None:
    target = place_in(tier, config)
    stores.write(to(target), memoryview(data()))
    with stores.fill(target, 5, 9) as room:
        room[:] = b"abcd"
    assert bytes(stores.read(target)) == data()[:5] + b"abcd" + data()[9:]
    assert bytes(stores.read(target, 4, 10)) == data()[4:5] + b"abcd" + data()[9:10]


def test_a_part_of_a_page_on_disk_is_read(stores: TierStores, config: ShardConfig) -> None:
    target = place_in(Tier.DISK, config)
    stores.write(to(target), memoryview(data()))
    assert bytes(stores.read(target, 3, 700)) == data()[3:700]


def test_what_is_not_in_its_store_cannot_be_read(stores: TierStores) -> None:
    with pytest.raises(OSError, match="truncated"):
        stores.read(slot_in(Tier.DISK, 2 * FILE_BYTES - SECTOR_BYTES // 2))


def test_nothing_is_shown_once_they_are_closed() -> None:
    stores = TierStores(regions(), {})
    stores.close()
    with pytest.raises(Unavailable, match="ending"):
        stores.read(slot_in(Tier.HOST, 0))


def test_what_was_written_is_found_by_the_next_and_what_was_purged_is_not(config: ShardConfig) -> None:
    target, stone = place_in(Tier.DISK, config), Tombstone(3, TENANT)
    for purged in (False, True):
        opened, _ = open_stores(config, SHARD)
        stores = TierStores(regions(), opened)
        stores.write(to(target), memoryview(data()))
        if purged:
            stores.erase(Erase((stone,), (stone,)))
        stores.close()
        opened, found = open_stores(config, SHARD)
        for store in opened.values():
            store.close()
        assert [page.key for page in found[Tier.DISK].pages] == ([] if purged else [target.key])
        assert found[Tier.DISK].tombstones == ((stone,) if purged else ())


def test_what_is_not_configured_is_not_opened() -> None:
    assert open_stores(ShardConfig(), SHARD) == ({}, dict.fromkeys(STORED, NO_STORE))


def test_a_store_that_cannot_be_opened_says_why_and_the_shard_does_without(config: ShardConfig) -> None:
    held, _ = open_stores(config, SHARD)
    opened, found = open_stores(config, SHARD)
    assert opened == {} and "another process uses" in found[Tier.DISK].trouble
    for store in held.values():
        store.close()
