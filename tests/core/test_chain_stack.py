"""The stack distances of chains say what a plain LRU cache of each capacity holds."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.observe.reuse_prediction import ChainStack, DistanceRun

Chain = tuple[tuple[int, ...], ...]


def chain_of(path: Sequence[int]) -> Chain:
    """Names each block by all that comes before it, as a chained hash does."""
    return tuple(tuple(path[: end + 1]) for end in range(len(path)))


class PlainLRU:
    """A cache of so many blocks that evicts the block used longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[object, None] = OrderedDict()

    def leading(self, chain: Chain) -> int:
        return next((at for at, block in enumerate(chain) if block not in self._blocks), len(chain))

    def use(self, chain: Chain) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)


chains = st.lists(st.integers(0, 2), max_size=7).map(chain_of)


@given(st.lists(st.tuples(st.booleans(), chains), max_size=30), st.integers(1, 25))
def test_at_every_capacity_the_leading_hits_are_those_of_a_plain_lru_cache(
    events: list[tuple[bool, Chain]], capacity: int
) -> None:
    stack, plain = ChainStack(uses=len(events)), PlainLRU(capacity)
    for uses, chain in events:
        found = sum(run.within(capacity) for run in stack.distances(chain))
        assert found == plain.leading(chain)
        if uses:
            stack.use(chain)
            plain.use(chain)


def test_distances_of_one_chain_count_from_its_root() -> None:
    stack = ChainStack(uses=2)
    stack.use("abcd")
    assert stack.distances("abcd") == [DistanceRun(1, 4)]
    stack.use("abX")
    assert stack.distances("abcd") == [DistanceRun(1, 2), DistanceRun(4, 2)]
    assert len(stack) == 5


def test_distances_end_before_the_first_unknown_block() -> None:
    stack = ChainStack(uses=1)
    stack.use("ab")
    assert stack.distances("aXb") == [DistanceRun(1, 1)]
    assert stack.distances("Xab") == []


def test_a_hash_that_two_chains_share_by_accident_breaks_nothing() -> None:
    stack = ChainStack(uses=3)
    stack.use("abcd")
    stack.use("cab")
    stack.use("aa")
    for chain in ("abcd", "cab", "dcba"):
        runs = stack.distances(chain)
        ends = [(run.nearest, run.nearest + run.blocks - 1) for run in runs]
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


@pytest.mark.parametrize(("capacity", "holds"), [(0, 0), (4, 0), (5, 1), (6, 2), (7, 3), (100, 3)])
def test_a_run_is_held_from_its_nearest_block_on(capacity: int, holds: int) -> None:
    assert DistanceRun(5, 3).within(capacity) == holds


def test_without_its_leading_blocks_a_run_begins_further_away() -> None:
    assert DistanceRun(5, 3).without(2) == DistanceRun(7, 1)
