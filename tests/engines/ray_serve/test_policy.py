"""The policy prefers replicas with most of the prefix on their host, if it is enough and they are not too busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.engines.ray_serve.replica_choice import ReplicaCandidate, Stretch, held_by_host, preferred

HOSTS = st.sampled_from(["a", "b", "c", "d"])
STRETCHES = st.lists(
    st.builds(Stretch, st.integers(1, 40), st.lists(HOSTS, min_size=1, max_size=4).map(tuple)), max_size=6
)
CANDIDATES = st.lists(st.tuples(HOSTS, st.none() | st.integers(0, 40)), max_size=6).map(
    lambda drawn: [ReplicaCandidate(f"r{number}", host, ongoing) for number, (host, ongoing) in enumerate(drawn)]
)
A, B = ReplicaCandidate("ra", "a", 0), ReplicaCandidate("rb", "b", 0)


def test_the_host_that_holds_most_of_the_prefix_is_preferred() -> None:
    assert preferred([Stretch(10, ("a",)), Stretch(11, ("b",))], [A, B], min_blocks=1, ahead=8) == ("rb",)


def test_a_block_in_parts_counts_for_each_host_in_part() -> None:
    assert held_by_host([Stretch(4, ("a", "a", "a", "b"))]) == {"a": 3, "b": 1}


def test_a_short_prefix_is_not_worth_a_preference() -> None:
    assert preferred([Stretch(3, ("a",))], [A, B], min_blocks=4, ahead=8) == ()
    assert preferred([Stretch(4, ("a",))], [A, B], min_blocks=4, ahead=8) == ("ra",)


def test_a_host_without_a_replica_is_passed_over_for_the_next_best() -> None:
    assert preferred([Stretch(9, ("c",)), Stretch(5, ("b",))], [A, B], min_blocks=4, ahead=8) == ("rb",)


def test_a_replica_that_is_too_far_ahead_of_the_others_is_not_preferred() -> None:
    busy = ReplicaCandidate("ra", "a", 9)
    assert preferred([Stretch(9, ("a",))], [busy, B], min_blocks=1, ahead=8) == ()
    assert preferred([Stretch(9, ("a",))], [busy, ReplicaCandidate("rb", "b", 1)], min_blocks=1, ahead=8) == ("ra",)


def test_all_replicas_of_the_best_host_share_its_rank() -> None:
    more = [A, B, ReplicaCandidate("ra2", "a", 3)]
    assert preferred([Stretch(9, ("a",))], more, min_blocks=1, ahead=8) == ("ra", "ra2")


@given(STRETCHES, CANDIDATES, st.integers(0, 50), st.integers(0, 20))
def test_only_candidates_on_a_host_that_holds_most_are_ever_preferred(
    stretches: list[Stretch], candidates: list[ReplicaCandidate], min_blocks: int, ahead: int
) -> None:
    chosen = preferred(stretches, candidates, min_blocks=min_blocks, ahead=ahead)
    held = held_by_host(stretches)
    by_name = {one.name: one for one in candidates}
    for name in chosen:
        mine = held[by_name[name].host]
        assert mine >= max(1, min_blocks)
        assert all(held.get(other.host, 0) <= mine for other in candidates)
        assert all((by_name[name].ongoing or 0) - (other.ongoing or 0) <= ahead for other in candidates)


@given(STRETCHES, CANDIDATES, st.integers(0, 50), st.integers(0, 20), st.randoms())
def test_neither_the_order_of_stretches_nor_that_of_candidates_matters(
    stretches: list[Stretch], candidates: list[ReplicaCandidate], min_blocks: int, ahead: int, random: object
) -> None:
    chosen = preferred(stretches, candidates, min_blocks=min_blocks, ahead=ahead)
    mixed, others = list(stretches), list(candidates)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    random.shuffle(others)  # type: ignore[attr-defined]
    assert set(preferred(mixed, others, min_blocks=min_blocks, ahead=ahead)) == set(chosen)


@given(STRETCHES)
def test_every_block_is_counted_once(stretches: list[Stretch]) -> None:
    assert sum(held_by_host(stretches).values()) == sum(stretch.blocks for stretch in stretches)
