"""Pages that are demoted between a shard's tiers, the orders for that, and what may happen in between."""

from __future__ import annotations

import pytest

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, Epoch
from kvcluster.core.messages import (
    Move,
    MoveOrder,
    NewPage,
    PageKey,
    PullOrder,
    PurgedEvent,
    Suspect,
    Tier,
    Tombstone,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.shard import tier_mover
from tests.core.lone_shard import (
    BLOCKS,
    A,
    B,
    C,
    D,
    LoneShard,
    counters,
    end,
    granted,
    is_done,
    misses,
    moves,
    pinned,
    report,
    running,
    slots,
)
from tests.core.moving import (
    BELOW,
    IN_RAM,
    INTERRUPTIONS,
    Q8,
    RAW,
    SOURCE,
    arrived,
    doubled,
    free,
    holding,
    interrupt,
    left,
    lies,
    lowered,
    one_page,
    sources,
    tiered,
)
from tests.core.samples import CODED, LEFT, MIXED, OURS, RIGHT, SECOND, SPEC, THEIRS, attempt, key, ours, root

# ---------------------------------------------------------------------------------------------- demotion


def test_a_demoted_page_is_encoded_below_and_told_of_there_before_it_leaves_its_tier() -> None:
    shard = holding(A)
    shard.demote(A)
    assert shard.moving is not None
    [(namespace, tenant, spec, parent, depth, source, target, _)] = shard.moving.pages
    assert (namespace, tenant, spec, parent, depth) == (shard.space, OURS, CODED, root(), 0)
    assert (source.tier, source.codec, source.nbytes, source.loss) == (*IN_RAM[:2], RAW, Loss.EXACT)
    assert (target.tier, target.codec, target.nbytes, target.loss) == (*BELOW[:2], Q8, Loss.Q8)
    assert (source.key, target.key) == (key(A), key(A))
    assert shard.settle() == [], "nothing has happened yet"
    shard.move()
    assert shard.settle() == [arrived(A, *BELOW), left(A, Tier.RAM)]
    assert lies(shard) == [BELOW]
    assert (free(shard), free(shard, Tier.HOST)) == (8 * RAW, 8 * RAW - Q8)
    assert (counters(shard)["demoted"], counters(shard)["evicted"]) == (1, 0)


@pytest.mark.parametrize("before", Loss)
@pytest.mark.parametrize("codec", Codec)
def test_a_demoted_page_has_lost_the_worse_of_what_it_had_and_what_its_codec_loses(before: Loss, codec: Codec) -> None:
    shard = holding(A, loss=before)
    shard.demote(A, codec=codec)
    shard.move()
    assert lies(shard) == [(Tier.HOST, codec, max(before, codec.loss))]


def test_readers_of_before_and_during_a_demotion_read_on_and_those_after_it_read_below() -> None:
    shard = holding(A)
    pinned(shard.pin(attempt(2), A))
    shard.demote(A)
    [during] = pinned(shard.pin(attempt(3), A))
    assert (during.tier, during.codec) == (Tier.RAM, Codec.RAW)
    shard.move()
    [after] = pinned(shard.pin(attempt(4), A, accept=Loss.Q8))
    assert (after.tier, after.codec, after.loss) == BELOW
    assert misses(shard.pin(attempt(5), A)) == [MissReason.LOSSY]
    assert free(shard) == 7 * RAW
    assert end(shard, attempt(2)) and free(shard) == 7 * RAW, "its bytes are still being read"
    assert end(shard, attempt(3)) and free(shard) == 8 * RAW


def test_a_demotion_makes_room_for_who_waits() -> None:
    shard = holding(A, pages=1)
    waiting = shard.reserving(attempt(2), B, wait_ns=SECOND)
    shard.demote(A)
    assert waiting not in shard.replies
    shard.move()
    assert slots(granted(shard, waiting))


def test_what_cannot_be_encoded_goes_down_raw_by_the_next_batch_and_for_good() -> None:
    shard = holding(A, B)
    shard.demote(A, B)
    shard.move(unfit=[0])
    assert shard.settle() == [arrived(B, *BELOW), left(B, Tier.RAM)]
    assert shard.moving is not None
    [again] = shard.moving.pages
    assert (again.source.key, again.target.codec, again.target.nbytes) == (key(A), Codec.RAW, RAW)
    assert running(shard) == (shard.ordered,)
    shard.move()
    assert lies(shard) == [(Tier.HOST, Codec.RAW, Loss.EXACT)]
    assert running(shard) == ()
    shard.promote(A)
    shard.move()
    shard.evict(A, tier=Tier.HOST)
    assert lies(shard) == [IN_RAM], "a page that was not decoded needs no twin"
    shard.demote(A, codec=Codec.Q4)
    assert shard.moving is not None
    assert [move.target.codec for move in shard.moving.pages] == [Codec.RAW], "it is not tried again"
    shard.move()
    assert lies(shard) == [(Tier.HOST, Codec.RAW, Loss.EXACT)]


def test_a_page_found_corrupt_on_its_way_down_is_condemned_and_comes_nowhere() -> None:
    shard = holding(A, B)
    shard.demote(A, B)
    shard.move(corrupt=[0])
    assert shard.settle() == [left(A, Tier.RAM, corrupt=True), arrived(B, *BELOW), left(B, Tier.RAM)]
    assert lies(shard) == []
    assert (free(shard), free(shard, Tier.HOST)) == (8 * RAW, 8 * RAW - Q8)
    assert counters(shard)["corrupt"] == 1
    assert shard.moving is None


def test_a_corrupt_page_that_cannot_be_encoded_either_is_not_tried_again() -> None:
    shard = holding(A)
    shard.demote(A)
    shard.move(unfit=[0], corrupt=[0])
    assert shard.settle() == [left(A, Tier.RAM, corrupt=True)]
    assert shard.moving is None


def test_what_lies_below_already_is_not_encoded_again_but_leaves_its_tier() -> None:
    shard = doubled(A)
    shard.demote(A, codec=Codec.Q4)
    assert shard.moving is None
    assert is_done(shard), "it is said at once"
    assert shard.settle() == [left(A, Tier.RAM)]
    assert lies(shard) == [BELOW]


def test_what_is_being_written_below_stays_above_until_it_is_there() -> None:
    shard = holding(A, loss=Loss.Q4)
    better = NewPage(key(A), root(), 0, Loss.Q8)
    shard.order(one_page(better, Codec.Q8, Tier.HOST))
    [fetch] = shard.fetching
    shard.demote(A)
    assert shard.moving is None and lies(shard) == [(Tier.RAM, Codec.RAW, Loss.Q4)]
    shard.settle()
    shard.commit(fetch.attempt, 0)
    assert shard.settle() == [arrived(A, *BELOW), left(A, Tier.RAM)], "which has lost more"


def test_where_there_is_no_room_below_a_page_is_evicted() -> None:
    shard = holding(A, B, C, host_bytes=Q8)
    shard.demote(A, B, C)
    assert sources(shard) == [A]
    assert lies(shard, B) == lies(shard, C) == []
    shard.move()
    assert lies(shard) == [BELOW]
    assert (counters(shard)["evicted"], counters(shard)["demoted"]) == (2, 1)


def test_where_there_is_no_room_below_a_page_that_its_move_keeps_stays() -> None:
    shard = holding(A, B, host_bytes=Q8)
    shard.demote(A, B, keeps=True)
    assert sources(shard) == [A]
    shard.move()
    assert (lies(shard, A), lies(shard, B)) == ([BELOW], [(Tier.RAM, Codec.RAW, Loss.EXACT)])
    assert (counters(shard)["evicted"], counters(shard)["demoted"]) == (0, 1)


def test_a_page_that_cannot_be_encoded_and_finds_no_room_raw_stays_if_its_move_keeps_it() -> None:
    shard = holding(A, host_bytes=Q8)
    shard.demote(A, keeps=True)
    shard.move(unfit=[0])
    assert lies(shard, A) == [(Tier.RAM, Codec.RAW, Loss.EXACT)]
    assert counters(shard)["evicted"] == 0


def test_a_codec_that_makes_pages_no_smaller_is_not_used() -> None:
    shard = tiered(spec=SPEC)
    shard.store(attempt(1), A)
    shard.demote(A, codec=Codec.Q4)
    shard.move()
    assert lies(shard) == [(Tier.HOST, Codec.RAW, Loss.EXACT)]


def test_of_a_block_each_part_goes_in_the_codec_that_makes_it_smaller() -> None:
    shard = tiered(spec=MIXED)
    shard.store(attempt(1), *(PageKey(A, group, MIXED.whole(group)) for group in range(2)))
    shard.demote(A)
    assert shard.moving is not None
    assert [(move.target.codec, move.target.nbytes) for move in shard.moving.pages] == [
        (Codec.Q8, 96),
        (Codec.RAW, 192),
    ]


def test_the_parts_of_a_block_go_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", 1)
    shard = tiered()
    for at, block in enumerate((A, B)):
        shard.store(attempt(at), key(block, LEFT), key(block, RIGHT))
    shard.demote(A, B)
    assert sources(shard) == [A, A]
    shard.move()
    assert sources(shard) == [B, B]
    shard.move()
    assert [len(lies(shard, block)) for block in (A, B)] == [2, 2]


# ---------------------------------------------------------------------------------------------- orders


def test_a_long_order_goes_batch_by_batch_and_is_done_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", 2 * RAW)
    shard = holding(*BLOCKS[:5])
    shard.demote(*BLOCKS[:5])
    batches: list[list[BlockHash]] = []
    while shard.moving is not None:
        assert running(shard) == (shard.ordered,)
        batches.append(sources(shard))
        shard.move()
    assert batches == [[A, B], [C, D], [BLOCKS[4]]]
    assert is_done(shard), "it is said at once"


def test_an_order_is_carried_out_once_however_often_it_is_told() -> None:
    shard = holding(A, B)
    shard.demote(A)
    repeated = MoveOrder(shard.ordered, (Move(shard.space, B, Tier.HOST, Codec.Q8),))
    shard.hear(orders=(repeated,))
    assert sources(shard) == [A]
    assert running(shard) == (shard.ordered,)
    shard.move()
    shard.hear(orders=(repeated,))
    assert shard.moving is None and running(shard) == ()
    shard.demote(B)
    assert sources(shard) == [B]


def test_a_block_that_is_named_twice_is_moved_once() -> None:
    shard = holding(A)
    shard.demote(A, A)
    assert sources(shard) == [A]
    shard.move()
    assert lies(shard) == [BELOW] and running(shard) == ()


def test_an_order_that_finds_nothing_to_do_is_done() -> None:
    shard = holding(A)
    shard.order(moves(Move(SPEC.namespace(THEIRS), A, Tier.HOST), Move(shard.space, B, Tier.HOST)))
    assert (shard.moving, is_done(shard)) == (None, True)
    shard.settle()
    shard.order(moves(Move(shard.space, A, Tier.RAM, up=True)))
    assert (shard.moving, is_done(shard)) == (None, True), "it lies there already"
    assert lies(shard) == [IN_RAM]


def test_a_shard_without_a_tier_below_demotes_nothing() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.demote(A)
    assert shard.moving is None and is_done(shard)
    assert pinned(shard.pin(attempt(2), A))


def test_a_new_coordinator_s_orders_follow_the_batch_under_way_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", RAW)
    shard = holding(A, B, C)
    shard.order(moves(*[Move(shard.space, block, Tier.HOST, Codec.Q8) for block in (A, B)]))
    shard.later(SECOND)
    shard.coordinator = Epoch(200)
    shard.settle()
    shard.demote(C)
    assert sources(shard) == [A]
    shard.move()
    assert sources(shard) == [C], "no report asks for the rest of the old order any more"
    assert lies(shard) == [BELOW]
    assert running(shard) == (shard.ordered,)
    shard.move()
    assert running(shard) == ()
    assert lies(shard, B) == [IN_RAM]


# ------------------------------------------------------------------------------ what comes between


def test_a_purge_in_the_middle_of_a_move_takes_its_source_and_its_target() -> None:
    shard = holding(A)
    shard.demote(A)
    assert shard.moving is not None
    shard.hear(tombstones=(Tombstone(5, OURS),))
    assert shard.revoked == [shard.moving.attempt]
    assert free(shard) == 7 * RAW, "it is still being read"
    assert shard.settle() == [PurgedEvent(5)]
    shard.move()
    assert shard.settle() == [] and lies(shard) == []
    assert (free(shard), free(shard, Tier.HOST)) == (8 * RAW, 8 * RAW)


def test_a_purge_of_one_namespace_leaves_the_source_of_another_where_it_is() -> None:
    shard = holding(A)
    shard.attach(CODED, THEIRS)
    theirs = CODED.namespace(THEIRS)
    shard.order(lambda number: PullOrder(number, SOURCE, THEIRS, CODED, (NewPage(key(B), root(), 0),)))
    shard.commit(shard.fetching[0].attempt, 0)
    shard.settle()
    shard.order(moves(Move(theirs, B, Tier.HOST, Codec.Q8), Move(shard.space, A, Tier.HOST, Codec.Q8)))
    shard.hear(tombstones=(Tombstone(5, OURS),))
    shard.move()
    assert lies(shard, B) == [IN_RAM] and lies(shard, A) == []
    assert running(shard) == ()
    assert free(shard, Tier.HOST) == 8 * RAW


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_whatever_comes_in_the_middle_of_a_move_nothing_leaks_and_its_source_stays(how: str) -> None:
    shard = holding(A, lease_ttl_ms=1_000 if how == "its lease expires" else 8_000)
    shard.demote(A)
    interrupt(shard, how)
    shard.move()
    assert lies(shard) == [BELOW if how == "a drain" else IN_RAM]
    assert sources(shard) == []
    assert not len(shard.core.leases)
    assert free(shard, Tier.HOST) == 8 * RAW - (Q8 if how == "a drain" else 0)


def test_a_move_goes_on_when_a_coordinator_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_mover, "BATCH_BYTES", RAW)
    shard = holding(A, B, lease_ttl_ms=8_000)
    shard.demote(A, B)
    shard.settle()
    shard.later(6 * SECOND)
    shard.move()
    assert shard.moving is None, "no coordinator knows this shard"
    shard.settle()
    assert sources(shard) == [B]
    shard.move()
    assert running(shard) == ()
    assert (lies(shard, A), lies(shard, B)) == ([IN_RAM], [BELOW]), "pages that stayed are ordered again"


@pytest.mark.parametrize("how", ["found corrupt", "evicted"])
def test_a_source_that_was_withdrawn_meanwhile_takes_its_target_with_it(how: str) -> None:
    shard = lowered(A)
    shard.promote(A)
    if how == "evicted":
        shard.evict(A, tier=Tier.HOST)
    else:
        shard.call(ours(Suspect(shard.epoch, (key(A),)), shard.space))
        shard.verdict(0)
    assert free(shard, Tier.HOST) == 8 * RAW - Q8, "it is still being read"
    shard.settle()
    shard.move()
    assert shard.settle() == [] and lies(shard) == []
    assert (free(shard), free(shard, Tier.HOST)) == (8 * RAW, 8 * RAW)


def test_what_a_shard_moves_is_none_of_the_leases_that_it_tells_of() -> None:
    shard = holding(A)
    shard.pin(attempt(2), A)
    shard.demote(A)
    shard.settle()
    shard.later(SECOND)
    assert (report(shard).info.leases, len(shard.core.leases)) == (1, 3)
    assert len(shard.core.own_attempts) == 2


def test_each_page_found_corrupt_on_its_way_down_counts() -> None:
    shard = holding(A, B)
    shard.demote(A, B)
    shard.move(corrupt=[0, 1])
    assert (counters(shard)["corrupt"], counters(shard)["demoted"]) == (2, 0)
