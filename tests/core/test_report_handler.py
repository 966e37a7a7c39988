"""How the coordinator handles reports and inventories, and shards that join, leave and fall silent."""

from __future__ import annotations

import itertools

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator import record_sweeper
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import CallId, Epoch
from kvcluster.core.messages import (
    Answer,
    Attach,
    Attached,
    Decision,
    Effect,
    Inventory,
    PageEvent,
    Persist,
    Purge,
    Purged,
    PurgedEvent,
    Refused,
    RefusedKind,
    RemovedEvent,
    Stalled,
    Tick,
    Tier,
    Tombstone,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from tests.core.lone_coordinator import (
    BLOCKS,
    A,
    B,
    C,
    D,
    LoneCoordinator,
    beat,
    decisions,
    pin,
    reasons,
    rebuilding,
    served_by,
    unpin,
)
from tests.core.samples import HYBRID, OURS, SECOND, SPEC, attempt, gone, key, ours, page, pages, root

# ------------------------------------------------------------------------------------- the report stream


def test_a_gap_in_the_reports_asks_for_an_inventory() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    ack = voice.report(page(C), first=3)
    assert (ack.inventory, ack.acked) == (True, 0)
    assert voice.report().inventory, "until it comes"
    assert coordinator.load(attempt(1), [A]).blocks == 1, "pages reported before are still served"
    assert not voice.inventory(*pages([B]), upto=5).inventory
    assert voice.report(page(C), first=6).acked == 6
    assert reasons(coordinator.explain([A, B, C])) == [(1, MissReason.SHARD_LOST), (2, None)]


def test_a_repeated_report_is_heard_once() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert voice.report(page(A), page(B)).acked == 2
    assert voice.report(page(A), page(B), gone(B), first=1).acked == 3
    assert voice.report(page(A), page(B), first=1).acked == 3, "a late one, overtaken"
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.EVICTED)]
    assert [coordinator.counter(name) for name in ("committed_pages", "gone_pages")] == [2, 1]


def test_an_inventory_replaces_what_was_known() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]))
    voice.inventory(*pages([A]))
    coordinator.later(0)
    assert coordinator.status().blocks == 1
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.SHARD_LOST)]


def test_a_coordinator_that_does_not_know_how_many_shards_there_are_waits_for_its_grace() -> None:
    coordinator = LoneCoordinator(expected=None, rebuild_grace_ms=5_000)
    coordinator.voice("a").join()
    assert rebuilding(coordinator), "others may be about to report"
    coordinator.now += 5 * SECOND
    coordinator.step(Tick())
    assert not rebuilding(coordinator)


def test_an_inventory_counts_when_its_last_chunk_has_come() -> None:
    coordinator = LoneCoordinator(expected=1)
    voice = coordinator.voice("a")
    voice.coordinator = Epoch(100)
    assert not voice.inventory(*pages([A]), chunk=0, last=False, upto=9).inventory
    assert not voice.inventory(*pages([A]), chunk=0, last=False, upto=9).inventory, "its answer was lost"
    assert rebuilding(coordinator)
    assert coordinator.status().shards[0].state == "joining"
    assert coordinator.load(attempt(1), [A, B]).blocks == 1, "reported pages may be loaded already"
    for _ in range(2):
        assert not voice.inventory(*pages([A, B])[1:], chunk=1, upto=9).inventory
    assert not rebuilding(coordinator)
    assert voice.report(page(C, parent=B, depth=2), first=10).acked == 10
    assert coordinator.load(attempt(2), [A, B, C]).blocks == 3


@pytest.mark.parametrize("chunks", [(1,), (0, 2), (0, 1, 2, 1)])
def test_chunks_out_of_order_ask_for_the_whole_again(chunks: tuple[int, ...]) -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert voice.report(page(D), first=9).inventory
    answers = [
        voice.inventory(page(block), chunk=chunk, last=False) for chunk, block in zip(chunks, BLOCKS, strict=False)
    ]
    assert [answer.inventory for answer in answers] == [False] * (len(chunks) - 1) + [True]
    assert not voice.inventory(*pages([A])).inventory
    coordinator.later(0)
    assert coordinator.status().blocks == 1


def test_an_inventory_that_comes_late_undoes_nothing() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.report(gone(A), page(B))
    assert voice.inventory(*pages([A]), upto=0).acked == 2
    assert voice.report().acked == 2
    assert reasons(coordinator.explain([A, B])) == [(1, MissReason.EVICTED), (1, None)]


def test_a_shard_that_lacks_one_byte_and_has_nothing_to_evict_is_full() -> None:
    coordinator, voice = LoneCoordinator.serving()
    voice.report(pressure=1)
    assert decisions(coordinator.store(attempt(1), [A])) == [(1, Decision.REFUSED)]
    voice.report()
    assert decisions(coordinator.store(attempt(2), [A])) == [(1, Decision.WRITE)]


def test_an_event_of_a_namespace_over_the_bound_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    unknown = PageEvent(HYBRID.namespace(OURS), key(B), root(), 0, Tier.RAM, Loss.EXACT)
    assert voice.report(unknown, page(B, parent=A, depth=1)).acked == 2
    assert voice.report(RemovedEvent(HYBRID.namespace(OURS), key(B), corrupt=False)).acked == 3
    assert coordinator.status().blocks == 2


# ----------------------------------------------------------------------------------------- membership


def test_a_silent_shard_is_lost_for_lookups_at_once_and_swept_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sweeper, "SWEEP_BLOCKS", 4)
    coordinator, _voice = LoneCoordinator.serving(*pages(BLOCKS))
    pin(coordinator, [A])
    other = coordinator.voice("b")
    other.join(*pages([B]))
    beat(coordinator, other, until=coordinator.now + 4 * SECOND)
    coordinator.now += SECOND
    coordinator.step(Tick())
    assert coordinator.counter("lost_shards") == 1
    assert reasons(coordinator.explain([A, B, C])) == [
        (1, MissReason.SHARD_LOST),
        (1, None),
        (1, MissReason.SHARD_LOST),
    ]
    left = [coordinator.status().blocks]
    while coordinator.core.next_deadline() == 0:
        coordinator.step(Tick())
        left.append(coordinator.status().blocks)
    assert all(0 <= before - after <= 4 for before, after in itertools.pairwise(left))
    assert left[-1] == 1
    assert coordinator.load(attempt(1), [A]).miss == Miss(MissReason.SHARD_LOST, "0 s ago")
    assert unpin(coordinator, [A]) == 0, "a pin goes with its block"


def test_a_lost_shard_that_reports_again_sends_a_new_inventory() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.report(page(B, parent=A, depth=1))
    coordinator.later(5 * SECOND)
    assert coordinator.status().blocks == 0
    assert voice.report().inventory
    assert not voice.inventory(*pages([A, B])).inventory
    assert coordinator.load(attempt(1), [A, B]).blocks == 2


def test_nothing_is_written_to_a_shard_before_it_knows_that_it_is_a_member() -> None:
    coordinator = LoneCoordinator(expected=1)
    voice = coordinator.voice("a")
    coordinator.ask(Attached, ours(Attach(SPEC)))
    voice.coordinator = voice.report().epoch
    assert not voice.inventory(*pages([A])).inventory, "the answer is still on its way"
    assert coordinator.load(attempt(1), [A]).blocks == 1
    assert [shard.state for shard in coordinator.status().shards] == ["joining"]
    assert coordinator.store(attempt(2), [B])[0].miss == Miss(MissReason.SHARD_LOST, "no shard is up")
    voice.report()
    assert [shard.state for shard in coordinator.status().shards] == ["up"]
    assert coordinator.store(attempt(3), [B])[0].decision is Decision.WRITE


def test_a_newer_incarnation_replaces_the_older_which_is_told_to_leave() -> None:
    coordinator, old = LoneCoordinator.serving(*pages([A, B]))
    new = coordinator.voice("a", epoch=2)
    new.join(*pages([C]))
    assert served_by(coordinator.load(attempt(1), [C])) == [(1, ["a"])]
    assert coordinator.load(attempt(2), [A]).blocks == 0
    assert old.report(page(D)).leave
    assert old.inventory(*pages([D])).leave
    assert [s.info.epoch for s in coordinator.status().shards] == [2]
    coordinator.later(0)
    assert coordinator.status().blocks == 1


def test_a_report_of_a_newer_incarnation_is_enough_to_replace_the_older() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    new = coordinator.voice("a", epoch=2)
    new.coordinator = Epoch(100)
    assert new.report().inventory
    assert coordinator.load(attempt(1), [A]).blocks == 0


def test_an_older_incarnation_that_speaks_while_the_newer_is_lost_gives_way_again() -> None:
    """Which of two is the newer is forgotten with a lost shard, so an older one may take its place for a while."""
    coordinator, old = LoneCoordinator.serving(*pages([A]))
    new = coordinator.voice("a", epoch=2)
    new.join(*pages([B]))
    coordinator.later(6 * SECOND)
    assert old.report().inventory
    assert not old.inventory(*pages([A])).inventory
    assert new.report().inventory, "nothing that the older one told is taken for its own"
    assert not new.inventory(*pages([B])).inventory
    assert served_by(coordinator.load(attempt(1), [B])) == [(1, ["a"])]
    assert coordinator.load(attempt(2), [A]).blocks == 0
    assert old.report().leave


def test_a_shard_of_another_coordinator_epoch_is_asked_for_an_inventory_of_this_one() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.coordinator = Epoch(99)
    for ack in (voice.report(gone(A)), voice.inventory(*pages([B]))):
        assert (ack.epoch, ack.inventory) == (100, True)
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.NEVER_SEEN)], "nothing of it was heard"


def test_two_coordinators_that_outbid_the_same_epoch_differ() -> None:
    took = []
    for began in (100, 101):
        voice = LoneCoordinator(epoch=began, expected=2).voice("a")
        voice.coordinator = Epoch(500)
        took.append(voice.report(gone(A)).epoch)
    assert took[0] != took[1], "or neither would ever learn that there is another"


@pytest.mark.parametrize("low_bits", [0, 1, 65_535])
def test_an_epoch_is_outbid_by_at_least_one_and_by_less_than_a_millisecond(low_bits: int) -> None:
    """Epochs begin as the nanoseconds of a start, and the next start has to outbid this one too."""
    began = (1 << 60) + low_bits
    voice = LoneCoordinator(epoch=began, expected=2).voice("a")
    voice.coordinator = Epoch(began + 10)
    assert 1 <= voice.report().epoch - voice.coordinator <= 65_536


def test_a_higher_epoch_reported_while_rebuilding_is_outbid() -> None:
    coordinator = LoneCoordinator(epoch=100, expected=2)
    early, voice = coordinator.voice("b"), coordinator.voice("a")
    early.join()
    voice.coordinator = Epoch(500)
    ack = voice.report(gone(A))
    assert ack.epoch > 500 and ack.inventory
    voice.join(*pages([A]))
    assert coordinator.status().epoch == ack.epoch
    assert early.report().inventory, "a shard that heard of the lower one sends a new inventory"
    early.join()
    assert coordinator.load(attempt(1), [A]).blocks == 1
    assert not rebuilding(coordinator)


def test_shards_that_reported_before_the_epoch_was_raised_send_new_inventories() -> None:
    """Under another epoch streams are numbered from 1 again: an old cursor would skip what is new."""
    coordinator = LoneCoordinator(expected=3)
    one, two = coordinator.voice("a"), coordinator.voice("b")
    one.coordinator = coordinator.core.epoch
    one.inventory(page(A))
    one.report(page(B, parent=A, depth=1))
    two.coordinator = Epoch(500)
    two.report()
    one.coordinator, one.told = coordinator.core.epoch, 0
    one.inventory(page(A), page(B, parent=A, depth=1))
    one.report(page(C, parent=B, depth=2), first=1)
    assert coordinator.status().blocks == 3


def test_a_higher_epoch_reported_while_serving_ends_this_coordinator() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.coordinator = Epoch(101)
    assert voice.report(gone(A)).epoch == 100
    assert coordinator.left


def test_rebuilding_ends_when_the_expected_have_told_or_the_grace_has_passed() -> None:
    coordinator = LoneCoordinator(expected=2, rebuild_grace_ms=3_000)
    one, two = coordinator.voice("a"), coordinator.voice("b")
    one.join()
    assert rebuilding(coordinator)
    coordinator.later(3 * SECOND - 1)
    assert rebuilding(coordinator)
    two.join()
    assert not rebuilding(coordinator)
    lonely = LoneCoordinator(expected=2, rebuild_grace_ms=3_000)
    lonely.later(3 * SECOND)
    assert not rebuilding(lonely)


def test_a_stall_extends_what_others_owe() -> None:
    coordinator = LoneCoordinator(expected=2, ticket_ttl_ms=5_000, rebuild_grace_ms=5_000)
    coordinator.ask(Attached, ours(Attach(SPEC)))
    voice = coordinator.voice("a")
    voice.join(*pages([A]))
    coordinator.load(attempt(1), [A])
    coordinator.now += 60 * SECOND
    coordinator.step(Stalled(60 * SECOND))
    coordinator.step(Tick())
    status = coordinator.status()
    assert (status.state, status.tickets, [s.state for s in status.shards]) == ("rebuilding", 1, ["up"])
    coordinator.later(5 * SECOND)
    status = coordinator.status()
    assert (status.state, status.tickets, [s.state for s in status.shards]) == ("serving", 0, ["lost"])


def test_a_shard_heard_during_a_stall_was_seen_no_later_than_now() -> None:
    coordinator, voice = LoneCoordinator.serving()
    coordinator.now += SECOND
    voice.report()
    coordinator.step(Stalled(SECOND))
    coordinator.step(Stalled(SECOND))
    assert coordinator.status().shards[0].seen_ns_ago == 0


# ------------------------------------------------------------------------------------------------- purges

CLEAR = Tombstone(40, OURS)


def purge(coordinator: LoneCoordinator, **named: str) -> list[Effect]:
    return coordinator.step(ours(Purge(**named))(CallId(10**6)))


def test_a_purge_is_on_disk_before_it_is_answered_and_nothing_that_it_names_is_found() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]))
    persist, answer = purge(coordinator)
    stone = Tombstone(100, OURS)
    assert (persist, answer) == (Persist((stone,)), Answer(CallId(10**6), Purged(2)))
    assert reasons(coordinator.explain([A, B])) == [(2, MissReason.EVICTED)]
    assert coordinator.counter("purged_blocks") == 2
    assert voice.report(*pages([C])).tombstones == (stone,)
    assert voice.report().tombstones == (stone,), "until it is carried out"
    assert coordinator.load(attempt(1), [C]).blocks == 0, "it was stored before its shard heard of the purge"
    assert voice.report(*pages([A]), PurgedEvent(100), *pages([B])).tombstones == ()
    assert [fate.miss is None for fate in coordinator.explain([A, B])] == [False, True]


def test_what_a_purge_forgets_is_noted_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sweeper, "SWEEP_BLOCKS", 1)
    coordinator, voice = LoneCoordinator.serving(*pages([A, B, C]))
    assert purge(coordinator)[1] == Answer(CallId(10**6), Purged(3))
    assert coordinator.core.next_deadline() == 0
    voice.report(PurgedEvent(100), *pages([A]))
    assert coordinator.load(attempt(1), [A]).blocks == 1
    coordinator.later(0)
    assert reasons(coordinator.explain([B, C])) == [(2, MissReason.EVICTED)]
    voice.report(gone(A, corrupt=True))
    assert reasons(coordinator.explain([A])) == [(1, MissReason.CORRUPT)]


def test_a_purge_of_one_model_leaves_the_others() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    assert purge(coordinator, model="another")[1] == Answer(CallId(10**6), Purged(0))
    assert coordinator.load(attempt(1), [A]).blocks == 1


def test_a_purge_too_many_is_refused_and_a_clear_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOMBSTONES_PER_TENANT", 1)
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    purge(coordinator, model="another")
    [refused] = purge(coordinator, model="m")
    assert isinstance(refused, Answer)
    assert isinstance(refused.reply, Refused)
    assert refused.reply.kind is RefusedKind.LIMIT
    assert coordinator.load(attempt(1), [A]).blocks == 1
    assert len(purge(coordinator)) == 2


def test_a_shard_that_was_cut_off_brings_nothing_back() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    coordinator.later(6 * SECOND)
    purge(coordinator)
    ack = voice.report()
    assert (ack.inventory, ack.tombstones) == (True, (Tombstone(100, OURS),))
    voice.inventory(*pages([A]))
    assert coordinator.load(attempt(1), [A]).blocks == 0
    voice.tombstones = ack.tombstones
    assert voice.inventory(*pages([B])).tombstones == ()
    assert [fate.miss is None for fate in coordinator.explain([A, B])] == [False, True]


def test_a_coordinator_that_knows_nothing_learns_of_purges_from_the_shards() -> None:
    coordinator, early = LoneCoordinator.serving(*pages([A, B]))
    late = coordinator.voice("b")
    late.coordinator = Epoch(100)
    late.tombstones = (CLEAR,)
    inventory = Inventory(late.info, Epoch(100), 0, 0, True, (), tombstones=late.tombstones)
    persist, *_ = coordinator.step(ours(inventory)(CallId(10**6)))
    assert persist == Persist((CLEAR,))
    assert coordinator.load(attempt(1), [A]).blocks == 0
    ack = early.report()
    assert (ack.inventory, ack.tombstones) == (True, (CLEAR,))
    early.tombstones = ack.tombstones
    assert not early.inventory(*pages([B])).inventory
    assert [fate.miss is None for fate in coordinator.explain([A, B])] == [False, True]


def test_a_tombstone_that_a_shard_passed_over_is_given_to_it_by_another_number() -> None:
    coordinator, early = LoneCoordinator.serving(*pages([A, B]))
    purge(coordinator, model="another")
    early.report(PurgedEvent(100))
    late = coordinator.voice("b")
    late.tombstones = (CLEAR, Tombstone(100, OURS, model="another"))
    late.join()
    assert coordinator.load(attempt(1), [A]).blocks == 0
    early.tombstones = (Tombstone(100, OURS, model="another"),)
    again = Tombstone(101, OURS)
    assert early.report().inventory
    assert early.inventory(*pages([A, B])).tombstones == (again,)
    assert coordinator.load(attempt(2), [A]).blocks == 0, "it has not carried out the clear"
    early.report(PurgedEvent(101), *pages([C]))
    assert coordinator.load(attempt(3), [C]).blocks == 1
    assert coordinator.core.state.tombstones.all() == (again,)
    assert late.report().tombstones == (again,), "to carry it out twice is safe"


def test_what_a_coordinator_was_given_is_heeded_from_its_first_step() -> None:
    coordinator = LoneCoordinator(expected=1)
    given = Coordinator(Epoch(1), coordinator.config, membership_ttl_ms=1, expected=1, now=0, tombstones=(CLEAR,))
    coordinator.core = given
    voice = coordinator.voice("a")
    voice.coordinator = Epoch(1)
    assert voice.inventory(*pages([A])).tombstones == (CLEAR,)
    assert coordinator.status().blocks == 0
