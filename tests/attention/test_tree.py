"""The tree over positions: subtrees tile a range, and folding visits them in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.attention import CUT_TOKENS, ROOT, Subtree, subtrees
from kvcluster.core.position_tree import fold
from kvcluster.errors import CallerError


@given(st.integers(0, 300), st.integers(0, 300))
def test_subtrees_tile_their_range_and_are_as_large_as_can_be(start: int, cuts: int) -> None:
    found = subtrees(start * CUT_TOKENS, (start + cuts) * CUT_TOKENS)
    at = start * CUT_TOKENS
    for subtree in found:
        assert subtree.start == at
        at = subtree.stop
    assert at == (start + cuts) * CUT_TOKENS
    for left, right in itertools.pairwise(found):
        assert left.parent != right.parent


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(0, 6))
def test_a_fold_of_leaves_is_a_fold_of_folded_subtrees(cuts: set[int], level: int) -> None:
    def pair(left: str, right: str) -> str:
        return f"({left} {right})"

    leaves = {Subtree(0, cut): str(cut) for cut in sorted(cuts)}
    groups: dict[Subtree, dict[Subtree, str]] = {}
    for leaf, text in leaves.items():
        groups.setdefault(Subtree(level, leaf.index >> level), {})[leaf] = text
    parts = {subtree: fold(below, pair)[1] for subtree, below in reversed(groups.items())}
    assert fold(parts, pair)[1] == fold(leaves, pair)[1]


def test_a_fold_refuses_subtrees_that_overlap() -> None:
    with pytest.raises(CallerError, match="overlap"):
        fold({Subtree(1, 0): "a", Subtree(0, 1): "b"}, lambda left, right: left)
    with pytest.raises(CallerError, match="overlap"):
        fold({ROOT: "a", Subtree(0, 1): "b"}, lambda left, right: left)


@pytest.mark.parametrize(("start", "stop"), [(1, 512), (0, 100), (1024, 512), (-512, 0), (0, 512 << 32)])
def test_subtrees_are_of_whole_cuts_in_range(start: int, stop: int) -> None:
    with pytest.raises(CallerError, match="whole cuts"):
        subtrees(start, stop)
