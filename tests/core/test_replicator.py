"""Which blocks get another copy, because of heat, pins and lost copies, and the pulls that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator import replicator
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    LeaveReason,
    PageEvent,
    Purge,
    Purged,
    PurgedEvent,
    StreamEvent,
    Tier,
    TierUse,
)
from kvcluster.core.miss import Loss
from tests.core.lone_coordinator import BLOCKS, A, B, C, LoneCoordinator, Voice, served_by
from tests.core.pulling import (
    drain,
    homes,
    lose,
    others,
    pull,
    pull_all,
    pull_in_vain,
    purge,
    want,
    wanted,
)
from tests.core.samples import CODED, LEFT, OURS, PAGE, RIGHT, SECOND, attempt, gone, ours, page, pages

# ------------------------------------------------------------------------------------------- replicas


def test_a_hot_run_gets_another_copy_from_who_has_it() -> None:
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:6]), run_blocks=4, hot_loads=2)
    [two] = others(coordinator, "b")
    coordinator.load(attempt(1), BLOCKS[:4])
    assert two.report().pull is None
    coordinator.load(attempt(2), BLOCKS[:4])
    ack = two.report()
    assert ack.pull is not None
    assert (ack.pull.number, ack.pull.source, ack.pull.tenant) == (1, one.address, OURS)
    assert [(new.key.hash, new.parent, new.depth) for new in ack.pull.pages] == [
        (event.key.hash, event.parent, event.depth) for event in pages(BLOCKS[:4])
    ]
    assert two.report().pull == ack.pull, "until it has ended"
    assert pull(two, ack).pull is None
    assert coordinator.counter("pulls") == 1
    assert homes(coordinator, A) == ["a", "b"]
    assert one.report().pull is None


def test_readers_share_the_replicas() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    two.report(*pages([A]))
    assert {served_by(coordinator.load(attempt(1, worker), [A]))[0][1][0] for worker in range(2)} == {"a", "b"}


def test_one_shard_alone_has_no_replicas_to_make() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hot_loads=1)
    coordinator.load(attempt(1), [A])
    assert voice.report().pull is None
    want(coordinator, 3, A)
    assert voice.report().pull is None
    [two] = others(coordinator, "b")
    assert wanted(two.report()) == [A], "requests for which there were too few shards are remembered"


@pytest.mark.parametrize("replicas", [2, 5, 8])
def test_a_pinned_block_lies_on_as_many_shards_as_it_is_to(replicas: int) -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    voices = others(coordinator, "bcdefg")
    want(coordinator, replicas, A)
    pull_all(one, *voices)
    assert len(homes(coordinator, A)) == min(replicas, 7)


def test_a_pull_that_brings_nothing_is_tried_again_a_few_times() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A)
    ack, tried = two.report(), 0
    while ack.pull is not None:
        tried += 1
        assert pull_in_vain(two, ack).pull is None, "not at once: it would be told the same without end"
        coordinator.later(replicator.RETRY_NS)
        ack = two.report()
    assert tried == replicator.TRIES


def test_a_pull_that_brings_nothing_to_who_has_another_part_is_not_tried_for_ever() -> None:
    coordinator, _ = LoneCoordinator.serving(page(A, LEFT), page(A, RIGHT))
    [two] = others(coordinator, "b")
    two.report(page(A, LEFT))
    want(coordinator, 2, A)
    tried = 0
    for _ in range(3 * replicator.TRIES):
        ack = two.report()
        if ack.pull is not None:
            assert [new.key.part for new in ack.pull.pages] == [RIGHT]
            tried += 1
            pull_in_vain(two, ack)
        coordinator.later(replicator.RETRY_NS)
    assert tried == replicator.TRIES


def test_nothing_is_pulled_into_room_that_would_have_to_be_made() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:3]), low_free=0.1, high_free=0.1)
    [two] = others(coordinator, "b", capacity_pages=20)
    want(coordinator, 2, *BLOCKS[:3])
    two.free(2)
    assert two.report().pull is None
    two.free(4)
    assert two.report(pressure=PAGE).pull is None, "reservations wait for room there"
    assert len(wanted(two.report())) == 2


def test_an_order_names_a_bounded_number_of_pages_of_one_namespace_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULL_PAGES", 2)
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:3]))
    two, three = others(coordinator, "bc")
    two.report(*pages(BLOCKS)[3:5])
    want(coordinator, 2, *BLOCKS[:5])
    first = three.report()
    assert (wanted(first), first.pull and first.pull.source) == ([A, B], one.address)
    second = pull(three, first)
    assert (wanted(second), second.pull and second.pull.source) == ([C], one.address)
    third = pull(three, second)
    assert (wanted(third), third.pull and third.pull.source) == (list(BLOCKS[3:5]), two.address)


def test_a_block_larger_than_an_order_may_be_goes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULL_BYTES", PAGE - 1)
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A, B)
    assert pull_all(one, two) == [A, B]


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    coordinator, _ = LoneCoordinator.serving(page(A), page(B, LEFT, parent=A, depth=1), low_free=0.0)
    [two] = others(coordinator, "b")
    want(coordinator, 2, A, B)
    two.info = replace(two.info, free_bytes=PAGE - 1)
    assert wanted(two.report()) == [B]


def test_replica_requests_that_no_shard_can_fulfil_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "INSPECTED", 2)
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:3]))
    two, three = others(coordinator, "bc")
    three.free(0)
    three.report()
    want(coordinator, 3, *BLOCKS[:2])
    two.report(*pages(BLOCKS[:2]))
    want(coordinator, 2, C)
    acks = [two.report() for _ in range(3)]
    assert wanted(acks[-1]) == [C], "the others are only for the third, which is full"


def test_a_bounded_number_of_replica_requests_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_REQUESTS", 2)
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    want(coordinator, 2, *BLOCKS[:4])
    want(coordinator, 3, A)
    [two] = others(coordinator, "b")
    assert pull_all(one, two) == [A, B]


def test_a_block_that_is_to_lie_on_more_shards_than_there_are_gets_another_with_each_that_joins() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    voices = [one]
    want(coordinator, 3, A)
    for name, copies in [("b", 2), ("c", 3), ("d", 3)]:
        voices += others(coordinator, name)
        pull_all(*voices)
        assert len(homes(coordinator, A)) == copies


def test_a_bounded_number_of_replica_requests_waits_for_more_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLICA_REQUESTS", 1)
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    for block in (A, B):
        want(coordinator, 2, block)
        assert one.report().pull is None
    [two] = others(coordinator, "b")
    assert pull_all(one, two) == [A]


def test_a_replica_request_that_was_fulfilled_takes_no_room_from_one_that_waits_for_more_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "REPLICA_REQUESTS", 1)
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A)
    assert pull_all(one, two) == [A]
    want(coordinator, 3, B)
    assert pull_all(one, two) == [B]
    [three] = others(coordinator, "c")
    assert pull_all(one, two, three) == [B]
    assert (homes(coordinator, A), homes(coordinator, B)) == (["a", "b"], ["a", "b", "c"])


def test_while_rebuilding_nothing_is_pulled() -> None:
    coordinator = LoneCoordinator(expected=3)
    one, two = others(coordinator, "ab")
    one.report(*pages([A]))
    want(coordinator, 2, A)
    assert two.report().pull is None
    three = coordinator.voice("c")
    three.join()
    assert wanted(two.report()) + wanted(three.report()) == [A]


def test_a_target_that_is_lost_is_followed_by_another() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    two, three = others(coordinator, "bc")
    want(coordinator, 2, A)
    assert wanted(two.report()) == [A]
    assert three.report().pull is None, "it is under way"
    for _ in range(6):
        coordinator.later(SECOND)
        one.report()
        three.report()
    assert wanted(three.report()) == [A]


# --------------------------------------------------------------------------------------------- repair


def test_what_a_lost_shard_leaves_with_fewer_copies_gets_another() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    two, three = others(coordinator, "bc")
    two.report(*pages([A]))
    lose(coordinator, one, three)
    assert pull_all(one, three) == [A], "B had one copy, and still has"
    assert homes(coordinator, A) == ["a", "c"]


def test_a_shard_that_sends_a_new_inventory_has_lost_nothing() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    two, three = others(coordinator, "bc")
    two.report(*pages([A]))
    two.inventory(*pages([A]))
    coordinator.later(0)
    assert pull_all(one, two, three) == []


@pytest.mark.parametrize("how", ["it is lost", "it is corrupt"])
def test_halves_of_a_block_on_two_shards_are_no_replicas(how: str) -> None:
    coordinator, one = LoneCoordinator.serving(page(A, LEFT))
    two, three = others(coordinator, "bc")
    two.report(page(A, RIGHT))
    if how == "it is lost":
        lose(coordinator, one, three)
    else:
        two.report(gone(A, RIGHT, corrupt=True))
    assert pull_all(one, three) == []


def test_a_replica_found_corrupt_is_replaced_and_one_evicted_is_not() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    [two] = others(coordinator, "b")
    two.report(*pages([A, B]))
    two.report(gone(A, corrupt=True), gone(B))
    assert pull_all(one, two) == [A]
    assert coordinator.counter("corrupt_pages") == 1


def test_a_copy_that_is_evicted_as_soon_as_it_has_come_is_not_brought_again() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A)
    ack = two.report()
    assert wanted(ack) == [A] and ack.pull is not None
    two.ends(ack.pull)
    two.report(*pages([A]), pressure=PAGE)
    assert two.report(gone(A)).pull is None


def test_a_copy_that_comes_and_goes_while_another_is_requested_is_brought_a_few_times() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    two, three = others(coordinator, "bc")
    three.info = replace(three.info, free_bytes=0)  # no other shard has room for the third
    want(coordinator, 3, A)
    ack, brought = two.report(), 0
    while ack.pull is not None:
        brought += 1
        assert pull(two, ack).pull is None
        two.report(gone(A))
        coordinator.later(replicator.RETRY_NS)
        three.report()
        ack = two.report()
    assert brought == 1 + replicator.TRIES


# -------------------------------------------------------------------------------------------- purges


def test_purged_blocks_are_no_longer_pulled() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A)
    assert wanted(two.report()) == [A], "which is lost on its way"
    assert purge(coordinator) == 1
    ack = two.report()
    assert ack.pull is None, "its source has not heard of the purge"
    assert len(ack.tombstones) == 1
    two.report(PurgedEvent(ack.tombstones[0].number))
    two.report(*pages([A]))
    assert homes(coordinator, A) == ["b"], "stored after the purge"
    one.report(*pages([A]))
    assert homes(coordinator, A) == ["b"], "told before its shard has heard of it"


def test_a_pull_of_another_namespace_goes_on_after_a_purge() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    [two] = others(coordinator, "b")
    want(coordinator, 2, A)
    before = two.report().pull
    coordinator.ask(Purged, ours(Purge(model="another")))
    assert two.report().pull == before


# --------------------------------------------------------------------------------------------- tiers


def below(free_bytes: int = 64 * PAGE) -> tuple[TierUse, ...]:
    return (TierUse(Tier.HOST, 64 * PAGE, free_bytes, 0),)


def twins(*blocks: BlockHash) -> list[StreamEvent]:
    """Encoded below, and decoded above."""
    return [*pages(blocks, tier=Tier.HOST, codec=Codec.Q8, spec=CODED), *pages(blocks, loss=Loss.Q8, spec=CODED)]


def tiered(*told: StreamEvent) -> tuple[LoneCoordinator, Voice]:
    return LoneCoordinator.serving(*told, below=below(), spec=CODED)


def test_twins_count_as_one_copy() -> None:
    coordinator, _ = tiered(*twins(A), *pages([A, B], spec=CODED)[1:])
    [two] = others(coordinator, "b", below=below())
    want(coordinator, 2, A, B)
    assert sorted(pull_all(two)) == sorted([A, B])
    want(coordinator, 2, A, B)
    assert pull_all(two) == []


def test_what_was_decoded_is_pulled_as_it_was_encoded_and_has_lost_as_much() -> None:
    coordinator, one = tiered(*twins(A))
    [two] = others(coordinator, "b", below=below())
    want(coordinator, 2, A)
    ack = two.report()
    assert ack.pull is not None
    assert (ack.pull.codec, ack.pull.source, [new.loss for new in ack.pull.pages]) == (Codec.Q8, one.address, [Loss.Q8])
    assert pull(two, ack).pull is None
    assert homes(coordinator, A) == ["a", "b"]


def test_an_encoded_page_is_pulled_only_by_shards_with_a_tier_for_it() -> None:
    coordinator, _ = tiered(*pages([A, B], tier=Tier.HOST, codec=Codec.Q8, spec=CODED))
    two, three, four = (*others(coordinator, "bc"), *others(coordinator, "d", below=below(free_bytes=0)))
    want(coordinator, 2, A, B)
    assert [voice.report().pull for voice in (two, three, four)] == [None] * 3
    four.free_below(64 * PAGE)
    assert wanted(four.report()) == [A, B]


def test_a_full_ram_tier_keeps_no_shard_from_pulling_what_is_encoded() -> None:
    coordinator, _ = tiered(*pages([A], tier=Tier.HOST, codec=Codec.Q8, spec=CODED), *pages([A, B], spec=CODED)[1:])
    [two] = others(coordinator, "b", below=below())
    want(coordinator, 2, A, B)
    two.info = replace(two.info, capacity_bytes=0, free_bytes=0)
    assert wanted(two.report()) == [A]


def test_one_order_is_of_one_codec() -> None:
    coordinator, _ = tiered(
        *pages([A], tier=Tier.HOST, codec=Codec.RAW, spec=CODED),
        *pages([A, B], tier=Tier.HOST, codec=Codec.Q8, spec=CODED)[1:],
        *pages(BLOCKS[:3], tier=Tier.HOST, codec=Codec.Q4, spec=CODED)[2:],
    )
    [two] = others(coordinator, "b", below=below())
    want(coordinator, 2, *BLOCKS[:3])
    orders = []
    ack = two.report()
    while ack.pull is not None:
        orders.append((wanted(ack), ack.pull.codec))
        ack = pull(two, ack)
    assert orders == [([A], Codec.RAW), ([B], Codec.Q8), ([C], Codec.Q4)]


def test_a_block_of_two_codecs_is_pulled_by_two_orders() -> None:
    coordinator, _ = tiered(page(A, LEFT, spec=CODED), page(A, RIGHT, tier=Tier.HOST, codec=Codec.Q8, spec=CODED))
    [two] = others(coordinator, "b", below=below())
    want(coordinator, 2, A)
    first = two.report()
    assert first.pull is not None
    assert (first.pull.codec, [new.key.part for new in first.pull.pages]) == (Codec.RAW, [LEFT])
    second = pull(two, first)
    assert second.pull is not None
    assert (second.pull.codec, [new.key.part for new in second.pull.pages]) == (Codec.Q8, [RIGHT])
    assert pull(two, second).pull is None


def test_a_replica_that_is_demoted_is_still_one() -> None:
    coordinator, one = tiered(*pages([A], spec=CODED))
    two, three = others(coordinator, "bc", below=below())
    two.report(*pages([A], spec=CODED))
    two.report(*pages([A], tier=Tier.HOST, codec=Codec.Q8, spec=CODED), gone(A, spec=CODED))
    assert pull_all(one, two, three) == []
    assert homes(coordinator, A) == ["a", "b"]


def test_one_corrupt_twin_is_not_a_lost_replica() -> None:
    coordinator, one = tiered(*twins(A))
    two, three = others(coordinator, "bc", below=below())
    two.report(*twins(A))
    two.report(gone(A, corrupt=True, spec=CODED))
    assert pull_all(one, two, three) == []
    assert wanted(two.report(gone(A, corrupt=True, tier=Tier.HOST, spec=CODED))) == [A]


def test_a_draining_shard_that_holds_twins_is_emptied_of_each_once() -> None:
    coordinator, one = tiered(*twins(A, B))
    [two] = others(coordinator, "b", below=below())
    assert drain(coordinator, one)
    assert pull_all(two) == [A, B]
    assert one.report().leave is LeaveReason.DRAINED
    assert homes(coordinator, A) == homes(coordinator, B) == ["b"]


# ----------------------------------------------------------------------------------------- a disk tier


def below_it(free_bytes: int = 64 * PAGE) -> tuple[TierUse, ...]:
    """A disk tier of so many free bytes."""
    return tuple(use._replace(tier=Tier.DISK) for use in below(free_bytes))


def on_disk(*blocks: BlockHash, codec: Codec = Codec.Q8) -> list[PageEvent]:
    return pages(blocks, tier=Tier.DISK, codec=codec, spec=CODED)


@pytest.mark.parametrize("codec", Codec)
def test_what_lies_on_disk_is_pulled_into_a_host_tier_as_it_is(codec: Codec) -> None:
    coordinator, one = tiered(*on_disk(A, codec=codec))
    [two] = others(coordinator, "b", below=below() + below_it())
    want(coordinator, 2, A)
    ack = two.report()
    assert ack.pull is not None
    assert (ack.pull.source, ack.pull.codec, ack.pull.into) == (one.address, codec, Tier.HOST)
    assert [new.loss for new in ack.pull.pages] == [codec.loss]
    two.ends(ack.pull)
    assert two.report(*pages([A], tier=Tier.HOST, codec=codec, spec=CODED)).pull is None
    assert homes(coordinator, A) == ["a", "b"]


def test_room_on_disk_is_none_for_a_replica() -> None:
    coordinator, _ = tiered(*on_disk(A), *twins(A, B)[1:2])
    [two] = others(coordinator, "b", below=below(free_bytes=0) + below_it())
    want(coordinator, 2, A, B)
    assert two.report().pull is None, "its RAM takes nothing that is encoded"
    two.info = replace(two.info, free_bytes=0, others=below() + below_it(free_bytes=0))
    assert wanted(two.report()) == [A, B], "nor is any needed there"


def test_encoded_pages_on_disk_are_pulled_only_into_host_tiers_and_raw_ones_into_the_ram_tier() -> None:
    coordinator, _ = tiered(*on_disk(A), *on_disk(A, B, codec=Codec.RAW)[1:])
    [two] = others(coordinator, "b")
    want(coordinator, 2, A, B)
    ack = two.report()
    assert wanted(ack) == [B]
    assert ack.pull is not None and ack.pull.into is Tier.RAM
    assert pull(two, ack).pull is None


def test_copies_of_one_page_in_three_tiers_are_one_replica() -> None:
    coordinator, one = tiered(*twins(A), *on_disk(A))
    two, three = others(coordinator, "bc", below=below() + below_it())
    two.report(*on_disk(A))
    want(coordinator, 2, A)
    assert pull_all(one, two, three) == []
    two.report(gone(A, corrupt=True, tier=Tier.DISK, spec=CODED))
    assert pull_all(one, two, three) == [A]


def test_a_draining_shard_is_emptied_of_what_it_holds_on_disk() -> None:
    coordinator, one = tiered(*on_disk(A, B))
    [two] = others(coordinator, "b", below=below() + below_it())
    assert drain(coordinator, one)
    assert pull_all(two) == [A, B]
    assert one.report().leave is LeaveReason.DRAINED
