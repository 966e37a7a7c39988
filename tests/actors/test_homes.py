"""On which node each shard starts, given the free memory of Ray's nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvcluster.actors import cluster
from kvcluster.actors.own_ray import pools_bytes
from kvcluster.config import Config, load

POOL = 64 * 2**20


def config(shards: int) -> Config:
    return load(overrides={"shards": shards, "shard": {"device_bytes": POOL}})


def homes(monkeypatch: pytest.MonkeyPatch, shards: int, free: dict[str, float]) -> list[dict[str, Any]]:
    nodes = {node: {"memory": memory} for node, memory in free.items()} | {"a" * 56: {"CPU": 4.0}}
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: nodes)
    return cluster._homes(config(shards))


def nodes_of(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(home["scheduling_strategy"].node_id for home in found)


ONE, TWO, THREE = "1" * 56, "2" * 56, "3" * 56


def test_shards_spread_over_the_nodes_before_any_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found = homes(monkeypatch, 5, {ONE: 10.0 * POOL, TWO: 2.0 * POOL, THREE: 2.0 * POOL})
    assert sorted(nodes_of(found).values()) == [1, 2, 2]
    assert set(nodes_of(found)) == {ONE, TWO, THREE}
    assert all(home["memory"] == POOL for home in found)


def test_no_node_takes_more_shards_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = homes(monkeypatch, 5, {ONE: 4.0 * POOL, TWO: 1.9 * POOL, THREE: 0.5 * POOL})
    assert nodes_of(found) == {ONE: 4, TWO: 1}


def test_a_shard_may_begin_anew_elsewhere_when_its_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(home["scheduling_strategy"].soft for home in homes(monkeypatch, 2, {ONE: 2.0 * POOL}))


def test_where_not_all_fit_none_claims_memory_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = homes(monkeypatch, 3, {ONE: 2.5 * POOL})
    assert found == [{"scheduling_strategy": "SPREAD"}] * 3
    assert "room for 2 of 3 shards" in caplog.text


def test_a_ray_of_our_own_offers_what_its_shards_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    found = homes(monkeypatch, 3, {ONE: float(pools_bytes(config(3)))})
    assert nodes_of(found) == {ONE: 3}
