"""Readers of pages on disk: what they wait for, what they get, and what may happen in between."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import CLUSTER, BlockHash, CallId
from kvcluster.core.messages import (
    Abort,
    Commit,
    CommitGrant,
    Erase,
    LeaveReason,
    PageSlot,
    PinGrant,
    PurgedEvent,
    RefusedKind,
    RemovedEvent,
    Revoke,
    Suspect,
    Tier,
    Tombstone,
    Unpin,
    Written,
)
from kvcluster.core.miss import PURGING, Loss, Miss, MissReason
from kvcluster.core.shard.pin_handler import ROOM_NS
from tests.core.lone_shard import A, B, C, D, counters, end, inventory, misses, pinned, refusal, report
from tests.core.samples import CODED, OURS, SECOND, attempt, key, ours
from tests.core.test_disk_recovery import DiskShard, event, found, lying, on_disk, used

RAW, Q8 = CODED.page_bytes(0, CODED.whole(0)), 192
TTL = 10 * SECOND
NO_ROOM = Miss(MissReason.FULL, "the host tier has no room to read it from disk now; raise host_bytes")
TOO_LATE = Miss(MissReason.DEADLINE, "the page was not read into the host tier in time")


def having(*blocks: BlockHash, **config: int) -> DiskShard:
    """A shard that has these on disk."""
    return DiskShard.knowing(found(*lying(*blocks)), spec=CODED, **config)


def reply(shard: DiskShard, call: CallId) -> tuple[PageSlot | Miss, ...]:
    """Returns the answer to a pin."""
    grant = shard.replies[call]
    assert isinstance(grant, PinGrant)
    return grant.pages


def host_bytes(shard: DiskShard) -> int:
    """Used."""
    return shard.core.pool.allocators[Tier.HOST].used_bytes


def nothing_is_left(shard: DiskShard, *, on_disk: int = 0) -> bool:
    """No lease, no page but those that readers find, and all room free but for so many of them on disk."""
    pool = shard.core.pool
    assert not len(shard.core.leases) and not shard.core.own_attempts
    assert list(pool.everything()) == list(pool.ready())
    assert [allocator.used_bytes for allocator in pool.memory.values()] == [0, 0]
    return used(shard) == on_disk


# ------------------------------------------------------------------------------------------- what is read


def test_a_pin_of_a_page_on_disk_is_answered_when_the_page_has_been_read() -> None:
    [page] = lying(A)
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    assert call not in shard.replies
    [stage] = shard.stages
    assert stage.attempt in shard.core.own_attempts
    [move] = stage.pages
    assert (move.namespace, move.tenant, move.spec, move.sampled) == (shard.space, OURS, CODED, False)
    assert (move.parent, move.depth) == (page.parent, page.depth)
    assert (move.source.key, move.source.tier, move.source.offset) == (key(A), Tier.DISK, page.offset)
    assert (move.source.nbytes, move.source.sums) == (page.nbytes, page.sums)
    assert (move.target.key, move.target.tier, move.target.nbytes) == (key(A), Tier.HOST, Q8)
    assert (move.target.codec, move.target.loss, move.target.sums) == (Codec.Q8, Loss.Q8, b"")
    shard.read()
    assert reply(shard, call) == (move.target._replace(sums=page.sums),)
    assert counters(shard)["staged"] == 1


def test_a_page_that_was_read_stays_on_disk_and_is_told_of_there_alone() -> None:
    [page] = lying(A)
    shard = having(A)
    shard.pinning(attempt(1), A)
    for _ in ("while it is being read", "while it is lent"):
        shard.hear(inventory=True)
        assert inventory(shard).pages == (event(page),)
        assert inventory(shard).info.others[0].pages == 0
        assert shard.settle() == [event(page)]
        if shard.stages:
            shard.read()
            assert shard.sent is None, "it is no news"
    assert end(shard, attempt(1))
    assert on_disk(shard) == (page,)
    assert nothing_is_left(shard, on_disk=1)


def test_one_answer_tells_of_what_is_in_memory_and_of_what_was_read_each_in_its_place() -> None:
    shard = having(A, C)
    shard.store(attempt(1), B)
    call = shard.pinning(attempt(2), A, B, D, C)
    assert call not in shard.replies
    [stage] = shard.stages
    assert [move.source.key for move in stage.pages] == [key(A), key(C)]
    shard.read()
    first, second, missing, last = reply(shard, call)
    assert missing == Miss(MissReason.EVICTED)
    slots = [slot for slot in (first, second, last) if isinstance(slot, PageSlot)]
    assert [(slot.key, slot.tier) for slot in slots] == [
        (key(A), Tier.HOST),
        (key(B), Tier.RAM),
        (key(C), Tier.HOST),
    ]
    assert [slot.sums for slot in slots] == [b"sums of " + A, b"sums", b"sums of " + C]
    assert counters(shard)["staged"] == 2
    assert end(shard, attempt(2))


def test_what_lies_in_memory_too_is_not_read_from_disk() -> None:
    shard = having(A)
    shard.order_moves(Tier.RAM, A)
    shard.move()
    [slot] = pinned(shard.pin(attempt(1), A, accept=Loss.Q8))
    assert (slot.tier, shard.stages) == (Tier.RAM, [])


def test_what_has_lost_more_than_the_reader_accepts_is_not_read() -> None:
    shard = having(A)
    assert misses(shard.pin(attempt(1), A)) == [MissReason.LOSSY]
    assert shard.stages == [] and host_bytes(shard) == 0


def test_another_shard_gets_the_encoded_twin_on_disk_of_what_was_decoded() -> None:
    shard = having(A)
    shard.order_moves(Tier.RAM, A)
    shard.move()
    shard.settle()
    call = shard.pinning(attempt(1), A, tenant=CLUSTER)
    shard.read()
    [slot] = pinned(shard.replies[call])
    assert (slot.tier, slot.codec, slot.sums) == (Tier.HOST, Codec.Q8, b"sums of " + A)
    assert end(shard, attempt(1))


def test_two_readers_of_one_page_have_a_copy_each_and_are_answered_as_theirs_is_read() -> None:
    shard = having(A)
    one, other = shard.pinning(attempt(1), A), shard.pinning(attempt(2), A)
    assert host_bytes(shard) == 2 * Q8
    shard.read(which=1)
    assert one not in shard.replies
    [theirs] = pinned(shard.replies[other])
    shard.read()
    [ours] = pinned(shard.replies[one])
    assert ours.offset != theirs.offset and ours.generation != theirs.generation
    assert ours.sums == theirs.sums
    assert end(shard, attempt(2)) and host_bytes(shard) == Q8
    assert end(shard, attempt(1))
    assert nothing_is_left(shard, on_disk=1)


def test_a_key_that_is_named_twice_is_read_twice() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A, A)
    shard.read(1)
    sound, corrupt = reply(shard, call)
    assert isinstance(sound, PageSlot)
    assert corrupt == Miss(MissReason.CORRUPT, "on disk")
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_a_copy_belongs_to_its_one_reader_until_that_is_done() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    shard.read()
    shard.evict(A, tier=Tier.DISK)
    shard.settle()
    assert misses(shard.pin(attempt(2), A, accept=Loss.Q4)) == [MissReason.EVICTED]
    assert end(shard, attempt(2))
    shard.evict(A, tier=Tier.HOST)
    shard.later(TTL)
    assert attempt(1) in shard.revoked and host_bytes(shard) == Q8, "the reader may still be reading"
    assert end(shard, attempt(1))
    shard.settle()
    assert nothing_is_left(shard)


def test_a_shard_tells_of_the_reader_who_waits_and_of_no_lease_of_its_own() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    shard.later(SECOND)
    assert (report(shard).info.leases, len(shard.core.leases)) == (1, 2)
    shard.settle()
    shard.read()
    shard.later(SECOND)
    assert (report(shard).info.leases, len(shard.core.leases)) == (1, 1)


# ---------------------------------------------------------------------------------------------- no page


def test_a_page_that_is_found_corrupt_is_a_miss_and_is_withdrawn_and_the_others_are_served() -> None:
    shard = having(A, B)
    shard.store(attempt(1), C)
    call = shard.pinning(attempt(2), A, B, C)
    shard.read(0)
    corrupt, second, third = reply(shard, call)
    assert corrupt == Miss(MissReason.CORRUPT, "on disk")
    assert isinstance(second, PageSlot) and isinstance(third, PageSlot)
    assert (second.key, third.key) == (key(B), key(C))
    assert shard.settle() == [RemovedEvent(shard.space, key(A), corrupt=True, tier=Tier.DISK)]
    told = counters(shard)
    assert (told["corrupt"], told["staged"]) == (1, 1)
    assert (used(shard), host_bytes(shard)) == (1, Q8)
    assert misses(shard.pin(attempt(3), A, accept=Loss.Q4)) == [MissReason.EVICTED]


def test_a_page_that_two_readers_find_corrupt_is_told_of_once() -> None:
    shard = having(A)
    calls = [shard.pinning(attempt(number), A) for number in (1, 2)]
    for call in calls:
        shard.read(0)
        assert reply(shard, call) == (Miss(MissReason.CORRUPT, "on disk"),)
    assert shard.settle() == [RemovedEvent(shard.space, key(A), corrupt=True, tier=Tier.DISK)]
    assert counters(shard)["corrupt"] == 1
    assert end(shard, attempt(1)) and end(shard, attempt(2))
    assert nothing_is_left(shard)


def test_what_was_decoded_from_a_page_that_is_found_corrupt_goes_with_it() -> None:
    shard = having(A)
    shard.order_moves(Tier.RAM, A)
    shard.move()
    shard.settle()
    shard.pinning(attempt(1), A, tenant=CLUSTER)
    shard.read(0)
    told = [(gone.tier, gone.corrupt) for gone in shard.settle() if isinstance(gone, RemovedEvent)]
    assert told == [(Tier.DISK, True), (Tier.RAM, False)]
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_what_a_reader_suspects_is_read_again_on_disk_too() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    shard.read()
    shard.call(ours(Suspect(shard.epoch, (key(A),)), shard.space))
    assert shard.reading is not None
    assert [(slot.tier, slot.sums) for slot in shard.reading.slots] == [(Tier.DISK, b"sums of " + A)]
    shard.verdict(0)
    assert shard.settle() == [RemovedEvent(shard.space, key(A), corrupt=True, tier=Tier.DISK)]
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_what_never_fits_the_host_tier_beside_the_rest_of_its_pin_is_a_miss_and_the_others_are_served() -> None:
    shard = having(A, B, host_bytes=Q8)
    shard.store(attempt(1), C)
    call = shard.pinning(attempt(2), A, B, C)
    shard.read()
    first, second, third = reply(shard, call)
    assert isinstance(first, PageSlot) and isinstance(third, PageSlot)
    assert second == NO_ROOM
    assert on_disk(shard) == tuple(lying(A, B)), "it may be read another time"
    assert end(shard, attempt(2))
    again = shard.pinning(attempt(3), B)
    shard.read()
    assert pinned(shard.replies[again])


def test_no_more_is_read_at_once_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PINS_FROM_DISK", 2)
    shard = having(A, B)
    shard.store(attempt(9), C)
    for number in (1, 2):
        shard.pinning(attempt(number), A, B)
    full, served = reply(shard, shard.pinning(attempt(3), A, C))
    assert full == NO_ROOM and isinstance(served, PageSlot)
    shard.read()
    last = shard.pinning(attempt(4), A)
    assert last not in shard.replies, "one of them has been served"
    shard.read()
    shard.read()
    assert all(end(shard, attempt(number)) for number in (1, 2, 3, 4))
    assert host_bytes(shard) == 0


def test_a_reader_who_has_gone_counts_until_the_drive_is_done_with_his_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PINS_FROM_DISK", 1)
    shard = having(A)
    shard.pinning(attempt(1), A)
    assert end(shard, attempt(1))
    assert reply(shard, shard.pinning(attempt(2), A)) == (NO_ROOM,)
    shard.read()
    assert shard.pinning(attempt(3), A) not in shard.replies


# -------------------------------------------------------------------------------- which readers wait for room


def crowded(*blocks: BlockHash, copies: int = 1) -> DiskShard:
    """A shard that has these on disk, and whose host tier is full of a reader's copies of the first of them."""
    shard = having(*blocks, host_bytes=copies * Q8)
    shard.pinning(attempt(0), *blocks[:1] * copies)
    shard.read()
    assert shard.core.pool.allocators[Tier.HOST].free_bytes == 0
    return shard


def wanted(shard: DiskShard) -> int:
    """Bytes of the host tier that readers wait for, as the report under way tells it."""
    return report(shard).info.use(Tier.HOST).wanted_bytes


def test_a_reader_for_whose_pages_there_is_no_room_waits_and_the_shard_says_so_at_once() -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    assert wanted(shard) == Q8
    assert call not in shard.replies and shard.stages == []
    assert (len(shard.core.leases), shard.core.own_attempts) == (1, []), (
        "the own lease of the stage begins when there is room"
    )
    shard.settle()
    assert end(shard, attempt(0))
    shard.read()
    assert pinned(shard.replies[call])
    shard.settle()
    shard.later(SECOND)
    assert wanted(shard) == 0
    assert end(shard, attempt(1))
    assert nothing_is_left(shard, on_disk=2)


def test_a_reader_who_has_waited_long_enough_for_room_gets_what_fits() -> None:
    shard = crowded(A, B)
    shard.store(attempt(9), C)
    call = shard.pinning(attempt(1), B, C, D)
    shard.settle()
    shard.later(ROOM_NS - 1)
    assert call not in shard.replies
    assert shard.core.next_deadline() == shard.now + 1
    shard.later(1)
    full, served, missing = reply(shard, call)
    assert (full, missing) == (NO_ROOM, Miss(MissReason.EVICTED))
    assert isinstance(served, PageSlot) and served.key == key(C)
    assert shard.stages == [] and shard.core.own_attempts == []
    assert end(shard, attempt(1)) and end(shard, attempt(0))
    assert host_bytes(shard) == 0


def test_of_what_a_reader_has_waited_for_he_gets_the_part_that_fits() -> None:
    shard = having(A, B, C, host_bytes=2 * Q8)
    for number in (8, 9):
        shard.pinning(attempt(number), A)
        shard.read()
    call = shard.pinning(attempt(1), B, C)
    assert end(shard, attempt(9))
    assert shard.stages == [], "there is room for one of them"
    shard.settle()
    shard.later(ROOM_NS)
    shard.read()
    first, second = reply(shard, call)
    assert isinstance(first, PageSlot) and first.key == key(B)
    assert second == NO_ROOM


def test_a_reader_of_more_than_the_host_tier_holds_gets_what_fits_as_soon_as_any_of_it_does() -> None:
    shard = crowded(A, B, C)
    call = shard.pinning(attempt(1), B, C)
    assert call not in shard.replies
    assert end(shard, attempt(0))
    shard.read()
    first, second = reply(shard, call)
    assert isinstance(first, PageSlot) and first.key == key(B)
    assert second == NO_ROOM


def test_readers_find_room_in_order_of_arrival() -> None:
    shard = crowded(A, B, C, copies=2)
    two, one = shard.pinning(attempt(1), B, C), shard.pinning(attempt(2), B)
    assert end(shard, attempt(0))
    [stage] = shard.stages
    assert len(stage.pages) == 2, "the first was not overtaken"
    shard.read()
    assert pinned(shard.replies[two]) and one not in shard.replies
    assert end(shard, attempt(1))
    shard.read()
    assert pinned(shard.replies[one])


def test_a_reader_who_comes_while_others_wait_waits_behind_them_though_there_is_room_for_him() -> None:
    shard = having(A, B, C, host_bytes=2 * Q8)
    shard.pinning(attempt(9), A)
    shard.read()
    first = shard.pinning(attempt(1), B, C)
    second = shard.pinning(attempt(2), C)
    assert shard.stages == []
    assert end(shard, attempt(9))
    shard.read()
    assert first in shard.replies and second not in shard.replies


def test_readers_who_find_room_at_the_same_time_are_all_served() -> None:
    shard = having(A, B, C, host_bytes=3 * Q8)
    shard.pinning(attempt(9), A, A)
    shard.read()
    calls = [shard.pinning(attempt(1), B, C), shard.pinning(attempt(2), B)]
    assert end(shard, attempt(9))
    shard.read()
    shard.read()
    assert [len(pinned(shard.replies[call])) for call in calls] == [2, 1]


def test_who_wants_nothing_from_disk_waits_for_no_room() -> None:
    shard = crowded(A, B)
    shard.store(attempt(9), D)
    shard.pinning(attempt(1), B)
    assert pinned(shard.pin(attempt(2), D))


def test_a_demotion_out_of_the_host_tier_makes_room_for_readers() -> None:
    shard = having(A, host_bytes=Q8)
    shard.store(attempt(9), B)
    shard.order_moves(Tier.HOST, B)
    shard.move_all()
    shard.settle()
    call = shard.pinning(attempt(1), A)
    assert wanted(shard) == Q8
    shard.order_moves(Tier.DISK, B)
    assert shard.stages == []
    shard.move()
    shard.read()
    assert pinned(shard.replies[call])


def test_a_shard_wants_as_much_room_as_all_who_wait() -> None:
    shard = crowded(A, B, C, copies=2)
    shard.pinning(attempt(1), B, C)
    shard.pinning(attempt(2), B)
    shard.settle()
    shard.pinning(attempt(3), C)
    assert wanted(shard) == 4 * Q8


def test_no_more_readers_wait_for_room_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PINS_FROM_DISK", 2)
    shard = crowded(A, B)
    first = shard.pinning(attempt(1), B)
    assert reply(shard, shard.pinning(attempt(2), B)) == (NO_ROOM,)
    assert first not in shard.replies


def test_an_attempt_that_waits_for_room_is_none_that_another_pin_may_name() -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    assert refusal(shard.replies[shard.pinning(attempt(1), B)]) is RefusedKind.BAD
    assert refusal(shard.replies[shard.reserving(attempt(1), D)]) is RefusedKind.BAD
    assert call not in shard.replies


@pytest.mark.parametrize("kind", [Unpin, Abort])
def test_a_reader_who_ends_while_he_waits_for_room_waits_no_more(kind: type[Unpin | Abort]) -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    assert end(shard, attempt(1), kind)
    assert reply(shard, call) == (TOO_LATE,)
    assert not end(shard, attempt(1), kind), "the reader is gone"
    assert end(shard, attempt(0))
    assert shard.stages == []
    shard.settle()
    assert nothing_is_left(shard, on_disk=2)


def test_a_page_that_goes_while_a_reader_waits_for_room_is_a_miss() -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    shard.evict(B, tier=Tier.DISK)
    assert used(shard) == 1, "no reader has held it"
    shard.later(ROOM_NS)
    assert reply(shard, call) == (Miss(MissReason.EVICTED),)


def test_a_purge_while_a_reader_waits_for_room_is_a_miss() -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    shard.hear(tombstones=(Tombstone(5, OURS),))
    shard.later(ROOM_NS)
    assert reply(shard, call) == (Miss(MissReason.EVICTED),)
    assert end(shard, attempt(0)) and end(shard, attempt(1))
    shard.settle()
    assert nothing_is_left(shard)


def test_a_page_that_comes_up_while_a_reader_waits_for_room_is_given_to_him_there() -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B)
    shard.order_moves(Tier.RAM, B)
    shard.move()
    shard.later(ROOM_NS)
    [slot] = pinned(shard.replies[call])
    assert slot.tier is Tier.RAM


def test_a_reader_who_waits_for_room_is_given_nothing_once_no_coordinator_is_there_any_more() -> None:
    shard = crowded(A, B)
    shard.store(attempt(9), C)
    shard.later(SECOND)
    shard.settle()
    shard.later(4_800_000_000)
    assert shard.core.state.member(shard.now)
    call = shard.pinning(attempt(1), B, C)
    assert call not in shard.replies
    shard.later(ROOM_NS)
    assert not shard.core.state.member(shard.now)
    assert misses(shard.replies[call]) == [MissReason.SHARD_LOST] * 2
    assert end(shard, attempt(0)) and not end(shard, attempt(1))
    assert shard.stages == [] and host_bytes(shard) == 0


@pytest.mark.parametrize("leave_reason", LeaveReason)
def test_a_shard_that_leaves_tells_who_waits_for_room(leave_reason: LeaveReason) -> None:
    shard = crowded(A, B)
    call = shard.pinning(attempt(1), B, D)
    shard.hear(leave=leave_reason)
    assert misses(shard.replies[call]) == [MissReason.SHARD_LOST] * 2
    assert end(shard, attempt(0)) and not end(shard, attempt(1))
    shard.later(SECOND)
    assert nothing_is_left(shard, on_disk=2)


# ----------------------------------------------------------------------------------- what comes between


@pytest.mark.parametrize("kind", [Unpin, Abort])
@pytest.mark.parametrize("corrupt", [(), (0,)], ids=["sound", "corrupt"])
def test_a_reader_who_ends_while_he_waits_gets_nothing_and_leaves_nothing(
    kind: type[Unpin | Abort], corrupt: tuple[int, ...]
) -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    assert end(shard, attempt(1), kind)
    assert call not in shard.replies and host_bytes(shard) == Q8, "it is still being read"
    shard.read(*corrupt)
    assert reply(shard, call) == (TOO_LATE,)
    assert shard.settle() == []
    assert counters(shard)["staged"] == 0
    assert nothing_is_left(shard, on_disk=1)


def test_a_commit_of_a_reader_who_waits_ends_him_and_commits_nothing() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    committed = shard.ask(CommitGrant, ours(Commit(attempt(1), (0,), (b"sums",))))
    assert committed.pages == (Written.LOST,)
    shard.read()
    assert reply(shard, call) == (TOO_LATE,)
    assert nothing_is_left(shard, on_disk=1)


def test_an_attempt_that_is_repeated_does_not_get_what_was_read_for_its_first() -> None:
    shard = having(A)
    first = shard.pinning(attempt(1), A)
    assert end(shard, attempt(1))
    second = shard.pinning(attempt(1), A)
    shard.read()
    assert reply(shard, first) == (TOO_LATE,)
    assert second not in shard.replies
    shard.read()
    assert pinned(shard.replies[second])
    assert end(shard, attempt(1))
    assert nothing_is_left(shard, on_disk=1)


def test_a_reader_may_wait_for_the_drive_for_longer_than_a_lease_runs() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    for _ in range(6):
        shard.later(TTL // 2)
        shard.settle()
    assert shard.revoked == []
    shard.read()
    assert pinned(shard.replies[call])
    shard.later(TTL)
    assert shard.revoked == [attempt(1)], "a granted lease runs out unless its reader renews it"
    assert end(shard, attempt(1))
    shard.settle()
    assert nothing_is_left(shard, on_disk=1)


def test_who_has_gone_meanwhile_is_not_held_on_to() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    assert end(shard, attempt(1))
    shard.later(3 * TTL)
    shard.settle()
    assert shard.revoked == []
    shard.read()
    assert nothing_is_left(shard, on_disk=1)


def test_a_page_read_after_the_coordinator_was_lost_is_given_to_no_reader() -> None:
    shard = having(A)
    shard.store(attempt(9), B)
    call = shard.pinning(attempt(1), A, B)
    shard.settle()
    shard.later(6 * SECOND)
    assert not shard.core.state.member(shard.now) and attempt(1) not in shard.revoked
    shard.read()
    assert misses(shard.replies[call]) == [MissReason.SHARD_LOST] * 2, "nor what was in memory all the time"
    assert host_bytes(shard) == 0
    assert end(shard, attempt(1))
    shard.settle()
    assert not len(shard.core.leases)


def test_a_corrupt_page_is_found_by_a_later_read_if_no_reader_waits_for_it_any_more() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    shard.settle()
    shard.later(6 * SECOND)
    shard.read(0)
    assert end(shard, attempt(1))
    shard.settle()
    call = shard.pinning(attempt(2), A)
    shard.read(0)
    assert reply(shard, call) == (Miss(MissReason.CORRUPT, "on disk"),)
    assert counters(shard)["corrupt"] == 1


@pytest.mark.parametrize("leave_reason", LeaveReason)
def test_a_shard_that_leaves_tells_who_waits_and_ends_what_is_under_way(leave_reason: LeaveReason) -> None:
    shard = having(A)
    shard.store(attempt(9), B)
    call = shard.pinning(attempt(1), A, B)
    [stage] = shard.stages
    effects = shard.hear(leave=leave_reason)
    assert shard.left
    revoked = [effect.attempt for effect in effects if isinstance(effect, Revoke)]
    assert sorted(revoked) == sorted([attempt(1), stage.attempt])
    assert misses(shard.replies[call]) == [MissReason.SHARD_LOST] * 2
    assert shard.core.own_attempts == []
    assert shard.read() == []
    assert host_bytes(shard) == 0
    assert end(shard, attempt(1))
    assert not len(shard.core.leases)
    assert misses(shard.pin(attempt(2), A)) == [MissReason.SHARD_LOST] and shard.stages == []


def test_a_draining_shard_reads_on() -> None:
    shard = having(A)
    shard.hear(drain=True)
    call = shard.pinning(attempt(1), A)
    shard.read()
    assert pinned(shard.replies[call])


def test_a_page_that_is_evicted_while_a_reader_waits_is_gone_for_others_and_stays_for_him() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    shard.evict(A, tier=Tier.DISK)
    assert shard.settle() == [RemovedEvent(shard.space, key(A), corrupt=False, tier=Tier.DISK)]
    assert misses(shard.pin(attempt(2), A, accept=Loss.Q4)) == [MissReason.EVICTED]
    assert end(shard, attempt(2))
    assert used(shard) == 1, "it is still being read"
    shard.read()
    [slot] = pinned(shard.replies[call])
    assert slot.sums == b"sums of " + A
    assert used(shard) == 0
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_an_evicted_page_that_its_last_reader_finds_corrupt_is_told_of_no_more() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    shard.evict(A, tier=Tier.DISK)
    shard.settle()
    shard.read(0)
    assert reply(shard, call) == (Miss(MissReason.CORRUPT, "on disk"),)
    assert shard.settle() == []
    assert counters(shard)["corrupt"] == 0
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_a_slot_on_disk_is_not_given_to_another_page_while_it_is_being_read() -> None:
    shard = DiskShard.knowing(found(*lying(A), files=1))
    shard.pinning(attempt(1), A)
    [move] = shard.stages[0].pages
    shard.evict(A, tier=Tier.DISK)
    shard.store(attempt(2), B)
    shard.order_moves(Tier.HOST, B)
    shard.move_all()
    shard.order_moves(Tier.DISK, B)
    assert shard.moving is not None
    assert shard.moving.pages[0].target.offset != move.source.offset
    shard.move_all()
    shard.read()
    assert [page.key for page in on_disk(shard)] == [key(B)]


def test_only_a_reader_from_before_a_purge_gets_its_page() -> None:
    shard = having(A, B)
    call = shard.pinning(attempt(1), A)
    own = shard.stages[0].attempt
    effects = shard.hear(tombstones=(Tombstone(5, OURS),))
    assert Revoke(own, PURGING) in effects and [type(effect) for effect in effects].count(Erase) == 1
    assert shard.settle() == [PurgedEvent(5)]
    assert used(shard) == 1, "one of them is still being read"
    assert misses(shard.pin(attempt(2), A, accept=Loss.Q4)) == [MissReason.EVICTED]
    assert end(shard, attempt(2))
    shard.read()
    assert pinned(shard.replies[call])
    assert used(shard) == 0 and counters(shard)["purged"] == 2
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_a_reader_of_before_a_purge_whose_page_is_erased_under_him_gets_a_miss() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    shard.hear(tombstones=(Tombstone(5, OURS),))
    shard.settle()
    shard.read(0)
    assert reply(shard, call) == (Miss(MissReason.CORRUPT, "on disk"),)
    assert shard.settle() == [] and counters(shard)["corrupt"] == 0
    assert end(shard, attempt(1))
    assert nothing_is_left(shard)


def test_a_page_comes_up_while_readers_wait_for_it_and_each_gets_what_he_asked_for() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    shard.order_moves(Tier.RAM, A)
    shard.move()
    [above] = pinned(shard.pin(attempt(2), A, accept=Loss.Q8))
    shard.read()
    [copy] = pinned(shard.replies[call])
    assert (above.tier, above.codec) == (Tier.RAM, Codec.RAW)
    assert (copy.tier, copy.codec) == (Tier.HOST, Codec.Q8)
    assert end(shard, attempt(1)) and end(shard, attempt(2))
    assert host_bytes(shard) == 0


def test_a_page_that_is_written_better_while_a_reader_waits_takes_its_place_for_others() -> None:
    shard = having(A)
    call = shard.pinning(attempt(1), A)
    shard.store(attempt(2), A)
    assert [slot.loss for slot in pinned(shard.pin(attempt(3), A))] == [Loss.EXACT]
    shard.read()
    assert [slot.loss for slot in pinned(shard.replies[call])] == [Loss.Q8]
    assert used(shard) == 0


def test_a_copy_stays_its_reader_s_beside_a_page_of_the_same_block_in_the_host_tier() -> None:
    shard = having(A)
    shard.pinning(attempt(1), A)
    shard.read()
    shard.store(attempt(2), A)
    shard.order_moves(Tier.HOST, A)
    shard.move_all()
    assert host_bytes(shard) == 2 * Q8
    [slot] = pinned(shard.pin(attempt(3), A, accept=Loss.Q8))
    assert (slot.tier, slot.sums) == (Tier.HOST, b"sums"), "which is no copy of what lay on disk"
    assert end(shard, attempt(1)) and host_bytes(shard) == Q8


def test_who_waits_behind_a_reader_who_has_gone_gets_the_room_that_there_is() -> None:
    shard = having(A, B, C, host_bytes=2 * Q8)
    shard.pinning(attempt(8), A)
    shard.read()
    shard.pinning(attempt(1), B, C)
    shard.pinning(attempt(2), B)
    assert end(shard, attempt(1))
    assert len(shard.stages) == 1


def test_each_page_found_corrupt_on_disk_counts() -> None:
    shard = having(A, B)
    call = shard.pinning(attempt(1), A, B)
    shard.read(0, 1)
    assert reply(shard, call) == (Miss(MissReason.CORRUPT, "on disk"),) * 2
    assert counters(shard)["corrupt"] == 2
