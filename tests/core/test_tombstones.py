"""What was purged is remembered in order and in bounded memory, and every shard carries it out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.messages import Tombstone
from kvcluster.core.tombstones import Tombstones
from tests.core.build import spec

OURS, THEIRS = Tenant("ours"), Tenant("theirs")
CLEAR, MODEL = Tombstone(5, OURS), Tombstone(5, OURS, model="model")
names = st.sampled_from([None, "model", "other"])
tombstones = st.builds(
    Tombstone, st.integers(1, 9), st.sampled_from([OURS, THEIRS]), model=names, weights=names, adapter=names
)


@pytest.mark.parametrize(
    "stone, named",
    [
        (Tombstone(1, OURS), True),
        (Tombstone(1, THEIRS), False),
        (Tombstone(1, OURS, model="model"), True),
        (Tombstone(1, OURS, model="other"), False),
        (Tombstone(1, OURS, weights="sha256:1", adapter=""), True),
        (Tombstone(1, OURS, weights="sha256:2"), False),
        (Tombstone(1, OURS, model="model", adapter="lora"), False),
    ],
)
def test_a_tombstone_names_the_namespaces_that_equal_all_that_it_says(stone: Tombstone, named: bool) -> None:
    assert stone.names(OURS, spec()) is named
    assert Tombstones([stone]).latest(OURS, spec()) == (1 if named else 0)


def test_those_above_a_number_are_told_in_order() -> None:
    stones = Tombstones([Tombstone(7, OURS, model="b"), Tombstone(3, OURS, model="a"), Tombstone(5, THEIRS)])
    assert [stone.number for stone in stones.all()] == [3, 5, 7]
    assert [stone.number for stone in stones.since(3)] == [5, 7]
    assert stones.highest == 7
    assert Tombstones().highest == 0


def test_one_that_says_as_much_takes_the_place_of_older_ones() -> None:
    stones = Tombstones([Tombstone(1, OURS, model="a"), Tombstone(2, OURS, model="b"), Tombstone(3, THEIRS)])
    assert stones.add(Tombstone(4, OURS, model="a"))
    assert [stone.number for stone in stones.all()] == [2, 3, 4]
    assert stones.add(CLEAR)
    assert stones.all() == (Tombstone(3, THEIRS), CLEAR)
    assert not stones.add(MODEL), "the clear of the same number says as much"
    assert not stones.add(Tombstone(2, OURS, model="b"))


def test_a_number_is_above_all_that_are_known_and_all_that_were_made() -> None:
    assert Tombstones().next_number(Epoch(100)) == 100
    assert Tombstones([Tombstone(100, OURS)]).next_number(Epoch(100)) == 101


@given(st.lists(tombstones, max_size=6), st.lists(tombstones, max_size=6))
def test_learning_loses_no_tombstone_that_either_side_knew(known: list[Tombstone], told: list[Tombstone]) -> None:
    stones = Tombstones(known)
    stones.learn(told)
    for stone in (*known, *told):
        assert any(
            kept.number >= stone.number
            and kept.tenant == stone.tenant
            and kept.model in (None, stone.model)
            and kept.weights in (None, stone.weights)
            and kept.adapter in (None, stone.adapter)
            for kept in stones.all()
        )
    assert stones.learn(told) == [], "a known tombstone is not new"


def test_more_than_can_be_remembered_become_a_clear_of_who_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOMBSTONES", 3)
    stones = Tombstones([Tombstone(1, OURS, model="a"), Tombstone(2, THEIRS)])
    new = stones.learn([Tombstone(3, OURS, model="b"), Tombstone(4, OURS, model="c")])
    assert new == [Tombstone(4, OURS)]
    assert stones.all() == (Tombstone(2, THEIRS), Tombstone(4, OURS))
    monkeypatch.setattr(limits, "TOMBSTONES", 1)
    assert stones.learn([]) == [], "one of each tenant is the least"
    assert len(stones.all()) == 2


def test_a_purge_is_admitted_while_there_is_room_or_it_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOMBSTONES_PER_TENANT", 2)
    stones = Tombstones([Tombstone(1, OURS, model="a"), Tombstone(2, OURS, model="b")])
    assert not stones.admits(Tombstone(3, OURS, model="c"))
    assert stones.admits(Tombstone(3, OURS, model="a"))
    assert stones.admits(Tombstone(3, OURS))
    assert stones.admits(Tombstone(3, THEIRS, model="c"))
    monkeypatch.setattr(limits, "TOMBSTONES", 2)
    assert not stones.admits(Tombstone(3, THEIRS, model="c"))


def test_a_tombstone_that_a_shard_skipped_gets_a_new_number() -> None:
    late, carried, later = Tombstone(3, OURS, model="a"), Tombstone(5, OURS, model="b"), Tombstone(6, THEIRS)
    stones = Tombstones([late, carried, later])
    assert stones.renew([carried], Epoch(1)) == [Tombstone(7, OURS, model="a")]
    assert stones.all() == (carried, later, Tombstone(7, OURS, model="a"))
    assert stones.renew([carried], Epoch(1)) == [], "it will be given that one now"


def test_what_a_shard_has_carried_out_by_a_wider_one_is_not_passed_over() -> None:
    stones = Tombstones([Tombstone(3, OURS, model="a")])
    assert stones.renew([CLEAR], Epoch(1)) == []
    assert stones.renew([Tombstone(3, OURS, model="a")], Epoch(1)) == []
    assert stones.renew([], Epoch(1)) == [], "one that has carried out nothing is given all"


@given(st.lists(tombstones, max_size=6), st.lists(tombstones, max_size=6), st.integers(1, 20))
def test_after_learning_and_renewing_a_shard_is_given_all_that_it_lacks(
    known: list[Tombstone], told: list[Tombstone], epoch: int
) -> None:
    stones, shard = Tombstones(known), Tombstones(told)
    stones.learn(told)
    stones.renew(told, Epoch(epoch))
    given_now = stones.since(shard.highest)
    assert [stone.number for stone in given_now] == sorted({stone.number for stone in given_now})
    for stone in given_now:  # as a shard does: in order, each above the last
        assert stone.number > shard.highest
        shard.add(stone)
    for one in (spec(), spec(weights="other"), spec(adapter="other")):
        for tenant in (OURS, THEIRS):
            assert shard.latest(tenant, one) >= stones.latest(tenant, one)
