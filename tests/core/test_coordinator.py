"""What the coordinator answers, message by message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Attach,
    Attached,
    CoordinatorQuestion,
    Done,
    Drain,
    Explain,
    Findings,
    GetStatus,
    LeaveReason,
    LoadGrant,
    Need,
    PageEvent,
    PrepareLoad,
    PrepareStore,
    Probe,
    Probed,
    ProbeOrder,
    ProcessFacts,
    Purge,
    Purged,
    PurgedEvent,
    Refused,
    RefusedKind,
    ScheduleSeen,
    ShardFindings,
    Siblings,
    SiblingSpecs,
    Status,
    Tier,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_coordinator import (
    BLOCKS,
    QUESTIONS,
    A,
    B,
    C,
    D,
    LoneCoordinator,
    beat,
    end_ticket,
    reasons,
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
    key,
    ours,
    page,
    pages,
    root,
)

# --------------------------------------------------------------------------------------------- attach


def test_attach_names_the_namespace_and_the_terms() -> None:
    coordinator = LoneCoordinator(expected=1, run_blocks=3, ticket_ttl_ms=1_500)
    attached = coordinator.ask(Attached, ours(Attach(SPEC)))
    assert attached == Attached(SPEC.namespace(OURS), Epoch(100), 1_500 * MS, 3, ())


def test_attach_tells_where_the_shards_are() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert coordinator.ask(Attached, ours(Attach(SPEC))).shards == (voice.address,)


def test_a_tenant_has_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    assert coordinator.ask(Refused, ours(Attach(HYBRID))).kind is RefusedKind.LIMIT
    theirs = coordinator.ask(Attached, build_request(Attach(HYBRID), THEIRS))
    assert theirs.namespace == HYBRID.namespace(THEIRS)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_namespace_of_another_tenant_is_unknown(question: CoordinatorQuestion) -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    theirs = coordinator.ask(Refused, build_request(question, THEIRS, coordinator.space))
    unknown = coordinator.ask(Refused, build_request(question, THEIRS, HYBRID.namespace(OURS)))
    assert theirs.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert theirs == unknown
    assert not len(coordinator.core.state.tickets)


def test_a_ticket_is_not_shown_to_workers_of_another_namespace() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    coordinator.load(attempt(1), BLOCKS)
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    load, theirs = QUESTIONS["load"], SPEC.namespace(THEIRS)
    assert coordinator.ask(LoadGrant, build_request(load, THEIRS, theirs)).blocks == 0
    of_ours = coordinator.ask(Refused, build_request(load, THEIRS, coordinator.space))
    assert of_ours.kind is RefusedKind.UNKNOWN_NAMESPACE


@pytest.mark.parametrize("bad", [Need((Part(0, 3, 0, 2),)), Need((WHOLE, WHOLE)), Need(())])
def test_a_need_that_the_spec_cannot_have_is_refused(bad: Need) -> None:
    coordinator, _ = LoneCoordinator.serving()
    space = coordinator.space
    load = coordinator.ask(Refused, ours(PrepareLoad(attempt(1), BLOCKS, bad), space))
    explain = coordinator.ask(Refused, ours(Explain(BLOCKS, bad), space))
    assert load.kind is explain.kind is RefusedKind.BAD


@pytest.mark.parametrize("bad", [(), ((1, WHOLE),), ((0, WHOLE), (0, Part(0, 2, 1, 3)))])
def test_a_store_of_parts_that_the_spec_lacks_is_refused(bad: tuple[tuple[int, Part], ...]) -> None:
    coordinator, _ = LoneCoordinator.serving()
    refused = coordinator.ask(
        Refused,
        ours(PrepareStore(attempt(1), 0, root(), A, BLOCKS, bad), coordinator.space),
    )
    assert refused.kind is RefusedKind.BAD


# -------------------------------------------------------------------------------------------- questions


def test_explain_merges_equal_fates_and_promises_nothing() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS)[:4], page(BLOCKS[4], LEFT), page(BLOCKS[5], RIGHT))
    coordinator.store(attempt(1), BLOCKS[6:8])
    voice.report(gone(B), gone(C))
    fates = coordinator.explain(BLOCKS)
    assert reasons(fates) == [
        (1, None),
        (2, MissReason.EVICTED),
        (1, None),
        (1, MissReason.PART),
        (1, MissReason.PART),
        (2, MissReason.PENDING),
        (4, MissReason.NEVER_SEEN),
    ]
    assert fates[0].plan == fates[2].plan == coordinator.load(attempt(2), [A], hold=False).runs[0].plan
    assert coordinator.status().tickets == 1, "the ticket of the store"


def test_siblings_are_the_tenants_own_that_hold_something_the_most_alike_first() -> None:
    coordinator, voice = LoneCoordinator.serving()
    alike = replace(SPEC, weights="sha256:new")
    other = replace(alike, adapter="sha256:lora")
    bare = replace(SPEC, model="unused")
    for tenant, spec in [(OURS, other), (OURS, alike), (OURS, bare), (THEIRS, SPEC)]:
        space = coordinator.ask(Attached, build_request(Attach(spec), tenant)).namespace
        if spec is not bare:
            voice.report(PageEvent(space, key(A), root(), 0, Tier.RAM, Loss.EXACT))
    siblings = coordinator.ask(SiblingSpecs, ours(Siblings(), coordinator.space))
    assert siblings.specs == (alike, other)


def test_a_tenant_s_status_tells_its_own_figures_and_which_shards_are_up() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    coordinator.load(attempt(1), BLOCKS)
    of_ours, of_theirs = (
        coordinator.ask(Status, build_request(GetStatus(), tenant, operator=False)) for tenant in (OURS, THEIRS)
    )
    assert (of_ours.tenant, of_ours.blocks, of_ours.tickets) == (OURS, len(BLOCKS), 1)
    assert (of_theirs.tenant, of_theirs.namespaces, of_theirs.blocks, of_theirs.tickets) == (THEIRS, 1, 0, 0)
    assert dict(of_ours.counters)["hit_blocks"] == len(BLOCKS)
    assert not any(dict(of_theirs.counters).values())
    assert [(shard.info.shard, shard.state) for shard in of_theirs.shards] == [("a", "up")]
    assert of_theirs.shards[0].info == of_theirs.shards[0].info.without_use()


def test_what_the_reconciler_said_is_shown_to_operators_until_it_is_silent() -> None:
    coordinator, _ = LoneCoordinator.serving()
    said = ScheduleSeen(("a shard waits",), ((ShardId("shard-7"), "10.0.0.3"),))
    coordinator.step(said)

    def status(*, operator: bool) -> Status:
        return coordinator.ask(Status, build_request(GetStatus(), OURS, operator=operator))

    assert (status(operator=True).waiting, status(operator=True).orphans) == (said.waiting, said.orphans)
    assert (status(operator=False).waiting, status(operator=False).orphans) == ((), ())
    coordinator.now += 31 * SECOND
    assert (status(operator=True).waiting, status(operator=True).orphans) == ((), ())


def test_a_lost_shard_is_shown_until_shards_of_other_names_have_taken_its_place() -> None:
    coordinator, _ = LoneCoordinator.serving()
    coordinator.later(10 * SECOND)

    def shown() -> list[tuple[str, str]]:
        return [(each.info.shard, each.state) for each in coordinator.status().shards]

    coordinator.step(ScheduleSeen())
    coordinator.step(ScheduleSeen(shards=frozenset({ShardId("a")})))  # Ray starts it again, or its volume is awaited
    assert shown() == [("a", "lost")]
    coordinator.step(ScheduleSeen(shards=frozenset({ShardId("b")})))
    assert shown() == []


def test_a_node_that_is_to_be_taken_down_is_remembered_by_its_shard_until_it_is_heard() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    coordinator.ask(Done, ours(Drain(ShardId("unknown"), leaving=True)))
    assert coordinator.core.state.members.leaving == {}
    coordinator.ask(Done, ours(Drain(ShardId("a"))))
    assert coordinator.core.state.members.leaving == {}
    coordinator.ask(Done, ours(Drain(ShardId("a"), leaving=True)))  # one that drains already
    assert coordinator.core.state.members.leaving == {"a": "a:1"}


def test_what_a_shard_found_is_kept_for_the_operator_and_no_other_run() -> None:
    coordinator, voice = LoneCoordinator.serving()
    voice.info = replace(voice.info, protocol=3)
    voice.report()
    begun = coordinator.ask(Probed, ours(Probe()))
    assert (begun.running, begun.silent) == (True, ("a",))
    assert voice.report().probe == ProbeOrder(begun.number, ())
    voice.findings = Findings(begun.number, ProcessFacts(1, 2))
    assert voice.report().probe is None
    ended = coordinator.ask(Probed, ours(Probe(begun.number)))
    assert (ended.running, ended.silent) == (False, ())
    assert ended.shards == (ShardFindings(ShardId("a"), voice.findings),)
    assert coordinator.ask(Refused, ours(Probe(begun.number + 1))).kind is RefusedKind.STALE


def test_status_tells_what_there_is() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]))
    coordinator.voice("0").report()
    lost = coordinator.voice("1")
    lost.join()
    coordinator.load(attempt(1), [A])
    beat(coordinator, voice, until=coordinator.now + 4 * SECOND)
    coordinator.voice("0").join()
    beat(coordinator, voice, until=coordinator.now + SECOND)
    coordinator.later(SECOND // 2)
    status = coordinator.status()
    assert (status.epoch, status.state, status.uptime_ns) == (100, "serving", 11 * SECOND // 2)
    assert (status.namespaces, status.blocks, status.tickets) == (2, 2, 1)
    assert [(s.info.shard, s.state, s.seen_ns_ago) for s in status.shards] == [
        ("0", "up", 3 * SECOND // 2),
        ("1", "lost", 0),
        ("a", "up", SECOND // 2),
    ]
    assert coordinator.counter("lost_shards") == 1


def test_a_shard_that_was_told_to_stop_is_shown_as_lost_and_not_counted_as_one_that_was_lost() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    stopping, silent = coordinator.voice("stopping"), coordinator.voice("silent")
    for each in (stopping, silent):
        each.join()
    stopping.info = replace(stopping.info, stopping=True)
    stopping.report()
    beat(coordinator, voice, until=coordinator.now + 11 * SECOND)
    coordinator.later(0)
    assert {shard.info.shard: shard.state for shard in coordinator.status().shards} == {
        "a": "up",
        "stopping": "lost",
        "silent": "lost",
    }
    assert coordinator.counter("lost_shards") == 1


def test_status_tells_how_often_each_shard_has_restarted_and_when() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    seen: list[tuple[int, int]] = []

    def look() -> None:
        [shard] = [shard for shard in coordinator.status().shards if shard.info.shard == "a"]
        seen.append((shard.restarts, shard.restarted_ns_ago))

    look()
    voice.join(*pages([A]))  # the same incarnation, which sends its inventory again
    coordinator.later(10 * SECOND)
    voice.join(*pages([A]))  # and again, after it was lost
    look()
    coordinator.voice("a", 2).join()  # it was not lost before
    coordinator.now += SECOND
    look()
    coordinator.later(10 * SECOND)
    look()
    coordinator.voice("a", 3).join()  # it was lost before
    look()
    assert seen == [(0, 0), (0, 0), (1, SECOND), (1, 11 * SECOND), (2, 0)]
    assert coordinator.counter("restarted_shards") == 2
    of_theirs = coordinator.ask(Status, build_request(GetStatus(), THEIRS, operator=False))
    assert [shard.restarts for shard in of_theirs.shards] == [2]


def test_a_shard_that_was_drained_and_comes_back_has_not_restarted() -> None:
    coordinator, voice = LoneCoordinator.serving()
    coordinator.ask(Done, ours(Drain(ShardId("a"))))
    voice.report()
    assert voice.report().leave is LeaveReason.DRAINED
    coordinator.voice("a", 2).join()
    assert [(shard.state, shard.restarts) for shard in coordinator.status().shards] == [("up", 0)]
    coordinator.ask(Done, ours(Drain(ShardId("a"))))
    coordinator.voice("a", 3).join()  # in the middle of its drain
    assert [(shard.state, shard.restarts) for shard in coordinator.status().shards] == [("draining", 1)]


def test_a_bounded_number_of_restarts_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAST_SHARDS", 2)
    coordinator = LoneCoordinator(expected=0)
    for epoch in (1, 2):
        for name in "abc":
            coordinator.voice(name, epoch).join()
    coordinator.voice("b", 3).join()
    assert [shard.restarts for shard in coordinator.status().shards] == [0, 2, 1]


def test_every_counter_adds_up() -> None:
    """Two equal events count twice, and one of them once."""
    coordinator, voice = LoneCoordinator.serving()

    def once(number: int) -> None:
        of = [attempt(10 * number + at) for at in range(1, 5)]
        voice.report(*pages(BLOCKS[:4]))
        coordinator.load(of[0], BLOCKS[:6])
        assert [end_ticket(coordinator, of[0]) for _ in range(2)] == [True, False]
        coordinator.store(of[1], BLOCKS[4:6], parent=D)
        coordinator.store(of[2], BLOCKS[:6])
        assert end_ticket(coordinator, of[1]) and end_ticket(coordinator, of[2]) is False
        voice.report(gone(BLOCKS[2]), gone(D, corrupt=True))
        silent = coordinator.voice(f"silent-{number}")
        silent.join()
        coordinator.voice(f"silent-{number}", 2).join()
        beat(coordinator, voice, until=coordinator.now + 6 * SECOND)
        coordinator.ask(Purged, ours(Purge()))
        coordinator.store(of[3], BLOCKS[:1])
        voice.report(PurgedEvent(coordinator.core.state.tombstones.highest))

    once(1)
    first = dict(coordinator.status().counters)
    once(2)
    assert dict(coordinator.status().counters) == {name: 2 * count for name, count in first.items()}
    others = {"pulls", "drains", "late_drains"}
    assert {name for name, count in first.items() if count <= 0} == others, (
        "replicas and drains are other tests' matter"
    )
