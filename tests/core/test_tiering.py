"""Which blocks change their tier: demotion by watermark and pressure, promotion on heat, one order at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator import tiering
from kvcluster.core.groups import Group, Plane
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    Decision,
    Done,
    Move,
    OrderProgress,
    PageEvent,
    PageKey,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    SetPolicy,
    StreamEvent,
    Tier,
    TierUse,
)
from kvcluster.core.miss import Loss, MissReason
from tests.core.lone_coordinator import (
    BLOCKS,
    A,
    B,
    C,
    D,
    Heard,
    LoneCoordinator,
    Voice,
    beat,
    decisions,
    moved,
    moves,
    ordered,
    pin,
    served_by,
    unpin,
    why,
)
from tests.core.pulling import drain, others
from tests.core.samples import (
    CODED,
    LEFT,
    OURS,
    PAGE,
    RIGHT,
    SECOND,
    SPEC,
    THEIRS,
    WHOLE,
    attempt,
    chain,
    gone,
    ours,
    page,
    pages,
    whole,
)

RAW, Q8 = CODED.page_bytes(0, WHOLE), 192
ALL = 100 * RAW


def below(capacity_bytes: int = ALL, free_bytes: int | None = None, pages: int = 0) -> tuple[TierUse, ...]:
    return (TierUse(Tier.HOST, capacity_bytes, capacity_bytes if free_bytes is None else free_bytes, pages),)


def disk(capacity_bytes: int = ALL, free_bytes: int | None = None, pages: int = 0) -> tuple[TierUse, ...]:
    """The tier under that."""
    return tuple(use._replace(tier=Tier.DISK) for use in below(capacity_bytes, free_bytes, pages))


def serving(
    *told: StreamEvent, capacity_pages: int = 100, host: tuple[TierUse, ...] | None = None, **config: Any
) -> tuple[LoneCoordinator, Voice]:
    """A coordinator and a shard with a host tier. Promises hold nothing unless `hold_ms` says so."""
    settings = {"hold_ms": 0, "host_raw_blocks": 0} | config
    tier = below() if host is None else host
    return LoneCoordinator.serving(*told, capacity_pages=capacity_pages, below=tier, spec=CODED, **settings)


def above(*blocks: BlockHash) -> list[PageEvent]:
    """A chain in RAM."""
    return pages(blocks, spec=CODED)


def encoded(*blocks: BlockHash) -> list[PageEvent]:
    """A chain in the tier below."""
    return pages(blocks, tier=Tier.HOST, codec=Codec.Q8, spec=CODED)


def on_disk(*blocks: BlockHash) -> list[PageEvent]:
    """A chain in the tier below that."""
    return pages(blocks, tier=Tier.DISK, codec=Codec.Q8, spec=CODED)


def decoded(*blocks: BlockHash) -> list[PageEvent]:
    return pages(blocks, loss=Loss.Q8, spec=CODED)


def left(*blocks: BlockHash, tier: Tier = Tier.RAM) -> list[StreamEvent]:
    return [gone(block, tier=tier, spec=CODED) for block in blocks]


def carry_out(voice: Voice, ack: Heard, *events: StreamEvent, pressure: int = 0) -> Heard:
    """The shard has carried out its moves and reports these events; returns the answer."""
    assert ack.move is not None
    voice.ends(ack.move)
    return voice.report(*events, pressure=pressure)


def free_on(voice: Voice, tier: Tier, free_bytes: int) -> None:
    """From now on it says that it has so much room in that tier below RAM."""
    uses = [use._replace(free_bytes=free_bytes) if use.tier is tier else use for use in voice.info.others]
    voice.info = replace(voice.info, others=tuple(uses))


def heat(coordinator: LoneCoordinator, *blocks: BlockHash, loads: int = 4) -> None:
    for at in range(loads):
        grant = coordinator.load(attempt(1_000 + at), blocks, whole(CODED, Loss.Q8))
        assert grant.blocks == len(blocks)


# --------------------------------------------------------------------------------------------- demotion


def test_below_the_low_mark_the_coldest_go_down_and_nothing_is_evicted() -> None:
    coordinator, voice = serving(*above(*BLOCKS), capacity_pages=20, low_free=0.1, high_free=0.3)
    voice.free(2)
    assert voice.report().move is None
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS[:2])
    voice.free(1)
    ack = voice.report()
    assert ack.evict is None and ack.move is not None
    assert moves(ack) == tuple(Move(coordinator.space, block, Tier.HOST, Codec.Q8) for block in BLOCKS[:6:-1])


def test_pressure_demotes_what_is_waited_for() -> None:
    _, voice = serving(*above(*BLOCKS))
    ack = voice.report(pressure=2 * RAW - 1)
    assert ack.evict is None
    assert moved(ack, Tier.HOST) == [BLOCKS[11], BLOCKS[10]]


def test_without_a_tier_below_pressure_evicts_as_ever() -> None:
    _, voice = serving(*above(*BLOCKS), host=())
    ack = voice.report(pressure=2 * RAW)
    assert ack.move is None and ack.evict is not None
    assert (ordered(ack), ack.evict.tier) == ([BLOCKS[11], BLOCKS[10]], Tier.RAM)


def test_held_and_pinned_blocks_are_demoted_no_sooner_than_they_are_let_go() -> None:
    coordinator, voice = serving(*above(A, B, C, D), hold_ms=2_000)
    coordinator.load(attempt(1), [A, B])
    assert pin(coordinator, [C]) == 1
    ack = voice.report(pressure=9 * RAW)
    assert moved(ack, Tier.HOST) == [D]
    ack = carry_out(voice, ack, *encoded(A, B, C, D)[3:], *left(D), pressure=9 * RAW)
    assert ack.move is None
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert unpin(coordinator, [C]) == 1
    assert moved(voice.report(pressure=9 * RAW), Tier.HOST) == [C, B, A]


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_the_first_blocks_of_a_sequence_go_down_raw_and_the_others_as_they_are_to(codec: str) -> None:
    _, voice = serving(*above(A, B, C, D), host_codec=codec, host_raw_blocks=2)
    ack = voice.report(pressure=4 * RAW)
    told = Codec[codec.upper()]
    assert [(move.hash, move.codec) for move in moves(ack)] == [(D, told), (C, told), (B, Codec.RAW), (A, Codec.RAW)]


def test_an_order_is_repeated_until_it_is_accepted_and_the_next_waits_for_its_end() -> None:
    _, voice = serving(*above(A, B))
    first = voice.report(pressure=RAW)
    assert moved(first, Tier.HOST) == [B]
    again = voice.report(*encoded(A, B)[1:], *left(B), pressure=2 * RAW)
    assert again.move == first.move
    assert again.move is not None
    voice.orders = OrderProgress(again.move.number, (again.move.number,))
    assert voice.report(pressure=2 * RAW).orders == (), "it runs"
    second = carry_out(voice, again, pressure=RAW)
    assert moved(second, Tier.HOST) == [A]
    assert second.move is not None and first.move is not None and second.move.number == first.move.number + 1
    assert carry_out(voice, second, *encoded(A), *left(A)).move is None


def test_what_stayed_in_ram_is_ordered_again() -> None:
    _, voice = serving(*above(A, B))
    ack = voice.report(pressure=2 * RAW)
    assert moved(ack, Tier.HOST) == [B, A]
    ack = carry_out(voice, ack, *encoded(A), *left(A), pressure=2 * RAW)
    assert moved(ack, Tier.HOST) == [B]


def test_order_numbers_continue_when_a_shard_sends_a_new_inventory() -> None:
    _, voice = serving(*above(A, B))
    carry_out(voice, voice.report(pressure=RAW), *encoded(A, B)[1:], *left(B))
    voice.inventory(*above(A), *encoded(A, B)[1:])
    ack = voice.report(pressure=RAW)
    assert moved(ack, Tier.HOST) == [A]
    assert ack.move is not None and ack.move.number > voice.orders.accepted, "else it were one that is done"


def test_an_order_names_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 3)
    _, voice = serving(*above(*BLOCKS))
    assert moved(voice.report(pressure=ALL), Tier.HOST) == list(BLOCKS[:8:-1])


def test_a_shard_where_nothing_can_go_down_is_full() -> None:
    coordinator, voice = serving(*above(A), hold_ms=60_000)
    coordinator.load(attempt(1), [A])
    assert voice.report(pressure=RAW).move is None
    assert decisions(coordinator.store(attempt(2), [B])) == [(1, Decision.REFUSED)]
    voice.report()
    assert decisions(coordinator.store(attempt(3), [B])) == [(1, Decision.WRITE)]


def test_a_shard_that_makes_room_below_itself_is_not_full() -> None:
    coordinator, voice = serving(*above(A, B))
    ack = voice.report(pressure=RAW)
    voice.report(pressure=RAW)
    assert decisions(coordinator.store(attempt(2), [C])) == [(1, Decision.WRITE)], "an order is under way"
    carry_out(voice, ack, *encoded(A, B)[1:], *left(B))


def test_while_rebuilding_nothing_moves() -> None:
    coordinator = LoneCoordinator(expected=2, spec=CODED, hold_ms=0, promote_loads=1)
    voice = coordinator.voice("a", below=below())
    voice.join(*above(A), *encoded(A, B)[1:])
    heat(coordinator, A, B, loads=1)
    assert voice.report(pressure=RAW).move is None
    assert voice.report().move is None
    coordinator.voice("b").join()
    assert moved(voice.report(pressure=RAW), Tier.HOST) == [A]


# ----------------------------------------------------------------------------------- room below


def test_what_a_demotion_takes_below_is_evicted_there_by_the_same_answer() -> None:
    old = chain(4, seed=8)
    coordinator, voice = serving(
        *encoded(*old), host=below(8 * Q8, free_bytes=Q8, pages=4), low_free=0.0, high_free=0.0
    )
    coordinator.now += SECOND
    voice.report(*above(*BLOCKS[:4]))
    ack = voice.report(pressure=3 * RAW)
    assert moved(ack, Tier.HOST) == list(BLOCKS[3:0:-1])
    assert ack.evict is not None and ack.evict.tier is Tier.HOST
    assert ordered(ack) == [old[3], old[2]], "there is room for one"


def test_what_lies_below_already_takes_no_room_there() -> None:
    _, voice = serving(
        *encoded(A, B), *decoded(A, B), host=below(2 * Q8, free_bytes=0, pages=2), low_free=0.0, high_free=0.0
    )
    ack = voice.report(pressure=2 * RAW)
    assert moved(ack, Tier.HOST) == [B, A]
    assert ack.evict is None


def test_what_goes_down_raw_takes_as_much_below() -> None:
    old = chain(4, seed=8)
    coordinator, voice = serving(
        *encoded(*old), host=below(4 * Q8, free_bytes=0, pages=4), low_free=0.0, high_free=0.0, host_raw_blocks=1
    )
    coordinator.now += SECOND
    voice.report(*above(A))
    assert ordered(voice.report(pressure=RAW)) == list(old[:0:-1]), "512 bytes, of 192 each"


def test_what_no_codec_makes_smaller_takes_no_more_below_than_above() -> None:
    spec = replace(CODED, block_tokens=1, groups=(Group((0,), (Plane("k", 2, 8, "float16"),)),))
    nbytes = spec.page_bytes(0, spec.whole(0))
    told = [
        PageEvent(spec.namespace(OURS), PageKey(block, 0, spec.whole(0)), A, 1, Tier.RAM, Loss.EXACT)
        for block in (B, C)
    ]
    host = (TierUse(Tier.HOST, 8 * nbytes, 2 * nbytes, 1),)
    lower = PageEvent(spec.namespace(OURS), PageKey(D, 0, spec.whole(0)), A, 1, Tier.HOST, Loss.EXACT)
    _, voice = LoneCoordinator.serving(
        *told, lower, below=host, spec=spec, capacity_pages=8, host_codec="q4", hold_ms=0, low_free=0.0, high_free=0.0
    )
    ack = voice.report(pressure=2 * nbytes)
    assert sorted(moved(ack, Tier.HOST)) == sorted([B, C])
    assert ack.evict is None, "there is room for both"


def test_a_tier_below_has_watermarks_of_its_own() -> None:
    coordinator, voice = serving(
        *encoded(*BLOCKS), host=below(20 * Q8, free_bytes=Q8, pages=12), low_free=0.1, high_free=0.3
    )
    ack = voice.report()
    assert ack.move is None and ack.evict is not None and ack.evict.tier is Tier.HOST
    assert ordered(ack) == list(BLOCKS[:6:-1])
    assert pin(coordinator, BLOCKS[:2]) == 2
    voice.ends(ack.evict)
    voice.free_below(0)
    assert ordered(voice.report(*left(*ordered(ack), tier=Tier.HOST))) == list(BLOCKS[6:1:-1]), "pinned ones are spared"


def test_an_eviction_below_that_did_not_happen_is_ordered_again() -> None:
    _, voice = serving(*encoded(A, B), host=below(10 * Q8, free_bytes=0, pages=2), low_free=0.1, high_free=0.2)
    first = voice.report()
    assert ordered(first) == [B, A]
    assert voice.report().evict == first.evict
    voice.ends(first.evict)
    assert ordered(voice.report(*left(B, tier=Tier.HOST))) == [A]


def test_while_an_eviction_below_is_under_way_nothing_is_demoted() -> None:
    _, voice = serving(*encoded(A, B), host=below(10 * Q8, free_bytes=0, pages=2), low_free=0.1, high_free=0.2)
    ack = voice.report()
    assert ordered(ack) == [B, A]
    voice.report(*above(C))
    assert voice.report(pressure=RAW).move is None, "one after the other"
    voice.ends(ack.evict)
    voice.free_below(2 * Q8)
    assert moved(voice.report(*left(B, A, tier=Tier.HOST), pressure=RAW), Tier.HOST) == [C]


# ------------------------------------------------------------------------------------ three tiers

OLD, OLDER = chain(6, seed=8), chain(6, seed=10)


def three_deep(*, host_free: int, disk_free: int, hold_ms: int = 0, blocks: int = 6) -> tuple[LoneCoordinator, Voice]:
    """A coordinator without marks, and a shard with the oldest blocks on disk, old ones in its host tier, and the
    latest in RAM."""
    coordinator, voice = serving(
        *on_disk(*OLDER[:blocks]),
        host=below(6 * Q8, free_bytes=host_free, pages=6) + disk(6 * Q8, free_bytes=disk_free, pages=6),
        low_free=0.0,
        high_free=0.0,
        hold_ms=hold_ms,
    )
    for told in (encoded(*OLD[:blocks]), above(*BLOCKS[:blocks])):
        coordinator.now += SECOND
        voice.report(*told)
    return coordinator, voice


def test_below_its_low_mark_the_host_tier_is_relieved_to_disk_and_nothing_is_evicted() -> None:
    tiers = below(20 * Q8, free_bytes=2 * Q8, pages=12) + disk()
    coordinator, voice = serving(*encoded(*BLOCKS), host=tiers, low_free=0.1, high_free=0.3)
    assert voice.report().move is None
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS[:2], whole(CODED, Loss.Q8))
    free_on(voice, Tier.HOST, Q8)
    ack = voice.report()
    assert ack.evict is None
    assert moved(ack, Tier.DISK) == list(BLOCKS[:6:-1])
    assert len(moves(ack)) == 5
    free_on(voice, Tier.HOST, 6 * Q8)
    events = [*on_disk(*BLOCKS)[7:], *left(*BLOCKS[7:], tier=Tier.HOST)]
    ack = carry_out(voice, ack, *events)
    assert (ack.move, ack.evict) == (None, None)


def test_what_is_waited_for_above_is_handed_down_tier_by_tier_and_evicted_out_of_the_lowest_alone() -> None:
    _, voice = three_deep(host_free=Q8, disk_free=Q8)
    ack = voice.report(pressure=4 * RAW)
    assert moved(ack, Tier.HOST) == list(BLOCKS[5:1:-1])
    assert moved(ack, Tier.DISK) == list(OLD[5:2:-1]), "there is room for one in the host tier"
    assert ack.evict is not None and ack.evict.tier is Tier.DISK
    assert ordered(ack) == list(OLDER[5:3:-1]), "and on disk"
    assert voice.report(pressure=4 * RAW).move == ack.move, "until it is done"


def test_room_is_made_in_the_lower_tier_before_the_upper_takes_it() -> None:
    _, voice = three_deep(host_free=0, disk_free=6 * Q8)
    ack = voice.report(pressure=2 * RAW)
    assert [move.to for move in moves(ack)] == [Tier.DISK, Tier.DISK, Tier.HOST, Tier.HOST]
    assert ack.evict is None, "there is room on disk"


def test_where_the_host_tier_has_room_nothing_goes_to_disk() -> None:
    _, voice = three_deep(host_free=2 * Q8, disk_free=0)
    ack = voice.report(pressure=2 * RAW)
    assert {move.to for move in moves(ack)} == {Tier.HOST}
    assert ack.evict is None


@pytest.mark.parametrize(("codec", "nbytes", "evicted"), [(Codec.RAW, RAW, 2), (Codec.Q4, 144, 0)])
def test_what_goes_to_disk_takes_there_what_it_takes_in_the_host_tier_whatever_the_policy_says(
    codec: Codec, nbytes: int, evicted: int
) -> None:
    tiers = below(2 * nbytes, free_bytes=0, pages=2) + disk(6 * Q8, free_bytes=0, pages=6)
    coordinator, voice = serving(*on_disk(*OLD), host=tiers, low_free=0.1, high_free=0.5)
    free_on(voice, Tier.DISK, 150)
    coordinator.now += SECOND
    ack = voice.report(*pages([A, B], tier=Tier.HOST, codec=codec, spec=CODED))
    assert moved(ack, Tier.DISK) == [B]
    assert len(ordered(ack)) == evicted


def test_what_takes_no_room_in_the_host_tier_sends_nothing_to_disk() -> None:
    coordinator, voice = three_deep(host_free=0, disk_free=0)
    coordinator.now += SECOND
    voice.report(*left(*BLOCKS[:6]), *decoded(*OLDER[:2]), *decoded(*OLD[:2])[1:])
    ack = voice.report(pressure=3 * RAW)
    assert sorted(moved(ack, Tier.HOST)) == sorted([*OLDER[:2], OLD[1]]), "each lies in a tier below already"
    assert moved(ack, Tier.DISK) == [] and ack.evict is None


def test_a_full_disk_tier_evicts_by_marks_of_its_own_and_the_host_tier_evicts_nothing() -> None:
    tiers = below(6 * Q8, free_bytes=0, pages=6) + disk(20 * Q8, free_bytes=Q8, pages=6)
    coordinator, voice = serving(*on_disk(*OLD), host=tiers, low_free=0.1, high_free=0.2)
    coordinator.now += SECOND
    ack = voice.report(*encoded(*BLOCKS[:6]))
    assert moved(ack, Tier.DISK) == [BLOCKS[5], BLOCKS[4]], "a fifth of the host tier is to be free"
    assert ack.evict is not None and ack.evict.tier is Tier.DISK
    assert ordered(ack) == list(OLD[:2:-1])


def test_held_and_pinned_blocks_stay_in_the_host_tier_and_on_disk() -> None:
    coordinator, voice = three_deep(host_free=0, disk_free=0, hold_ms=60_000)
    coordinator.load(attempt(1), OLD[:5], whole(CODED, Loss.Q8))
    assert pin(coordinator, OLDER[:5]) == 5
    ack = voice.report(pressure=3 * RAW)
    assert moved(ack, Tier.HOST) == list(BLOCKS[5:2:-1])
    assert moved(ack, Tier.DISK) == [OLD[5]]
    assert ordered(ack) == [OLDER[5]]


def test_what_an_order_left_in_its_tier_is_ordered_again_and_what_it_moved_is_not() -> None:
    _, voice = three_deep(host_free=0, disk_free=6 * Q8, blocks=2)
    ack = voice.report(pressure=2 * RAW)
    assert [(move.hash, move.to) for move in moves(ack)] == [
        *((block, Tier.DISK) for block in (OLD[1], OLD[0])),
        *((block, Tier.HOST) for block in (B, A)),
    ]
    came = [*on_disk(*OLD)[1:2], *left(OLD[1], tier=Tier.HOST), *encoded(A, B)[1:], *left(B)]
    ack = carry_out(voice, ack, *came, pressure=2 * RAW)
    assert moved(ack, Tier.HOST) == [A]
    assert moved(ack, Tier.DISK) == [OLD[0]]


def test_what_has_gone_to_disk_waits_there_for_its_turn_to_be_evicted() -> None:
    coordinator, voice = three_deep(host_free=0, disk_free=Q8, blocks=1)
    ack = voice.report(pressure=RAW)
    assert moved(ack, Tier.DISK) == [OLD[0]]
    free_on(voice, Tier.DISK, 0)
    free_on(voice, Tier.HOST, 0)
    came = [*on_disk(OLD[0]), *left(OLD[0], tier=Tier.HOST), *encoded(A), *left(A)]
    coordinator.now += SECOND
    ack = carry_out(voice, ack, *came, *above(*BLOCKS[:2])[1:], pressure=RAW)
    assert (moved(ack, Tier.HOST), moved(ack, Tier.DISK)) == ([B], [A])
    assert ordered(ack) == [OLDER[0]], "the coldest there"
    voice.ends(ack.evict)
    ack = carry_out(voice, ack, *left(OLDER[0], tier=Tier.DISK), pressure=RAW)
    assert ordered(ack) == [OLD[0]], "and then the next"


def wanting(voice: Voice, nbytes: int) -> None:
    """From now on it says that readers of what it has on disk wait for so much of its host tier."""
    uses = [use._replace(wanted_bytes=nbytes) if use.tier is Tier.HOST else use for use in voice.info.others]
    voice.info = replace(voice.info, others=tuple(uses))


def test_the_host_tier_is_relieved_of_what_readers_of_the_disk_wait_for() -> None:
    _, voice = three_deep(host_free=0, disk_free=6 * Q8)
    assert voice.report().move is None
    wanting(voice, Q8 + 1)
    ack = voice.report()
    assert moved(ack, Tier.DISK) == list(OLD[5:3:-1]) and len(moves(ack)) == 2
    assert ack.evict is None
    wanting(voice, 0)
    ack = carry_out(voice, ack, *on_disk(*OLD)[4:], *left(*OLD[4:], tier=Tier.HOST))
    assert (ack.move, ack.evict) == (None, None)


def test_what_readers_wait_for_is_added_to_what_is_lacking_for_what_comes_down() -> None:
    _, voice = three_deep(host_free=0, disk_free=0)
    wanting(voice, Q8)
    ack = voice.report(pressure=2 * RAW)
    assert moved(ack, Tier.HOST) == list(BLOCKS[5:3:-1])
    assert moved(ack, Tier.DISK) == list(OLD[5:2:-1])
    assert ordered(ack) == list(OLDER[5:2:-1]), "and the disk of what comes to it"


def test_what_readers_wait_for_waits_for_no_eviction_where_the_disk_has_room() -> None:
    _, voice = three_deep(host_free=0, disk_free=0)
    wanting(voice, Q8)
    first = voice.report()
    assert (moved(first, Tier.DISK), ordered(first)) == ([OLD[5]], [OLDER[5]])
    came = [*on_disk(*OLD)[5:], *left(OLD[5], tier=Tier.HOST)]
    assert carry_out(voice, first, *came).move is None, "the move is still under way, and there is no room"
    free_on(voice, Tier.DISK, Q8)
    again = voice.report()
    assert again.evict == first.evict
    assert moved(again, Tier.DISK) == [OLD[4]]


def test_a_draining_shard_makes_room_for_those_who_read_from_its_disk() -> None:
    coordinator, voice = three_deep(host_free=0, disk_free=6 * Q8)
    others(coordinator, "b", below=below())
    assert drain(coordinator, voice)
    assert voice.report().move is None
    wanting(voice, Q8)
    ack = voice.report()
    assert [(move.hash, move.to) for move in moves(ack)] == [(OLD[5], Tier.DISK)]
    assert ack.evict is None


def test_an_order_names_a_bounded_number_of_blocks_of_each_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.MOVES_PER_ORDER == 2 * limits.EVICTIONS_PER_ORDER
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 3)
    _, voice = three_deep(host_free=0, disk_free=0)
    ack = voice.report(pressure=6 * RAW)
    assert [len(moved(ack, to)) for to in (Tier.HOST, Tier.DISK)] == [3, 3]
    assert len(ordered(ack)) == 3


def test_a_shard_whose_blocks_all_stay_where_they_are_is_full_in_spite_of_its_disk_tier() -> None:
    coordinator, voice = three_deep(host_free=6 * Q8, disk_free=6 * Q8, hold_ms=60_000)
    coordinator.load(attempt(1), BLOCKS[:6])
    ack = voice.report(pressure=RAW)
    assert (ack.move, ack.evict) == (None, None)
    assert decisions(coordinator.store(attempt(2), BLOCKS[6:7])) == [(1, Decision.REFUSED)]


def test_what_is_loaded_often_from_disk_comes_straight_up() -> None:
    coordinator, voice = serving(*on_disk(A, B), *encoded(A, B, C)[2:], host=below() + disk(), promote_loads=3)
    heat(coordinator, A, B, C, loads=2)
    assert voice.report().move is None
    heat(coordinator, A, B, C, loads=1)
    ack = voice.report()
    assert moves(ack) == tuple(Move(coordinator.space, block, Tier.RAM, up=True) for block in (A, B, C))
    assert carry_out(voice, ack, *decoded(A, B, C)).move is None
    assert served_by(coordinator.load(attempt(9), [A, B, C], whole(CODED, Loss.Q8))) == [(3, ["a"])]


@pytest.mark.parametrize(("free_pages", "comes"), [(2, 0), (4, 2), (5, 3)])
def test_what_comes_up_from_disk_needs_room_for_raw_pages(free_pages: int, comes: int) -> None:
    tiers = below(free_bytes=0) + disk()
    coordinator, voice = serving(
        *on_disk(A, B, C), host=tiers, capacity_pages=20, promote_loads=1, low_free=0.1, high_free=0.1
    )
    heat(coordinator, A, B, C, loads=1)
    voice.free(free_pages)
    assert moved(voice.report(), Tier.RAM) == [A, B, C][:comes]


def test_what_came_up_from_disk_goes_down_again_without_taking_room() -> None:
    tiers = below(free_bytes=0) + disk(free_bytes=0)
    coordinator, voice = serving(*on_disk(A), host=tiers, promote_loads=1, low_free=0.0, high_free=0.0)
    heat(coordinator, A, loads=1)
    assert carry_out(voice, voice.report(), *decoded(A)).move is None
    ack = voice.report(pressure=RAW)
    assert moved(ack, Tier.HOST) == [A], "there its shard finds that it lies on disk"
    assert (len(moves(ack)), ack.evict) == (1, None)
    assert carry_out(voice, ack, *left(A), pressure=RAW).move is None


# --------------------------------------------------------------------------------------------- promotion


def test_what_is_loaded_often_from_below_comes_up_again() -> None:
    coordinator, voice = serving(*encoded(A, B, C), promote_loads=3)
    heat(coordinator, A, B, loads=2)
    assert voice.report().move is None
    heat(coordinator, A, B, loads=1)
    ack = voice.report()
    assert moves(ack) == (Move(coordinator.space, A, Tier.RAM, up=True), Move(coordinator.space, B, Tier.RAM, up=True))
    assert voice.report().move == ack.move, "until it is done"
    assert carry_out(voice, ack, *decoded(A, B)).move is None
    assert served_by(coordinator.load(attempt(9), [A, B, C], whole(CODED, Loss.Q8))) == [(2, ["a"]), (1, ["a"])]


def test_loads_count_within_one_window() -> None:
    coordinator, voice = serving(*encoded(A), promote_loads=2, hot_window_ms=1_000)
    heat(coordinator, A, loads=1)
    beat(coordinator, voice, until=coordinator.now + SECOND)
    heat(coordinator, A, loads=1)
    assert voice.report().move is None
    heat(coordinator, A, loads=1)
    assert moved(voice.report(), Tier.RAM) == [A]


def test_only_what_lies_below_alone_is_promoted() -> None:
    coordinator, voice = serving(*encoded(A, B, C), *decoded(A, B, C)[1:2], *above(A, B, C, D)[3:], promote_loads=1)
    heat(coordinator, A, B, C, D, loads=1)
    assert moved(voice.report(), Tier.RAM) == [A, C]


def test_nothing_is_promoted_into_room_that_others_wait_for() -> None:
    coordinator, voice = serving(*encoded(A), promote_loads=1)
    heat(coordinator, A, loads=1)
    assert voice.report(pressure=RAW).move is None
    assert moved(voice.report(), Tier.RAM) == [A]


def test_what_came_up_or_went_meanwhile_is_not_promoted() -> None:
    coordinator, voice = serving(*encoded(A, B, C), promote_loads=1)
    heat(coordinator, A, B, C, loads=1)
    assert moved(voice.report(*decoded(A), *left(B, tier=Tier.HOST)), Tier.RAM) == [C]


def test_a_namespace_that_was_purged_meanwhile_is_not_promoted() -> None:
    coordinator, voice = serving(*encoded(A), promote_loads=1)
    heat(coordinator, A, loads=1)
    coordinator.ask(Purged, ours(Purge()))
    assert voice.report().move is None


@pytest.mark.parametrize(("free_pages", "comes"), [(2, 0), (4, 2), (5, 3), (9, 3)])
def test_no_more_is_promoted_than_there_is_room_for_above_the_mark(free_pages: int, comes: int) -> None:
    coordinator, voice = serving(*encoded(A, B, C), capacity_pages=20, promote_loads=1, low_free=0.1, high_free=0.1)
    heat(coordinator, A, B, C, loads=1)
    voice.free(free_pages)
    assert moved(voice.report(), Tier.RAM) == [A, B, C][:comes]


def test_what_was_hot_and_found_no_room_comes_up_when_it_is_hot_again() -> None:
    coordinator, voice = serving(*encoded(A), capacity_pages=20, promote_loads=1, hot_window_ms=1_000)
    heat(coordinator, A, loads=1)
    voice.free(1)
    assert voice.report().move is None
    voice.free(20)
    beat(coordinator, voice, until=coordinator.now + SECOND)
    assert voice.report().move is None
    heat(coordinator, A, loads=1)
    assert moved(voice.report(), Tier.RAM) == [A]


def test_one_promotion_names_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 2)
    coordinator, voice = serving(*encoded(A, B, C), promote_loads=1)
    heat(coordinator, A, B, C, loads=1)
    assert moved(voice.report(), Tier.RAM) == [A, B]


def test_a_bounded_number_of_blocks_waits_to_be_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROMOTIONS", 2)
    coordinator, voice = serving(*encoded(A, B, C), promote_loads=1)
    heat(coordinator, A, B, C, loads=1)
    assert moved(voice.report(), Tier.RAM) == [A, B]


def test_a_draining_shard_promotes_nothing() -> None:
    coordinator, voice = serving(*encoded(A), promote_loads=1)
    others(coordinator, "b", below=below())
    heat(coordinator, A, loads=1)
    assert drain(coordinator, voice)
    assert voice.report().move is None


def test_a_shard_that_is_gone_is_owed_nothing() -> None:
    coordinator, voice = serving(*encoded(A), *above(*BLOCKS)[1:3], promote_loads=1)
    heat(coordinator, A, loads=1)
    assert moved(voice.report(pressure=RAW), Tier.HOST) == [C]
    coordinator.later(6 * SECOND)
    assert coordinator.status().blocks == 0
    again = coordinator.voice("a", epoch=2, below=below())
    again.join(*encoded(A))
    assert again.report().move is None, "another incarnation, of which nothing was hot"


def test_what_came_up_is_queued_once_for_its_way_down() -> None:
    coordinator, voice = serving(*encoded(A), promote_loads=1)
    heat(coordinator, A, loads=1)
    carry_out(voice, voice.report(), *decoded(A))
    [member] = coordinator.core.state.members.all()
    assert [len(member.cold[tier]) for tier in (Tier.RAM, Tier.HOST, Tier.DISK)] == [1, 1, 0]


def test_a_promotion_does_not_hide_what_is_to_be_demoted_next() -> None:
    coordinator, voice = serving(*encoded(A), *above(*BLOCKS)[1:3], promote_loads=1)
    heat(coordinator, A, loads=1)
    ack = voice.report()
    assert moved(ack, Tier.RAM) == [A]
    assert voice.report(pressure=RAW).move == ack.move
    ack = carry_out(voice, ack, *decoded(A), pressure=3 * RAW)
    assert sorted(moved(ack, Tier.HOST)) == sorted([A, B, C])


# ------------------------------------------------------------------------------ what readers are promised


def test_what_was_demoted_is_given_to_who_accepts_its_loss() -> None:
    coordinator, voice = serving(*above(A, B))
    voice.report(*encoded(A, B)[1:], *left(B))
    exact = coordinator.load(attempt(1), [A, B], whole(CODED))
    assert (exact.blocks, why(exact)) == (1, MissReason.LOSSY)
    lossy = coordinator.load(attempt(2), [A, B], whole(CODED, Loss.Q8))
    assert lossy.blocks == 2
    sources = [source for run in lossy.runs for group in run.plan for source in group or ()]
    assert [(source.tier, source.loss) for source in sources] == [(Tier.RAM, Loss.EXACT), (Tier.HOST, Loss.Q8)]


def test_of_twins_the_upper_serves() -> None:
    coordinator, voice = serving(*encoded(A), *decoded(A))
    [run] = coordinator.load(attempt(1), [A], whole(CODED, Loss.Q4)).runs
    assert [source.tier for group in run.plan for source in group or ()] == [Tier.RAM]
    voice.report(*left(A))
    [run] = coordinator.load(attempt(2), [A], whole(CODED, Loss.Q4)).runs
    assert [source.tier for group in run.plan for source in group or ()] == [Tier.HOST]


def test_a_faster_tier_serves_before_a_better_copy_where_its_loss_is_accepted() -> None:
    coordinator, _ = serving(*pages([A], tier=Tier.HOST, spec=CODED))
    [two] = others(coordinator, "b", below=below())
    two.report(*decoded(A))
    assert served_by(coordinator.load(attempt(1), [A], whole(CODED, Loss.Q8))) == [(1, ["b"])]
    assert served_by(coordinator.load(attempt(2), [A], whole(CODED))) == [(1, ["a"])]


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations((Tier.RAM, Tier.HOST, Tier.DISK))),
    ids=lambda order: "-".join(t.name for t in order),
)
def test_a_block_is_gone_only_with_its_last_copy_in_any_tier(order: tuple[Tier, ...]) -> None:
    coordinator, voice = serving(*encoded(A), *decoded(A), *on_disk(A), host=below() + disk())
    for tier in order:
        assert coordinator.status().blocks == 1
        voice.report(*left(A, tier=tier))
    assert coordinator.status().blocks == 0
    assert why(coordinator.load(attempt(1), [A], whole(CODED))) is MissReason.EVICTED


def test_a_pin_stays_with_a_block_that_changes_its_tier_and_goes_with_the_last_copy() -> None:
    coordinator, voice = serving(*above(A))
    assert pin(coordinator, [A]) == 1
    voice.report(*encoded(A), *left(A))
    voice.report(*decoded(A), *left(A, tier=Tier.HOST))
    assert unpin(coordinator, [A]) == 1
    assert pin(coordinator, [A]) == 1
    voice.report(*left(A))
    assert unpin(coordinator, [A]) == 0


def test_an_exact_store_of_what_is_only_there_with_a_loss_is_granted() -> None:
    coordinator, _ = serving(*encoded(A))
    assert decisions(coordinator.store(attempt(1), [A])) == [(1, Decision.WRITE)]
    assert decisions(coordinator.store(attempt(2), [A], loss=Loss.Q8)) == [(1, Decision.COMMITTED)]
    assert decisions(coordinator.store(attempt(3), [A], loss=Loss.Q4)) == [(1, Decision.COMMITTED)]


@pytest.mark.parametrize("under", [(), disk(100 * RAW)], ids=["no disk", "a disk"])
def test_pins_may_take_their_share_of_all_tiers_in_memory(under: tuple[TierUse, ...]) -> None:
    coordinator, _ = serving(*above(A, B, C), capacity_pages=4, host=below(4 * RAW) + under, pinned_share=0.25)
    assert pin(coordinator, [A, B, C]) == 2


def test_of_tiers_the_fastest_serves_and_disk_where_there_is_no_other() -> None:
    coordinator, voice = serving(*on_disk(A), *encoded(A), host=below() + disk())
    for tier in (Tier.HOST, Tier.DISK):
        [run] = coordinator.load(attempt(tier), [A], whole(CODED, Loss.Q4)).runs
        assert [source.tier for group in run.plan for source in group or ()] == [tier]
        voice.report(*left(A, tier=Tier.HOST))


def test_parts_of_one_block_are_weighed_together() -> None:
    halves = [page(A, part, spec=CODED) for part in (LEFT, RIGHT)]
    _, voice = serving(*halves, host=below(10 * PAGE, free_bytes=0), low_free=0.0, high_free=0.0)
    ack = voice.report(pressure=1)
    assert moved(ack, Tier.HOST) == [A], "once, with all its parts"


# --------------------------------------------------------------------------------------------- policy


def test_a_policy_that_is_set_is_the_policy_from_then_on() -> None:
    coordinator, _ = serving()
    settings = (("host.codec", "q4"), ("host.raw_blocks", "7"), ("promote.loads", "1"))
    assert coordinator.ask(Done, ours(SetPolicy(settings))).ok
    assert coordinator.status().policy == (("cache", "on"), *settings)
    assert coordinator.ask(Done, ours(SetPolicy((("host.raw_blocks", "0"),)))).ok
    assert coordinator.status().policy == (("cache", "on"), settings[0], ("host.raw_blocks", "0"), settings[2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host.codec", "zip"),
        ("host.raw_blocks", "x"),
        ("host.raw_blocks", "-1"),
        ("host.raw_blocks", "\u00b2"),
        ("host.raw_blocks", "1" * 10),
        ("promote.loads", "0"),
        ("promote.loads", "1.5"),
        ("unheard-of", "1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name_and_nothing_of_it_holds(name: str, value: str) -> None:
    coordinator, _ = serving()
    before = coordinator.status().policy
    settings = (("host.raw_blocks", "9"), (name, value))
    refused = coordinator.ask(Refused, ours(SetPolicy(settings)))
    assert refused.kind is RefusedKind.BAD and name in refused.detail
    assert coordinator.status().policy == before


def test_q4_is_given_up_once_and_only_where_the_namespace_is_known() -> None:
    coordinator, _ = serving()
    core = coordinator.core.tiering
    lossy = [(coordinator.space, 1_000_000)] * tiering.SAMPLES_WANTED
    assert len(core.sampled(lossy)) == 1
    assert core.sampled(lossy) == [], "it is told once"
    assert core.sampled([(CODED.namespace(THEIRS), 1_000_000)] * tiering.SAMPLES_WANTED) != []
    assert core.sampled([(SPEC.namespace(OURS), 1_000_000)] * tiering.SAMPLES_WANTED) == [], "no client has attached it"
    assert core.fallen == ((coordinator.space, 1_000_000), (CODED.namespace(THEIRS), 1_000_000))
