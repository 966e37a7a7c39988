"""Which shards a cluster should run, and where each starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.config import SHARD_RESOURCE, Config, GroupConfig, load
from kvcluster.core.ids import ShardId
from kvcluster.core.shard_scheduler import (
    GPU,
    MEMORY,
    Node,
    RunningShard,
    Schedule,
    Start,
    expected,
    group_of,
    pool_bytes,
    schedule,
    wanted,
)

GIB = 2**30


def config(shards: int = 3, **shard: Any) -> Config:
    return load(overrides={"shards": shards, "shard": {"ram_bytes": GIB, **shard}})


def with_disk(shards: int = 2) -> Config:
    return config(shards, host_bytes=GIB, disk_bytes=GIB, disk_dir="/disk")


def node(
    name: str, *, shards: float = 4, memory: float = 8 * GIB, volumes: tuple[str, ...] = (), **labels: str
) -> Node:
    has = {SHARD_RESOURCE: shards, MEMORY: memory}
    return Node(f"id-{name}", name, has, has, labels, frozenset(map(ShardId, volumes)))


def runs(shard: str, on: str = "", *, draining: bool = False) -> RunningShard:
    return RunningShard(ShardId(shard), f"id-{on}" if on else "", draining)


def homes(found: Schedule) -> dict[str, str]:
    return {start.shard: start.node.removeprefix("id-") for start in found.start}


def test_shards_spread_over_the_nodes_before_any_takes_a_second() -> None:
    found = schedule(config(5).shard_groups, [node("a", memory=20 * GIB), node("b"), node("c")], [])
    assert sorted(Counter(homes(found).values()).values()) == [1, 2, 2]
    assert set(homes(found).values()) == {"a", "b", "c"}
    assert sorted(homes(found)) == [f"shard-{number}" for number in range(5)]
    assert not found.waiting and not any(start.bound for start in found.start)


def test_no_node_takes_more_than_its_memory_and_its_resource_allow() -> None:
    found = schedule(config(6).shard_groups, [node("a", shards=2), node("b", memory=1.5 * GIB)], [])
    assert Counter(homes(found).values()) == {"a": 2, "b": 1}
    assert found.waiting == ("3 shards of group shard wait for a node with kvcluster_shard 1, 1 GiB of memory free",)
    assert not found.settled


def test_a_pool_that_no_node_could_ever_hold_is_named() -> None:
    found = schedule(config(1, ram_bytes=64 * GIB).shard_groups, [node("a"), node("b", memory=9 * GIB)], [])
    assert not found.start
    (sentence,) = found.waiting
    assert "64 GiB of memory free: none is large enough; the largest has 9 GiB of memory for pools" in sentence


def test_a_cluster_that_is_as_configured_is_left_alone() -> None:
    running = [runs("shard-0", "a"), runs("shard-1", "b"), runs("shard-2", "a")]
    assert schedule(config().shard_groups, [node("a"), node("b")], running).settled


def test_a_lost_shard_starts_again_under_its_name() -> None:
    found = schedule(config().shard_groups, [node("a"), node("b")], [runs("shard-0", "a"), runs("shard-2", "a")])
    assert homes(found) == {"shard-1": "b"}


def test_a_shard_that_waits_for_a_node_is_not_started_twice() -> None:
    found = schedule(config(2).shard_groups, [node("a")], [runs("shard-0", "a"), runs("shard-1")])
    assert not found.start
    assert found.waiting == ("shard-1 waits for a node with kvcluster_shard 1, 1 GiB of memory free",)


def test_the_replacement_of_a_draining_shard_starts_before_it_is_gone() -> None:
    running = [runs("shard-0", "a", draining=True), runs("shard-1", "b")]
    assert homes(schedule(config(2).shard_groups, [node("a"), node("b"), node("c")], running)) == {"shard-2": "c"}


def test_shards_that_are_too_many_drain_the_latest_first_and_waiting_ones_end_at_once() -> None:
    running = [runs("shard-0", "a"), runs("shard-1"), runs("shard-2", "b"), runs("shard-3", "b")]
    found = schedule(config(2).shard_groups, [node("a"), node("b")], running)
    assert (found.drain, found.kill) == ((ShardId("shard-3"),), (ShardId("shard-1"),))
    draining = [replace(each, draining=each.shard == "shard-3") for each in running if each.shard != "shard-1"]
    assert schedule(config(2).shard_groups, [node("a"), node("b")], draining).settled


def test_a_group_that_is_configured_no_more_drains() -> None:
    assert schedule(config(1).shard_groups, [node("a")], [runs("shard-0", "a"), runs("gpu-0", "a")]).drain == ("gpu-0",)


def test_the_shards_of_a_node_that_leaves_drain_beside_their_replacements() -> None:
    nodes = [replace(node("a"), leaving=True), node("b")]
    running = [runs("shard-0", "a"), runs("shard-1", "b")]
    found = schedule(config(2).shard_groups, nodes, running)
    assert homes(found) == {"shard-2": "b"}
    assert found.drain == ("shard-0",)
    draining = [*(replace(each, draining=each.shard == "shard-0") for each in running), runs("shard-2", "b")]
    assert schedule(config(2).shard_groups, nodes, draining).settled


# ------------------------------------------------------------------------------------------------------ groups


def groups(**named: dict[str, Any]) -> dict[str, GroupConfig]:
    return dict(load(overrides={"shard": {"ram_bytes": GIB}, "groups": named}).shard_groups)


def test_a_group_goes_to_the_nodes_with_its_resources_and_labels() -> None:
    gpu = Node("id-g", "g", {"gpus": 2.0, MEMORY: 8.0 * GIB}, {"gpus": 2.0, MEMORY: 8.0 * GIB}, {"zone": "x"})
    wants = groups(
        gpu={"shards": 2, "resources": {"gpus": 1.0}, "labels": {"zone": "x"}},
        cpu={"shards": 1},
        far={"labels": {"zone": "y"}},
    )
    found = schedule(wants, [gpu, node("a")], [])
    assert homes(found) == {"gpu-0": "g", "gpu-1": "g", "cpu-0": "a"}
    far = "a shard of group far waits for a node with kvcluster_shard 1, 1 GiB of memory free, label zone=y"
    assert found.waiting == (f"{far}: no node is of that kind",)


def test_shards_with_pools_on_gpus_take_the_parts_that_they_claim() -> None:
    wants = config(5, host_bytes=GIB, gpu_bytes=GIB, num_gpus=0.5).shard_groups
    has = node("a").free | {GPU: 1.0}
    found = schedule(wants, [replace(node("a"), free=has, total=has), node("b")], [])
    assert list(homes(found).values()) == ["a", "a"], "and none on the node without"
    assert found.waiting == (
        "3 shards of group shard wait for a node with kvcluster_shard 1, GPU 0.5, 2 GiB of memory free",
    )
    (without,) = schedule(config(1, host_bytes=GIB, gpu_bytes=GIB, num_gpus=1).shard_groups, [node("b")], []).waiting
    assert "GPU 1, 2 GiB of memory free: no node is of that kind" in without


def test_a_group_of_one_a_node_follows_the_nodes() -> None:
    each = groups(all={"per_node": True})
    two = [node("a", shards=1), node("b", shards=1), node("other", shards=0)]
    assert wanted(each["all"], two) == 2
    running = [runs("all-0", "a"), runs("all-1", "b")]
    assert Counter(homes(schedule(each, two, [])).values()) == {"a": 1, "b": 1}
    assert schedule(each, two, running).settled
    full = [replace(one, free={**one.free, SHARD_RESOURCE: 0.0}) for one in two]
    assert homes(schedule(each, [*full, node("c", shards=1)], running)) == {"all-2": "c"}
    assert schedule(each, two[:1], [runs("all-0", "a"), runs("all-1")]).kill == ("all-1",)


# ----------------------------------------------------------------------------------------------------- volumes


def test_a_shard_starts_where_its_volume_lies_and_nowhere_else() -> None:
    nodes = [node("a", volumes=("shard-1",)), node("b"), node("c", volumes=("shard-0",))]
    found = schedule(with_disk().shard_groups, nodes, [])
    assert homes(found) == {"shard-0": "c", "shard-1": "a"}
    assert all(start.bound for start in found.start)


def test_a_shard_whose_node_is_away_is_waited_for_and_replaced_under_another_name_afterwards() -> None:
    nodes, running = [node("a", volumes=("shard-0",)), node("b")], [runs("shard-0", "a")]
    found = schedule(with_disk().shard_groups, nodes, running, {ShardId("shard-1"): "c"})
    assert not found.start
    assert found.waiting == ("shard-1 waits for node c, where its volume lies",)
    found = schedule(with_disk().shard_groups, nodes, running, given_up=[ShardId("shard-1")])
    assert homes(found) == {"shard-2": "b"}


def test_shards_are_expected_that_run_start_or_are_waited_for_and_none_whose_place_was_taken() -> None:
    nodes, running = [node("a", volumes=("shard-0",)), node("b")], [runs("shard-0", "a")]
    names = {each: ShardId(f"shard-{each}") for each in range(3)}
    found = schedule(with_disk().shard_groups, nodes, running, {names[1]: "c"})
    assert expected(found, running, {names[1]: "c"}) == {names[0], names[1]}
    found = schedule(with_disk().shard_groups, nodes, running, given_up=[names[1]])
    assert expected(found, running) == {names[0], names[2]}
    found = schedule(config(1).shard_groups, [node("a")], [runs("shard-0", "a"), runs("shard-1")])
    assert expected(found, [runs("shard-0", "a"), runs("shard-1")]) == {names[0]}  # the other waited and is not wanted


def test_a_volume_that_comes_back_too_late_is_an_orphan() -> None:
    nodes = [node("a", volumes=("shard-0",)), node("b", volumes=("shard-2",)), node("c", volumes=("shard-1",))]
    found = schedule(with_disk().shard_groups, nodes, [runs("shard-0", "a"), runs("shard-2", "b")])
    assert found == Schedule(orphans=((ShardId("shard-1"), "c"),))


def test_a_volume_is_preferred_to_a_fresh_name() -> None:
    nodes = [node("a"), node("b", volumes=("shard-7",))]
    assert homes(schedule(with_disk(1).shard_groups, nodes, [])) == {"shard-7": "b"}


def test_a_shard_waits_for_room_beside_its_volume_rather_than_begin_empty_elsewhere() -> None:
    found = schedule(with_disk(1).shard_groups, [node("a"), node("b", memory=GIB, volumes=("shard-0",))], [])
    assert not found.start
    assert found.waiting[0].startswith(
        "shard-0 waits for kvcluster_shard 1, 2 GiB of memory free on node b, where its volume"
    )


# --------------------------------------------------------------------------------------------------- invariants

NAMES = st.sampled_from("abcd")
VOLUMES = st.lists(st.integers(0, 5), max_size=3, unique=True)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Config, list[Node], list[RunningShard]]:
    volumes: set[int] = set()
    nodes = []
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        here = [number for number in draw(VOLUMES) if number not in volumes]
        volumes.update(here)
        memory = draw(st.integers(0, 6)) * GIB
        names = tuple(f"shard-{number}" for number in here)
        nodes.append(node(name, shards=draw(st.integers(0, 3)), memory=memory, volumes=names))
    wants = with_disk(draw(st.integers(1, 5))) if draw(st.booleans()) else config(draw(st.integers(1, 5)))
    running = [
        runs(f"shard-{number}", draw(st.sampled_from(["", *(one.name for one in nodes)])), draining=draw(st.booleans()))
        for number in draw(st.lists(st.integers(0, 7), unique=True, max_size=6))
    ]
    return wants, nodes, running


@given(worlds())
def test_whatever_the_world_nothing_is_overcommitted_or_started_twice(
    world: tuple[Config, list[Node], list[RunningShard]],
) -> None:
    wants, nodes, running = world
    found = schedule(wants.shard_groups, nodes, running)
    started = [start.shard for start in found.start]
    assert len(set(started)) == len(started)
    assert not set(started) & {each.shard for each in running}
    (group,) = wants.shard_groups.values()
    for one in nodes:
        here = [start for start in found.start if start.node == one.id]
        assert len(here) <= one.free[SHARD_RESOURCE]
        assert len(here) * pool_bytes(group) <= one.free[MEMORY]
    lies = {shard: one.id for one in nodes for shard in one.volumes}
    assert all(lies.get(start.shard, start.node) == start.node for start in found.start)
    staying = sum(not each.draining for each in running)
    assert staying + len(started) <= max(staying, group.shards)
    assert set(found.kill) | set(found.drain) <= {each.shard for each in running if not each.draining}
    assert all(group_of(start.shard) == start.group for start in found.start)


@given(worlds())
def test_what_was_started_is_not_started_again(world: tuple[Config, list[Node], list[RunningShard]]) -> None:
    wants, nodes, running = world
    found = schedule(wants.shard_groups, nodes, running)
    after = [each for each in running if each.shard not in found.kill]
    after = [replace(each, draining=each.draining or each.shard in found.drain) for each in after]
    after += [RunningShard(start.shard, start.node) for start in found.start]
    assert not schedule(wants.shard_groups, nodes, after).kill
    again = schedule(wants.shard_groups, [replace(one, free={}) for one in nodes], after)
    assert not again.start and not again.drain


@pytest.mark.parametrize("start", [Start(ShardId("shard-0"), "shard", "id-a", bound=False)])
def test_a_node_without_memory_for_pools_takes_none(start: Start) -> None:
    assert not schedule(config(1).shard_groups, [node("a", memory=0)], []).start
    assert schedule(config(1).shard_groups, [node("a")], []).start == (start,)
