"""Private pages that no sequence claims are erased, and blocks of open sequences are not evicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.messages import Attach, Attached, Decision, Stalled, TableChange, Tick, Tier, TierUse
from tests.core.lone_coordinator import LoneCoordinator, Voice, beat, carry_out, decisions, moved, ordered
from tests.core.samples import MS, OURS, PAGE, SECOND, SPEC, attempt, ours, pages
from tests.core.sequences import (
    BLOCKS,
    PAGES,
    PRIVATE_SPEC,
    Q,
    R,
    Syncing,
    carries_out,
    erased,
    private_gone,
    private_page,
)

GRACE = 20 * SECOND
CONFIG = {"sequence_ttl_ms": 15_000, "private_grace_ms": GRACE // MS, "hold_ms": 0}


def serving(**more: float | tuple[TierUse, ...]) -> tuple[LoneCoordinator, Voice, Syncing]:
    coordinator, voice = LoneCoordinator.serving(**CONFIG | more)  # type: ignore[arg-type]
    coordinator.ask(Attached, ours(Attach(PRIVATE_SPEC)))
    return coordinator, voice, Syncing(coordinator)


def holding(**more: float | tuple[TierUse, ...]) -> tuple[LoneCoordinator, Voice, Syncing]:
    """A sequence of two public blocks and three private ones, all of which are stored."""
    coordinator, voice, worker = serving(**more)
    worker.opens(Q, BLOCKS[:2], PAGES[:3])
    voice.report(*pages(BLOCKS[:2]), *map(private_page, PAGES[:3]))
    return coordinator, voice, worker


def host(free_pages: int, capacity_pages: int = 100) -> tuple[TierUse, ...]:
    return (TierUse(Tier.HOST, capacity_pages * PAGE, free_pages * PAGE, 0),)


def test_a_closed_sequences_private_pages_are_erased_without_pressure_and_its_public_ones_are_not() -> None:
    coordinator, voice, worker = holding()
    assert erased(voice.report()) == []
    worker.closes(Q)
    ack = voice.report()
    assert ordered(ack) == erased(ack) == [*PAGES[2::-1]]
    assert ordered(carries_out(voice, ack.evict)) == []
    assert (coordinator.status().private_blocks, coordinator.status().blocks) == (0, 2)


def test_truncated_and_replaced_private_pages_are_erased_and_those_of_a_fork_stay() -> None:
    _, voice, worker = holding()
    worker.sync(TableChange(R, 4, parent=Q), TableChange(Q, 2))
    assert erased(voice.report()) == [PAGES[2]]
    worker.sync(TableChange(R, 0, BLOCKS[:1]))
    ack = carries_out(voice, voice.report().evict)
    assert erased(ack) == [PAGES[1], PAGES[0]]


def test_the_end_of_a_holders_lease_erases_its_private_pages() -> None:
    coordinator, voice, _ = holding()
    beat(coordinator, voice, until=coordinator.now + 14 * SECOND)
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + SECOND)
    assert len(erased(voice.report())) == 3


def test_pages_of_a_holder_that_is_to_send_its_tables_again_stay_for_a_grace() -> None:
    """Seed 412: a worker whose messages went to another coordinator for a while lost what it had."""
    coordinator, voice, worker = holding()
    assert worker.sync(TableChange(R, 0, closed=True), number=worker.number + 2).forgotten
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + GRACE // 2)
    worker.opens(Q, BLOCKS[:2], PAGES[:2])
    worker.opens(R, BLOCKS[:1])
    beat(coordinator, voice, until=coordinator.now + GRACE // 2 - 1)
    assert erased(voice.report()) == []
    worker.sync()
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)  # its chain was released some time after the message
    assert erased(voice.report()) == [PAGES[2]]


def test_pages_are_erased_on_every_shard_and_in_every_tier() -> None:
    coordinator, voice, worker = serving(below=host(100))
    other = coordinator.voice("b", below=host(100))
    other.join()
    worker.opens(Q, (), PAGES[:1])
    voice.report(private_page(PAGES[0]), private_page(PAGES[0], Tier.HOST))
    other.report(private_page(PAGES[0]))
    worker.closes(Q)
    first = voice.report()
    assert first.evict is not None and (erased(first), first.evict.tier) == ([PAGES[0]], Tier.RAM)
    second = carries_out(voice, first.evict)
    assert second.evict is not None and (erased(second), second.evict.tier) == ([PAGES[0]], Tier.HOST)
    assert not erased(carries_out(voice, second.evict))
    assert erased(other.report()) == [PAGES[0]]


def test_pages_to_erase_come_before_other_victims_and_demotions_go_on() -> None:
    _, voice, worker = serving(below=host(100), capacity_pages=4, host_raw_blocks=9)
    worker.opens(Q, (), PAGES[:1])
    voice.report(*pages(BLOCKS[:2]), private_page(PAGES[0]), *pages(BLOCKS[:1], tier=Tier.HOST))
    worker.closes(Q)
    ack = voice.report(pressure=PAGE)
    assert ordered(ack) == [PAGES[0]]
    assert moved(ack, Tier.HOST) == [BLOCKS[1]]


def test_a_long_list_is_erased_in_several_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 2)
    _, voice, worker = holding()
    worker.closes(Q)
    first = voice.report()
    assert len(erased(first)) == 2
    assert len(erased(carries_out(voice, first.evict))) == 1


def test_a_page_that_is_claimed_again_before_the_order_stays() -> None:
    _, voice, worker = holding()
    worker.closes(Q)
    worker.opens(R, BLOCKS[:2], PAGES[:2])
    assert erased(voice.report()) == [PAGES[2]]


def test_a_page_that_is_recorded_without_a_claim_is_erased_after_the_grace() -> None:
    coordinator, voice, _ = serving()
    voice.report(private_page(PAGES[0]))
    beat(coordinator, voice, until=coordinator.now + GRACE - 1)
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + 1)
    assert erased(voice.report()) == [PAGES[0]]


def test_a_page_that_is_claimed_within_its_grace_stays() -> None:
    coordinator, voice, worker = serving()
    voice.report(*map(private_page, PAGES[:2]))
    worker.opens(Q, (), PAGES[:1])
    for _ in range(4):
        beat(coordinator, voice, until=coordinator.now + 10 * SECOND)
        worker.sync()
    assert voice.info.shard == "a" and coordinator.core.state.tables.claimed_blocks == 1
    assert erased(voice.report()) == [PAGES[1]]


def test_a_page_that_vanishes_within_its_grace_is_not_ordered() -> None:
    coordinator, voice, _ = serving()
    voice.report(private_page(PAGES[0]))
    voice.report(private_gone(PAGES[0]))
    beat(coordinator, voice, until=coordinator.now + GRACE)
    assert erased(voice.report()) == []
    assert coordinator.core.next_deadline() != 0


def test_a_copy_that_is_committed_after_the_erasure_is_erased_after_the_grace() -> None:
    coordinator, voice, worker = holding()
    worker.closes(Q)
    carries_out(voice, voice.report().evict)
    voice.report(private_page(PAGES[0]))
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + GRACE)
    assert erased(voice.report()) == [PAGES[0]]


def test_a_page_that_an_order_did_not_erase_is_ordered_again_after_the_grace() -> None:
    coordinator, voice, worker = holding()
    worker.closes(Q)
    voice.ends(voice.report().evict)
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + GRACE)
    assert len(erased(voice.report())) == 3


def test_a_shard_that_begins_anew_is_told_again_what_to_erase() -> None:
    coordinator, voice, worker = holding()
    worker.closes(Q)
    again = coordinator.voice("a", epoch=2)
    again.specs = ((OURS, PRIVATE_SPEC),)
    again.join(private_page(PAGES[0]))
    beat(coordinator, again, until=coordinator.now + GRACE)
    assert erased(again.report()) == [PAGES[0]]
    assert voice.info.epoch == 1


def test_a_shard_that_is_gone_is_to_erase_nothing_though_records_still_name_it() -> None:
    coordinator, _, worker = holding()
    again = coordinator.voice("a", epoch=2)
    again.specs = ((OURS, PRIVATE_SPEC),)
    again.join(private_page(PAGES[0]))
    assert coordinator.core.next_deadline() == 0, "the old one's records are yet to be swept"
    worker.closes(Q)
    assert erased(again.report()) == [PAGES[0]]


def restarted() -> tuple[LoneCoordinator, Voice]:
    """A coordinator that is rebuilding, and a shard that has told it of two private pages."""
    coordinator = LoneCoordinator(expected=2, rebuild_grace_ms=4_000, **CONFIG)
    voice = coordinator.voice("a")
    voice.specs = ((OURS, SPEC), (OURS, PRIVATE_SPEC))
    coordinator.ask(Attached, ours(Attach(SPEC)))
    voice.join(*map(private_page, PAGES[:2]))
    return coordinator, voice


def test_nothing_is_erased_while_rebuilding_and_the_grace_begins_at_its_end() -> None:
    coordinator, voice = restarted()
    worker = Syncing(coordinator)
    worker.opens(Q, (), PAGES[:2])
    worker.sync(TableChange(Q, 1))
    assert erased(voice.report()) == [], "a rebuilding coordinator gives no orders"
    beat(coordinator, voice, until=coordinator.now + 4 * SECOND)
    assert erased(voice.report()) == [PAGES[1]]


def test_pages_of_a_worker_that_does_not_open_its_tables_again_are_erased_after_a_restart() -> None:
    coordinator, voice = restarted()
    worker = Syncing(coordinator)
    assert worker.sync(number=8).forgotten
    worker.opens(Q, (), PAGES[:1])
    began = coordinator.now
    for passed in range(1, 4):
        beat(coordinator, voice, until=began + passed * 7 * SECOND)
        worker.sync()
    beat(coordinator, voice, until=began + 4 * SECOND + GRACE - 1)
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + 1)
    assert erased(voice.report()) == [PAGES[1]]


def test_a_stalled_coordinator_extends_the_grace() -> None:
    coordinator, voice, _ = serving()
    voice.report(private_page(PAGES[0]))
    coordinator.now += GRACE
    coordinator.step(Stalled(GRACE))
    coordinator.later(0)
    assert erased(voice.report()) == []
    beat(coordinator, voice, until=coordinator.now + GRACE)
    assert erased(voice.report()) == [PAGES[0]]


def test_many_graces_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACES_PER_STEP", 2)
    coordinator, voice, _ = serving()
    voice.report(*map(private_page, PAGES[:3]))
    beat(coordinator, voice, until=coordinator.now + GRACE - 1)
    coordinator.now += 1
    coordinator.step(Tick())
    assert len(erased(voice.report())) == 2
    assert coordinator.core.next_deadline() is not None and coordinator.core.next_deadline() <= coordinator.now


# ---------------------------------------------------------------------------- blocks of open sequences


def test_blocks_of_open_sequences_are_not_evicted_whatever_is_wanted() -> None:
    _, voice, worker = holding()
    voice.report(*pages(BLOCKS[:3])[2:])
    ack = voice.report(pressure=100 * PAGE)
    assert ordered(ack) == [BLOCKS[2]]
    ack = carry_out(voice, ack)
    assert ordered(voice.report(pressure=100 * PAGE)) == []
    worker.closes(Q)
    ack = voice.report(pressure=100 * PAGE)
    assert len(erased(ack)) == 3
    assert ordered(carries_out(voice, ack.evict)) == []
    assert ordered(voice.report(pressure=100 * PAGE)) == [BLOCKS[1], BLOCKS[0]]


def test_blocks_of_open_sequences_are_demoted_as_far_as_there_is_room_below() -> None:
    _, voice, worker = serving(below=host(2), host_raw_blocks=9)
    worker.opens(Q, BLOCKS[:2], PAGES[:2])
    voice.report(*map(private_page, PAGES[:2]), *pages(BLOCKS[:3]))
    ack = voice.report(pressure=100 * PAGE)
    down = moved(ack, Tier.HOST)
    assert len(down) == 3 and BLOCKS[2] in down
    assert down[-1] == BLOCKS[2], "what is claimed takes the room first"
    assert ack.move is not None
    assert [move.keeps for move in ack.move.moves] == [True, True, False]


def with_blocks_that_find_no_room_below() -> tuple[LoneCoordinator, Voice]:
    """Three blocks of an open sequence, of which the first was ordered into the host tier and stayed."""
    coordinator, voice, worker = serving(below=host(1), host_raw_blocks=9)
    worker.opens(Q, (), PAGES[:3])
    for block in PAGES[:3]:
        voice.report(private_page(block))
        coordinator.later(MS)
    first = voice.report(pressure=1)
    assert moved(first, Tier.HOST) == [PAGES[0]]
    voice.ends(first.move)
    return coordinator, voice


def test_a_block_that_stayed_for_want_of_room_has_no_other_ordered_in_turn_until_the_room_changes() -> None:
    _, voice = with_blocks_that_find_no_room_below()
    for _ in range(5):
        assert voice.report(pressure=1).move is None
    voice.info = replace(voice.info, others=host(2))
    assert moved(voice.report(pressure=1), Tier.HOST) == [PAGES[1]], "it is not the next victim again"


def test_a_block_that_stayed_while_the_room_below_changed_says_nothing_of_the_room_there_is_now() -> None:
    _, voice, worker = serving(below=host(1), host_raw_blocks=9)
    worker.opens(Q, (), PAGES[:2])
    voice.report(*map(private_page, PAGES[:2]))
    voice.ends(voice.report(pressure=1).move)
    voice.info = replace(voice.info, others=host(2))
    assert len(moved(voice.report(pressure=1), Tier.HOST)) == 1


def test_where_a_writer_waits_and_no_block_finds_room_below_the_shard_is_full() -> None:
    coordinator, voice = with_blocks_that_find_no_room_below()
    voice.report(pressure=1)
    assert decisions(coordinator.store(attempt(2), [BLOCKS[0]])) == [(1, Decision.REFUSED)]


def test_a_shard_that_sends_its_inventory_again_has_its_blocks_tried_again() -> None:
    _, voice = with_blocks_that_find_no_room_below()
    assert voice.report(pressure=1).move is None
    voice.inventory(*map(private_page, PAGES[:3]))
    assert len(moved(voice.report(pressure=1), Tier.HOST)) == 1


def test_blocks_of_open_sequences_in_the_lowest_tier_make_room_for_nothing() -> None:
    _, voice, worker = serving(below=host(0, 2), host_raw_blocks=9)
    worker.opens(Q, BLOCKS[:2], PAGES[:1])
    voice.report(*pages(BLOCKS[:2], tier=Tier.HOST), private_page(PAGES[0]))
    ack = voice.report(pressure=100 * PAGE)
    assert (ordered(ack), moved(ack, Tier.HOST)) == ([], [])


def test_private_pages_in_their_grace_are_not_evicted_whatever_is_wanted() -> None:
    _, voice, _ = serving()
    voice.report(*pages(BLOCKS[:1]), *map(private_page, PAGES[:2]))
    ack = voice.report(pressure=100 * PAGE)
    assert ordered(ack) == [BLOCKS[0]]
    assert ordered(carry_out(voice, ack)) == ordered(voice.report(pressure=100 * PAGE)) == []
