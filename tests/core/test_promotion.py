"""Promotions and twins: a page with more loss gives way to one with less."""

from __future__ import annotations

import pytest

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Abort, NewPage, PageSlot, Tier, Written
from kvcluster.core.miss import Loss, MissReason
from tests.core.lone_shard import A, B, counters, end, granted, is_done, misses, pinned, slots
from tests.core.moving import (
    BELOW,
    DECODED,
    IN_RAM,
    Q8,
    RAW,
    arrived,
    doubled,
    free,
    holding,
    left,
    lies,
    lowered,
    one_page,
)
from tests.core.samples import SECOND, attempt, key, root

# --------------------------------------------------------------------------------------------- promotion


def test_a_promoted_page_is_decoded_above_keeps_its_loss_and_its_twin_stays() -> None:
    shard = lowered(A)
    shard.promote(A)
    assert shard.moving is not None
    [move] = shard.moving.pages
    assert (move.source.tier, move.source.codec, move.source.nbytes) == (*BELOW[:2], Q8)
    assert (move.target.tier, move.target.codec, move.target.nbytes, move.target.loss) == (*DECODED[:2], RAW, Loss.Q8)
    [meanwhile] = pinned(shard.pin(attempt(2), A, accept=Loss.Q4))
    assert meanwhile.tier is Tier.HOST
    shard.move()
    assert shard.settle() == [arrived(A, *DECODED)]
    assert lies(shard) == [DECODED, BELOW]
    [read] = pinned(shard.pin(attempt(3), A, accept=Loss.Q8))
    assert (read.tier, read.codec, read.loss) == DECODED
    assert misses(shard.pin(attempt(4), A)) == [MissReason.LOSSY], "a loss cannot be undone"
    assert counters(shard)["promoted"] == 1


def test_a_promotion_without_room_above_leaves_all_as_it_is() -> None:
    shard = lowered(A, pages=1)
    shard.store(attempt(2), B)
    shard.promote(A)
    assert shard.moving is None and is_done(shard)
    assert shard.settle() == []
    assert (lies(shard, A), lies(shard, B)) == ([BELOW], [IN_RAM])
    assert counters(shard)["evicted"] == 0


def test_a_page_found_corrupt_on_its_way_up_is_condemned_below() -> None:
    shard = lowered(A)
    shard.promote(A)
    shard.move(corrupt=[0])
    assert shard.settle() == [left(A, Tier.HOST, corrupt=True)]
    assert (free(shard), free(shard, Tier.HOST)) == (8 * RAW, 8 * RAW)


def test_a_page_that_is_being_promoted_or_demoted_is_not_written_by_a_worker() -> None:
    shard = lowered(A)
    shard.promote(A)
    assert shard.reserve(attempt(2), A) == (Written.PENDING,)
    assert end(shard, attempt(2), Abort)


def test_what_loses_more_and_is_being_demoted_gives_way_to_a_better_store() -> None:
    shard = holding(A, loss=Loss.Q8)
    shard.demote(A)
    assert all(isinstance(page, PageSlot) for page in shard.reserve(attempt(2), A)), "no other writer stores it raw"
    shard.move()
    assert shard.commit(attempt(2), 0) == (Written.COMMITTED,)
    shard.settle()
    assert [(page.tier, page.loss) for page in shard.core.pool.ready()] == [(Tier.RAM, Loss.EXACT)]
    assert shard.reserve(attempt(3), A, loss=Loss.Q8) == (Written.DUPLICATE,), "it may be read"


# ---------------------------------------------------------------------------------- better and worse copies


@pytest.mark.parametrize("where", ["below", "in both tiers"])
def test_an_exact_store_takes_the_place_of_copies_that_have_lost_something(where: str) -> None:
    shard = lowered(A) if where == "below" else doubled(A)
    assert slots(shard.reserve(attempt(2), A))
    gone_first = [] if where == "below" else [left(A, Tier.RAM)]
    assert shard.settle() == gone_first
    assert lies(shard) == [BELOW], "until there is a better one"
    assert shard.commit(attempt(2), 0) == (Written.COMMITTED,)
    assert shard.settle() == [arrived(A, *IN_RAM), left(A, Tier.HOST)]
    assert lies(shard) == [IN_RAM]


def test_an_exact_store_that_is_broken_off_leaves_the_copy_below() -> None:
    shard = doubled(A)
    shard.reserve(attempt(2), A)
    assert end(shard, attempt(2), Abort)
    assert lies(shard) == [BELOW]
    assert free(shard) == 8 * RAW


def test_an_exact_store_waits_for_room_beside_the_lossy_copy_that_it_replaces() -> None:
    shard = doubled(A, pages=1)
    assert shard.reserve(attempt(2), A) == (Written.FULL,), "readers may have the lossy one until then"
    assert lies(shard) == [DECODED, BELOW]
    waiting = shard.reserving(attempt(3), A, wait_ns=5 * SECOND)
    shard.settle()
    shard.demote(A)
    assert slots(granted(shard, waiting))


@pytest.mark.parametrize("codec", [Codec.RAW, None])
def test_a_lossy_store_over_an_exact_copy_is_a_duplicate(codec: Codec | None) -> None:
    shard = holding(A) if codec is None else lowered(A, codec=codec)
    assert shard.reserve(attempt(2), A, loss=Loss.Q8) == (Written.DUPLICATE,)
    assert shard.reserve(attempt(3), A) == (Written.DUPLICATE,)
    assert counters(shard)["duplicates"] == 2


def test_a_store_that_has_lost_as_much_as_the_copy_below_is_a_duplicate() -> None:
    shard = lowered(A)
    assert shard.reserve(attempt(2), A, loss=Loss.Q8) == (Written.DUPLICATE,)
    assert shard.reserve(attempt(3), A, loss=Loss.Q4) == (Written.DUPLICATE,)


def test_a_page_that_is_stored_during_its_promotion_has_one_writer_and_one_twin() -> None:
    shard = lowered(A)
    shard.reserve(attempt(2), A)
    shard.promote(A)
    assert shard.moving is None, "a worker writes it there"
    shard.commit(attempt(2), 0)
    assert lies(shard) == [IN_RAM]


def test_an_encoded_page_is_pulled_into_the_tier_below_in_place_of_a_worse_one_and_what_was_decoded_from_it() -> None:
    shard = lowered(A, codec=Codec.Q4)
    shard.promote(A)
    shard.move()
    shard.settle()
    shard.order(one_page(NewPage(key(A), root(), 0, Loss.Q8), Codec.Q8, Tier.HOST))
    [fetch] = shard.fetching
    assert [(slot.tier, slot.codec, slot.nbytes, slot.loss) for slot in fetch.slots] == [(*BELOW[:2], Q8, Loss.Q8)]
    assert shard.settle() == [left(A, Tier.HOST), left(A, Tier.RAM)]
    shard.commit(fetch.attempt, 0)
    assert lies(shard) == [BELOW]


def test_a_pulled_page_is_never_written_over_an_equal_one_in_whatever_tier() -> None:
    shard = holding(A)
    shard.order(one_page(NewPage(key(A), root(), 0, Loss.Q8), Codec.Q8, Tier.HOST))
    assert shard.fetching == [] and is_done(shard)
    assert isinstance(pinned(shard.pin(attempt(2), A))[0], PageSlot)


def test_each_page_that_is_promoted_counts() -> None:
    shard = lowered(A, B)
    shard.promote(A, B)
    shard.move_all()
    assert counters(shard)["promoted"] == 2
