"""Claims about new pages as columns: they are the pages that they were made of."""

from __future__ import annotations

import random

import pytest

from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import NewPage, NewPages, PageKey
from kvcluster.core.miss import Loss

PARTS = [Part(0, 4, 0, 2), Part(4, 8, 0, 2)]


def pages(count: int) -> list[NewPage]:
    """Returns pages of four places in random order, with parents, depths and losses of their own."""
    rng = random.Random(count)
    return [
        NewPage(
            PageKey(BlockHash(rng.randbytes(32)), rng.randrange(2), rng.choice(PARTS)),
            BlockHash(rng.randbytes(32)),
            rng.randrange(1_000),
            rng.choice(list(Loss)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 50])
def test_columns_are_the_pages_that_they_were_made_of(count: int) -> None:
    given = pages(count)
    columns = NewPages.of(given)
    assert len(columns) == count and columns == given and repr(columns) == repr(tuple(given))
    assert [columns[at] for at in range(count)] == given
    assert len(columns.places) == len(dict.fromkeys(page.key[1:] for page in given)) <= 4
    assert NewPages.of(columns) is columns


def test_columns_are_cut_and_selected_like_lists() -> None:
    given = pages(20)
    columns = NewPages.of(given)
    assert columns[3:11] == given[3:11] and columns[-1] == given[-1]
    assert columns.select([2, 5, 19]) == [given[2], given[5], given[19]]
    assert columns.select(range(20)) is columns
    assert columns != given[:19] and columns != [*given[:19], given[0]]
