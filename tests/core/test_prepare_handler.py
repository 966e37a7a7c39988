"""What workers are promised: how far a load reaches, which of them may write, and tickets from their grant to their
end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator.members import Member
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, Epoch
from kvcluster.core.messages import (
    Attach,
    Attached,
    Decision,
    Done,
    EndTicket,
    Explain,
    Explained,
    LoadGrant,
    Need,
    PageEvent,
    PageKey,
    PrepareStore,
    Purge,
    Purged,
    PurgedEvent,
    Refused,
    RefusedKind,
    RenewTicket,
    Run,
    Source,
    StoreGrant,
    StoreRun,
    Tier,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_coordinator import (
    BLOCKS,
    FORK,
    QUESTIONS,
    A,
    B,
    C,
    LoneCoordinator,
    beat,
    decisions,
    end_ticket,
    reasons,
    renew_ticket,
    served_by,
    why,
)
from tests.core.samples import (
    HYBRID,
    LEFT,
    MS,
    OURS,
    RIGHT,
    SECOND,
    SPEC,
    THEIRS,
    WHOLE,
    attempt,
    gone,
    ours,
    page,
    pages,
    root,
    whole,
)

# ---------------------------------------------------------------------------------------------- loads


def test_a_load_reaches_to_the_first_block_that_is_not_there() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), *pages(BLOCKS)[3:5])
    grant = coordinator.load(attempt(1), BLOCKS)
    source = Source(0, WHOLE, voice.address, Tier.RAM, Loss.EXACT)
    assert grant == LoadGrant(2, (Run(2, ((source,),)),), coordinator.config.hold_ms * MS, Miss(MissReason.NEVER_SEEN))


def test_a_load_of_everything_has_no_miss() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    assert coordinator.load(attempt(1), BLOCKS).miss is None
    assert coordinator.load(attempt(2), ()) == LoadGrant(0, (), 0, None)


def test_blocks_with_one_plan_are_one_run() -> None:
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS)[:2])
    two = coordinator.voice("b")
    two.join(*pages(BLOCKS)[2:5])
    one.report(*pages(BLOCKS)[5:6])
    assert served_by(coordinator.load(attempt(1), BLOCKS)) == [(2, ["a"]), (3, ["b"]), (1, ["a"])]


def test_a_part_of_a_block_is_found_and_the_other_is_a_miss_of_a_part() -> None:
    coordinator, voice = LoneCoordinator.serving(page(A, LEFT))
    assert coordinator.load(attempt(1), [A], Need((LEFT,))).blocks == 1
    grant = coordinator.load(attempt(2), [A])
    assert (grant.blocks, why(grant)) == (0, MissReason.PART)
    voice.report(page(A, RIGHT))
    assert served_by(coordinator.load(attempt(3), [A])) == [(1, ["a", "a"])]


def test_a_block_of_which_a_part_is_gone_still_has_the_other() -> None:
    coordinator, voice = LoneCoordinator.serving(page(A, LEFT), page(A, RIGHT))
    voice.report(gone(A, LEFT))
    assert coordinator.load(attempt(1), [A], Need((RIGHT,))).blocks == 1
    assert why(coordinator.load(attempt(2), [A])) is MissReason.PART


def test_a_copy_with_more_loss_than_is_accepted_is_a_miss() -> None:
    coordinator, _ = LoneCoordinator.serving(page(A, loss=Loss.Q8))
    assert why(coordinator.load(attempt(1), [A])) is MissReason.LOSSY
    assert coordinator.load(attempt(2), [A], whole(accept=Loss.Q8)).blocks == 1


def test_a_block_that_another_attempt_writes_is_pending() -> None:
    coordinator, voice = LoneCoordinator.serving()
    coordinator.store(attempt(1), [A])
    assert why(coordinator.load(attempt(2), [A])) is MissReason.PENDING
    voice.report(page(A))
    assert coordinator.load(attempt(3), [A]).blocks == 1


def test_an_evicted_block_is_a_miss_that_knows_its_age_until_it_is_back() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]))
    voice.report(gone(B))
    beat(coordinator, voice, until=coordinator.now + 42 * SECOND)
    assert coordinator.load(attempt(1), [A, B]).miss == Miss(MissReason.EVICTED, "42 s ago")
    voice.report(page(B, parent=A, depth=1))
    voice.report(gone(B))
    assert coordinator.load(attempt(2), [A, B]).miss == Miss(MissReason.EVICTED, "0 s ago")


def test_a_load_counts_what_was_asked_and_what_was_there() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:3]))
    coordinator.load(attempt(1), BLOCKS)
    coordinator.load(attempt(2), FORK)
    assert [coordinator.counter(name) for name in ("loads", "asked_blocks", "hit_blocks")] == [2, 24, 4]


LOOKUPS = ("loads", "asked_blocks", "hit_blocks", "hit_tokens", "reused_tokens")


@pytest.mark.parametrize(("blocks", "awaited"), [(3, 4), (0, 1), (0, 12)])
def test_a_lookup_that_finds_less_than_is_awaited_promises_and_counts_nothing(blocks: int, awaited: int) -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:blocks]))
    grant = coordinator.load(attempt(1), BLOCKS, awaited=awaited)
    assert (grant.blocks, grant.hold_ns, why(grant)) == (blocks, 0, MissReason.NEVER_SEEN)
    assert not len(coordinator.core.state.tickets)
    assert not any(map(coordinator.counter, LOOKUPS)) and not any(coordinator.core.state.missed_tokens.values())


def test_nor_does_one_whose_next_block_is_being_written() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:2]))
    coordinator.store(attempt(1), BLOCKS[2:3], parent=BLOCKS[1], first=2)
    grant = coordinator.load(attempt(2), BLOCKS, awaited=0)
    assert (grant.blocks, grant.hold_ns, why(grant)) == (2, 0, MissReason.PENDING)
    assert not any(map(coordinator.counter, LOOKUPS))
    last = coordinator.load(attempt(3), BLOCKS)
    assert (last.blocks, why(last)) == (2, MissReason.PENDING) and last.hold_ns, "it waits no longer"
    assert [coordinator.counter(name) for name in ("loads", "asked_blocks", "hit_blocks")] == [1, 12, 2]


@pytest.mark.parametrize("awaited", [0, 3, 12, 20])
def test_what_is_there_is_granted_and_counted_whatever_was_awaited(awaited: int) -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    grant = coordinator.load(attempt(1), BLOCKS, awaited=awaited)
    assert grant.blocks == 12 and grant.hold_ns
    tokens = 12 * SPEC.block_tokens
    assert [coordinator.counter(name) for name in LOOKUPS] == [1, 12, 12, tokens, tokens]


def test_the_load_of_what_a_lookup_has_found_is_not_counted_again() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:3]))
    coordinator.load(attempt(1), BLOCKS)
    before = [coordinator.counter(name) for name in LOOKUPS], dict(coordinator.core.state.missed_tokens)
    grant = coordinator.load(attempt(2), BLOCKS[:3], again=True)
    assert grant.blocks == 3 and grant.hold_ns
    assert ([coordinator.counter(name) for name in LOOKUPS], dict(coordinator.core.state.missed_tokens)) == before


def test_a_question_about_no_blocks_is_no_lookup() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:3]))
    assert coordinator.load(attempt(1), []).blocks == 0
    assert coordinator.counter("loads") == 0


# -------------------------------------------------------------------------------------------- tickets


def test_a_repeated_prepare_gets_the_same_answer() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    load = coordinator.load(attempt(1), BLOCKS)
    store = coordinator.store(attempt(2), BLOCKS)
    assert decisions(store) == [(1, Decision.COMMITTED), (11, Decision.WRITE)]
    voice.report(*pages(BLOCKS)[1:])
    assert coordinator.load(attempt(1), BLOCKS) == load
    assert coordinator.store(attempt(2), BLOCKS) == store
    assert coordinator.counter("loads") == coordinator.counter("stores") == 1


def test_an_attempt_that_prepared_a_load_prepares_no_store() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    coordinator.load(attempt(1), [A])
    question = QUESTIONS["store"]
    assert coordinator.ask(Refused, ours(question, coordinator.space)).kind is RefusedKind.BAD


def test_a_load_without_a_hold_promises_nothing() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    grant = coordinator.load(attempt(1), [A], hold=False)
    assert (grant.blocks, grant.hold_ns) == (1, 0)
    assert not len(coordinator.core.state.tickets)


def test_a_holder_of_too_many_tickets_is_answered_without_a_hold_and_stores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TICKETS_PER_HOLDER", 1)
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    coordinator.load(attempt(1), [A])
    grant = coordinator.load(attempt(2), [A])
    assert (grant.blocks, grant.hold_ns) == (1, 0)
    [refused] = coordinator.store(attempt(3), [B])
    assert refused.miss is not None
    assert (refused.decision, refused.miss.reason) == (Decision.REFUSED, MissReason.FULL)
    assert decisions(coordinator.store(attempt(3, worker=1), [B])) == [(1, Decision.WRITE)]


def test_a_ticket_ends_once() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    coordinator.load(attempt(1), [A])
    assert [end_ticket(coordinator, attempt(1)) for _ in range(2)] == [True, False]
    assert coordinator.counter("late") == 1
    assert not renew_ticket(coordinator, attempt(1))


def test_only_the_tenant_of_a_ticket_renews_and_ends_it() -> None:
    coordinator, _ = LoneCoordinator.serving()
    coordinator.store(attempt(1), BLOCKS)
    for question in (RenewTicket(attempt(1)), EndTicket(attempt(1))):
        assert coordinator.ask(Done, build_request(question, THEIRS)) == Done(False)
    assert renew_ticket(coordinator, attempt(1))
    assert end_ticket(coordinator, attempt(1))


def test_what_another_tenant_lost_explains_none_of_ours() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS))
    voice.report(*(gone(block) for block in BLOCKS))
    theirs = coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS)).namespace
    asked = Explain(tuple(BLOCKS), whole())
    fates = coordinator.ask(Explained, build_request(asked, THEIRS, theirs)).fates
    assert {fate.miss for fate in fates} == {Miss(MissReason.NEVER_SEEN)}
    assert coordinator.explain(BLOCKS)[0].miss != Miss(MissReason.NEVER_SEEN)


def test_renewing_a_ticket_spares_its_blocks_for_as_long_again() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hold_ms=3_000, ticket_ttl_ms=3_000)
    coordinator.load(attempt(1), [A])
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert renew_ticket(coordinator, attempt(1))
    record = coordinator.core.state.namespaces.record(coordinator.space, A)
    assert record is not None
    assert (record.stamp, record.held_until) == (coordinator.now, coordinator.now + 3 * SECOND)
    assert end_ticket(coordinator, attempt(1))
    assert record.held_until == 0, "and no longer than it runs"


def test_a_ticket_outlives_the_namespace_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    coordinator.load(attempt(1), [A])
    voice.report(gone(A))
    coordinator.ask(Attached, ours(Attach(HYBRID)))
    assert coordinator.core.state.namespaces.known(coordinator.space) is None, "it held nothing and made room"
    assert renew_ticket(coordinator, attempt(1))
    assert end_ticket(coordinator, attempt(1))


def test_a_ticket_ends_by_time_unless_it_is_renewed() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), ticket_ttl_ms=2_000)
    coordinator.load(attempt(1), [A])
    coordinator.load(attempt(2), [A])
    beat(coordinator, voice, until=coordinator.now + SECOND)
    assert renew_ticket(coordinator, attempt(1))
    beat(coordinator, voice, until=coordinator.now + SECOND)
    assert coordinator.status().tickets == 1
    assert renew_ticket(coordinator, attempt(1))
    assert not renew_ticket(coordinator, attempt(2))


# --------------------------------------------------------------------------------------------- stores


def test_a_store_writes_blocks_that_no_shard_has_and_no_attempt_writes() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    [first] = coordinator.store(attempt(1), BLOCKS[1:3], first=1, parent=A, run=A)
    assert first == StoreRun(2, Decision.WRITE, voice.address)
    second = coordinator.store(attempt(2, worker=1), BLOCKS[:4])
    assert decisions(second) == [(1, Decision.COMMITTED), (2, Decision.PENDING), (1, Decision.WRITE)]
    assert second[1].miss == Miss(MissReason.PENDING)
    counted = ("write_blocks", "duplicate_blocks", "pending_blocks", "refused_blocks")
    assert [coordinator.counter(name) for name in counted] == [3, 1, 2, 0]


def test_a_store_uses_its_chain_once_in_a_while() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), refresh_ms=1_000)

    def used_at() -> int:
        record = coordinator.core.state.namespaces.record(coordinator.space, A)
        assert record is not None
        return record.stamp

    began = used_at()
    beat(coordinator, voice, until=began + SECOND)
    coordinator.store(attempt(1), [C], first=2, parent=B, run=A)
    assert used_at() == began, "it was used a moment ago"
    beat(coordinator, voice, until=began + SECOND + 1)
    coordinator.store(attempt(2), [C], first=2, parent=B, run=A)
    assert used_at() == coordinator.now


def test_what_a_ticket_left_unwritten_others_may_write_when_it_ends() -> None:
    coordinator, voice = LoneCoordinator.serving()
    coordinator.store(attempt(1), [A, B])
    voice.report(page(A))
    assert decisions(coordinator.store(attempt(2), [A, B])) == [(1, Decision.COMMITTED), (1, Decision.PENDING)]
    end_ticket(coordinator, attempt(1))
    assert decisions(coordinator.store(attempt(2), [A, B])) == [(1, Decision.COMMITTED), (1, Decision.WRITE)]


def test_what_was_written_and_evicted_others_may_write_while_the_ticket_still_runs() -> None:
    coordinator, voice = LoneCoordinator.serving()
    coordinator.store(attempt(1), [A, B])
    voice.report(page(A), gone(A))
    assert decisions(coordinator.store(attempt(2), [A, B])) == [(1, Decision.WRITE), (1, Decision.PENDING)]


def test_a_writer_that_died_blocks_other_writers_no_longer_than_its_ticket_lasts() -> None:
    coordinator, voice = LoneCoordinator.serving(ticket_ttl_ms=2_000)
    coordinator.store(attempt(1), [A])
    beat(coordinator, voice, until=coordinator.now + 2 * SECOND - 1)
    assert decisions(coordinator.store(attempt(2), [A])) == [(1, Decision.PENDING)]
    beat(coordinator, voice, until=coordinator.now + 1)
    assert decisions(coordinator.store(attempt(2), [A])) == [(1, Decision.WRITE)]


def test_ranks_write_their_own_parts_of_a_block() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert decisions(coordinator.store(attempt(1), [A], parts=[(0, LEFT)])) == [(1, Decision.WRITE)]
    assert decisions(coordinator.store(attempt(2), [A], parts=[(0, RIGHT)])) == [(1, Decision.WRITE)]
    assert decisions(coordinator.store(attempt(3), [A], parts=[(0, LEFT), (0, RIGHT)])) == [(1, Decision.PENDING)]
    voice.report(page(A, RIGHT))
    assert decisions(coordinator.store(attempt(4), [A], parts=[(0, RIGHT)])) == [(1, Decision.COMMITTED)]
    assert decisions(coordinator.store(attempt(5), [A], parts=[(0, LEFT)])) == [(1, Decision.PENDING)]


@pytest.mark.parametrize("there", [LEFT, RIGHT])
def test_a_block_is_stored_when_every_part_of_it_is(there: Part) -> None:
    coordinator, voice = LoneCoordinator.serving(page(A, there))
    both = [(0, LEFT), (0, RIGHT)]
    assert decisions(coordinator.store(attempt(1), [A], parts=both)) == [(1, Decision.WRITE)]
    voice.report(page(A, RIGHT if there is LEFT else LEFT))
    assert decisions(coordinator.store(attempt(2), [A], parts=both)) == [(1, Decision.COMMITTED)]


def test_every_group_of_a_block_is_to_be_stored() -> None:
    coordinator, voice = LoneCoordinator.serving()
    space = coordinator.ask(Attached, ours(Attach(HYBRID))).namespace
    parts = tuple((group, HYBRID.whole(group)) for group in range(2))

    def store(counter: int) -> list[tuple[int, Decision]]:
        prepare = PrepareStore(attempt(counter), 0, root(HYBRID), A, (A,), parts)
        return decisions(coordinator.ask(StoreGrant, ours(prepare, space)).runs)

    for group, part in parts:
        assert store(group) == [(1, Decision.WRITE)]
        end_ticket(coordinator, attempt(group))
        voice.report(PageEvent(space, PageKey(A, group, part), root(HYBRID), 0, Tier.RAM, Loss.EXACT))
    assert store(2) == [(1, Decision.COMMITTED)]


def test_a_lossy_copy_does_not_keep_an_exact_one_from_being_stored() -> None:
    coordinator, _ = LoneCoordinator.serving(page(A, loss=Loss.Q8))
    assert decisions(coordinator.store(attempt(1), [A], loss=Loss.Q8)) == [(1, Decision.COMMITTED)]
    assert decisions(coordinator.store(attempt(2), [A])) == [(1, Decision.WRITE)]


def test_the_blocks_of_a_run_go_to_one_shard_however_many_stores_they_come_in() -> None:
    coordinator, _ = LoneCoordinator.serving(run_blocks=4)
    for name in "bcdefgh":
        coordinator.voice(name).join()
    at_once = coordinator.store(attempt(1), BLOCKS)
    homes = [run.shard for run in at_once for _ in range(run.count)]
    assert all(len({home for home in homes[run : run + 4] if home}) == 1 for run in (0, 4, 8))
    assert len({home for home in homes if home}) > 1, "runs spread"
    end_ticket(coordinator, attempt(1))
    piecemeal = [
        coordinator.store(attempt(2 + at), [block], first=at, parent=BLOCKS[at - 1], run=BLOCKS[at - at % 4])[0].shard
        for at, block in enumerate(BLOCKS)
    ]
    assert piecemeal == homes


def test_a_run_goes_to_the_host_of_its_writer_if_a_shard_is_there() -> None:
    coordinator, _ = LoneCoordinator.serving(run_blocks=1)
    near = coordinator.voice("near", host="mine")
    near.join()
    assert {run.shard for run in coordinator.store(attempt(1), BLOCKS, host="mine")} == {near.address}


def test_nothing_is_written_to_a_shard_whose_content_is_not_known_yet() -> None:
    coordinator, voice = LoneCoordinator.serving(run_blocks=1)
    joining = coordinator.voice("b")
    joining.coordinator = Epoch(100)
    assert joining.report().inventory
    assert {run.shard for run in coordinator.store(attempt(1), BLOCKS)} == {voice.address}


LARGE = replace(SPEC, block_tokens=2 * SPEC.block_tokens)
"""Its pages are twice as large as those that capacities are counted in."""


def store_large(coordinator: LoneCoordinator, *blocks: BlockHash, number: int = 1) -> StoreGrant | Refused:
    coordinator.ask(Attached, ours(Attach(LARGE)))
    prepare = PrepareStore(attempt(number), 0, root(), blocks[0], blocks, ((0, WHOLE),))
    answer = coordinator.ask_now(ours(prepare, LARGE.namespace(OURS)))
    assert isinstance(answer, (StoreGrant, Refused))
    return answer


def test_a_page_is_written_to_no_shard_that_can_never_hold_it() -> None:
    coordinator, enough = LoneCoordinator.serving(capacity_pages=2)
    for name in "bcdefgh":
        coordinator.voice(name, capacity_pages=1).join()
    for number, block in enumerate(BLOCKS):
        granted = store_large(coordinator, block, number=number)
        assert isinstance(granted, StoreGrant) and [run.shard for run in granted.runs] == [enough.address]


def test_a_store_whose_pages_fit_no_shard_is_refused_and_not_counted_as_written() -> None:
    coordinator, _ = LoneCoordinator.serving(capacity_pages=1)
    refused = store_large(coordinator, A, B)
    assert isinstance(refused, Refused) and refused.kind is RefusedKind.BAD
    assert "never fits a shard" in refused.detail and "raise ram_bytes or lower block_tokens" in refused.detail
    assert (coordinator.counter("write_blocks"), coordinator.counter("refused_blocks")) == (0, 2)


def test_a_run_is_placed_once_however_many_blocks_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, _ = LoneCoordinator.serving(run_blocks=6)
    placed: list[BlockHash] = []
    place = coordinator.core.state.members.place

    def noted(run: BlockHash, **about: Any) -> Member | None:
        placed.append(run)
        return place(run, **about)

    monkeypatch.setattr(coordinator.core.state.members, "place", noted)
    assert decisions(coordinator.store(attempt(1), BLOCKS)) == [(12, Decision.WRITE)]
    assert placed == [BLOCKS[0], BLOCKS[6]]


def test_while_rebuilding_nothing_is_stored_and_a_miss_says_why() -> None:
    coordinator = LoneCoordinator(expected=2)
    coordinator.ask(Attached, ours(Attach(SPEC)))
    coordinator.voice("a").join(*pages([A]))
    assert coordinator.status().state == "rebuilding"
    [run] = coordinator.store(attempt(1), [B, C])
    assert run == StoreRun(2, Decision.REFUSED, miss=Miss(MissReason.REBUILDING))
    grant = coordinator.load(attempt(2), [A, B])
    assert (grant.blocks, why(grant)) == (1, MissReason.REBUILDING), "known blocks are served"
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.REBUILDING)]


def test_without_a_shard_whose_content_is_known_nothing_is_stored() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert voice.report(page(B), first=7).inventory
    assert coordinator.status().shards[0].state == "joining"
    [run] = coordinator.store(attempt(1), [A])
    assert run == StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.SHARD_LOST, "no shard is up"))
    assert coordinator.counter("refused_blocks") == 1


def test_a_shard_that_has_yet_to_carry_out_a_purge_is_given_nothing_new() -> None:
    """It would drop the new pages together with those that it has to forget."""
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]))
    coordinator.ask(Purged, ours(Purge()))
    assert decisions(coordinator.store(attempt(1), BLOCKS[:2])) == [(2, Decision.REFUSED)]
    voice.report(PurgedEvent(coordinator.core.state.tombstones.highest))
    assert decisions(coordinator.store(attempt(2), BLOCKS[:2])) == [(2, Decision.WRITE)]
