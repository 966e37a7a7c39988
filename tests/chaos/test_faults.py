"""The schedule of faults: the same for the same seed, every kind in each round, and only those that the site allows."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.faults import BRIEF_S, LONG_S, ON_ONE_HOST, Fault, Kind, Stage, one_of_each, schedule

NODES = Stage(("s0", "s1"), ("w0", "w1"), ("head", "n1", "n2", "w0", "w1"), ("n1", "n2"), head_moves=True, older=True)
ONE_HOST = Stage(("s0", "s1"), ("w0", "w1"))


def drawn(seed: int, stage: Stage, rounds: int = 20) -> list[Fault]:
    return list(itertools.islice(schedule(seed, stage), rounds * len(stage.kinds)))


def test_the_same_seed_draws_the_same_faults_and_another_draws_others() -> None:
    assert drawn(1, NODES) == drawn(1, NODES) != drawn(2, NODES)
    assert one_of_each(1, NODES) == one_of_each(1, NODES)


@pytest.mark.parametrize("stage", [NODES, ONE_HOST])
def test_every_round_has_every_kind_of_the_stage_once(stage: Stage) -> None:
    faults, kinds = drawn(3, stage), set(stage.kinds)
    size = len(kinds)
    assert all({fault.kind for fault in faults[at : at + size]} == kinds for at in range(0, len(faults), size))
    assert [fault.kind for fault in one_of_each(3, stage)] == list(stage.kinds)


def test_one_host_loses_no_node_and_no_link() -> None:
    assert set(Kind) - set(ON_ONE_HOST) == {
        Kind.KILL_NODE,
        Kind.STOP_NODE,
        Kind.CUT_ONE_WAY,
        Kind.CUT_BOTH_WAYS,
        Kind.CUT_OFF,
        Kind.REPLACE_NODE,
        Kind.LOSE_HEAD,
        Kind.OLDER_SHARD,
    }


def test_without_redis_the_head_stays_and_without_an_older_release_none_is_mixed_in() -> None:
    bare = replace(NODES, head_moves=False, older=False)
    assert set(NODES.kinds) - set(bare.kinds) == {Kind.LOSE_HEAD, Kind.OLDER_SHARD}


def test_the_victims_are_on_the_stage() -> None:
    for fault in drawn(4, NODES):
        if "node" in fault.kind.value:
            assert fault.target in NODES.nodes
        elif "link" in fault.kind.value:
            assert {fault.target, fault.hearer} <= set(NODES.hosts)
            assert fault.target != fault.hearer
        elif "worker" in fault.kind.value:
            assert fault.target in NODES.workers


def test_what_lasts_is_brief_or_long_and_nothing_between() -> None:
    lasting = [fault.seconds for fault in drawn(5, NODES) if fault.seconds]
    assert all(any(low <= seconds <= high for low, high in (BRIEF_S, LONG_S)) for seconds in lasting)
    assert min(lasting) <= BRIEF_S[1] < LONG_S[0] <= max(lasting)


KEEPS = {"kvcluster", "kvcluster.client", "kvcluster.config", "kvcluster.errors"}
"""What every release has under these names, beside the core."""


@pytest.mark.parametrize("module", ["worker", "load", "content"])
def test_a_worker_of_an_older_release_finds_what_it_imports(module: str) -> None:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    named = {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    ours = {name for name in named if name.startswith("kvcluster") and not name.startswith("kvcluster.core.")}
    assert ours <= KEEPS
