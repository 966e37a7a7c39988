"""Which blocks are evicted when room is wanted, and which are spared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator import evictor
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import (
    Decision,
    Purge,
    Purged,
    PurgedEvent,
    StoreRun,
    Tier,
)
from kvcluster.core.miss import Miss, MissReason
from tests.core.lone_coordinator import (
    BLOCKS,
    A,
    B,
    C,
    D,
    LoneCoordinator,
    beat,
    carry_out,
    decisions,
    end_ticket,
    ordered,
    pin,
    renew_ticket,
    unpin,
)
from tests.core.samples import PAGE, SECOND, attempt, chain, gone, ours, pages, root

# --------------------------------------------------------------------------------------------- eviction


def test_below_the_low_mark_the_coldest_go_until_the_high_mark_is_free() -> None:
    coordinator, voice = LoneCoordinator.serving(
        *pages(BLOCKS), capacity_pages=20, low_free=0.1, high_free=0.3, hold_ms=0
    )
    voice.free(2)
    assert voice.report().evict is None
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS[:2])
    voice.free(1)
    ack = voice.report()
    assert ack.evict is not None
    assert ack.evict.blocks == tuple((coordinator.space, block) for block in BLOCKS[:6:-1])
    voice.free(6)
    assert carry_out(voice, ack).evict is None
    assert coordinator.load(attempt(2), BLOCKS).blocks == 7


def test_pressure_evicts_what_is_wanted() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    assert ordered(voice.report(pressure=2 * PAGE - 1)) == [BLOCKS[11], BLOCKS[10]]


def test_of_a_chain_the_tail_goes_before_the_root_however_slowly_it_grew() -> None:
    coordinator, voice = LoneCoordinator.serving(hold_ms=0, refresh_ms=10_000, ticket_ttl_ms=1_000)
    parent = root()
    for at, (block, event) in enumerate(zip(BLOCKS, pages(BLOCKS), strict=True)):
        beat(coordinator, voice, until=coordinator.now + 3 * SECOND)
        coordinator.store(attempt(at), [block], first=at, parent=parent, run=A)
        voice.report(event)
        parent = block
    assert ordered(voice.report(pressure=5 * PAGE)) == list(BLOCKS[:6:-1])


def test_what_is_in_use_outlives_what_was_stored_later() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    later = chain(3, seed=8)
    coordinator.now += SECOND
    voice.report(*pages(later))
    coordinator.now += SECOND
    coordinator.load(attempt(1), [A, B])
    assert ordered(voice.report(pressure=4 * PAGE)) == [later[2], later[1], later[0], B]


def test_a_growing_sequence_keeps_its_whole_chain_in_use() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0, refresh_ms=1_000)
    later = chain(1, seed=8)
    beat(coordinator, voice, until=coordinator.now + SECOND)
    voice.report(*pages(later))
    beat(coordinator, voice, until=coordinator.now + SECOND)
    coordinator.store(attempt(1), [C], first=2, parent=B, run=A)
    assert ordered(voice.report(pressure=PAGE)) == list(later)


def test_held_and_pinned_blocks_are_spared_while_they_are() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]), capacity_pages=8, hold_ms=2_000)
    coordinator.load(attempt(1), [A, B])
    assert pin(coordinator, [A], 3 * SECOND) == 1
    ack = voice.report(pressure=9 * PAGE)
    assert ordered(ack) == [D, C]
    voice.ends(ack.evict)
    assert ordered(voice.report(gone(C), gone(D), pressure=9 * PAGE)) == []
    beat(coordinator, until=coordinator.now + 2 * SECOND)
    ack = voice.report(pressure=9 * PAGE)
    assert ordered(ack) == [B]
    carry_out(voice, ack)
    beat(coordinator, until=coordinator.now + SECOND)
    assert ordered(voice.report(pressure=9 * PAGE)) == [A]


@pytest.mark.parametrize("how", ["it ends", "it expires"])
def test_a_hold_ends_with_its_ticket_and_that_of_another_stays(how: str) -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), hold_ms=4_000, ticket_ttl_ms=3_000)
    coordinator.load(attempt(1), [A, B])
    coordinator.now += SECOND
    coordinator.load(attempt(2), [A])
    assert ordered(voice.report(pressure=PAGE)) == []
    if how == "it ends":
        end_ticket(coordinator, attempt(1))
    else:
        beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert ordered(voice.report(pressure=9 * PAGE)) == [B]


def test_a_renewed_ticket_holds_on() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hold_ms=2_000)
    coordinator.load(attempt(1), [A])
    coordinator.now += SECOND
    renew_ticket(coordinator, attempt(1))
    coordinator.now += 2 * SECOND - 1
    assert ordered(voice.report(pressure=PAGE)) == []
    coordinator.now += 1
    assert ordered(voice.report(pressure=PAGE)) == [A]


def test_an_order_is_repeated_until_it_is_accepted() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    first = voice.report(pressure=PAGE)
    assert first.evict is not None
    assert voice.report(pressure=9 * PAGE).evict == first.evict
    voice.ends(first.evict)
    second = voice.report(*map(gone, ordered(first)), pressure=PAGE)
    assert second.evict is not None
    assert second.evict.number == first.evict.number + 1
    assert ordered(second) == [BLOCKS[10]]


def test_order_numbers_continue_when_a_shard_sends_a_new_inventory() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:3]), hold_ms=0)
    carry_out(voice, voice.report(pressure=PAGE))
    voice.inventory(*pages(BLOCKS[:2]))
    ack = voice.report(pressure=PAGE)
    assert ack.evict is not None
    assert ack.evict.number > voice.orders.accepted, "the shard would take it for one that it has carried out"
    assert ordered(ack) == [B]


def test_what_an_order_named_and_is_still_there_may_be_ordered_again() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    ack = voice.report(pressure=PAGE)
    assert ordered(ack) == [B]
    voice.ends(ack.evict)
    assert ordered(voice.report(pressure=PAGE)) == [B], "the event of its end is still to come"


def test_what_an_order_named_is_swept_when_its_shard_is_lost() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    assert ordered(voice.report(pressure=9 * PAGE)) == [B, A]
    coordinator.later(5 * SECOND)
    assert coordinator.status().blocks == 0


def test_an_order_names_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 5)
    monkeypatch.setattr(evictor, "BATCH", 2)
    _, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    ack = voice.report(pressure=12 * PAGE)
    assert ordered(ack) == list(BLOCKS[:6:-1])
    voice.ends(ack.evict)
    assert ordered(voice.report(*map(gone, ordered(ack)), pressure=6 * PAGE)) == list(BLOCKS[6:1:-1])


def test_what_a_search_found_too_much_stays_in_line() -> None:
    _, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    ack = voice.report(pressure=PAGE)
    assert ordered(ack) == [BLOCKS[11]]
    voice.ends(ack.evict)
    assert ordered(voice.report(gone(BLOCKS[11]), pressure=11 * PAGE)) == list(BLOCKS[10::-1])


def test_a_shard_where_nothing_can_go_is_full_and_passed_over_until_it_wants_no_more() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]), hold_ms=60_000)
    coordinator.load(attempt(1), [A])
    assert one.report(pressure=PAGE).evict is None
    [refused] = coordinator.store(attempt(2), [B])
    assert refused == StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.FULL, "no shard has room or can make some"))
    two = coordinator.voice("b")
    two.join()
    assert {run.shard for run in coordinator.store(attempt(3), BLOCKS[4:])} == {two.address}
    one.report()
    two.free(0)
    two.report(pressure=PAGE)
    assert {run.shard for run in coordinator.store(attempt(4), [B, C])} == {one.address}


def test_a_search_that_was_cut_short_makes_no_shard_full(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B, C]), hold_ms=60_000)
    coordinator.load(attempt(1), [A, B, C])
    voice.report(*pages(chain(1, seed=8)))
    search = EvictionQueue.pop_coldest
    searches: list[int] = []

    def short(
        queue: EvictionQueue[BlockRecord],
        count: int,
        spares: Callable[[BlockRecord], bool],
        now: int,
        closed: Callable[[NamespaceId], bool],
    ) -> list[BlockRecord]:
        searches.append(count)
        return search(queue, count, spares, now, closed, max_inspected=2)

    monkeypatch.setattr(EvictionQueue, "pop_coldest", short)
    found: list[BlockHash] = []
    for reports in range(1, 5):
        found += ordered(voice.report(pressure=9 * PAGE))
        assert len(searches) <= reports, "it does not search again in the same step"
        assert decisions(coordinator.store(attempt(2), [D])) == [(1, Decision.WRITE)]
    assert found[:1] == list(chain(1, seed=8))


def test_while_rebuilding_nothing_is_evicted() -> None:
    coordinator = LoneCoordinator(expected=2, low_free=0.5, high_free=0.5)
    voice = coordinator.voice("a")
    voice.join(*pages([A]))
    voice.free(0)
    assert voice.report(pressure=PAGE).evict is None
    coordinator.later(5 * SECOND - 1)
    voice.report()
    coordinator.later(1)
    assert ordered(voice.report(pressure=PAGE)) == [A]


def test_the_configuration_chooses_the_policy() -> None:
    often, late = chain(2, seed=1), chain(2, seed=2)
    orders = []
    for policy in ("lru", "gdsf"):
        coordinator, voice = LoneCoordinator.serving(*pages(often), hold_ms=0, eviction_policy=policy)
        coordinator.load(attempt(1), often)
        coordinator.load(attempt(2), often)
        coordinator.now += SECOND
        voice.report(*pages(late))
        orders.append(ordered(voice.report(pressure=2 * PAGE)))
    assert orders == [[often[1], often[0]], [late[1], late[0]]]


def test_what_is_stored_again_after_a_purge_goes_like_anything_else() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]), hold_ms=0)
    coordinator.ask(Purged, ours(Purge()))
    [member] = coordinator.core.state.members.all()
    assert len(member.cold[Tier.RAM]) == 0
    voice.report(*map(gone, BLOCKS[:4]), PurgedEvent(coordinator.core.state.tombstones.all()[0].number))
    voice.report(*pages([A]))
    assert ordered(voice.report(pressure=9 * PAGE)) == [A]


def test_a_queue_forgets_what_went_without_an_order() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hold_ms=0)
    later = chain(1_200, seed=8)
    voice.report(*pages(later))
    voice.report(*(gone(block, corrupt=True) for block in later))
    [member] = coordinator.core.state.members.all()
    assert len(member.cold[Tier.RAM]) == 1
    assert ordered(voice.report(pressure=PAGE)) == [A]


# ------------------------------------------------------------------------------------------------- pins


def test_pins_take_the_leading_blocks_that_are_there_and_fit_their_share() -> None:
    coordinator, _voice = LoneCoordinator.serving(*pages(BLOCKS[:4]), capacity_pages=12, pinned_share=0.25)
    assert pin(coordinator, BLOCKS[3:6]) == 1, "the next is not there"
    assert pin(coordinator, BLOCKS) == 2, "three of twelve fit the share, and one is taken"
    assert pin(coordinator, [D, *BLOCKS[:3]]) == 3, "a block that is already pinned takes no further share"
    assert unpin(coordinator, BLOCKS) == 3
    assert pin(coordinator, BLOCKS) == 3


def test_a_pin_that_ran_out_leaves_its_share() -> None:
    coordinator, _voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), capacity_pages=4, pinned_share=0.25)
    assert pin(coordinator, [A], SECOND) == 1
    assert pin(coordinator, [B]) == 0
    coordinator.now += SECOND
    assert pin(coordinator, [B]) == 1


def test_a_pin_goes_with_its_block() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    assert pin(coordinator, [A]) == 1
    voice.report(gone(A, corrupt=True))
    assert unpin(coordinator, [A]) == 0


def test_a_block_that_has_left_a_shard_is_not_ordered_away_there_though_another_holds_it() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]))
    other = coordinator.voice("b")
    other.join(*pages([A, B]))
    voice.report(gone(A))
    assert ordered(voice.report(pressure=2 * PAGE)) == [B]
