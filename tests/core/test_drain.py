"""A shard that drains: what is copied, what waits for what, and when the shard may leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator import replicator
from kvcluster.core.ids import BlockHash, Epoch
from kvcluster.core.messages import (
    LeaveReason,
    PageEvent,
    Stalled,
    Tick,
    Tier,
    TierUse,
)
from tests.core.lone_coordinator import BLOCKS, A, B, C, D, LoneCoordinator, Voice, ordered, served_by
from tests.core.pulling import (
    drain,
    homes,
    lose,
    others,
    pull,
    pull_all,
    pull_in_vain,
    wanted,
)
from tests.core.samples import (
    LEFT,
    MS,
    PAGE,
    RIGHT,
    SECOND,
    attempt,
    chain,
    gone,
    page,
    pages,
)


def test_a_drained_shard_is_told_to_go_when_what_it_alone_held_is_elsewhere() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A, B, C]))
    [two] = others(coordinator, "b")
    two.report(*pages([A]))
    assert drain(coordinator, one)
    assert one.report().drain
    ack = two.report()
    assert (wanted(ack), ack.drain) == ([B, C], False)
    assert one.report().leave is None, "its last pull is under way"
    pull(two, ack)
    assert one.report().leave is LeaveReason.DRAINED
    assert one.inventory(*pages([A])).leave is LeaveReason.DRAINED, "whatever it says"
    coordinator.later(0)
    assert pull_all(two) == [], "it is not repaired as if it were lost"
    assert served_by(coordinator.load(attempt(1), [A, B, C])) == [(3, ["b"])]
    assert [shard.info.shard for shard in coordinator.status().shards] == ["b"]
    assert coordinator.counter("lost_shards") == 0


def test_a_drain_of_an_unknown_shard_fails_and_of_the_last_one_ends_at_once() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    assert not drain(coordinator, coordinator.voice("z"))
    assert drain(coordinator, one)
    assert drain(coordinator, one), "twice is once"
    assert one.report().leave is LeaveReason.DRAINED


def test_a_shard_goes_only_by_a_report_that_it_made_when_it_knew_of_the_drain() -> None:
    coordinator, one = LoneCoordinator.serving()
    others(coordinator, "b")
    assert drain(coordinator, one, known=False)
    late = one.report()  # it may have been under way for long, and what has been written since is not in it
    assert late.drain and late.leave is None
    assert one.report().leave is LeaveReason.DRAINED


def test_a_drained_shard_may_come_back_as_another_incarnation() -> None:
    coordinator, one = LoneCoordinator.serving()
    others(coordinator, "b")
    drain(coordinator, one)
    assert one.report().leave is LeaveReason.DRAINED
    again = coordinator.voice("a", epoch=2)
    again.join(*pages([A]))
    assert served_by(coordinator.load(attempt(1), [A])) == [(1, ["a"])]


def test_readers_of_a_draining_shard_are_sent_elsewhere_as_soon_as_there_is_another_copy() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    [two] = others(coordinator, "b")
    two.report(*pages([A]))
    drain(coordinator, one)
    for worker in range(2):
        assert served_by(coordinator.load(attempt(1, worker), [A, B])) == [(1, ["b"]), (1, ["a"])]
    assert all(run.shard == two.address for run in coordinator.store(attempt(9), [C, D], first=2, parent=B, run=A))


def test_what_runs_at_a_draining_shard_ends_first() -> None:
    coordinator, one = LoneCoordinator.serving()
    [two] = others(coordinator, "b")
    drain(coordinator, one)
    one.info = replace(one.info, leases=1)
    assert one.report().leave is None
    assert one.report(page(A)).leave is None, "it was written before"
    one.info = replace(one.info, leases=0)
    assert one.report().leave is None
    assert pull_all(two) == [A]
    assert one.report().leave is LeaveReason.DRAINED


def test_what_a_draining_shard_has_not_told_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPORTS_PER_MESSAGE", 2)
    coordinator, one = LoneCoordinator.serving()
    others(coordinator, "b")
    drain(coordinator, one)
    assert one.report(page(A), gone(A)).leave is None, "there may be more in its backlog"
    assert one.report(page(B)).leave is None
    assert one.report(gone(B)).leave is LeaveReason.DRAINED


def test_the_last_used_is_moved_first_and_blocks_that_fit_nowhere_leave_with_their_shard() -> None:
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:4]), low_free=0.0, high_free=0.0)
    [two] = others(coordinator, "b")
    coordinator.now += SECOND
    other = chain(2, seed=8)
    one.report(*pages(other))
    two.report()
    two.free(3)
    drain(coordinator, one)
    two.report()
    ack = two.report()
    assert wanted(ack) == [*other, A]
    two.free(0)
    pull(two, ack)
    assert one.report().leave is LeaveReason.DRAINED


@pytest.mark.parametrize("full", [False, True])
def test_a_drain_waits_for_shards_whose_inventory_is_not_complete(full: bool) -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    drain(coordinator, one)
    assert two.report(first=99).inventory
    assert one.report().leave is None
    if full:
        two.free(0)
    two.inventory(upto=99)
    two.told = 99
    two.report()
    coordinator.later(0)
    assert one.report().leave is (LeaveReason.DRAINED if full else None)


@pytest.mark.parametrize("how", ["lost", "corrupt", "new inventory"])
def test_a_block_whose_new_place_is_no_more_is_moved_once_again(how: str) -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    two, three = others(coordinator, "bc")
    drain(coordinator, one)
    one.info = replace(one.info, leases=1)
    ack = two.report()
    pull(two, ack)
    one.report()
    if how == "lost":
        for _ in range(5):
            coordinator.now += SECOND
            one.report()
            three.report()
        one.info = replace(one.info, leases=0)
        coordinator.step(Tick())
    elif how == "corrupt":
        assert wanted(two.report(gone(A, corrupt=True))) == [A]
        assert pull_in_vain(two, two.report()).pull is not None
        lose(coordinator, one, three)
        one.info = replace(one.info, leases=0)
    else:
        two.inventory()
        one.info = replace(one.info, leases=0)
        assert one.report().leave is None, "blocks that it no longer holds are not swept yet"
        coordinator.later(0)
    assert one.report().leave is None
    assert wanted(three.report()) == [A]


def test_a_block_that_is_evicted_elsewhere_is_not_taken_along_by_the_shard_that_goes() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    two.report(*pages([A]))
    drain(coordinator, one)
    one.info = replace(one.info, leases=1)
    assert one.report().leave is None, "a reader still has a lease"
    ack = two.report(gone(A))
    assert wanted(ack) == [A]
    one.info = replace(one.info, leases=0)
    assert one.report().leave is None
    pull(two, ack)
    assert one.report().leave is LeaveReason.DRAINED


def moved_while_busy(held: PageEvent) -> tuple[Voice, Voice]:
    """Returns a draining shard with a lease, and the shard that has pulled what it held."""
    coordinator, one = LoneCoordinator.serving(held)
    [two] = others(coordinator, "b")
    drain(coordinator, one)
    one.info = replace(one.info, leases=1)
    assert one.report().leave is None, "a reader or writer still has a lease"
    ack = two.report()
    assert wanted(ack) == [A]
    pull(two, ack)
    return one, two


def test_a_part_that_is_told_after_the_others_were_moved_is_moved_as_well() -> None:
    one, two = moved_while_busy(page(A, LEFT))
    assert one.report(page(A, RIGHT)).leave is None
    one.info = replace(one.info, leases=0)
    assert one.report().leave is None
    ack = two.report()
    assert ack.pull is not None and [new.key.part for new in ack.pull.pages] == [RIGHT]
    pull(two, ack)
    assert one.report().leave is LeaveReason.DRAINED


def test_what_was_moved_and_is_evicted_there_is_not_moved_again() -> None:
    """It was the coldest there, and would be again, without end."""
    one, two = moved_while_busy(page(A))
    assert two.report(gone(A)).pull is None
    one.info = replace(one.info, leases=0)
    assert one.report().leave is LeaveReason.DRAINED


def test_one_copy_elsewhere_is_enough_even_while_another_shard_is_joining() -> None:
    coordinator, going = LoneCoordinator.serving(*pages([A]))
    two, _three = others(coordinator, "bc")
    two.report(*pages([A]))
    late = coordinator.voice("d")
    late.coordinator = coordinator.core.epoch
    assert late.report(page(B), first=7).inventory
    assert drain(coordinator, going)
    assert going.report().leave is LeaveReason.DRAINED


def test_a_shard_that_goes_waits_for_no_block_that_another_holds() -> None:
    coordinator, empty = LoneCoordinator.serving()
    going, staying = others(coordinator, "bc")
    for voice in (going, staying):
        voice.report(*pages([B]))
    assert drain(coordinator, going) and drain(coordinator, empty)
    staying.report(gone(B))
    assert empty.report().leave is LeaveReason.DRAINED
    assert going.report().leave is None, "it alone has it now"


def test_what_two_shards_hold_that_go_has_as_many_places_afterwards() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    two, three, four = others(coordinator, "bcd")
    two.report(*pages([A]))
    drain(coordinator, one)
    drain(coordinator, two)
    first = three.report()
    assert wanted(first) == [A, B]
    assert four.report().pull is None
    assert one.report().leave is two.report().leave is None
    pull(three, first)
    second = four.report()
    assert wanted(second) == [A], "B had only one copy"
    pull(four, second)
    assert one.report().leave is LeaveReason.DRAINED
    coordinator.later(0)
    assert two.report().leave is LeaveReason.DRAINED
    coordinator.later(0)
    assert pull_all(three, four) == []
    assert (homes(coordinator, A), homes(coordinator, B)) == (["c", "d"], ["c"])


def test_a_draining_shard_evicts_nothing_that_could_be_moved() -> None:
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:4]), low_free=0.5, high_free=0.9, hold_ms=0)
    others(coordinator, "b")
    drain(coordinator, one)
    one.free(1)
    assert ordered(one.report()) == []


def test_a_drain_ends_at_its_time_and_no_stall_of_the_coordinator_counts() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]), drain_ms=10_000)
    [two] = others(coordinator, "b")
    drain(coordinator, one)
    coordinator.now += 60 * SECOND
    coordinator.step(Stalled(60 * SECOND))
    assert wanted(two.report()) == [A]
    coordinator.now += 10 * SECOND - 1
    assert one.report().leave is None
    coordinator.now += 1
    assert one.report().leave is LeaveReason.DRAINED
    assert pull_in_vain(two, two.report()).pull is None


def test_a_drain_goes_on_with_every_new_beginning_of_its_shard_and_gets_no_more_time() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]), drain_ms=10_000)
    [two] = others(coordinator, "b")
    drain(coordinator, one)
    one.info = replace(one.info, draining=True)
    for _ in range(9):
        coordinator.now += SECOND
        assert not one.inventory(*pages([A])).inventory
        two.report()
    assert one.report().leave is None
    coordinator.now += SECOND
    assert one.report().leave is LeaveReason.DRAINED


def test_a_draining_shard_that_restarts_goes_all_the_same() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    others(coordinator, "b")
    drain(coordinator, one)
    again = coordinator.voice("a", epoch=2)
    again.coordinator = again.report().epoch
    assert again.inventory().drain, "it learns of it first"
    coordinator.later(0)
    assert again.report().leave is None, "it has not said so yet"
    assert again.report().leave is LeaveReason.DRAINED


def test_a_new_coordinator_learns_of_a_drain_from_its_shard() -> None:
    coordinator = LoneCoordinator(expected=2)
    one, two = coordinator.voice("a"), coordinator.voice("b")
    one.info = replace(one.info, draining=True)
    one.join(*pages([A, B]))
    assert one.report().leave is None, "rebuilding"
    two.join()
    assert one.report().leave is None
    assert pull_all(two) == [A, B]
    assert one.report().leave is LeaveReason.DRAINED


def test_a_replica_request_that_no_shard_can_fulfil_does_not_delay_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "INSPECTED", 2)
    halves = [page(block, LEFT) for block in BLOCKS[4:6]]
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:4]), low_free=0.0)
    [two] = others(coordinator, "b")
    one.report(*halves)
    coordinator.load(attempt(1), BLOCKS[:4])
    two.info = replace(two.info, free_bytes=PAGE - 1)
    two.report()
    drain(coordinator, one)
    reports = 0
    moved: list[BlockHash] = []
    while one.report().leave is None:
        reports += 1
        assert reports < 20, "it never goes"
        ack = two.report()
        if ack.pull is not None:
            moved += wanted(ack)
            two.info = replace(two.info, free_bytes=two.info.free_bytes - PAGE // 2)
            pull(two, ack)
    assert moved == [BLOCKS[4]], "the only one that there was room for, though four were before it"


def test_a_drain_of_many_blocks_looks_at_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "INSPECTED", 3)
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS))
    [two] = others(coordinator, "b")
    two.report(*pages(BLOCKS))
    drain(coordinator, one)
    reports = 1
    while one.report().leave is None:
        reports += 1
    assert reports == 4


def test_the_blocks_of_a_shard_that_goes_are_listed_in_several_steps_the_last_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicator, "LISTED_BLOCKS", 2)
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    [two] = others(coordinator, "b")
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS[:2])
    drain(coordinator, one)
    assert coordinator.core.next_deadline() == 0
    assert (one.report().leave, two.report().pull) == (None, None), "nothing is listed yet, and the shard stays"
    coordinator.step(Tick())
    coordinator.step(Tick())
    pull = two.report().pull
    assert pull is not None and [page.key.hash for page in pull.pages] == [*BLOCKS[:1]]
    coordinator.later(0)
    assert coordinator.core.next_deadline() != 0


def test_a_bounded_number_of_past_shards_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAST_SHARDS", 2)
    coordinator = LoneCoordinator(expected=0)
    gone_by = others(coordinator, "abc")
    for voice in gone_by:
        drain(coordinator, voice)
        assert voice.report().leave is LeaveReason.DRAINED
        coordinator.later(0)
    assert gone_by[2].report().leave is gone_by[1].report().leave is LeaveReason.DRAINED
    gone_by[0].info = replace(gone_by[0].info, draining=True)
    gone_by[0].join()
    coordinator.later(0)
    assert gone_by[0].report().leave is LeaveReason.DRAINED, "a forgotten shard is drained again"
    others(coordinator, "xyz")
    coordinator.later(5_000 * MS)
    assert [shard.info.shard for shard in coordinator.status().shards] == ["y", "z"]
    assert coordinator.core.epoch == Epoch(100)


def test_a_shard_that_goes_a_second_time_is_remembered_as_the_last_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAST_SHARDS", 2)
    coordinator = LoneCoordinator(expected=0)
    voices = [coordinator.voice(name, epoch) for name, epoch in [("a", 1), ("b", 1), ("a", 2), ("c", 1)]]
    for voice in voices:
        voice.join()
        drain(coordinator, voice)
        assert voice.report().leave is LeaveReason.DRAINED
        coordinator.later(0)
    assert [voice.report().leave for voice in voices[2:]] == [LeaveReason.DRAINED] * 2
    assert voices[1].report().leave is None, "it is forgotten, as the one that went first"


@pytest.mark.parametrize(("host_pages", "into"), [(100, Tier.HOST), (0, None)])
def test_what_finds_no_room_in_ram_elsewhere_goes_into_the_tier_below(host_pages: int, into: Tier | None) -> None:
    """A drain evicts nothing there, so that no demotion would make room."""
    coordinator, one = LoneCoordinator.serving(*pages([A, B, C]), low_free=0.1, high_free=0.1)
    below = (TierUse(Tier.HOST, host_pages * PAGE, host_pages * PAGE, 0),) if host_pages else ()
    [two] = others(coordinator, "b", capacity_pages=20, below=below)
    two.free(4)
    assert drain(coordinator, one)
    ack = two.report()
    assert ack.pull is not None and ack.pull.into is Tier.RAM and len(wanted(ack)) == 2
    two.free(2)
    ack = pull(two, ack)
    if into is None:
        assert ack.pull is None and one.report().leave is LeaveReason.DRAINED
        return
    assert ack.pull is not None and (ack.pull.into, ack.pull.codec, len(wanted(ack))) == (into, Codec.RAW, 1)
    pull(two, ack)
    assert one.report().leave is LeaveReason.DRAINED
    assert [homes(coordinator, block) for block in (A, B, C)] == [["b"]] * 3
