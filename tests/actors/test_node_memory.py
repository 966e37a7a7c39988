"""Pools are summed before anything starts, against the memory of the machine or its container."""

from __future__ import annotations

import pytest

from kvcluster.actors.node_memory import bytes_for_pools, checked_bytes_for_pools
from kvcluster.config import Config, load
from kvcluster.errors import ConfigError

GIB = 2**30


def config(shards: int, **shard: object) -> Config:
    return load(overrides={"shards": shards, "shard": shard})


def test_a_hundred_pools_of_a_gib_do_not_fit_in_24() -> None:
    with pytest.raises(ConfigError, match=r"100 shard\(s\) with 100 GiB of pools in all do not fit: of the 24 GiB"):
        checked_bytes_for_pools(config(100, ram_bytes=GIB), 24 * GIB)


def test_every_tier_in_memory_and_every_group_counts() -> None:
    assert checked_bytes_for_pools(config(2, ram_bytes=8 * GIB), 24 * GIB) >= 16 * GIB
    with pytest.raises(ConfigError, match="2 shard"):
        checked_bytes_for_pools(config(2, ram_bytes=8 * GIB, host_bytes=4 * GIB), 24 * GIB)
    groups = {"a": {"shard": {"ram_bytes": 12 * GIB}}, "b": {"shard": {"ram_bytes": 12 * GIB}}}
    with pytest.raises(ConfigError, match="2 shard"):
        checked_bytes_for_pools(load(overrides={"groups": groups}), 24 * GIB)


def test_each_process_needs_room_beside_the_pools() -> None:
    assert bytes_for_pools(24 * GIB, shards=9) < bytes_for_pools(24 * GIB, shards=1) < 0.9 * 24 * GIB
    assert bytes_for_pools(GIB // 2) == 0
