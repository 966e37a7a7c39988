"""Claims about wants as columns: they are the wants that they were made of, and share what these have in common."""

from __future__ import annotations

import random

import pytest

from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PageKey, PageWant, PageWants, WantKind

PARTS = [Part(0, 4, 0, 2), Part(4, 8, 0, 2)]


def wants(count: int) -> list[PageWant]:
    """Returns wants of four kinds in random order."""
    rng = random.Random(count)
    keys = [PageKey(BlockHash(rng.randbytes(32)), rng.randrange(2), PARTS[0]) for _ in range(count)]
    return [PageWant(key, *rng.choice([(0, 4), (1, 3)])) for key in keys]


@pytest.mark.parametrize("count", [0, 1, 50])
def test_columns_are_the_wants_that_they_were_made_of(count: int) -> None:
    given = wants(count)
    columns = PageWants.of(given)
    assert len(columns) == count and columns == given and list(columns) == given
    assert [columns[at] for at in range(count)] == given
    assert len(columns.kinds) == len(dict.fromkeys(want[1:] + want.key[1:] for want in given)) <= 4
    assert PageWants.of(columns) is columns


def test_columns_are_cut_and_selected_like_lists() -> None:
    given = wants(20)
    columns = PageWants.of(given)
    assert columns[3:11] == given[3:11]
    assert columns[-1] == given[-1]
    assert columns.select([2, 5, 19]) == [given[2], given[5], given[19]]
    assert columns.select(range(20)) is columns
    assert columns.keys() == [want.key for want in given]


def test_other_wants_are_not_equal() -> None:
    given = wants(5)
    assert PageWants.of(given) != given[:4]
    assert PageWants.of(given) != [*given[:4], given[4]._replace(layer_stop=2)]
    assert PageWants([], [], [WantKind(0, PARTS[0], 0, 4)]) == []
    assert PageWants.of(given) != 5
