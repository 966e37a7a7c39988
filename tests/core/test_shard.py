"""What a shard promises its workers, message by message: pages, leases and refusals."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.messages import (
    Abort,
    AttachedShard,
    Done,
    Flush,
    GetOffers,
    NewPage,
    Offer,
    Offers,
    PageEvent,
    PageKey,
    PageSlot,
    PinGrant,
    Refused,
    RefusedKind,
    Reserve,
    Stalled,
    Tick,
    Tier,
    Unpin,
    Written,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.spec import KVSpec
from tests.core.lone_shard import (
    OTHER,
    A,
    B,
    C,
    LoneShard,
    counters,
    end,
    granted,
    misses,
    pinned,
    refusal,
    renew,
    slots,
)
from tests.core.samples import LEFT, MS, OURS, SECOND, SUMS, THEIRS, WHOLE, attempt, key, ours, root

# -------------------------------------------------------------------------------------------- what it offers


def test_a_shard_passes_on_what_its_shell_serves_before_a_worker_attaches() -> None:
    shard = LoneShard()
    assert shard.ask(Offers, ours(GetOffers())) == Offers(shard.epoch)
    told = Offers(shard.epoch, (Offer("tcp", "here:1"),), (("shm", "for some reason"),))
    shard.core.offers = told
    assert shard.ask(Offers, ours(GetOffers())) == told


def test_a_tenant_attaches_no_more_namespaces_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    assert refusal(shard.attach(OTHER)) is RefusedKind.LIMIT
    assert shard.attach() == AttachedShard(shard.space, shard.epoch, shard.core.leases.ttl_ns)
    assert isinstance(shard.attach(OTHER, THEIRS), AttachedShard), "one tenant's bound is none of another"


# -------------------------------------------------------------------------------------- the life of a page


def test_a_page_can_be_read_once_it_is_committed() -> None:
    shard = LoneShard.joined()
    [slot] = slots(shard.reserve(attempt(1), A))
    assert misses(shard.pin(attempt(2), A)) == [MissReason.PENDING]
    assert shard.commit(attempt(1), 0) == (Written.COMMITTED,)
    [read] = pinned(shard.pin(attempt(3), A))
    assert read == slot._replace(sums=SUMS)


def test_an_aborted_page_was_never_there_and_its_room_is_free() -> None:
    shard = LoneShard.joined(pages=1)
    [first] = slots(shard.reserve(attempt(1), A))
    assert shard.reserve(attempt(2), B) == (Written.FULL,)
    assert end(shard, attempt(1), Abort)
    assert misses(shard.pin(attempt(3), A)) == [MissReason.EVICTED]
    [second] = slots(shard.reserve(attempt(4), B))
    assert second.offset == first.offset
    assert second.generation > first.generation


def test_a_commit_names_what_is_whole_and_aborts_the_rest() -> None:
    shard = LoneShard.joined()
    slots(shard.reserve(attempt(1), A, B, C))
    assert shard.commit(attempt(1), 2, 0) == (Written.COMMITTED, Written.COMMITTED)
    reply = shard.pin(attempt(2), A, B, C)
    assert isinstance(reply, PinGrant)
    assert [isinstance(page, PageSlot) for page in reply.pages] == [True, False, True]
    assert counters(shard)["aborted"] == 1


def test_a_commit_of_what_was_not_granted_is_lost() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    assert shard.reserve(attempt(2), A, B)[0] is Written.DUPLICATE
    assert shard.commit(attempt(2), 0, 1, 1, 2) == (Written.LOST, Written.COMMITTED, Written.LOST, Written.LOST)


def test_a_page_that_is_ready_is_a_duplicate_and_one_being_written_is_pending() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    slots(shard.reserve(attempt(2), B))
    outcome = shard.reserve(attempt(3), A, B, C, C)
    assert list(outcome[:2]) == [Written.DUPLICATE, Written.PENDING]
    assert isinstance(outcome[2], PageSlot)
    assert outcome[3] is Written.PENDING, "an attempt writes a page once"
    assert counters(shard)["duplicates"] == 1


def test_a_page_is_told_with_its_place_in_the_chain_and_its_loss() -> None:
    shard = LoneShard.joined()
    new = NewPage(key(B, LEFT), A, 1, Loss.Q8)
    shard.call(ours(Reserve(attempt(1), shard.epoch, (new,)), shard.space))
    shard.commit(attempt(1), 0)
    assert shard.settle() == [PageEvent(shard.space, key(B, LEFT), A, 1, Tier.RAM, Loss.Q8)]


def test_unpin_and_abort_end_an_attempt_once() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.pin(attempt(2), A)
    shard.reserve(attempt(3), B)
    assert [end(shard, attempt(2)), end(shard, attempt(2))] == [True, False]
    assert [end(shard, attempt(3), Abort), end(shard, attempt(3), Abort)] == [True, False]
    assert not len(shard.core.leases)


def test_a_commit_of_a_read_is_lost_and_ends_it() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.pin(attempt(2), A)
    assert shard.commit(attempt(2), 0) == (Written.LOST,)
    assert not len(shard.core.leases)


# ------------------------------------------------------------------------------------- what is refused


def test_another_epoch_is_stale() -> None:
    shard = LoneShard.joined()
    assert refusal(shard.pin(attempt(1), A, epoch=6)) is RefusedKind.STALE
    assert refusal(shard.pin(attempt(1), A, epoch=8)) is RefusedKind.STALE


def test_an_attempt_has_one_lease() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    shard.reserving(attempt(2), B, wait_ns=SECOND)
    for again in (attempt(1), attempt(2)):
        assert refusal(shard.pin(again, A)) is RefusedKind.BAD
        assert refusal(shard.replies[shard.reserving(again, C)]) is RefusedKind.BAD
    assert shard.commit(attempt(1), 0) == (Written.COMMITTED,), "the pages that it had before are untouched"


def test_a_holder_has_a_bounded_number_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES_PER_HOLDER", 2)
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.pin(attempt(2), A)
    shard.reserve(attempt(3), B)
    assert refusal(shard.pin(attempt(4), A)) is RefusedKind.LIMIT
    assert refusal(shard.replies[shard.reserving(attempt(4), C)]) is RefusedKind.LIMIT
    assert pinned(shard.pin(attempt(1, worker=1), A))
    assert end(shard, attempt(3), Abort)
    assert pinned(shard.pin(attempt(4), A))


@pytest.mark.parametrize(
    "bad", [PageKey(A, 1, WHOLE), PageKey(A, 0, Part(0, 3, 0, 2)), PageKey(A, 0, Part(0, 2, 1, 3))]
)
def test_a_part_that_the_spec_lacks_is_refused_and_nothing_is_reserved(bad: PageKey) -> None:
    shard = LoneShard.joined()
    assert refusal(shard.replies[shard.reserving(attempt(1), B, bad)]) is RefusedKind.BAD
    assert not len(shard.core.pool)
    assert not len(shard.core.leases)


def test_a_page_that_never_fits_is_refused_and_not_waited_for() -> None:
    shard = LoneShard.joined(pages=2)
    large = KVSpec.uniform(
        model="large", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=2
    )
    shard.attach(large)
    page = NewPage(PageKey(A, 0, large.whole(0)), root(), 0)
    space = large.namespace(OURS)
    reply = shard.ask(Refused, ours(Reserve(attempt(1), shard.epoch, (page,), SECOND), space))
    assert reply.kind is RefusedKind.BAD
    assert f"a page of {large.page_bytes(0, large.whole(0))} bytes never fits" in reply.detail


# ------------------------------------------------------------------------------------------------ leases


def test_an_expired_lease_is_revoked_and_cannot_be_renewed() -> None:
    shard = LoneShard.joined(lease_ttl_ms=1_000)
    shard.reserve(attempt(1), A)
    shard.later(999 * MS)
    assert shard.revoked == []
    assert renew(shard, attempt(1))
    shard.later(999 * MS)
    assert shard.revoked == []
    shard.later(MS)
    assert shard.revoked == [attempt(1)]
    assert not renew(shard, attempt(1))
    assert counters(shard)["revoked"] == 1


def test_a_commit_after_the_lease_is_lost_and_counted_and_frees_its_pages() -> None:
    shard = LoneShard.joined(pages=1, lease_ttl_ms=1_000)
    shard.reserve(attempt(1), A)
    shard.later(SECOND)
    assert shard.commit(attempt(1), 0) == (Written.LOST,)
    assert slots(shard.reserve(attempt(2), B))
    assert shard.commit(attempt(9), 0) == (Written.LOST,), "this attempt is unknown"
    assert counters(shard)["late"] == 2


@pytest.mark.parametrize("kind", [Unpin, Abort])
def test_time_alone_frees_no_page_that_a_transfer_may_still_touch(kind: type[Unpin | Abort]) -> None:
    shard = LoneShard.joined(pages=1, lease_ttl_ms=1_000)
    if kind is Unpin:
        shard.store(attempt(1), A)
        shard.pin(attempt(2), A)
        shard.evict(A)
    else:
        shard.reserve(attempt(2), A)
    shard.later(60 * SECOND)
    shard.settle()
    shard.later(SECOND)
    shard.settle()
    assert shard.revoked == [attempt(2)]
    assert shard.reserve(attempt(3), B) == (Written.FULL,)
    assert end(shard, attempt(2), kind)
    assert end(shard, attempt(3), Abort)
    assert slots(shard.reserve(attempt(4), B))


def test_a_stall_extends_the_leases_that_others_owe_their_renewal_for() -> None:
    shard = LoneShard.joined(lease_ttl_ms=1_000)
    shard.reserve(attempt(1), A)
    shard.now += 3 * SECOND
    shard.step(Stalled(3 * SECOND))
    shard.step(Tick())
    assert shard.revoked == []
    assert renew(shard, attempt(1))
    shard.later(SECOND)
    assert shard.revoked == [attempt(1)], "a renewed lease runs as long as any"


def test_a_stall_extends_nothing_that_the_shard_owes() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=2 * SECOND)
    flush = shard.call(ours(Flush(2 * SECOND)))
    shard.fail()
    shard.now += 6 * SECOND
    shard.step(Stalled(6 * SECOND))
    assert granted(shard, waiting) == (Written.LOST,), "and it no longer considers itself a member"
    shard.step(Tick())
    assert shard.replies[flush] == Done()
    assert not shard.core.state.member(shard.now)
