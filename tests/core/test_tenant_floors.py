"""Floors of tenants: what others may evict of a tenant's cache, and what only it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.coordinator.tenant_floors import StoredBytes, TenantFloors
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    LoadGrant,
    NewPage,
    PageEvent,
    PageSlot,
    PrepareLoad,
    PrepareStore,
    Reserve,
    StoreGrant,
    Tier,
    TierUse,
    WriteGrant,
    Written,
)
from kvcluster.core.messages.coordinator import Decision
from kvcluster.core.tiers import INGEST
from kvcluster.replay.core_stepper import build_request
from tests.core.build import SPACE
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator, Voice, beat, decisions, moved, ordered
from tests.core.lone_shard import LoneShard
from tests.core.samples import OURS, PAGE, SECOND, SPEC, THEIRS, WHOLE, attempt, chain, gone, key, pages, root, whole

ONE, TWO = Tenant("one"), Tenant("two")
THEIR_BLOCKS = chain(12, tenant=THEIRS)


def of_theirs(hashes: Sequence[BlockHash]) -> list[PageEvent]:
    """Events of pages of the other tenant: a chain from its first block on."""
    space, parents = SPEC.namespace(THEIRS), (root(tenant=THEIRS), *hashes)
    return [
        event._replace(namespace=space, parent=parent) for event, parent in zip(pages(hashes), parents, strict=False)
    ]


def crowded(ours: int, theirs: int, capacity: int = 12) -> tuple[LoneCoordinator, Voice]:
    """A full shard that both tenants have stored in; what we stored is older."""
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:ours]), capacity_pages=capacity, hold_ms=0)
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    coordinator.now += 1
    voice.report(*of_theirs(THEIR_BLOCKS[:theirs]))
    rest = (capacity - ours - theirs) * PAGE
    voice.info = replace(voice.info, free_bytes=0, writing_bytes=rest)
    return coordinator, voice


# ------------------------------------------------------------------------------------------- the coordinator


def test_reservations_of_another_evict_no_block_below_the_floor() -> None:
    _, voice = crowded(ours=12, theirs=0)
    evicted = ordered(voice.report(pressure=12 * PAGE, presses=THEIRS))
    assert evicted == list(BLOCKS[:5:-1]), "half of the tier is our floor while no other tenant stores there"


def test_stores_of_another_evict_no_block_below_the_floor() -> None:
    _, voice = crowded(ours=3, theirs=9)
    assert ordered(voice.report(pressure=9 * PAGE, presses=THEIRS)) == list(THEIR_BLOCKS[8::-1]), "their own"


def test_beyond_the_floors_the_coldest_goes_first_of_whichever_tenant() -> None:
    _, voice = crowded(ours=6, theirs=6)
    assert ordered(voice.report(pressure=3 * PAGE, presses=THEIRS)) == list(BLOCKS[5:2:-1])


def test_a_tenant_s_own_reservations_evict_what_it_has_below_its_floor() -> None:
    _, voice = crowded(ours=3, theirs=3)
    assert ordered(voice.report(pressure=2 * PAGE, presses=THEIRS)) == list(THEIR_BLOCKS[2:0:-1])


def test_a_tenant_alone_evicts_all_that_it_has() -> None:
    _, voice = crowded(ours=12, theirs=0)
    assert ordered(voice.report(pressure=12 * PAGE)) == list(BLOCKS[::-1])


def test_a_shard_is_full_for_the_tenant_that_waits_and_no_other() -> None:
    coordinator, voice = crowded(ours=3, theirs=0)
    assert ordered(voice.report(pressure=9 * PAGE, presses=THEIRS)) == []
    assert decisions(coordinator.store(attempt(1), BLOCKS[3:5], first=3, parent=BLOCKS[2])) == [(2, Decision.WRITE)]
    prepare = PrepareStore(attempt(1), 0, root(tenant=THEIRS), THEIR_BLOCKS[0], THEIR_BLOCKS[:1], ((0, WHOLE),))
    runs = coordinator.ask(StoreGrant, build_request(prepare, THEIRS, SPEC.namespace(THEIRS))).runs
    assert [run.decision for run in runs] == [Decision.REFUSED]


def test_what_is_evicted_or_purged_is_charged_no_more() -> None:
    coordinator, voice = crowded(ours=6, theirs=6)
    (member,) = coordinator.core.state.members.all()
    stored = member.stored[INGEST]
    assert dict(stored.tenants) == {OURS: 6 * PAGE, THEIRS: 6 * PAGE}
    voice.report(gone(BLOCKS[5]), gone(BLOCKS[4]))
    assert dict(stored.tenants) == {OURS: 4 * PAGE, THEIRS: 6 * PAGE}
    stored.forget(SPEC.namespace(THEIRS))
    assert dict(stored.tenants) == {OURS: 4 * PAGE}


def test_a_replica_is_charged_to_no_tenant_and_goes_first() -> None:
    coordinator = LoneCoordinator(expected=2, hold_ms=0)
    first, second = (coordinator.voice(name, capacity_pages=4) for name in "ab")
    first.join(*pages(BLOCKS[:2]))
    second.join(*pages(BLOCKS[:4]))
    stored = [dict(member.stored[INGEST].tenants) for member in coordinator.core.state.members.all()]
    assert stored == [{OURS: 2 * PAGE}, {OURS: 2 * PAGE}]
    second.free(0)
    assert ordered(second.report(pressure=1)) == [BLOCKS[3]], "a block goes after those that follow it"
    second.report(gone(BLOCKS[3]), gone(BLOCKS[2]))
    first.report(gone(BLOCKS[1]))
    stored = [dict(member.stored[INGEST].tenants) for member in coordinator.core.state.members.all()]
    assert stored == [{OURS: PAGE}, {OURS: PAGE}], "the copy that stays is the tenant's now"


# -------------------------------------------------------------------------------- holds of tickets, and floors


def their_load(coordinator: LoneCoordinator, counter: int, hashes: Sequence[BlockHash]) -> LoadGrant:
    prepare = PrepareLoad(attempt(counter, 9), tuple(hashes), whole(), hold=True)
    return coordinator.ask(LoadGrant, build_request(prepare, THEIRS, SPEC.namespace(THEIRS)))


def held_by_them(
    theirs: int, *, ours: int = 0, loads: int = 1, below: tuple[TierUse, ...] = (), elsewhere: int = 0
) -> tuple[LoneCoordinator, Voice]:
    """A full shard of 12 pages whose other tenant has tickets for all that it has stored; what we stored is older.
    Another shard has so many pages `elsewhere`, and is empty."""
    coordinator, voice = LoneCoordinator.serving(
        *pages(BLOCKS[:ours]), capacity_pages=12, below=below, hold_ms=20_000, ticket_ttl_ms=5_000
    )
    if elsewhere:
        coordinator.voice("b", capacity_pages=elsewhere).join()
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    coordinator.now += 1
    voice.report(*of_theirs(THEIR_BLOCKS[:theirs]))
    voice.info = replace(voice.info, free_bytes=0, writing_bytes=(12 - ours - theirs) * PAGE)
    for load in range(loads):
        assert their_load(coordinator, load + 1, THEIR_BLOCKS[:theirs]).blocks == theirs, "held or not, it is granted"
    return coordinator, voice


@pytest.mark.parametrize("loads", [1, 3])
def test_loads_hold_no_more_than_the_share_of_their_tenant(loads: int) -> None:
    _, voice = held_by_them(12, loads=loads)
    assert ordered(voice.report(pressure=12 * PAGE, presses=OURS)) == list(THEIR_BLOCKS[:5:-1]), "the last of the chain"


def test_holds_end_with_their_tickets_and_leave_room_for_others() -> None:
    coordinator, voice = held_by_them(12)
    holds = coordinator.core.state.tickets.holds
    assert holds.held_bytes(THEIRS) == 6 * PAGE
    beat(coordinator, voice, until=coordinator.now + 6 * SECOND)
    assert holds.held_bytes(THEIRS) == 0 and not len(coordinator.core.state.tickets)


def test_a_load_beyond_the_bound_on_tickets_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TICKETS_PER_HOLDER", 1)
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), hold_ms=20_000)
    grants = [coordinator.load(attempt(at + 1), BLOCKS[: at + 1]) for at in range(2)]
    assert [grant.blocks for grant in grants] == [1, 2] and len(coordinator.core.state.tickets) == 1
    assert ordered(voice.report(pressure=2 * PAGE)) == [BLOCKS[1]]


def test_holds_yield_to_the_floor_of_another_tenant_and_no_further() -> None:
    _, voice = held_by_them(12, elsewhere=12)
    assert ordered(voice.report(pressure=12 * PAGE, presses=OURS)) == list(THEIR_BLOCKS[:8:-1]), "a quarter of the tier"
    _, voice = held_by_them(9, ours=3, elsewhere=12)
    assert ordered(voice.report(pressure=2 * PAGE, presses=OURS)) == [BLOCKS[2], BLOCKS[1]], "we have our floor"


def test_what_lies_beyond_the_floor_of_another_goes_before_what_is_held_and_before_our_own() -> None:
    _, voice = held_by_them(10, ours=2)
    assert ordered(voice.report(pressure=2 * PAGE, presses=OURS)) == list(THEIR_BLOCKS[9:7:-1])


def test_holds_yield_to_floors_in_an_upper_tier_too() -> None:
    below = (TierUse(Tier.HOST, 24 * PAGE, 24 * PAGE, 0),)
    _, voice = held_by_them(12, below=below)
    told = voice.report(pressure=12 * PAGE, presses=OURS)
    assert moved(told, Tier.HOST) == list(THEIR_BLOCKS[:8:-1]) and ordered(told) == []


# ------------------------------------------------------------------------------------------------ the shard


def reserve(shard: LoneShard, tenant: Tenant, hashes: Sequence[BlockHash], worker: int) -> list[bool]:
    """Which of these a worker of this tenant may write."""
    new = tuple(NewPage(key(block), root(tenant=tenant), 0) for block in hashes)
    request = Reserve(attempt(1, worker), shard.epoch, new)
    grant = shard.ask(WriteGrant, build_request(request, tenant, SPEC.namespace(tenant)))
    return [isinstance(page, PageSlot) for page in grant.pages]


def test_reservations_without_pages_leave_room_for_another_tenant() -> None:
    shard = LoneShard.joined(pages=8)
    shard.attach(tenant=THEIRS)
    assert reserve(shard, THEIRS, THEIR_BLOCKS[:8], worker=1) == [True] * 4 + [False] * 4
    assert reserve(shard, THEIRS, THEIR_BLOCKS[8:9], worker=2) == [False], "whichever worker asks"
    assert reserve(shard, OURS, BLOCKS[:3], worker=3) == [True, True, False]


def test_a_tenant_alone_reserves_all_that_there_is() -> None:
    shard = LoneShard.joined(pages=8)
    assert reserve(shard, OURS, BLOCKS[:8], worker=1) == [True] * 8
    assert shard.reserve(attempt(1, 2), BLOCKS[8]) == (Written.FULL,)


# ------------------------------------------------------------------------------------------------ the nouns


@given(
    st.dictionaries(st.sampled_from([ONE, TWO, OURS, THEIRS]), st.integers(1, 100), min_size=1),
    st.integers(0, 300),
    st.dictionaries(st.sampled_from([ONE, TWO]), st.integers(1, 50)),
    st.lists(st.tuples(st.sampled_from([ONE, TWO, OURS, THEIRS]), st.integers(1, 9)), max_size=80),
)
def test_no_tenant_falls_below_its_floor_but_for_itself(
    stored: dict[Tenant, int], floors: int, pressing: dict[Tenant, int], asked: list[tuple[Tenant, int]]
) -> None:
    floor = floors // len(stored)
    may = TenantFloors(stored, dict.fromkeys(stored, floor), pressing)
    left = dict(stored)
    for tenant, nbytes in asked:
        if not may.closed(tenant):
            may.take(tenant, nbytes)
            left[tenant] = left.get(tenant, 0) - nbytes
    for tenant, held in stored.items():
        assert left[tenant] > min(held, floor) - pressing.get(tenant, 0) - 9, "it may be the last to go"


def test_bytes_are_counted_by_namespace_and_tenant() -> None:
    stored, other = StoredBytes(), NamespaceId(b"o" * 32)
    stored.add(SPACE, ONE, 5)
    stored.add(other, ONE, 3)
    assert dict(stored.tenants) == {ONE: 8}
    stored.forget(SPACE)
    stored.forget(SPACE)
    assert dict(stored.tenants) == {ONE: 3}
    stored.add(other, ONE, -3)
    assert not stored.tenants
    with pytest.raises(AssertionError, match="charged wrongly"):
        stored.add(other, ONE, -1)
