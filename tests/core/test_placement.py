from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.placement import Candidate, choose, run_start

hosts = st.sampled_from(["a", "b", ""])
shard_lists = st.lists(
    st.builds(
        Candidate,
        shard=st.text("xyz", min_size=1, max_size=3).map(ShardId),
        host=hosts,
        weight_bytes=st.integers(0, 2**40),
        available=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.shard,
)


def runs(count: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(32, "little")) for i in range(count)]


def shard(name: str, weight_bytes: int = 2**30, host: str = "a") -> Candidate:
    return Candidate(ShardId(name), host, weight_bytes, available=True)


RUNS = runs(40)


def chosen(candidates: list[Candidate], host: str = "") -> list[str | None]:
    picks = [choose(run, candidates, host) for run in RUNS]
    return [pick.shard if pick is not None else None for pick in picks]


def test_choices_are_the_same_in_every_process_for_ever() -> None:
    candidates = [shard("shard-0"), shard("shard-1"), shard("shard-2", 2**31)]
    assert "".join(str(name)[-1] for name in chosen(candidates)) == "2022222120011122222202110222202112220122"


@given(shard_lists, hosts, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(candidates: list[Candidate], host: str, random: Random) -> None:
    shuffled = random.sample(candidates, len(candidates))
    assert chosen(candidates, host) == chosen(shuffled, host)


@given(shard_lists, st.integers(1, 2**40))
def test_a_shard_that_comes_only_takes(candidates: list[Candidate], weight_bytes: int) -> None:
    before = chosen(candidates)
    after = chosen([*candidates, shard("new", weight_bytes)])
    assert all(now in (then, "new") for then, now in zip(before, after, strict=True))


@given(shard_lists.filter(bool), st.booleans())
def test_a_shard_that_goes_or_fills_leaves_only_its_own_runs(candidates: list[Candidate], fills: bool) -> None:
    gone = candidates[0]
    rest = [dataclasses.replace(gone, available=False)] if fills else []
    before = chosen(candidates)
    after = chosen([*rest, *candidates[1:]])
    assert gone.shard not in after
    assert all(now == then for then, now in zip(before, after, strict=True) if then != gone.shard)


@given(shard_lists.filter(bool), st.integers(1, 2**40))
def test_a_shard_that_grows_loses_nothing(candidates: list[Candidate], more_bytes: int) -> None:
    one = candidates[0]
    grown = dataclasses.replace(one, weight_bytes=one.weight_bytes + more_bytes)
    before = chosen(candidates)
    after = chosen([grown, *candidates[1:]])
    assert all(now in (then, one.shard) for then, now in zip(before, after, strict=True))


def test_a_share_is_proportional_to_its_weight() -> None:
    candidates = [shard("one", 1 * 2**30), shard("two", 2 * 2**30), shard("five", 5 * 2**30)]
    picks = Counter(pick.shard for run in runs(8_000) if (pick := choose(run, candidates, "")))
    assert picks.total() == 8_000
    assert picks == {
        ShardId("one"): pytest.approx(1_000, rel=0.1),
        ShardId("two"): pytest.approx(2_000, rel=0.1),
        ShardId("five"): pytest.approx(5_000, rel=0.1),
    }


@given(shard_lists, hosts)
def test_the_workers_own_host_comes_first_and_only_the_able_are_chosen(candidates: list[Candidate], host: str) -> None:
    able = [c for c in candidates if c.available and c.weight_bytes]
    near = [c for c in able if host and c.host == host]
    for run in RUNS[:8]:
        pick = choose(run, candidates, host)
        assert pick in (near or able) if pick else not able


def test_a_worker_without_a_host_is_near_no_shard() -> None:
    nameless, named = shard("nameless", host=""), shard("named")
    assert set(chosen([nameless, named], "")) == {"nameless", "named"}


@pytest.mark.parametrize(("weight_bytes", "available"), [(0, True), (2**30, False)])
def test_no_shard_is_chosen_if_none_is_available(weight_bytes: int, available: bool) -> None:
    assert choose(RUNS[0], [], "a") is None
    assert choose(RUNS[0], [Candidate(ShardId("only"), "a", weight_bytes, available)], "a") is None


@given(st.integers(0, 2**24), st.integers(1, 1_000))
def test_runs_cut_a_chain_evenly(depth: int, run_blocks: int) -> None:
    start = run_start(depth, run_blocks)
    assert start <= depth < start + run_blocks
    assert start % run_blocks == 0
    assert run_start(start, run_blocks) == start
