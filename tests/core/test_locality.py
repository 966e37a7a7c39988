"""Which processes are on one node, and which may share memory."""

from __future__ import annotations

from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.placement import Candidate, choose, host_text, may_share_memory, name_of, same_node

POD, SIDECAR, OTHER_POD = host_text("pod-a", "m1", "7"), host_text("engine", "m1", "7"), host_text("pod-b", "m1", "8")
ELSEWHERE = host_text("pod-a", "m2", "7")


def test_containers_of_a_pod_share_memory_whatever_they_are_called() -> None:
    assert may_share_memory(POD, SIDECAR)
    assert same_node(POD, SIDECAR)


def test_pods_of_a_node_do_not() -> None:
    assert same_node(POD, OTHER_POD)
    assert not may_share_memory(POD, OTHER_POD)


def test_machines_of_one_name_are_two() -> None:
    assert not same_node(POD, ELSEWHERE)
    assert not may_share_memory(POD, ELSEWHERE)


def test_a_host_is_known_to_ray_by_its_name() -> None:
    assert name_of(POD) == "pod-a"
    assert name_of("memory") == "memory"


def test_a_release_that_told_its_name_alone_is_compared_by_it() -> None:
    assert may_share_memory("pod-a", POD)
    assert same_node(POD, "pod-a")
    assert not may_share_memory("pod-b", POD)


def test_nowhere_is_near_nothing() -> None:
    assert not same_node("", "")
    assert not may_share_memory("", "")


def test_blocks_are_placed_where_memory_is_shared_then_on_the_node_then_anywhere() -> None:
    run = BlockHash(bytes(32))
    hosts = {"a": POD, "b": OTHER_POD, "c": ELSEWHERE}

    def chosen(*names: str) -> str | None:
        candidates = [Candidate(ShardId(name), hosts[name], 1, name in names) for name in hosts]
        found = choose(run, candidates, SIDECAR)
        return found.shard if found else None

    assert chosen("a", "b", "c") == "a"
    assert chosen("b", "c") == "b"
    assert chosen("c") == "c"
    assert chosen() is None
