"""What a shard does by order of the coordinator: evictions, pulls, purges and drains, each of them once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, Epoch, ShardId
from kvcluster.core.messages import (
    Abort,
    Effect,
    Erase,
    EvictOrder,
    Leave,
    LeaveReason,
    Move,
    MoveOrder,
    MovePages,
    NewPage,
    OrderProgress,
    PageEvent,
    PageKey,
    PullOrder,
    PurgedEvent,
    RemovedEvent,
    ShardAddress,
    Suspect,
    Tier,
    Tombstone,
    Written,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPages
from kvcluster.core.spec import KVSpec
from tests.core.lone_shard import (
    BLOCKS,
    OTHER,
    A,
    B,
    C,
    D,
    LoneShard,
    counters,
    end,
    granted,
    inventory,
    is_done,
    misses,
    moves,
    pinned,
    report,
    running,
    slots,
)
from tests.core.moving import disk, holding, lowered, on_disk, tiered
from tests.core.samples import CODED, LEFT, OURS, RIGHT, SECOND, SPEC, THEIRS, attempt, key, ours, root


def test_a_condemned_page_stays_with_its_reader_and_is_found_by_no_other() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    [read] = pinned(shard.pin(attempt(2), A))
    shard.evict(A)
    assert shard.settle() == [RemovedEvent(shard.space, key(A), corrupt=False)]
    assert misses(shard.pin(attempt(3), A)) == [MissReason.EVICTED]
    assert shard.core.pool.condemned == 1
    assert shard.reserve(attempt(4), A) == (Written.FULL,), "its bytes are still being read"
    assert end(shard, attempt(4), Abort)
    assert end(shard, attempt(2))
    [written] = slots(shard.reserve(attempt(5), A))
    assert written.offset == read.offset
    assert written.generation > read.generation


def test_an_order_takes_all_parts_of_a_block_and_leaves_what_is_being_written() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), key(B, LEFT), key(B, RIGHT))
    shard.commit(attempt(2), 0, 1)
    shard.settle()
    shard.reserve(attempt(3), C)
    shard.evict(B, C, D)
    assert shard.settle() == [RemovedEvent(shard.space, key(B, part), corrupt=False) for part in (LEFT, RIGHT)]
    assert shard.commit(attempt(3), 0) == (Written.COMMITTED,)
    assert counters(shard)["evicted"] == 2


def test_an_order_for_a_namespace_that_no_worker_attached_here_is_carried_out() -> None:
    shard = LoneShard.joined()
    shard.order(lambda number: EvictOrder(number, ((SPEC.namespace(THEIRS), A),)))
    assert is_done(shard)


def test_an_order_is_carried_out_once_and_said_at_once() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.evict(A)
    assert is_done(shard) and report(shard).events == (RemovedEvent(shard.space, key(A), corrupt=False),)
    shard.settle()
    shard.store(attempt(2), A)
    shard.hear(orders=(EvictOrder(shard.ordered, ((shard.space, A),)),))
    assert pinned(shard.pin(attempt(3), A)), "a repeated order is an old one"


# -------------------------------------------------------------------------------------------------- pulls

SOURCE = ShardAddress(ShardId("b"), Epoch(3), "b:1")


def pull(*blocks: BlockHash, spec: KVSpec = SPEC) -> Callable[[int], PullOrder]:
    pages = tuple(NewPage(PageKey(block, 0, spec.whole(0)), root(spec), 0) for block in blocks)
    return partial(PullOrder, source=SOURCE, tenant=OURS, spec=spec, pages=pages)


def test_a_pull_reserves_pages_under_a_lease_of_the_shard_s_own_and_its_commit_ends_it() -> None:
    shard = LoneShard.joined()
    shard.order(pull(A, B))
    [fetch] = shard.fetching
    assert (fetch.namespace, fetch.source) == (shard.space, SOURCE)
    assert [slot.key for slot in fetch.slots] == [key(A), key(B)]
    assert misses(shard.pin(attempt(2), A)) == [MissReason.PENDING]
    assert running(shard) == (shard.ordered,)
    assert shard.commit(fetch.attempt, 0, 1) == (Written.COMMITTED,) * 2
    assert is_done(shard), "it is said at once"
    assert [event.key for event in shard.settle() if isinstance(event, PageEvent)] == [key(A), key(B)]
    assert counters(shard)["pulled"] == 2


def test_a_pull_is_carried_out_once_however_often_it_is_told() -> None:
    shard = LoneShard.joined()
    for _ in range(3):
        shard.hear(orders=(pull(A)(1),))
    assert len(shard.fetching) == 1
    shard.commit(shard.fetching[0].attempt, 0)
    shard.hear(orders=(EvictOrder(2, ((shard.space, A),)),))
    shard.hear(orders=(pull(A)(1),))
    assert len(shard.fetching) == 1


def test_a_pull_that_finds_nothing_to_do_has_ended() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    shard.order(pull(A, B))
    assert shard.fetching == []
    assert is_done(shard)


def test_a_pull_of_a_namespace_that_was_never_attached_here_attaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 2)
    shard = LoneShard.joined()
    other, one_too_many = replace(SPEC, weights="sha256:o"), replace(SPEC, weights="sha256:p")
    shard.order(pull(A, spec=other))
    shard.commit(shard.fetching[0].attempt, 0)
    assert report(shard).specs == ((OURS, other),)
    shard.store(attempt(1), B)
    shard.order(pull(A, spec=one_too_many))
    assert len(shard.fetching) == 1
    assert is_done(shard), "this tenant has as many as it may"


@pytest.mark.parametrize("how", ["time", "abort", "purge", "a new coordinator", "the end"])
def test_a_pull_ends_with_its_lease_in_whatever_way_that_ends(how: str) -> None:
    shard = LoneShard.joined(lease_ttl_ms=1_000)
    shard.order(pull(A))
    [fetch] = shard.fetching
    if how == "time":
        shard.settle()
        shard.later(SECOND)
    elif how == "purge":
        shard.hear(tombstones=(Tombstone(5, OURS),))
    elif how == "a new coordinator":
        shard.later(SECOND // 2)
        shard.coordinator = Epoch(200)
        shard.settle()
    elif how == "the end":
        shard.hear(leave=LeaveReason.DRAINED)
    stopped = how in ("time", "purge", "the end")
    assert shard.revoked == ([fetch.attempt] if stopped else [])
    if how == "abort":
        assert end(shard, fetch.attempt, Abort)
    else:
        outcome = shard.commit(fetch.attempt, 0)
        assert outcome == (Written.LOST if stopped else Written.COMMITTED,)
    assert not len(shard.core.leases)
    if how != "the end":
        shard.settle()
        shard.later(SECOND)
        assert report(shard).orders == OrderProgress(0 if how == "a new coordinator" else 1)
        assert counters(shard)["pulled"] == (1 if how == "a new coordinator" else 0), "only pages that came count"
        shard.order(pull(B))
        assert len(shard.fetching) == 2, "the next may begin"


def test_a_new_coordinator_s_pull_waits_for_the_one_under_way() -> None:
    shard = LoneShard.joined()
    shard.order(pull(A))
    shard.later(SECOND)
    shard.coordinator, shard.ordered = Epoch(200), 0
    shard.settle()
    shard.order(pull(B))
    assert len(shard.fetching) == 1
    assert running(shard) == (1,)
    shard.commit(shard.fetching[0].attempt, 0)
    assert report(shard).orders == OrderProgress(1, (1,)), "the one that ended was no pull of this coordinator's"
    shard.answer()
    assert len(shard.fetching) == 2


def test_a_pull_that_waits_gives_way_to_the_next_since_the_coordinator_has_withdrawn_it() -> None:
    shard = LoneShard.joined()
    for block in (A, B, C):
        shard.order(pull(block))
    assert running(shard) == (1, 3)
    shard.commit(shard.fetching[0].attempt, 0)
    shard.settle()
    assert [[slot.key for slot in fetch.slots] for fetch in shard.fetching] == [[key(A)], [key(C)]]


def test_a_pull_that_waits_is_not_begun_once_what_it_names_is_purged() -> None:
    shard = LoneShard.joined()
    shard.order(pull(A, spec=OTHER))
    shard.order(pull(B))
    shard.hear(tombstones=(Tombstone(5, OURS, weights=SPEC.weights),))
    assert running(shard) == (1,), "its source may not have heard of the purge"
    shard.commit(shard.fetching[0].attempt, 0)
    shard.settle()
    assert len(shard.fetching) == 1 and running(shard) == ()


def test_what_waits_of_an_earlier_coordinator_is_not_begun() -> None:
    shard = LoneShard.joined()
    shard.order(pull(A))
    shard.order(pull(B))
    shard.later(SECOND)
    shard.coordinator, shard.ordered = Epoch(200), 0
    shard.settle()
    shard.commit(shard.fetching[0].attempt, 0)
    shard.settle()
    assert len(shard.fetching) == 1 and running(shard) == ()


def test_an_eviction_waits_for_no_pull_and_for_no_move() -> None:
    shard = holding(A, B, pages=4)
    shard.order(pull(C, spec=CODED))
    shard.demote(B)
    shard.evict(A)
    assert len(shard.fetching) == 1 and shard.moving is not None
    assert misses(shard.pin(attempt(2), A)) == [MissReason.EVICTED]
    assert report(shard).orders == OrderProgress(3, (1, 2))


def test_one_answer_may_bring_an_order_of_each_kind_and_repeat_what_was_accepted_before() -> None:
    shard = holding(A, B)
    orders = (
        EvictOrder(1, ((shard.space, A),)),
        MoveOrder(2, (Move(shard.space, B, Tier.HOST, Codec.Q8),)),
        pull(C, spec=CODED)(3),
    )
    shard.hear(orders=orders[:1])
    shard.settle()
    shard.store(attempt(2), A)
    shard.hear(orders=orders)
    assert pinned(shard.pin(attempt(3), A)), "that order was carried out"
    assert len(shard.fetching) == 1 and shard.moving is not None
    shard.ordered = 3
    assert running(shard) == (2, 3)


def test_no_more_orders_are_accepted_than_may_run_and_the_rest_when_they_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "ORDERS_IN_FLIGHT", 1)
    shard = LoneShard.joined()
    shard.store(attempt(1), B)
    orders = (pull(A)(1), EvictOrder(2, ((shard.space, B),)))
    shard.hear(orders=orders)
    assert pinned(shard.pin(attempt(2), B))
    shard.commit(shard.fetching[0].attempt, 0)
    assert report(shard).orders == OrderProgress(1)
    shard.hear(orders=orders[1:])
    assert misses(shard.pin(attempt(3), B)) == [MissReason.EVICTED]


# ------------------------------------------------------------------------------------------------- purges

CLEAR = Tombstone(10, OURS)


def test_a_tombstone_condemns_what_is_there_and_stops_what_is_being_written() -> None:
    shard = LoneShard.joined(pages=3)
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.pin(attempt(3), A)
    waiting = shard.reserving(attempt(4), C, D, wait_ns=SECOND)
    shard.hear(tombstones=(CLEAR,))
    assert misses(shard.pin(attempt(5), A)) == [MissReason.EVICTED]
    assert shard.revoked == [attempt(2)], "a reader reads on: its bytes are right"
    assert granted(shard, waiting) == (Written.LOST,) * 2
    assert shard.commit(attempt(2), 0) == (Written.LOST,)
    assert shard.settle() == [PurgedEvent(10)]
    assert counters(shard)["purged"] == 1


def test_a_tombstone_leaves_alone_what_it_does_not_name() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.hear(
        tombstones=(Tombstone(10, THEIRS), Tombstone(11, OURS, model="another"), Tombstone(12, OURS, adapter="x"))
    )
    assert shard.settle() == [PurgedEvent(10), PurgedEvent(11), PurgedEvent(12)]
    assert shard.commit(attempt(2), 0) == (Written.COMMITTED,)
    assert pinned(shard.pin(attempt(3), A, B))


def test_a_tombstone_is_carried_out_once() -> None:
    shard = LoneShard.joined()
    shard.hear(tombstones=(CLEAR,))
    shard.settle()
    shard.store(attempt(1), A)
    shard.hear(tombstones=(CLEAR,))
    assert shard.settle() == []
    assert pinned(shard.pin(attempt(2), A)), "pages stored after a purge stay"


def test_a_purge_of_many_pages_is_carried_out_in_slices_and_told_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PURGED_PAGES_PER_STEP", 2)
    shard = LoneShard.joined()
    shard.store(attempt(1), *BLOCKS[:5])
    writing = attempt(2)
    assert slots(shard.reserve(writing, BLOCKS[6]))
    orders = (pull(BLOCKS[7])(1),)
    shard.hear(tombstones=(CLEAR,), orders=orders)
    assert len(list(shard.core.pool.ready())) == 3
    assert (report(shard).events, shard.fetching, shard.revoked) == ((), [], []), "it speaks at once, to be told again"
    shard.hear(tombstones=(CLEAR,), orders=orders)
    assert len(list(shard.core.pool.ready())) == 1
    assert report(shard).orders == OrderProgress(), "the purge comes first"
    shard.hear(tombstones=(CLEAR,), orders=orders)
    assert shard.revoked == [writing] and len(shard.fetching) == 1
    assert shard.settle() == [PurgedEvent(10)]
    assert counters(shard)["purged"] == 5


def test_a_tombstone_and_a_pull_in_one_answer_purge_what_was_there_and_fetch_what_comes() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.order(pull(A), tombstones=(CLEAR,))
    assert shard.settle() == [PurgedEvent(10)]
    assert shard.revoked == []
    assert shard.commit(shard.fetching[0].attempt, 0) == (Written.COMMITTED,)


def test_an_inventory_tells_the_tombstones_that_its_pages_have_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 1)
    shard = LoneShard.joined()
    shard.hear(tombstones=(Tombstone(4, OURS),))
    shard.settle()
    shard.store(attempt(1), A, B)
    shard.hear(inventory=True)
    assert (inventory(shard).chunk, inventory(shard).tombstones) == (0, (Tombstone(4, OURS),))
    shard.hear(tombstones=(CLEAR,))
    told = inventory(shard)
    assert [page.key for page in told.pages] == [key(B)], "which was there when the inventory began"
    assert told.tombstones == (Tombstone(4, OURS),)
    assert shard.settle() == [*told.pages, PurgedEvent(10)]
    shard.hear(inventory=True)
    assert (inventory(shard).pages, inventory(shard).tombstones) == ((), (CLEAR,))


def done_to_disk(effects: list[Effect]) -> list[Effect]:
    """Returns the effects among these that go to the thread that writes to disk, in order."""
    return [effect for effect in effects if isinstance(effect, Erase | MovePages)]


def test_what_a_tombstone_names_is_erased_from_disk_once_with_all_that_one_answer_brings() -> None:
    shard = on_disk(A, B)
    first, second, third = CLEAR, Tombstone(11, THEIRS), Tombstone(12, OURS, model="another")
    assert done_to_disk(shard.hear(tombstones=(first, second))) == [Erase((first, second), (first, second))]
    assert list(shard.core.pool.ready()) == []
    shard.settle()
    assert done_to_disk(shard.hear(tombstones=(first, second))) == [], (
        "it was told again, since it had not acknowledged it"
    )
    assert done_to_disk(shard.hear(tombstones=(second, third))) == [Erase((third,), (first, second, third))]
    assert done_to_disk(shard.hear()) == []


def test_what_an_answer_purges_is_erased_before_anything_that_it_orders_is_written() -> None:
    shard = lowered(A, found=disk())
    shard.attach(SPEC, THEIRS)
    move = Move(shard.space, A, Tier.DISK)
    stones = (Tombstone(10, THEIRS),)
    erase, written = done_to_disk(shard.order(moves(move), tombstones=stones))
    assert isinstance(erase, Erase) and isinstance(written, MovePages)


def test_tombstones_that_were_found_on_disk_are_kept_with_those_that_come() -> None:
    kept = Tombstone(4, THEIRS)
    shard = tiered(found=replace(disk(), tombstones=(kept,)))
    shard.hear(inventory=True)
    assert inventory(shard).tombstones == (kept,), "its pages have survived that"
    shard.settle()
    assert done_to_disk(shard.hear(tombstones=(kept,))) == [], "it was carried out by the shard before"
    assert done_to_disk(shard.hear(tombstones=(kept, CLEAR))) == [Erase((CLEAR,), (kept, CLEAR))]


@pytest.mark.parametrize("found", [NO_STORE, RecoveredPages(trouble="the drive is gone")])
def test_a_shard_without_a_disk_tier_has_nothing_to_erase(found: RecoveredPages) -> None:
    shard = holding(A, found=found)
    assert done_to_disk(shard.hear(tombstones=(CLEAR,))) == []
    assert shard.settle() == [PurgedEvent(10)]


# ------------------------------------------------------------------------------------------------- drains


def test_who_waits_for_room_at_a_shard_that_is_to_go_is_told_at_once() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=SECOND)
    shard.hear(drain=True)
    assert granted(shard, waiting) == (Written.LOST,)


def test_a_shard_that_is_to_go_says_so_from_then_on_and_serves_readers_until_it_goes() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.hear(drain=True)
    assert report(shard).info.draining
    shard.coordinator = Epoch(200)
    shard.settle()
    shard.later(SECOND)
    assert report(shard).info.draining, "so that the next coordinator knows"
    assert pinned(shard.pin(attempt(2), A))
    assert shard.reserve(attempt(3), B) == (Written.LOST,), "it would go along, after the last report"
    [*_, leave] = shard.hear(leave=LeaveReason.DRAINED)
    assert leave == Leave("this shard is drained", for_good=True)


# ----------------------------------------------------------------------------------------------- counters


def test_every_counter_of_a_shard_without_tiers_adds_up() -> None:
    """Two equal events count twice, and one of them once."""
    shard = LoneShard.joined(pages=5, lease_ttl_ms=1_000)

    def once(number: int) -> None:
        of = [attempt(10 * number + at) for at in range(6)]
        shard.store(of[0], A, B)
        assert shard.reserve(of[1], A, C)[0] is Written.DUPLICATE
        assert end(shard, of[1], Abort)
        assert shard.commit(of[1], 0) == (Written.LOST,)
        shard.call(ours(Suspect(shard.epoch, (key(A), key(B))), shard.space))
        shard.verdict(0)
        shard.evict(A, B)
        shard.store(of[2], A)
        shard.order(pull(C))
        shard.commit(shard.fetching[-1].attempt, 0)
        shard.settle()
        assert Written.FULL in shard.reserve(of[3], *BLOCKS[6:10])
        shard.later(SECOND)
        assert shard.revoked[-1] == of[3]
        assert end(shard, of[3], Abort)
        shard.hear(tombstones=(Tombstone(number, OURS),))

    once(1)
    first = counters(shard)
    once(2)
    assert counters(shard) == {name: 2 * count for name, count in first.items()}
    assert {name for name, count in first.items() if count <= 0} == {
        *("demoted", "promoted", "staged", "read_on_device")
    }
