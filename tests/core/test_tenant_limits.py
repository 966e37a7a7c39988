"""Limits, floors and weights of quotas: what a coordinator evicts, and which stores it refuses."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcluster.core.coordinator.block_tables import BlockTables, Outcome
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.engine_registry import EngineRegistry
from kvcluster.core.ids import SequenceId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    Decision,
    EngineInfo,
    GetStatus,
    PageEvent,
    PrepareStore,
    SetQuotas,
    Status,
    StoreGrant,
    TableChange,
    TenantTier,
    Tier,
    TierUse,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.quotas import Quotas, TenantQuota, TierQuota
from kvcluster.core.tiers import INGEST
from kvcluster.replay.core_stepper import build_request
from tests.core.build import SPACE, holder
from tests.core.lone_coordinator import (
    BLOCKS,
    LoneCoordinator,
    Voice,
    decisions,
    moved,
    ordered,
    pin,
    unpin,
)
from tests.core.samples import OURS, PAGE, SECOND, SPEC, THEIRS, WHOLE, attempt, chain, gone, pages, root

THEIR_BLOCKS = chain(12, tenant=THEIRS)


def of_theirs(count: int) -> list[PageEvent]:
    space, hashes = SPEC.namespace(THEIRS), THEIR_BLOCKS[:count]
    parents = (root(tenant=THEIRS), *hashes)
    return [
        event._replace(namespace=space, parent=parent) for event, parent in zip(pages(hashes), parents, strict=False)
    ]


def put(coordinator: LoneCoordinator, tier: Tier = INGEST, **quotas: TierQuota) -> None:
    """Puts quotas of one tier in force: `ours`, `theirs`."""
    names = {"ours": OURS, "theirs": THEIRS}
    tenants = {names[name]: TenantQuota({tier: quota}) for name, quota in quotas.items()}
    coordinator.step(SetQuotas(Quotas(tenants=tenants)))


def shared(ours: int, theirs: int, capacity: int = 40, **more: object) -> tuple[LoneCoordinator, Voice]:
    """A shard with much room that both tenants have stored in; what we stored is older."""
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:ours]), capacity_pages=capacity, hold_ms=0, **more)
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    coordinator.now += 1
    voice.report(*of_theirs(theirs))
    return coordinator, voice


def their_store(coordinator: LoneCoordinator, first: int, stop: int, counter: int = 1) -> list[tuple[int, Decision]]:
    before = THEIR_BLOCKS[first - 1] if first else root(tenant=THEIRS)
    wanted = THEIR_BLOCKS[first:stop]
    prepare = PrepareStore(attempt(counter), first, before, wanted[0], wanted, ((0, WHOLE),))
    return decisions(coordinator.ask(StoreGrant, build_request(prepare, THEIRS, SPEC.namespace(THEIRS))).runs)


# ------------------------------------------------------------------------------------------------------ limits


def test_a_lowered_limit_evicts_the_coldest_blocks_of_that_tenant_alone() -> None:
    coordinator, voice = shared(ours=6, theirs=8)
    assert ordered(voice.report()) == []
    put(coordinator, theirs=TierQuota(limit=4 * PAGE))
    assert ordered(voice.report()) == list(THEIR_BLOCKS[7:2:-1]), "to a tenth below its limit"
    voice.report(*(gone(block)._replace(namespace=SPEC.namespace(THEIRS)) for block in THEIR_BLOCKS[:2:-1][:5]))


def test_a_limit_that_leaves_room_evicts_nothing() -> None:
    coordinator, voice = shared(ours=6, theirs=8)
    put(coordinator, ours=TierQuota(limit=100 * PAGE), theirs=TierQuota(limit=9 * PAGE))
    assert ordered(voice.report()) == []


def test_a_store_beyond_the_limit_is_refused_and_the_next_finds_room() -> None:
    coordinator, voice = shared(ours=6, theirs=4)
    put(coordinator, theirs=TierQuota(limit=6 * PAGE))
    runs = their_store(coordinator, 4, 8)
    assert runs == [(2, Decision.WRITE), (2, Decision.REFUSED)], "what is being written counts"
    assert coordinator.store(attempt(5), BLOCKS[6:9], first=6, parent=BLOCKS[5])[0].decision is Decision.WRITE
    evicted = ordered(voice.report(*of_theirs(6)[4:]))
    assert evicted == list(THEIR_BLOCKS[5:3:-1]), "as much as was refused, of the same tenant"


def test_a_refused_store_says_why() -> None:
    coordinator, _ = shared(ours=1, theirs=1)
    put(coordinator, ours=TierQuota(limit=PAGE))
    (run,) = coordinator.store(attempt(5), BLOCKS[1:3], first=1, parent=BLOCKS[0])
    assert run.decision is Decision.REFUSED and run.miss is not None
    assert run.miss.reason is MissReason.FULL and "at its limit" in run.miss.detail


def test_what_a_store_writes_is_counted_once_and_no_more_when_it_ends() -> None:
    coordinator, voice = shared(ours=2, theirs=0)
    put(coordinator, ours=TierQuota(limit=6 * PAGE))
    limits, tickets = coordinator.core.state.limits, coordinator.core.state.tickets
    coordinator.store(attempt(5), BLOCKS[2:5], first=2, parent=BLOCKS[1])
    assert (tickets.writing_bytes(OURS), limits.room(OURS, INGEST)) == (3 * PAGE, PAGE)
    voice.report(*pages(BLOCKS[:3])[2:])
    assert (tickets.writing_bytes(OURS), limits.room(OURS, INGEST)) == (2 * PAGE, PAGE)
    coordinator.later(40_000_000_000)
    assert tickets.writing_bytes(OURS) == 0


def test_pinned_and_held_blocks_stay_however_low_the_limit() -> None:
    coordinator, voice = shared(ours=6, theirs=2)
    pin(coordinator, BLOCKS[:4])
    put(coordinator, ours=TierQuota(limit=PAGE))
    assert ordered(voice.report()) == list(BLOCKS[5:3:-1])
    order = voice.report().evict
    voice.ends(order)
    assert voice.report(gone(BLOCKS[5]), gone(BLOCKS[4])).evict is None
    unpin(coordinator, BLOCKS[:4])
    assert ordered(voice.report()) == list(BLOCKS[3::-1]), "of a limit of one page a tenth is to be free"


def test_what_is_beyond_a_limit_goes_before_what_others_have() -> None:
    coordinator, voice = shared(ours=6, theirs=6, capacity=12)
    voice.info = replace(voice.info, free_bytes=0)
    put(coordinator, theirs=TierQuota(limit=4 * PAGE))
    evicted = ordered(voice.report(pressure=2 * PAGE, presses=OURS))
    assert evicted == list(THEIR_BLOCKS[5:2:-1]), "ours are colder"


def test_replicas_are_charged_to_no_tenant_and_not_evicted_for_its_limit() -> None:
    coordinator = LoneCoordinator(expected=2, hold_ms=0)
    first, second = (coordinator.voice(name) for name in "ab")
    first.join(*pages(BLOCKS[:4]))
    second.join(*pages(BLOCKS[:4]))
    put(coordinator, ours=TierQuota(limit=5 * PAGE))
    assert ordered(first.report()) == ordered(second.report()) == []
    put(coordinator, ours=TierQuota(limit=3 * PAGE))
    assert ordered(second.report()) == []
    assert ordered(first.report()) == list(BLOCKS[3:1:-1])


def test_each_shard_evicts_its_part_of_what_is_beyond_a_limit() -> None:
    coordinator = LoneCoordinator(expected=2, hold_ms=0, low_free=0.0, high_free=0.0)
    first, second = (coordinator.voice(name) for name in "ab")
    first.join(*pages(BLOCKS[:6]))
    second.join(*pages(BLOCKS[:8])[6:])
    put(coordinator, ours=TierQuota(limit=4 * PAGE))
    assert len(ordered(first.report())) == 3 and len(ordered(second.report())) == 1


def test_what_is_beyond_the_limit_of_an_upper_tier_is_demoted() -> None:
    below = (TierUse(Tier.HOST, 24 * PAGE, 24 * PAGE, 0),)
    coordinator, voice = shared(ours=6, theirs=8, below=below)
    put(coordinator, theirs=TierQuota(limit=4 * PAGE))
    told = voice.report()
    assert moved(told, Tier.HOST) == list(THEIR_BLOCKS[7:2:-1]) and ordered(told) == []


# ---------------------------------------------------------------------------------------------- floors, weights


def crowded(ours: int, theirs: int, capacity: int) -> tuple[LoneCoordinator, Voice]:
    coordinator, voice = shared(ours, theirs, capacity)
    voice.info = replace(voice.info, free_bytes=0, writing_bytes=(capacity - ours - theirs) * PAGE)
    return coordinator, voice


def test_a_floor_is_kept_in_place_of_the_equal_part() -> None:
    coordinator, voice = crowded(ours=10, theirs=2, capacity=12)
    put(coordinator, ours=TierQuota(floor=8 * PAGE))
    evicted = ordered(voice.report(pressure=12 * PAGE, presses=THEIRS))
    assert [block for block in evicted if block in BLOCKS] == list(BLOCKS[9:7:-1])


def test_a_floor_of_nothing_protects_nothing() -> None:
    coordinator, voice = crowded(ours=10, theirs=2, capacity=12)
    put(coordinator, ours=TierQuota(floor=0))
    assert ordered(voice.report(pressure=12 * PAGE, presses=THEIRS))[:10] == list(BLOCKS[9::-1])


def test_weights_divide_the_share_of_floors() -> None:
    coordinator, voice = crowded(ours=10, theirs=2, capacity=12)
    put(coordinator, ours=TierQuota(weight=2))
    assert ordered(voice.report(pressure=12 * PAGE, presses=THEIRS))[:6] == list(BLOCKS[9:3:-1]), "two thirds of six"


def test_floors_beyond_what_a_tier_has_are_scaled_down() -> None:
    coordinator, voice = crowded(ours=5, theirs=5, capacity=10)
    put(coordinator, ours=TierQuota(floor=10**6 * PAGE), theirs=TierQuota(floor=10**6 * PAGE))
    assert ordered(voice.report(pressure=9 * PAGE, presses=Tenant("green"))) != [], "a third still finds room"


TENANTS = (OURS, THEIRS)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_at_random_a_limit_is_reached_by_eviction_of_its_own_tenant_alone(data: st.DataObject) -> None:
    """Against a model of two counts: orders are carried out at once, and what they take is the excess and no more."""
    ours, theirs = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))
    coordinator, voice = shared(ours, theirs, low_free=0.0, high_free=0.0)
    held = {OURS: list(BLOCKS[:ours]), THEIRS: list(THEIR_BLOCKS[:theirs])}
    for _ in range(data.draw(st.integers(1, 5))):
        most = {tenant: data.draw(st.one_of(st.none(), st.integers(0, 12))) for tenant in TENANTS}
        quotas = {
            tenant: TenantQuota({INGEST: TierQuota(limit=pages_ * PAGE)})
            for tenant, pages_ in most.items()
            if pages_ is not None
        }
        coordinator.step(SetQuotas(Quotas(tenants=quotas)))
        heard = voice.report()
        events = []
        for block in ordered(heard):
            (tenant,) = (tenant for tenant in TENANTS if block in held[tenant])
            held[tenant].remove(block)
            events.append(gone(block)._replace(namespace=SPEC.namespace(tenant)))
        if heard.evict is not None:
            voice.ends(heard.evict)
            voice.report(*events)
        for tenant, before in held.items():
            wanted = most[tenant]
            stored = len(before)
            assert wanted is None or stored <= wanted
            assert before == list((BLOCKS if tenant == OURS else THEIR_BLOCKS)[:stored]), "the last of the chain go"
    _consistent(coordinator.core, held)


def _consistent(core: Coordinator, held: dict[Tenant, list[object]]) -> None:
    (member,) = core.state.members.all()
    stored = {tenant: len(blocks) * PAGE for tenant, blocks in held.items() if blocks}
    assert dict(member.stored[INGEST].tenants) == stored


# ------------------------------------------------------------------------------------ pins, sequences, engines


def put_all(coordinator: LoneCoordinator, quota: TenantQuota) -> None:
    coordinator.step(SetQuotas(Quotas(tenants={OURS: quota})))


def test_pins_beyond_the_quota_are_not_taken_and_those_before_it_was_lowered_stay() -> None:
    coordinator, _ = shared(ours=8, theirs=0)
    put_all(coordinator, TenantQuota(pinned=5 * PAGE))
    assert pin(coordinator, BLOCKS[:8]) == 5
    put_all(coordinator, TenantQuota(pinned=2 * PAGE))
    assert pin(coordinator, BLOCKS[5:8]) == 0
    assert unpin(coordinator, BLOCKS[:8]) == 5, "a lowered quota ends no pin"
    assert pin(coordinator, BLOCKS[:8]) == 2


def test_the_share_of_all_tenants_holds_beside_a_larger_quota() -> None:
    coordinator, _ = shared(ours=8, theirs=0, capacity=8)
    put_all(coordinator, TenantQuota(pinned=100 * PAGE))
    assert pin(coordinator, BLOCKS[:8]) == 2, "a quarter of all bytes"


def test_engines_beyond_the_quota_are_not_listed() -> None:
    registry = EngineRegistry(SECOND, {OURS: 2}.get)
    engines = [EngineInfo(f"e{number}", "host", "m", "w") for number in range(3)]
    assert [registry.register(OURS, engine, 0) for engine in engines] == ["", "", None]
    assert registry.register(OURS, engines[0], 1) == "", "one that is known registers again"
    assert registry.register(THEIRS, engines[2], 1) == ""


def test_sequences_beyond_the_quota_are_refused() -> None:
    tables = BlockTables(0.5, {OURS: 2}.get)
    claims = tables.claims_in(SPACE, OURS, private=False, block_bytes=1, block_tokens=1)
    owner = OURS, holder(1)

    def opened(number: int) -> Outcome:
        change = TableChange(SequenceId(b"%d" % number), 0, BLOCKS[:1])
        return tables.change(owner, change, claims, None, capacity_bytes=None)

    assert [opened(number) for number in (1, 2, 3)] == [Outcome.DONE, Outcome.DONE, Outcome.LIMIT]
    tables.change(owner, TableChange(SequenceId(b"1"), 0, closed=True), claims, None, capacity_bytes=None)
    assert opened(3) is Outcome.DONE


# ------------------------------------------------------------------------------------------------ the listing


def test_an_operator_sees_all_tenants_beside_their_quotas_and_a_tenant_itself() -> None:
    coordinator, _ = shared(ours=3, theirs=2)
    quota = TenantQuota(
        {INGEST: TierQuota(2 * PAGE, 9 * PAGE), Tier.DISK: TierQuota(limit=7)},
        requests_per_second=2.5,
        bytes_per_second=4,
        pinned=2 * PAGE,
    )
    coordinator.step(SetQuotas(Quotas(tenants={OURS: quota, Tenant("none yet"): TenantQuota()}), "it has a fault"))
    assert pin(coordinator, BLOCKS[:1]) == 1
    told = {one.tenant: one for one in coordinator.status().tenants}
    assert list(told) == sorted(["none yet", OURS, THEIRS])
    assert told[OURS].tiers == (
        TenantTier(INGEST, 3 * PAGE, 2 * PAGE, 9 * PAGE),
        TenantTier(Tier.DISK, 0, None, 7),
    )
    assert (told[OURS].pinned_bytes, told[OURS].most_pinned_bytes) == (PAGE, 2 * PAGE)
    assert (told[OURS].calls_per_1000_s, told[OURS].bytes_per_s) == (2_500, 4)
    assert told[THEIRS].tiers == (TenantTier(INGEST, 2 * PAGE),)
    assert coordinator.status().warnings == ("it has a fault",)
    own = coordinator.ask(Status, build_request(GetStatus(), THEIRS, operator=False))
    assert own.tenants == (told[THEIRS],) and own.warnings == ()


def test_replicas_of_a_tenant_beyond_its_limit_are_not_made() -> None:
    coordinator = LoneCoordinator(expected=2, hold_ms=0, low_free=0.0, high_free=0.0)
    first, second = (coordinator.voice(name) for name in "ab")
    first.join(*pages(BLOCKS[:4]))
    second.join()
    space = coordinator.core.state.namespaces.find(coordinator.space, OURS)
    assert space is not None
    coordinator.core.replicator.request_copies(space, BLOCKS[0], 2)
    put(coordinator, ours=TierQuota(limit=2 * PAGE))
    assert second.report().pull is None
    put(coordinator, ours=TierQuota(limit=9 * PAGE))
    assert second.report().pull is not None


QUOTA = st.builds(
    TierQuota,
    floor=st.one_of(st.none(), st.integers(0, 60).map(lambda count: count * PAGE)),
    weight=st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, 3.0])),
)


@given(
    ours=QUOTA, theirs=QUOTA, held=st.tuples(st.integers(1, 9), st.integers(1, 9)), share=st.sampled_from([0.0, 0.5])
)
@settings(max_examples=80, deadline=None)
def test_at_random_floors_fit_their_tier_and_those_that_fit_are_kept(
    ours: TierQuota, theirs: TierQuota, held: tuple[int, int], share: float
) -> None:
    coordinator, voice = shared(*held, capacity=40, tenant_floor=share)
    voice.info = replace(voice.info, free_bytes=(40 - sum(held)) * PAGE)
    voice.report()
    put(coordinator, ours=ours, theirs=theirs)
    (member,) = coordinator.core.state.members.all()
    floors = coordinator.core.state.limits.floors(member, INGEST, {OURS: 0, THEIRS: 0})
    assert all(floor >= 0 for floor in floors.values())
    assert sum(floors.values()) <= 0.8 * 40 * PAGE, "what is left suffices for those that have none"
    named = {OURS: ours.floor or 0, THEIRS: theirs.floor or 0}
    if sum(named.values()) <= 0.8 * 40 * PAGE:
        assert all(floors[tenant] >= floor for tenant, floor in named.items())
