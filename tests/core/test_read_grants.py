"""A tenant that may read another's KV, and a credential that only reads: what the cores answer them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core.dispatcher import READ_ONLY
from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    Done,
    EndTicket,
    Explain,
    Explained,
    LoadGrant,
    NewPage,
    Pin,
    PinGrant,
    PrepareLoad,
    Purge,
    Refused,
    RefusedKind,
    RenewTicket,
    Reply,
    Request,
    Reserve,
    Siblings,
    Suspect,
    SyncTables,
    WriteGrant,
)
from kvcluster.core.miss import Loss
from tests.core.lone_coordinator import BLOCKS, QUESTIONS, LoneCoordinator
from tests.core.lone_shard import LoneShard
from tests.core.samples import OURS, PAGE, SPEC, THEIRS, attempt, holder, key, pages, root, whole

SPACE = SPEC.namespace(OURS)
OTHER = replace(SPEC, weights="sha256:other")
STRANGE = Tenant("nobody")
CHANGING = {name: QUESTIONS[name] for name in ("store", "pin", "unpin")}


def said(
    core: LoneCoordinator | LoneShard,
    question: Any,
    namespace: NamespaceId | None = None,
    *,
    tenant: Tenant = THEIRS,
    reads: tuple[Tenant, ...] = (OURS,),
    read_only: bool = False,
) -> Reply:
    """What a core answers them, who may read ours."""

    def build(call: CallId) -> Request[Any]:
        return Request(call, tenant, namespace, question, read_only=read_only, reads=frozenset(reads))

    return core.ask_now(build)


def stored() -> LoneCoordinator:
    """We have stored blocks."""
    return LoneCoordinator.serving(*pages(BLOCKS))[0]


# ------------------------------------------------------------------------------------- the coordinator


def test_a_tenant_that_is_granted_finds_what_the_owner_has_stored() -> None:
    coordinator = stored()
    attached = said(coordinator, Attach(SPEC, OURS))
    assert isinstance(attached, Attached)
    assert attached.namespace == SPACE and attached.read_only and not attached.wants_tokens
    grant = said(coordinator, PrepareLoad(attempt(1), BLOCKS, whole()), SPACE)
    assert isinstance(grant, LoadGrant) and grant.blocks == len(BLOCKS)
    fates = said(coordinator, Explain(BLOCKS, whole()), SPACE)
    assert isinstance(fates, Explained) and all(fate.plan is not None for fate in fates.fates)


@pytest.mark.parametrize("owner", [OURS, STRANGE])
def test_without_a_grant_an_owner_is_refused_whether_it_exists_or_not(owner: Tenant) -> None:
    refused = said(stored(), Attach(SPEC, owner), reads=())
    assert isinstance(refused, Refused) and refused.kind is RefusedKind.BAD
    assert refused.detail.replace(owner, "X").count("X") == 2 and "grant" in refused.detail


def test_without_a_grant_its_blocks_are_not_found() -> None:
    coordinator = stored()
    for question in (PrepareLoad(attempt(1), BLOCKS, whole()), Explain(BLOCKS, whole())):
        answer = said(coordinator, question, SPACE, reads=())
        assert isinstance(answer, Refused) and answer.kind is RefusedKind.UNKNOWN_NAMESPACE


def test_what_a_reader_would_change_is_not_found_either() -> None:
    coordinator = stored()
    for question in (*CHANGING.values(), SyncTables(holder(1), 1)):
        answer = said(coordinator, question, SPACE)
        assert isinstance(answer, Refused) and answer.kind is RefusedKind.UNKNOWN_NAMESPACE, question


def test_a_purge_of_a_reader_takes_its_own_blocks_alone() -> None:
    coordinator = stored()
    said(coordinator, Purge())
    assert coordinator.load(attempt(3), BLOCKS).blocks == len(BLOCKS)


def test_a_reader_makes_no_namespace_and_is_told_what_differs() -> None:
    coordinator = stored()
    before = len(coordinator.core.state.namespaces)
    for spec in (OTHER, replace(SPEC, adapter="sha256:a")):
        refused = said(coordinator, Attach(spec, OURS))
        assert isinstance(refused, Refused) and refused.kind is RefusedKind.UNKNOWN_NAMESPACE
        assert refused.detail.endswith("differs in " + ("weights" if spec is OTHER else "adapter"))
    assert len(coordinator.core.state.namespaces) == before


def test_private_pages_of_an_owner_are_never_granted() -> None:
    coordinator, private = stored(), replace(SPEC, private=True)
    coordinator.core.state.namespaces.attach(OURS, private)
    refused = said(coordinator, Attach(private, OURS))
    assert isinstance(refused, Refused) and "private" in refused.detail
    shard = LoneShard.joined()
    shard.attach(private, OURS)
    assert isinstance(said(shard, AttachShard(private, OURS)), Refused)


def test_private_pages_of_an_owner_are_not_found_by_the_id_of_their_namespace_either() -> None:
    """The id can be computed by whoever knows the spec, so that a reader need not attach."""
    coordinator, shard, private = stored(), LoneShard.joined(), replace(SPEC, private=True)
    name = private.namespace(OURS)
    coordinator.core.state.namespaces.attach(OURS, private)
    shard.attach(private, OURS)
    asked = [(coordinator, PrepareLoad(attempt(1), BLOCKS, whole())), (coordinator, Explain(BLOCKS, whole()))]
    asked += [(coordinator, Siblings()), (shard, Pin(attempt(4), shard.epoch, (key(BLOCKS[0]),), Loss.EXACT))]
    for core, question in asked:
        refused = said(core, question, name)
        assert isinstance(refused, Refused) and refused.kind is RefusedKind.UNKNOWN_NAMESPACE, question
        assert not isinstance(said(core, question, name, tenant=OURS, reads=()), Refused), question


def test_a_ticket_ends_with_the_grant_by_which_it_was_given() -> None:
    coordinator = stored()
    tickets, index = coordinator.core.state.tickets, coordinator.core.state.namespaces.known(SPACE)
    assert index is not None
    said(coordinator, PrepareLoad(attempt(1), BLOCKS, whole()), SPACE)
    assert said(coordinator, RenewTicket(attempt(1))) == Done()
    said(coordinator, PrepareLoad(attempt(2), BLOCKS[:1], whole()), SPACE, tenant=OURS)
    for _ in range(2):
        assert said(coordinator, RenewTicket(attempt(1)), reads=()) == Done(False)
    assert tickets.held(THEIRS) == tickets.holds.held_bytes(THEIRS) == 0
    held = [record.held_until > 0 for block in BLOCKS if (record := index.index.get(block)) is not None]
    assert not any(held[1:]), "what it held can be evicted at once"
    assert said(coordinator, RenewTicket(attempt(2)), tenant=OURS, reads=()) == Done(), "the owner's own ticket stays"


def test_tickets_and_holds_are_the_reader_s() -> None:
    coordinator = stored()
    tickets = coordinator.core.state.tickets
    ours = coordinator.load(attempt(1), BLOCKS[:2])
    said(coordinator, PrepareLoad(attempt(1), BLOCKS, whole()), SPACE)
    assert ours.blocks == 2, "the same attempt of another tenant is another"
    assert tickets.held(THEIRS) == tickets.held(OURS) == 1
    assert tickets.holds.held_bytes(THEIRS) == len(BLOCKS) * PAGE
    assert tickets.holds.held_bytes(OURS) == 2 * PAGE
    said(coordinator, EndTicket(attempt(1)))
    assert tickets.holds.held_bytes(THEIRS) == 0 and tickets.holds.held_bytes(OURS) == 2 * PAGE


def test_what_a_reader_asks_counts_as_its_own() -> None:
    coordinator = stored()
    said(coordinator, PrepareLoad(attempt(1), BLOCKS, whole()), SPACE)
    assert coordinator.core.state.counted(THEIRS)["hit_blocks"] == len(BLOCKS)
    assert not coordinator.core.state.counted(OURS).get("hit_blocks")


def test_an_owner_that_names_itself_attaches_as_always() -> None:
    attached = said(stored(), Attach(SPEC, OURS), tenant=OURS, reads=())
    assert isinstance(attached, Attached) and not attached.read_only


# ------------------------------------------------------------------------------------------- a shard


def test_a_shard_lends_an_owner_s_pages_and_takes_none() -> None:
    shard = LoneShard.joined()
    shard.attach()
    shard.store(attempt(1), *BLOCKS[:3])
    attached = said(shard, AttachShard(SPEC, OURS))
    assert isinstance(attached, AttachedShard) and attached.namespace == SPACE
    granted = said(shard, Pin(attempt(4), shard.epoch, (key(BLOCKS[0]),), Loss.EXACT), SPACE)
    assert isinstance(granted, PinGrant)
    new = (NewPage(key(BLOCKS[4]), root(), 4, Loss.EXACT),)
    refused = said(shard, Reserve(attempt(5), shard.epoch, new, 0), SPACE)
    assert isinstance(refused, Refused) and refused.kind is RefusedKind.UNKNOWN_NAMESPACE
    said(shard, Suspect(shard.epoch, (key(BLOCKS[0]),)), SPACE)
    assert shard.core.state.counters["suspected"] == 1


def test_a_shard_shows_nothing_without_a_grant_and_makes_no_namespace_by_one() -> None:
    shard = LoneShard.joined()
    shard.attach()
    assert isinstance(said(shard, AttachShard(SPEC, OURS), reads=()), Refused)
    assert isinstance(said(shard, Pin(attempt(4), shard.epoch, (), Loss.EXACT), SPACE, reads=()), Refused)
    unknown = said(shard, AttachShard(OTHER, OURS))
    assert isinstance(unknown, Refused) and unknown.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert len(list(shard.core.state.namespaces)) == 1


# --------------------------------------------------------------------------- a credential that only reads


def test_a_read_only_credential_loads_its_tenant_s_blocks_and_stores_none() -> None:
    coordinator = stored()
    terms = {"tenant": OURS, "read_only": True}
    attached = said(coordinator, Attach(SPEC), **terms)
    assert isinstance(attached, Attached) and attached.read_only
    grant = said(coordinator, PrepareLoad(attempt(1), BLOCKS, whole()), SPACE, **terms)
    assert isinstance(grant, LoadGrant) and grant.blocks == len(BLOCKS)
    for name, question in CHANGING.items():
        assert said(coordinator, question, SPACE, **terms) == READ_ONLY, name
        assert said(coordinator, question, SPACE, tenant=OURS) != READ_ONLY, name


READING = {
    *("Attach", "PrepareLoad", "RenewTicket", "EndTicket", "Explain", "Siblings", "GetNamespaces"),
    *("RegisterEngine", "GetEngines", "GetPins", "GetStatus"),
    *("AttachShard", "GetOffers", "Pin", "PinSpans", "Unpin", "Renew", "Suspect", "Flush"),
}
"""The questions by which nothing of a tenant is changed. A new one is refused until it stands here."""


def test_of_all_questions_it_may_ask_these_alone() -> None:
    coordinator, shard = stored(), LoneShard.joined()
    kinds = [kind for core in (coordinator.core, shard.core) for kind in asked_by_callers(core)]
    allowed = {kind.__name__ for kind in kinds}
    for kind in kinds:
        core = coordinator if kind in asked_by_callers(coordinator.core) else shard
        if kind.__name__ not in READING:
            question = object.__new__(kind)
            assert said(core, question, SPACE, tenant=OURS, read_only=True) == READ_ONLY, kind
    assert allowed > READING, "and there are others"


def asked_by_callers(core: Any) -> list[type]:
    dispatcher = core._dispatcher
    return [*dispatcher._in_namespace, *dispatcher._of_no_namespace]


def test_a_shard_takes_no_page_of_it() -> None:
    shard = LoneShard.joined()
    shard.attach()
    new = (NewPage(key(BLOCKS[4]), root(), 4, Loss.EXACT),)
    assert said(shard, Reserve(attempt(5), shard.epoch, new, 0), SPACE, tenant=OURS, read_only=True) == READ_ONLY
    assert isinstance(said(shard, Reserve(attempt(5), shard.epoch, new, 0), SPACE, tenant=OURS), WriteGrant)
