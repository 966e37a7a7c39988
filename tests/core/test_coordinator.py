"""What the coordinator promises, message by message. Each test plays its shards and its workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kvcluster.config import CoordinatorConfig
from kvcluster.core import evictor, intake, limits
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.eviction import ColdQueue, Verdict
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.index import BlockRecord
from kvcluster.core.invariants import check_coordinator
from kvcluster.core.members import Member
from kvcluster.core.messages import (
    Answer,
    Attach,
    Attached,
    BlockFate,
    CoordinatorMessage,
    Decision,
    Done,
    Effect,
    EndTicket,
    Explain,
    Explained,
    GetStatus,
    GoneEvent,
    Inventory,
    Leave,
    LoadGrant,
    Need,
    PageEvent,
    PageKey,
    PinBlocks,
    Pinned,
    PrepareLoad,
    PrepareStore,
    Refused,
    RefusedKind,
    RenewTicket,
    Report,
    ReportAck,
    Run,
    ShardAddress,
    ShardInfo,
    Siblings,
    SiblingSpecs,
    Source,
    Stalled,
    Status,
    StoreGrant,
    StoreRun,
    StreamEvent,
    Tick,
    Tier,
    UnpinBlocks,
)
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import Part
from tests.core.world import (
    HYBRID,
    LEFT,
    MEMBERSHIP_MS,
    MS,
    OURS,
    PAGE,
    RIGHT,
    SECOND,
    SPEC,
    THEIRS,
    WHOLE,
    attempt,
    chain,
    gone,
    key,
    page,
    pages,
    root,
    whole,
)

R = TypeVar("R")


class Voice:
    """Plays one incarnation of a shard to a coordinator."""

    def __init__(self, coordinator: LoneCoordinator, shard: str, epoch: int, host: str, capacity_pages: int) -> None:
        self._to = coordinator
        self.info = ShardInfo(
            shard=ShardId(shard),
            epoch=Epoch(epoch),
            address=f"{shard}:1",
            host=host,
            capacity_bytes=capacity_pages * PAGE,
            free_bytes=capacity_pages * PAGE,
            pages=0,
            leases=0,
        )
        self.coordinator = Epoch(0)
        self.told = 0
        self.order = 0

    @property
    def address(self) -> ShardAddress:
        return ShardAddress(self.info.shard, self.info.epoch, self.info.address, self.info.host)

    def join(self, *pages: StreamEvent) -> None:
        """Learns the coordinator's epoch and tells all that it holds."""
        self.coordinator = self.report().epoch
        assert not self.inventory(*pages).inventory

    def report(self, *events: StreamEvent, pressure: int = 0, first: int | None = None) -> ReportAck:
        """The next events; given `first`, the number of the first of them."""
        message = Report(
            CallId(0),
            self.info,
            self.coordinator,
            self.told + 1 if first is None else first,
            events,
            pressure_bytes=pressure,
            order=self.order,
        )
        ack = self._to.ask(ReportAck, lambda call: replace(message, call=call))
        self.told = max(self.told, ack.acked)
        return ack

    def inventory(self, *pages: StreamEvent, chunk: int = 0, last: bool = True, upto: int | None = None) -> ReportAck:
        held = tuple(page for page in pages if isinstance(page, PageEvent))
        upto = self.told if upto is None else upto
        return self._to.ask(
            ReportAck,
            lambda call: Inventory(
                call, self.info, self.coordinator, upto, chunk, last, held, specs=((OURS, SPEC), (THEIRS, SPEC))
            ),
        )

    def free(self, pages: int) -> None:
        """From now on it says that it has so much room."""
        self.info = replace(self.info, free_bytes=pages * PAGE)


class LoneCoordinator:
    """A coordinator. The test plays its shards (`voice`) and its workers."""

    def __init__(self, *, expected: int, epoch: int = 100, **config: Any) -> None:
        self.now = 50 * SECOND
        self.config = replace(CoordinatorConfig(), **config)
        self.core = Coordinator(
            Epoch(epoch), self.config, membership_ttl_ms=MEMBERSHIP_MS, expected=expected, now=self.now
        )
        self.space = SPEC.namespace(OURS)
        self.left = False
        self._calls = itertools.count(1)

    @classmethod
    def serving(cls, *pages: StreamEvent, capacity_pages: int = 100, **config: Any) -> tuple[LoneCoordinator, Voice]:
        """One that knows our SPEC and one shard, `a`, which holds these pages."""
        coordinator = cls(expected=1, **config)
        coordinator.ask(Attached, lambda call: Attach(call, OURS, SPEC))
        voice = coordinator.voice("a", capacity_pages=capacity_pages)
        voice.join(*pages)
        assert not coordinator.core.rebuilding
        return coordinator, voice

    def voice(self, shard: str, epoch: int = 1, host: str = "", capacity_pages: int = 100) -> Voice:
        return Voice(self, shard, epoch, host, capacity_pages)

    def step(self, message: CoordinatorMessage) -> list[Effect]:
        effects = self.core.step(message, self.now)
        self.left = self.left or any(isinstance(effect, Leave) for effect in effects)
        check_coordinator(self.core)
        return effects

    def ask(self, kind: type[R], build: Callable[[CallId], CoordinatorMessage]) -> R:
        """Every question is answered at once, and once."""
        call = CallId(next(self._calls))
        answers = [effect for effect in self.step(build(call)) if isinstance(effect, Answer)]
        assert [answer.call for answer in answers] == [call]
        reply = answers[0].reply
        assert isinstance(reply, kind), reply
        return reply

    def later(self, passed_ns: int) -> None:
        """Time passes, and Ticks come as long as one is due."""
        self.now += passed_ns
        for _ in range(100):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > self.now:
                return
            self.step(Tick())
        raise AssertionError("ticks without end")

    # -------------------------------------------------------------------------------- as its workers

    def load(
        self, of: Attempt, hashes: Sequence[BlockHash], need: Need | None = None, *, hold: bool = True
    ) -> LoadGrant:
        asked = need or whole()
        return self.ask(LoadGrant, lambda call: PrepareLoad(call, OURS, self.space, of, tuple(hashes), asked, hold))

    def store(
        self,
        of: Attempt,
        hashes: Sequence[BlockHash],
        *,
        first: int = 0,
        parent: BlockHash | None = None,
        run: BlockHash | None = None,
        parts: Sequence[tuple[int, Part]] = ((0, WHOLE),),
        loss: Loss = Loss.EXACT,
        host: str = "",
    ) -> list[StoreRun]:
        """The runs of the grant."""
        message = PrepareStore(
            CallId(0),
            OURS,
            self.space,
            of,
            first,
            parent or root(),
            run or hashes[0],
            tuple(hashes),
            tuple(parts),
            loss,
            host,
        )
        return list(self.ask(StoreGrant, lambda call: replace(message, call=call)).runs)

    def explain(self, hashes: Sequence[BlockHash], need: Need | None = None) -> list[BlockFate]:
        asked = need or whole()
        return list(self.ask(Explained, lambda call: Explain(call, OURS, self.space, tuple(hashes), asked)).fates)

    def status(self) -> Status:
        return self.ask(Status, GetStatus)

    def counter(self, name: str) -> int:
        return dict(self.status().counters)[name]


BLOCKS = chain(12)
A, B, C, D = BLOCKS[:4]
FORK = chain(12, seed=1)
"""Another conversation that begins with A."""


def reasons(fates: Sequence[BlockFate]) -> list[tuple[int, MissReason | None]]:
    """How many blocks, and why they are not to be had."""
    return [(fate.count, fate.miss.reason if fate.miss else None) for fate in fates]


def decisions(runs: Sequence[StoreRun]) -> list[tuple[int, Decision]]:
    return [(run.count, run.decision) for run in runs]


def why(grant: LoadGrant) -> MissReason | None:
    return grant.miss.reason if grant.miss is not None else None


def served_by(grant: LoadGrant) -> list[tuple[int, list[str]]]:
    """How many blocks from which shards."""
    return [
        (run.count, [source.shard.shard for of_group in run.plan if of_group for source in of_group])
        for run in grant.runs
    ]


def ordered(ack: ReportAck) -> list[BlockHash]:
    return [block for _, block in ack.order.blocks] if ack.order is not None else []


def rebuilding(coordinator: LoneCoordinator) -> bool:
    return coordinator.status().state == "rebuilding"


def end_ticket(coordinator: LoneCoordinator, of: Attempt) -> bool:
    return coordinator.ask(Done, lambda call: EndTicket(call, of)).ok


def renew_ticket(coordinator: LoneCoordinator, of: Attempt) -> bool:
    return coordinator.ask(Done, lambda call: RenewTicket(call, of)).ok


def pin(coordinator: LoneCoordinator, hashes: Sequence[BlockHash], ttl_ns: int = 60 * SECOND) -> int:
    return coordinator.ask(Pinned, lambda call: PinBlocks(call, OURS, coordinator.space, tuple(hashes), ttl_ns)).blocks


def unpin(coordinator: LoneCoordinator, hashes: Sequence[BlockHash]) -> int:
    return coordinator.ask(Pinned, lambda call: UnpinBlocks(call, OURS, coordinator.space, tuple(hashes))).blocks


def carry_out(voice: Voice, ack: ReportAck) -> ReportAck:
    """The shard does as it was ordered, and says so; what it is told then."""
    assert ack.order is not None
    voice.order = ack.order.number
    return voice.report(*map(gone, ordered(ack)))


def beat(coordinator: LoneCoordinator, *voices: Voice, until: int) -> None:
    """Time passes while these shards keep talking."""
    while coordinator.now < until:
        coordinator.later(min(SECOND, until - coordinator.now))
        for voice in voices:
            voice.report()


# --------------------------------------------------------------------------------------------- attach


def test_attach_names_the_namespace_and_the_terms() -> None:
    coordinator = LoneCoordinator(expected=1, run_blocks=3, ticket_ttl_ms=1_500)
    attached = coordinator.ask(Attached, lambda call: Attach(call, OURS, SPEC))
    assert attached == Attached(SPEC.namespace(OURS), Epoch(100), 1_500 * MS, 3, ())


def test_attach_tells_where_the_shards_are() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert coordinator.ask(Attached, lambda call: Attach(call, OURS, SPEC)).shards == (voice.address,)


def test_a_tenant_has_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    assert coordinator.ask(Refused, lambda call: Attach(call, OURS, HYBRID)).kind is RefusedKind.LIMIT
    theirs = coordinator.ask(Attached, lambda call: Attach(call, THEIRS, HYBRID))
    assert theirs.namespace == HYBRID.namespace(THEIRS)


Question = Callable[[CallId, Tenant, NamespaceId], CoordinatorMessage]
QUESTIONS: dict[str, Question] = {
    "load": lambda call, tenant, space: PrepareLoad(call, tenant, space, attempt(1), BLOCKS, whole()),
    "store": lambda call, tenant, space: PrepareStore(
        call, tenant, space, attempt(1), 0, root(), A, BLOCKS, ((0, WHOLE),)
    ),
    "explain": lambda call, tenant, space: Explain(call, tenant, space, BLOCKS, whole()),
    "siblings": Siblings,
    "pin": lambda call, tenant, space: PinBlocks(call, tenant, space, BLOCKS, SECOND),
    "unpin": lambda call, tenant, space: UnpinBlocks(call, tenant, space, BLOCKS),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_namespace_of_another_tenant_is_unknown(question: Question) -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    theirs = coordinator.ask(Refused, lambda call: question(call, THEIRS, coordinator.space))
    nobodys = coordinator.ask(Refused, lambda call: question(call, THEIRS, HYBRID.namespace(OURS)))
    assert theirs.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert theirs == nobodys
    assert not len(coordinator.core.tickets)


def test_a_ticket_is_told_to_nobody_of_another_namespace() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    coordinator.load(attempt(1), BLOCKS)
    coordinator.ask(Attached, lambda call: Attach(call, THEIRS, SPEC))
    load, theirs = QUESTIONS["load"], SPEC.namespace(THEIRS)
    assert coordinator.ask(Refused, lambda call: load(call, THEIRS, theirs)).kind is RefusedKind.BAD
    assert (
        coordinator.ask(Refused, lambda call: load(call, THEIRS, coordinator.space)).kind
        is RefusedKind.UNKNOWN_NAMESPACE
    )


@pytest.mark.parametrize("bad", [Need((Part(0, 3, 0, 2),)), Need((WHOLE, WHOLE)), Need(())])
def test_a_need_that_the_spec_cannot_have_is_refused(bad: Need) -> None:
    coordinator, _ = LoneCoordinator.serving()
    space = coordinator.space
    load = coordinator.ask(Refused, lambda call: PrepareLoad(call, OURS, space, attempt(1), BLOCKS, bad))
    explain = coordinator.ask(Refused, lambda call: Explain(call, OURS, space, BLOCKS, bad))
    assert load.kind is explain.kind is RefusedKind.BAD


@pytest.mark.parametrize("bad", [(), ((1, WHOLE),), ((0, WHOLE), (0, Part(0, 2, 1, 3)))])
def test_a_store_of_parts_that_the_spec_lacks_is_refused(bad: tuple[tuple[int, Part], ...]) -> None:
    coordinator, _ = LoneCoordinator.serving()
    refused = coordinator.ask(
        Refused,
        lambda call: PrepareStore(call, OURS, coordinator.space, attempt(1), 0, root(), A, BLOCKS, bad),
    )
    assert refused.kind is RefusedKind.BAD


# ---------------------------------------------------------------------------------------------- loads


def test_a_load_reaches_to_the_first_block_that_is_not_there() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), *pages(BLOCKS)[3:5])
    grant = coordinator.load(attempt(1), BLOCKS)
    source = Source(0, WHOLE, voice.address, Tier.DEVICE, Loss.EXACT)
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


def test_a_block_that_somebody_writes_is_pending() -> None:
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
    assert coordinator.ask(Refused, lambda call: question(call, OURS, coordinator.space)).kind is RefusedKind.BAD


def test_a_load_without_a_hold_promises_nothing() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages([A]))
    grant = coordinator.load(attempt(1), [A], hold=False)
    assert (grant.blocks, grant.hold_ns) == (1, 0)
    assert not len(coordinator.core.tickets)


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


def test_a_store_writes_what_nobody_has_or_writes() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    [first] = coordinator.store(attempt(1), BLOCKS[1:3], first=1, parent=A, run=A)
    assert first == StoreRun(2, Decision.WRITE, voice.address)
    second = coordinator.store(attempt(2, worker=1), BLOCKS[:4])
    assert decisions(second) == [(1, Decision.COMMITTED), (2, Decision.PENDING), (1, Decision.WRITE)]
    assert second[1].miss == Miss(MissReason.PENDING)
    counted = ("write_blocks", "duplicate_blocks", "pending_blocks", "refused_blocks")
    assert [coordinator.counter(name) for name in counted] == [3, 1, 2, 0]


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


def test_a_writer_that_died_keeps_nobody_from_writing_for_longer_than_its_ticket() -> None:
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
    space = coordinator.ask(Attached, lambda call: Attach(call, OURS, HYBRID)).namespace
    parts = tuple((group, HYBRID.whole(group)) for group in range(2))

    def store(counter: int) -> list[tuple[int, Decision]]:
        prepare = PrepareStore(CallId(0), OURS, space, attempt(counter), 0, root(HYBRID), A, (A,), parts)
        return decisions(coordinator.ask(StoreGrant, lambda call: replace(prepare, call=call)).runs)

    for group, part in parts:
        assert store(group) == [(1, Decision.WRITE)]
        end_ticket(coordinator, attempt(group))
        voice.report(PageEvent(space, PageKey(A, group, part), root(HYBRID), 0, Tier.DEVICE, Loss.EXACT))
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


def test_a_run_is_placed_once_however_many_blocks_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, _ = LoneCoordinator.serving(run_blocks=6)
    placed: list[BlockHash] = []
    place = coordinator.core.members.place

    def noted(run: BlockHash, host: str) -> Member | None:
        placed.append(run)
        return place(run, host)

    monkeypatch.setattr(coordinator.core.members, "place", noted)
    assert decisions(coordinator.store(attempt(1), BLOCKS)) == [(12, Decision.WRITE)]
    assert placed == [BLOCKS[0], BLOCKS[6]]


def test_while_rebuilding_nothing_is_stored_and_a_miss_says_why() -> None:
    coordinator = LoneCoordinator(expected=2)
    coordinator.ask(Attached, lambda call: Attach(call, OURS, SPEC))
    coordinator.voice("a").join(*pages([A]))
    assert coordinator.status().state == "rebuilding"
    [run] = coordinator.store(attempt(1), [B, C])
    assert run == StoreRun(2, Decision.REFUSED, miss=Miss(MissReason.REBUILDING))
    grant = coordinator.load(attempt(2), [A, B])
    assert (grant.blocks, why(grant)) == (1, MissReason.REBUILDING), "what is known already is served"
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.REBUILDING)]


def test_without_a_shard_whose_content_is_known_nothing_is_stored() -> None:
    coordinator, voice = LoneCoordinator.serving()
    assert voice.report(page(B), first=7).inventory
    assert coordinator.status().shards[0].state == "joining"
    [run] = coordinator.store(attempt(1), [A])
    assert run == StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.SHARD_LOST, "no shard is up"))
    assert coordinator.counter("refused_blocks") == 1


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
    assert coordinator.status().tickets == 1, "that of the store"


def test_siblings_are_the_tenants_own_that_hold_something_the_most_alike_first() -> None:
    coordinator, voice = LoneCoordinator.serving()
    alike = replace(SPEC, weights="sha256:new")
    other = replace(alike, adapter="sha256:lora")
    bare = replace(SPEC, model="unused")
    for tenant, spec in [(OURS, other), (OURS, alike), (OURS, bare), (THEIRS, SPEC)]:
        attach = Attach(CallId(0), tenant, spec)
        space = coordinator.ask(Attached, lambda call, attach=attach: replace(attach, call=call)).namespace  # type: ignore[misc]
        if spec is not bare:
            voice.report(PageEvent(space, key(A), root(), 0, Tier.DEVICE, Loss.EXACT))
    siblings = coordinator.ask(SiblingSpecs, lambda call: Siblings(call, OURS, coordinator.space))
    assert siblings.specs == (alike, other)


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


# ------------------------------------------------------------------------------------- the report stream


def test_a_gap_in_the_reports_asks_for_an_inventory() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    ack = voice.report(page(C), first=3)
    assert (ack.inventory, ack.acked) == (True, 0)
    assert voice.report().inventory, "until it comes"
    assert coordinator.load(attempt(1), [A]).blocks == 1, "what was told before is served on"
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


def test_an_inventory_counts_when_its_last_chunk_has_come() -> None:
    coordinator = LoneCoordinator(expected=1)
    voice = coordinator.voice("a")
    voice.coordinator = Epoch(100)
    assert not voice.inventory(*pages([A]), chunk=0, last=False, upto=9).inventory
    assert not voice.inventory(*pages([A]), chunk=0, last=False, upto=9).inventory, "its answer was lost"
    assert rebuilding(coordinator)
    assert coordinator.status().shards[0].state == "joining"
    assert coordinator.load(attempt(1), [A, B]).blocks == 1, "what was told may be loaded already"
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


def test_an_event_of_a_namespace_over_the_bound_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    unknown = PageEvent(HYBRID.namespace(OURS), key(B), root(), 0, Tier.DEVICE, Loss.EXACT)
    assert voice.report(unknown, page(B, parent=A, depth=1)).acked == 2
    assert voice.report(GoneEvent(HYBRID.namespace(OURS), key(B), corrupt=False)).acked == 3
    assert coordinator.status().blocks == 2


# ----------------------------------------------------------------------------------------- membership


def test_a_silent_shard_is_lost_for_lookups_at_once_and_swept_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SWEEP_BLOCKS", 4)
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


def test_a_lost_shard_that_speaks_again_tells_everything_anew() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.report(page(B, parent=A, depth=1))
    coordinator.later(5 * SECOND)
    assert coordinator.status().blocks == 0
    assert voice.report().inventory
    assert not voice.inventory(*pages([A, B])).inventory
    assert coordinator.load(attempt(1), [A, B]).blocks == 2
    assert [shard.state for shard in coordinator.status().shards] == ["up"]


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


def test_a_shard_of_another_coordinator_epoch_is_asked_for_an_inventory_of_this_one() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    voice.coordinator = Epoch(99)
    for ack in (voice.report(gone(A)), voice.inventory(*pages([B]))):
        assert (ack.epoch, ack.inventory) == (100, True)
    assert reasons(coordinator.explain([A, B])) == [(1, None), (1, MissReason.NEVER_SEEN)], "nothing of it was heard"


def test_a_higher_epoch_reported_while_rebuilding_is_outbid() -> None:
    coordinator = LoneCoordinator(epoch=100, expected=2)
    early, voice = coordinator.voice("b"), coordinator.voice("a")
    early.join()
    voice.coordinator = Epoch(500)
    ack = voice.report(gone(A))
    assert (ack.epoch, ack.inventory) == (501, True)
    voice.join(*pages([A]))
    assert coordinator.status().epoch == 501
    assert early.report().inventory, "who heard the lower one begins anew"
    early.join()
    assert coordinator.load(attempt(1), [A]).blocks == 1
    assert not rebuilding(coordinator)


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
    coordinator.ask(Attached, lambda call: Attach(call, OURS, SPEC))
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


# --------------------------------------------------------------------------------------------- eviction


def test_below_the_low_mark_the_coldest_go_until_the_high_mark_is_free() -> None:
    coordinator, voice = LoneCoordinator.serving(
        *pages(BLOCKS), capacity_pages=20, low_free=0.1, high_free=0.3, hold_ms=0
    )
    voice.free(2)
    assert voice.report().order is None
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS[:2])
    voice.free(1)
    ack = voice.report()
    assert ack.order is not None
    assert ack.order.blocks == tuple((coordinator.space, block) for block in BLOCKS[:6:-1])
    voice.free(6)
    assert carry_out(voice, ack).order is None
    assert coordinator.load(attempt(2), BLOCKS).blocks == 7


def test_pressure_evicts_what_is_wanted() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    assert ordered(voice.report(pressure=2 * PAGE - 1)) == [BLOCKS[11], BLOCKS[10]]


def test_of_a_chain_the_tail_goes_before_the_root_however_slowly_it_grew() -> None:
    coordinator, voice = LoneCoordinator.serving(hold_ms=0, refresh_ms=10_000, ticket_ttl_ms=1_000)
    parent = root()
    for at, (block, event) in enumerate(zip(BLOCKS, pages(BLOCKS), strict=True)):
        beat(coordinator, voice, until=coordinator.now + 3 * SECOND)
        coordinator.store(attempt(at), [block], first=at, parent=parent, run=A)
        voice.report(event)
        parent = block
    assert ordered(voice.report(pressure=5 * PAGE)) == list(BLOCKS[:6:-1])


def test_what_is_in_use_outlives_what_was_stored_later() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    later = chain(3, seed=8)
    coordinator.now += SECOND
    voice.report(*pages(later))
    coordinator.now += SECOND
    coordinator.load(attempt(1), [A, B])
    assert ordered(voice.report(pressure=4 * PAGE)) == [later[2], later[1], later[0], B]


def test_a_growing_sequence_keeps_its_whole_chain_in_use() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0, refresh_ms=1_000)
    later = chain(1, seed=8)
    beat(coordinator, voice, until=coordinator.now + SECOND)
    voice.report(*pages(later))
    beat(coordinator, voice, until=coordinator.now + SECOND)
    coordinator.store(attempt(1), [C], first=2, parent=B, run=A)
    assert ordered(voice.report(pressure=PAGE)) == list(later)


def test_held_and_pinned_blocks_are_spared_while_they_are() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]), capacity_pages=8, hold_ms=2_000)
    coordinator.load(attempt(1), [A, B])
    assert pin(coordinator, [A], 3 * SECOND) == 1
    assert ordered(voice.report(pressure=9 * PAGE)) == [D, C]
    voice.order = 1
    assert ordered(voice.report(gone(C), gone(D), pressure=9 * PAGE)) == []
    beat(coordinator, until=coordinator.now + 2 * SECOND)
    ack = voice.report(pressure=9 * PAGE)
    assert ordered(ack) == [B]
    carry_out(voice, ack)
    beat(coordinator, until=coordinator.now + SECOND)
    assert ordered(voice.report(pressure=9 * PAGE)) == [A]


@pytest.mark.parametrize("how", ["it ends", "it expires"])
def test_a_hold_ends_with_its_ticket_and_that_of_another_stays(how: str) -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), hold_ms=4_000, ticket_ttl_ms=3_000)
    coordinator.load(attempt(1), [A, B])
    coordinator.now += SECOND
    coordinator.load(attempt(2), [A])
    assert ordered(voice.report(pressure=PAGE)) == []
    if how == "it ends":
        end_ticket(coordinator, attempt(1))
    else:
        beat(coordinator, voice, until=coordinator.now + 2 * SECOND)
    assert ordered(voice.report(pressure=9 * PAGE)) == [B]


def test_a_renewed_ticket_holds_on() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hold_ms=2_000)
    coordinator.load(attempt(1), [A])
    coordinator.now += SECOND
    renew_ticket(coordinator, attempt(1))
    coordinator.now += 2 * SECOND - 1
    assert ordered(voice.report(pressure=PAGE)) == []
    coordinator.now += 1
    assert ordered(voice.report(pressure=PAGE)) == [A]


def test_an_order_is_repeated_until_it_is_carried_out() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    first = voice.report(pressure=PAGE)
    assert first.order is not None
    assert voice.report(pressure=9 * PAGE).order == first.order
    voice.order = first.order.number
    second = voice.report(*map(gone, ordered(first)), pressure=PAGE)
    assert second.order is not None
    assert second.order.number == first.order.number + 1
    assert ordered(second) == [BLOCKS[10]]


def test_orders_count_on_when_a_shard_tells_its_content_anew() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:3]), hold_ms=0)
    carry_out(voice, voice.report(pressure=PAGE))
    voice.inventory(*pages(BLOCKS[:2]))
    ack = voice.report(pressure=PAGE)
    assert ack.order is not None
    assert ack.order.number > voice.order, "the shard would take it for one that it has carried out"
    assert ordered(ack) == [B]


def test_what_an_order_named_and_is_still_there_may_be_ordered_again() -> None:
    _coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    voice.order = 0
    assert ordered(voice.report(pressure=PAGE)) == [B]
    voice.order = 1
    assert ordered(voice.report(pressure=PAGE)) == [B], "the event of its end is still to come"


def test_what_an_order_named_is_swept_when_its_shard_is_lost() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B]), hold_ms=0)
    assert ordered(voice.report(pressure=9 * PAGE)) == [B, A]
    coordinator.later(5 * SECOND)
    assert coordinator.status().blocks == 0


def test_an_order_names_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVICTIONS_PER_ORDER", 5)
    monkeypatch.setattr(evictor, "BATCH", 2)
    _, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    ack = voice.report(pressure=12 * PAGE)
    assert ordered(ack) == list(BLOCKS[:6:-1])
    voice.order = 1
    assert ordered(voice.report(*map(gone, ordered(ack)), pressure=6 * PAGE)) == list(BLOCKS[6:1:-1])


def test_what_a_search_found_too_much_stays_in_line() -> None:
    _, voice = LoneCoordinator.serving(*pages(BLOCKS), hold_ms=0)
    ack = voice.report(pressure=PAGE)
    assert ordered(ack) == [BLOCKS[11]]
    voice.order = 1
    assert ordered(voice.report(gone(BLOCKS[11]), pressure=11 * PAGE)) == list(BLOCKS[10::-1])


def test_a_shard_where_nothing_can_go_is_full_and_passed_over_until_it_wants_no_more() -> None:
    coordinator, one = LoneCoordinator.serving(*pages([A]), hold_ms=60_000)
    coordinator.load(attempt(1), [A])
    assert one.report(pressure=PAGE).order is None
    [refused] = coordinator.store(attempt(2), [B])
    assert refused == StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.FULL, "no shard has room to make"))
    two = coordinator.voice("b")
    two.join()
    assert {run.shard for run in coordinator.store(attempt(3), BLOCKS[4:])} == {two.address}
    one.report()
    two.free(0)
    two.report(pressure=PAGE)
    assert {run.shard for run in coordinator.store(attempt(4), [B, C])} == {one.address}


def test_a_search_that_was_cut_short_makes_no_shard_full(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A, B, C]), hold_ms=60_000)
    coordinator.load(attempt(1), [A, B, C])
    voice.report(*pages(chain(1, seed=8)))
    search = ColdQueue.coldest
    searches: list[int] = []

    def short(
        queue: ColdQueue[BlockRecord], count: int, verdict: Callable[[BlockRecord], Verdict]
    ) -> list[BlockRecord]:
        searches.append(count)
        return search(queue, count, verdict, max_inspected=2)

    monkeypatch.setattr(ColdQueue, "coldest", short)
    found: list[BlockHash] = []
    for reports in range(1, 5):
        found += ordered(voice.report(pressure=9 * PAGE))
        assert len(searches) <= reports, "nor does it search on in the same step"
        assert decisions(coordinator.store(attempt(2), [D])) == [(1, Decision.WRITE)]
    assert found[:1] == list(chain(1, seed=8))


def test_while_rebuilding_nothing_is_evicted() -> None:
    coordinator = LoneCoordinator(expected=2, low_free=0.5, high_free=0.5)
    voice = coordinator.voice("a")
    voice.join(*pages([A]))
    voice.free(0)
    assert voice.report(pressure=PAGE).order is None
    coordinator.later(5 * SECOND - 1)
    voice.report()
    coordinator.later(1)
    assert ordered(voice.report(pressure=PAGE)) == [A]


def test_a_queue_forgets_what_went_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    search = ColdQueue.coldest
    monkeypatch.setattr(ColdQueue, "coldest", lambda *args: search(*args, max_inspected=1))
    coordinator, voice = LoneCoordinator.serving(*pages([A]), hold_ms=0)
    coordinator.now += SECOND
    later = chain(1_200, seed=8)
    voice.report(*pages(later))
    voice.report(*(gone(block, corrupt=True) for block in later))
    assert ordered(voice.report(pressure=PAGE)) == [A]
    [member] = coordinator.core.members.all()
    assert len(member.cold) == 0


# ------------------------------------------------------------------------------------------------- pins


def test_pins_take_the_leading_blocks_that_are_there_and_fit_their_share() -> None:
    coordinator, _voice = LoneCoordinator.serving(*pages(BLOCKS[:4]), capacity_pages=12, pinned_share=0.25)
    assert pin(coordinator, BLOCKS[3:6]) == 1, "the next is not there"
    assert pin(coordinator, BLOCKS) == 2, "three of twelve fit the share, and one is taken"
    assert pin(coordinator, [D, *BLOCKS[:3]]) == 3, "who is pinned already takes nothing again"
    assert unpin(coordinator, BLOCKS) == 3
    assert pin(coordinator, BLOCKS) == 3


def test_a_pin_that_ran_out_leaves_its_share() -> None:
    coordinator, _voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), capacity_pages=4, pinned_share=0.25)
    assert pin(coordinator, [A], SECOND) == 1
    assert pin(coordinator, [B]) == 0
    coordinator.now += SECOND
    assert pin(coordinator, [B]) == 1


def test_a_pin_goes_with_its_block() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages([A]))
    assert pin(coordinator, [A]) == 1
    voice.report(gone(A, corrupt=True))
    assert unpin(coordinator, [A]) == 0
