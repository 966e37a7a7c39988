"""The tier in a GPU's memory: above that which workers write into, and read by others through copies."""

from __future__ import annotations

from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Move, Report, Staged, StreamEvent, Tier, TierUse, Written
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.shutdown_saver import SaveList
from tests.core.lone_coordinator import D, LoneCoordinator, Voice, beat, moved, moves
from tests.core.lone_shard import A, B, C, LoneShard, counters, misses, pinned
from tests.core.moving import BELOW, IN_RAM, RAW, free, left, lies
from tests.core.samples import CODED, LEFT, RIGHT, SECOND, SPEC, WHOLE, attempt, gone, page, pages
from tests.core.test_tiering import ALL, above, below, carry_out, decoded, encoded, heat, serving

ON_GPU = (Tier.GPU, Codec.RAW, Loss.EXACT)
DECODED = (Tier.GPU, Codec.RAW, Loss.Q8)


def with_gpu(*blocks: BlockHash, gpu_pages: int = 4, pages: int = 8) -> LoneShard:
    """A shard with a pool on a GPU that holds these in RAM."""
    shard = LoneShard.joined(pages, host_pages=8, gpu_pages=gpu_pages, spec=CODED, extent_bytes=64)
    shard.store(attempt(1), *blocks)
    return shard


def promoted(*blocks: BlockHash, **room: int) -> LoneShard:
    shard = with_gpu(*blocks, **room)
    shard.promote(*blocks, to=Tier.GPU)
    shard.move_all()
    shard.settle()
    return shard


def lowered(shard: LoneShard, *blocks: BlockHash, to: Tier = Tier.HOST) -> LoneShard:
    shard.demote(*blocks, to=to)
    shard.move_all()
    shard.settle()
    return shard


def wanted(shard: LoneShard) -> list[BlockHash]:
    """What its next report says that readers want on the GPU."""
    shard.later(SECOND)
    assert isinstance(shard.sent, Report)
    blocks = shard.sent.wanted_on_device
    shard.settle()
    assert {space for space, _ in blocks} <= {shard.space}
    return [block for _, block in blocks]


# ------------------------------------------------------------------------------------------- a shard by itself


def test_a_promoted_page_stays_in_ram_where_readers_read_it_in_place() -> None:
    shard = promoted(A)
    assert lies(shard) == [ON_GPU, IN_RAM]
    (read,) = pinned(shard.pin(attempt(2), A))
    assert read.tier is Tier.RAM


def test_a_page_is_decoded_on_its_way_up_and_keeps_its_loss() -> None:
    shard = lowered(with_gpu(A), A)
    shard.promote(A, to=Tier.GPU)
    shard.move_all()
    assert lies(shard) == [DECODED, BELOW]
    assert misses(shard.pin(attempt(2), A)) == [MissReason.LOSSY]
    shard.evict(A, tier=Tier.HOST)
    shard.settle()
    assert lies(shard) == [], "without its twin it would be encoded a second time"


def test_a_copy_of_a_decoded_page_is_no_more_without_its_twin_than_that_page() -> None:
    shard = lowered(with_gpu(A), A)
    for tier in (Tier.RAM, Tier.GPU):
        shard.promote(A, to=tier)
        shard.move_all()
    assert lies(shard) == [DECODED, (Tier.RAM, Codec.RAW, Loss.Q8), BELOW]
    shard.evict(A, tier=Tier.HOST)
    shard.settle()
    assert lies(shard) == [], "by way of RAM it would be encoded a second time"


def test_what_cannot_be_promoted_stays_where_it_is() -> None:
    shard = with_gpu(A, B, gpu_pages=1)
    shard.promote(A, B, to=Tier.GPU)
    shard.move(unfit=[0])
    shard.move_all()
    shard.settle()
    assert (lies(shard, A), lies(shard, B), counters(shard)["evicted"]) == ([IN_RAM], [IN_RAM], 0)
    assert free(shard, Tier.GPU) == RAW


def test_a_page_leaves_the_gpu_for_ram_unless_a_twin_lies_below() -> None:
    shard = lowered(promoted(A), A, to=Tier.RAM)
    assert lies(shard) == [IN_RAM] and counters(shard)["evicted"] == 0
    shard = promoted(A)
    shard.evict(A, tier=Tier.RAM)
    shard.settle()
    assert lies(shard) == [ON_GPU]
    assert lies(lowered(shard, A, to=Tier.RAM)) == [IN_RAM]


def test_an_exact_copy_on_the_gpu_serves_those_who_accept_no_loss() -> None:
    shard = lowered(promoted(A), A)
    assert lies(shard) == [ON_GPU, BELOW]
    (read,) = pinned(shard.pin(attempt(2), A, accept=Loss.Q8))
    assert read.tier is Tier.HOST, "it is read in place"
    call = shard.pinning(attempt(3), A)
    stage = shard.staging
    assert call not in shard.replies and stage is not None
    assert [(page.source.tier, page.target.tier, page.target.codec) for page in stage.pages] == [
        (Tier.GPU, Tier.HOST, Codec.RAW)
    ]
    shard.step(Staged(stage.attempt, ()))
    (copy,) = pinned(shard.replies[call])
    assert (copy.tier, copy.loss) == (Tier.HOST, Loss.EXACT)


def test_a_page_that_rots_on_the_gpu_is_gone_from_there_alone() -> None:
    shard = lowered(promoted(A), A)
    call = shard.pinning(attempt(3), A)
    assert shard.staging is not None
    shard.step(Staged(shard.staging.attempt, (0,)))
    assert misses(shard.replies[call]) == [MissReason.CORRUPT]
    assert shard.settle() == [left(A, Tier.GPU, corrupt=True)]
    assert lies(shard) == [BELOW]


def test_a_better_page_takes_the_place_of_those_with_more_loss_on_the_gpu_too() -> None:
    shard = lowered(with_gpu(A), A)
    shard.promote(A, to=Tier.GPU)
    shard.move_all()
    shard.settle()
    assert shard.reserve(attempt(2), A) and shard.commit(attempt(2), 0) == (Written.COMMITTED,)
    assert lies(shard) == [IN_RAM]


def test_what_lies_on_a_gpu_alone_is_to_be_saved() -> None:
    shard = promoted(A, B)
    shard.evict(A, tier=Tier.RAM)
    shard.settle()
    listed = SaveList(list(shard.core.pool.ready()), lambda space: False)
    assert listed.left() == (2, 2 * RAW)


def test_the_tier_is_told_before_those_below_ram() -> None:
    others = promoted(A).core.info().others
    assert [(use.tier, use.pages, use.capacity_bytes - use.free_bytes) for use in others] == [
        (Tier.GPU, 1, RAW),
        (Tier.HOST, 0, 0),
    ]


def test_a_pool_without_a_host_tier_has_no_gpu_tier() -> None:
    pool: PagePool = LoneShard.joined(8, gpu_pages=4, spec=CODED, extent_bytes=64).core.pool
    assert pool.tiers == (Tier.RAM,)


# ------------------------------------------------------------------------------------------- what is ordered


def gpu(capacity_bytes: int = ALL, free_bytes: int | None = None) -> tuple[TierUse, ...]:
    return tuple(use._replace(tier=Tier.GPU) for use in below(capacity_bytes, free_bytes))


def coordinator_with(
    *told: StreamEvent, capacity_pages: int = 100, free_bytes: int = ALL
) -> tuple[LoneCoordinator, Voice]:
    host = gpu(free_bytes=free_bytes) + below()
    return serving(*told, capacity_pages=capacity_pages, host=host)


def test_what_readers_on_the_device_read_in_ram_is_promoted_to_the_gpu() -> None:
    shard = with_gpu(A, B, C)
    pinned(shard.pin(attempt(2), A, B, on_device=True))
    pinned(shard.pin(attempt(3), A, C))
    assert wanted(shard) == [A, B]
    assert not wanted(shard), "once"
    coordinator, voice = coordinator_with(*above(A, B))
    ack = voice.report(wanted=[A, B, C])
    assert moves(ack) == tuple(Move(coordinator.space, block, Tier.GPU, up=True) for block in (A, B)), "C is not known"


def test_what_they_read_on_the_gpu_is_not_wanted_there() -> None:
    shard = promoted(A)
    pinned(shard.pin(attempt(2), A, on_device=True))
    assert not wanted(shard)


def test_loads_by_others_promote_nothing_to_the_gpu() -> None:
    coordinator, voice = coordinator_with(*above(A, B))
    heat(coordinator, A, B)
    assert voice.report().move is None


def test_a_shard_without_a_gpu_promotes_nothing_that_is_wanted_there() -> None:
    _, voice = serving(*above(A), *encoded(B), host=below())
    assert voice.report(wanted=[A, B]).move is None


def test_a_bounded_number_of_blocks_is_wanted_in_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WANTED_ON_DEVICE", 2)
    shard = with_gpu(A, B, C)
    pinned(shard.pin(attempt(2), A, B, C, on_device=True))
    assert len(wanted(shard)) == 2


def test_what_is_hot_below_comes_up_where_all_read_it_in_place_and_then_to_the_gpu() -> None:
    coordinator, voice = serving(*encoded(A, B), host=gpu() + below())
    heat(coordinator, A, B)
    ack = voice.report()
    assert moves(ack) == tuple(Move(coordinator.space, block, Tier.RAM, up=True) for block in (A, B))
    assert carry_out(voice, ack, *decoded(A, B)).move is None
    assert moved(voice.report(wanted=[A, B]), Tier.GPU) == [A, B]


def test_a_promotion_to_ram_takes_nothing_off_the_gpu() -> None:
    shard = lowered(promoted(A), A)
    assert lies(shard) == [ON_GPU, BELOW]
    shard.promote(A, to=Tier.RAM)
    shard.move_all()
    shard.settle()
    assert lies(shard) == [ON_GPU, (Tier.RAM, Codec.RAW, Loss.Q8), BELOW]


def test_what_is_on_the_gpu_is_not_promoted_again() -> None:
    _, voice = coordinator_with(*above(A), *pages([A], tier=Tier.GPU, spec=CODED))
    assert voice.report(wanted=[A]).move is None


def test_who_waits_for_room_in_ram_moves_nothing_off_the_gpu() -> None:
    _, voice = coordinator_with(*above(A, B, C), *pages([A, B, C], tier=Tier.GPU, spec=CODED))
    assert moved(voice.report(pressure=2 * RAW), Tier.HOST) == [C, B]


def test_a_full_gpu_gives_its_coldest_to_ram() -> None:
    _, voice = coordinator_with(*pages([A, B, C], tier=Tier.GPU, spec=CODED), free_bytes=0)
    ack = voice.report()
    assert moved(ack, Tier.RAM)[:1] == [C] and not moved(ack, Tier.HOST)


def test_readers_are_told_of_raw_pages_since_older_ones_do_not_know_the_tier() -> None:
    coordinator, _ = coordinator_with(*above(A), *pages([A, B], tier=Tier.GPU, spec=CODED))
    grant = coordinator.load(attempt(1), [A, B])
    assert grant.blocks == 2
    assert {source.tier for run in grant.runs for group in run.plan for source in group or ()} == {Tier.RAM}


def full_gpu(*told: StreamEvent) -> tuple[LoneCoordinator, Voice]:
    """A pool on a GPU that has room for no page above its mark, and a window of one second."""
    return serving(*told, host=gpu(20 * RAW, 2 * RAW) + below(), low_free=0.1, high_free=0.1, hot_window_ms=1_000)


def test_what_is_hot_takes_the_place_of_what_nobody_has_used_for_a_window() -> None:
    coordinator, voice = full_gpu(*above(A, B, C), *pages([A, B], tier=Tier.GPU, spec=CODED))
    heat(coordinator, A, B, C)
    assert voice.report(wanted=[C]).move is None, "A and B have just been used"
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    ack = voice.report(wanted=[C])
    assert [(move.hash, move.to) for move in moves(ack)] == [(B, Tier.RAM), (C, Tier.GPU)]
    ack = carry_out(voice, ack, gone(B, tier=Tier.GPU, spec=CODED), *pages([C], tier=Tier.GPU, spec=CODED))
    assert ack.move is None


def test_what_lies_on_the_gpu_alone_gives_its_place_to_nobody() -> None:
    coordinator, voice = full_gpu(*above(C), *pages([A, B], tier=Tier.GPU, spec=CODED))
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert voice.report(wanted=[C]).move is None


def test_one_large_block_takes_no_place_from_others_and_keeps_none_from_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the pool, and all of that is idle."""
    coordinator, voice = full_gpu(*above(A, B, C, D), *pages([A, B], tier=Tier.GPU, spec=CODED))
    tiering = coordinator.core.tiering
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    sizes = tiering._state.namespaces.bytes_on

    def large(record: Any, *args: Any, **kwargs: Any) -> int:
        return 30 * RAW if record.hash == C else int(sizes(record, *args, **kwargs))

    monkeypatch.setattr(tiering._state.namespaces, "bytes_on", large)
    assert [(move.hash, move.to) for move in moves(voice.report(wanted=[C, D]))] == [(B, Tier.RAM), (D, Tier.GPU)]


def test_a_block_of_which_a_part_lies_on_the_gpu_alone_gives_its_place_to_nobody() -> None:
    parts = [page(A, LEFT, tier=tier) for tier in (Tier.GPU, Tier.RAM)]
    right = page(A, RIGHT, tier=Tier.GPU)
    room = 2 * SPEC.page_bytes(0, WHOLE)
    pool = TierUse(Tier.GPU, 10 * room, room, 0)
    coordinator, voice = LoneCoordinator.serving(
        *parts, right, *pages([B]), below=(pool, *below()), hold_ms=0, low_free=0.1, high_free=0.1, hot_window_ms=1_000
    )
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert voice.report(wanted=[B]).move is None


def test_in_a_tier_that_workers_store_into_nothing_gives_its_place() -> None:
    told = [*above(A), *encoded(A, B)]
    coordinator, voice = serving(*told, capacity_pages=20, low_free=0.1, high_free=0.1, hot_window_ms=1_000)
    voice.free(2)
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    heat(coordinator, A, B)
    assert voice.report().move is None


def test_a_shard_makes_the_place_before_it_fills_it() -> None:
    shard = promoted(A, gpu_pages=1)
    shard.store(attempt(2), B)
    shard.demote(A, to=Tier.RAM)
    shard.promote(B, to=Tier.GPU)
    shard.move_all()
    shard.settle()
    assert (lies(shard, A), lies(shard, B)) == ([IN_RAM], [ON_GPU, IN_RAM])
