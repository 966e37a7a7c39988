"""What a shard promises, message by message. Each test plays its workers and its coordinator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from kvcluster.config import ShardConfig
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, ShardId, Tenant
from kvcluster.core.invariants import check_shard
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    Done,
    Effect,
    EvictOrder,
    Farewell,
    Flush,
    GoneEvent,
    Inventory,
    Leave,
    NewPage,
    PageEvent,
    PageKey,
    PageSlot,
    Pin,
    PinGrant,
    Refused,
    RefusedKind,
    Renew,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Reserve,
    Revoke,
    Send,
    ShardMessage,
    Stalled,
    StreamEvent,
    Tick,
    Tier,
    Unpin,
    WriteGrant,
    Written,
)
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.shard import Shard
from kvcluster.core.spec import KVSpec, Part
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
    SUMS,
    THEIRS,
    WHOLE,
    attempt,
    chain,
    key,
    root,
)

OTHER = replace(SPEC, weights="sha256:other")
R = TypeVar("R")


def acknowledged(message: Report | Inventory, coordinator: Epoch, *, order: EvictOrder | None = None) -> ReportAck:
    """What a coordinator answers that has understood everything."""
    if isinstance(message, Inventory):
        return ReportAck(coordinator, message.upto if message.last else 0, order=order)
    return ReportAck(coordinator, message.first + len(message.events) - 1, order=order)


class LoneShard:
    """A shard. The test plays its workers, and its coordinator by `answer` and `fail`."""

    def __init__(self, pages: int = 8, epoch: int = 7, **config: int) -> None:
        self.now = 10 * SECOND
        self.epoch = Epoch(epoch)
        self.coordinator = Epoch(100)
        self.core = Shard(
            ShardId("a"),
            self.epoch,
            ShardConfig(device_bytes=pages * PAGE, extent_bytes=PAGE, **config),
            membership_ttl_ms=MEMBERSHIP_MS,
            address="a:1",
            host="here",
        )
        self.space = SPEC.namespace(OURS)
        self.sent: Report | Inventory | None = None
        self.replies: dict[CallId, Reply] = {}
        self.revoked: list[Attempt] = []
        self.left = False
        self._calls = itertools.count(1)

    @classmethod
    def joined(cls, pages: int = 8, **config: int) -> LoneShard:
        """One that a coordinator knows, with our SPEC attached and reported."""
        shard = cls(pages, **config)
        shard.attach()
        shard.settle()
        assert shard.core.member(shard.now)
        return shard

    def step(self, message: ShardMessage) -> list[Effect]:
        effects = self.core.step(message, self.now)
        for effect in effects:
            match effect:
                case Answer(call, reply):
                    assert call not in self.replies, "answered twice"
                    self.replies[call] = reply
                case Send(report):
                    assert self.sent is None, "two messages under way"
                    self.sent = report
                case Revoke(revoked):
                    self.revoked.append(revoked)
                case Leave():
                    self.left = True
        check_shard(self.core)
        return effects

    def call(self, build: Callable[[CallId], ShardMessage]) -> CallId:
        """Asks what may be answered later."""
        call = CallId(next(self._calls))
        self.step(build(call))
        return call

    def ask(self, kind: type[R], build: Callable[[CallId], ShardMessage]) -> R:
        """Asks what is answered at once, by a reply of that kind."""
        reply = self.replies[self.call(build)]
        assert isinstance(reply, kind)
        return reply

    def later(self, passed_ns: int) -> list[Effect]:
        """Time passes, and the Tick comes if one is due."""
        self.now += passed_ns
        deadline = self.core.next_deadline()
        return self.step(Tick()) if deadline is not None and deadline <= self.now else []

    # ------------------------------------------------------------------------------ as its coordinator

    def answer(self, ack: ReportAck | None = None) -> list[Effect]:
        """Answers the message under way; all is understood where nothing else is said."""
        message, self.sent = self.sent, None
        assert message is not None, "nothing was sent"
        return self.step(ReportAnswered(ack or acknowledged(message, self.coordinator)))

    def fail(self) -> list[Effect]:
        assert self.sent is not None, "nothing was sent"
        self.sent = None
        return self.step(ReportFailed())

    def settle(self) -> list[StreamEvent]:
        """Answers until nothing is under way; the events and pages that were told."""
        told: list[StreamEvent] = []
        while self.sent is not None:
            told += self.sent.pages if isinstance(self.sent, Inventory) else self.sent.events
            self.answer()
        return told

    def order(self, number: int, *blocks: BlockHash) -> list[Effect]:
        """Lets the next heartbeat bring an order back."""
        if self.sent is None:
            self.later(SECOND)
        assert self.sent is not None
        named = tuple((self.space, block) for block in blocks)
        return self.answer(acknowledged(self.sent, self.coordinator, order=EvictOrder(number, named)))

    # -------------------------------------------------------------------------------- as its workers

    def attach(self, spec: KVSpec = SPEC, tenant: Tenant = OURS) -> Reply:
        return self.replies[self.call(lambda call: AttachShard(call, tenant, spec))]

    def pin(self, of: Attempt, *blocks: BlockHash, tenant: Tenant = OURS, epoch: int | None = None) -> Reply:
        keys = tuple(key(block) for block in blocks)
        at = self.epoch if epoch is None else Epoch(epoch)
        return self.replies[self.call(lambda call: Pin(call, tenant, self.space, of, at, keys))]

    def reserving(self, of: Attempt, *pages: PageKey | BlockHash, wait_ns: int = 0, loss: Loss = Loss.EXACT) -> CallId:
        """A Reserve that may wait."""
        keys = [page if isinstance(page, PageKey) else key(page) for page in pages]
        new = tuple(NewPage(page, root(), 0, loss) for page in keys)
        return self.call(lambda call: Reserve(call, OURS, self.space, of, self.epoch, new, wait_ns))

    def reserve(self, of: Attempt, *pages: PageKey | BlockHash) -> Sequence[PageSlot | Written]:
        reply = self.replies[self.reserving(of, *pages)]
        assert isinstance(reply, WriteGrant)
        return reply.pages

    def commit(self, of: Attempt, *indices: int) -> Sequence[Written]:
        sums = (SUMS,) * len(indices)
        return self.ask(CommitGrant, lambda call: Commit(call, of, indices, sums)).pages

    def store(self, of: Attempt, *blocks: BlockHash) -> None:
        """Reserves and commits blocks that nobody has, and has the coordinator know of them."""
        assert all(isinstance(page, PageSlot) for page in self.reserve(of, *blocks))
        assert self.commit(of, *range(len(blocks))) == (Written.COMMITTED,) * len(blocks)
        self.settle()


BLOCKS = chain(12)
A, B, C, D = BLOCKS[:4]


def misses(reply: Reply) -> list[MissReason]:
    """Why each page of a pin was not given; every one was not."""
    assert isinstance(reply, PinGrant)
    assert all(isinstance(page, Miss) for page in reply.pages)
    return [page.reason for page in reply.pages if isinstance(page, Miss)]


def slots(pages: Sequence[PageSlot | Written | Miss]) -> list[PageSlot]:
    """The pages of a grant; every one was granted."""
    assert all(isinstance(page, PageSlot) for page in pages)
    return [page for page in pages if isinstance(page, PageSlot)]


def pinned(reply: Reply) -> list[PageSlot]:
    assert isinstance(reply, PinGrant)
    return slots(reply.pages)


def refusal(reply: Reply) -> RefusedKind:
    assert isinstance(reply, Refused)
    return reply.kind


def granted(shard: LoneShard, call: CallId) -> Sequence[PageSlot | Written]:
    """What a Reserve that waited was answered."""
    reply = shard.replies[call]
    assert isinstance(reply, WriteGrant)
    return reply.pages


def report(shard: LoneShard) -> Report:
    """The report under way."""
    assert isinstance(shard.sent, Report)
    return shard.sent


def inventory(shard: LoneShard) -> Inventory:
    """The chunk under way."""
    assert isinstance(shard.sent, Inventory)
    return shard.sent


def end(shard: LoneShard, of: Attempt, kind: type[Unpin | Abort] = Unpin) -> bool:
    return shard.ask(Done, lambda call: kind(call, of)).ok


def renew(shard: LoneShard, of: Attempt) -> bool:
    return shard.ask(Done, lambda call: Renew(call, of)).ok


def counters(shard: LoneShard) -> dict[str, int]:
    """As the next heartbeat tells them."""
    shard.settle()
    shard.later(SECOND)
    assert shard.sent is not None
    told = dict(shard.sent.info.counters)
    shard.settle()
    return told


# ------------------------------------------------------------------------------------------ namespaces


def test_attach_names_the_namespace_the_epoch_and_how_long_leases_run() -> None:
    shard = LoneShard(lease_ttl_ms=1_500)
    assert shard.attach() == AttachedShard(SPEC.namespace(OURS), Epoch(7), 1_500 * MS)
    assert shard.attach(tenant=THEIRS) == AttachedShard(SPEC.namespace(THEIRS), Epoch(7), 1_500 * MS)


def test_a_namespace_that_nobody_attached_is_unknown() -> None:
    shard = LoneShard()
    shard.settle()
    assert refusal(shard.pin(attempt(1), A)) is RefusedKind.UNKNOWN_NAMESPACE
    assert refusal(shard.replies[shard.reserving(attempt(1), A)]) is RefusedKind.UNKNOWN_NAMESPACE


def test_the_namespace_of_another_tenant_looks_like_none() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    unknown = shard.pin(attempt(2), A, tenant=THEIRS)
    assert refusal(unknown) is RefusedKind.UNKNOWN_NAMESPACE
    assert unknown == LoneShard().pin(attempt(2), A, tenant=THEIRS)


def test_a_tenant_has_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    assert refusal(shard.attach(HYBRID)) is RefusedKind.LIMIT
    assert isinstance(shard.attach(HYBRID, THEIRS), AttachedShard)
    assert isinstance(shard.attach(), AttachedShard), "which it has already"


def test_a_namespace_of_which_nothing_is_left_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 2)
    shard = LoneShard.joined(pages=1)
    shard.attach(OTHER, THEIRS)
    shard.attach(OTHER)
    shard.store(attempt(1), A)
    assert isinstance(shard.attach(HYBRID), AttachedShard), "`OTHER` holds nothing"
    shard.settle()
    assert isinstance(shard.attach(OTHER), AttachedShard), "and now `HYBRID`"
    assert pinned(shard.pin(attempt(2), A))


def test_a_namespace_that_a_reservation_waits_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined(pages=2)
    shard.attach(HYBRID, THEIRS)
    theirs = HYBRID.namespace(THEIRS)
    big = NewPage(PageKey(A, 0, HYBRID.whole(0)), root(), 0)
    shard.reserve(attempt(1), A, B)
    shard.settle()
    waiting = shard.call(lambda call: Reserve(call, THEIRS, theirs, attempt(2), shard.epoch, (big,), SECOND))
    shard.settle()
    assert refusal(shard.attach(SPEC, THEIRS)) is RefusedKind.LIMIT
    assert end(shard, attempt(1), Abort)
    assert slots(granted(shard, waiting))


# -------------------------------------------------------------------------------------- the life of a page


def test_a_page_can_be_read_once_it_is_committed() -> None:
    shard = LoneShard.joined()
    [slot] = slots(shard.reserve(attempt(1), A))
    assert misses(shard.pin(attempt(2), A)) == [MissReason.PENDING]
    assert shard.commit(attempt(1), 0) == (Written.COMMITTED,)
    [read] = pinned(shard.pin(attempt(3), A))
    assert read == replace(slot, sums=SUMS)


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
    shard.call(lambda call: Reserve(call, OURS, shard.space, attempt(1), shard.epoch, (new,)))
    shard.commit(attempt(1), 0)
    assert shard.settle() == [PageEvent(shard.space, key(B, LEFT), A, 1, Tier.DEVICE, Loss.Q8)]


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
    assert shard.commit(attempt(1), 0) == (Written.COMMITTED,), "what it had before is untouched"


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
    reply = shard.ask(Refused, lambda call: Reserve(call, OURS, space, attempt(1), shard.epoch, (page,), SECOND))
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
    assert shard.commit(attempt(9), 0) == (Written.LOST,), "nobody knows this attempt"
    assert counters(shard)["late"] == 2


@pytest.mark.parametrize("kind", [Unpin, Abort])
def test_time_alone_frees_no_page_that_somebody_may_still_touch(kind: type[Unpin | Abort]) -> None:
    shard = LoneShard.joined(pages=1, lease_ttl_ms=1_000)
    if kind is Unpin:
        shard.store(attempt(1), A)
        shard.pin(attempt(2), A)
        shard.order(1, A)
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
    flush = shard.call(lambda call: Flush(call, 2 * SECOND))
    shard.fail()
    shard.now += 6 * SECOND
    shard.step(Stalled(6 * SECOND))
    assert granted(shard, waiting) == (Written.LOST,), "nor does it believe that it is a member still"
    shard.step(Tick())
    assert shard.replies[flush] == Done()
    assert not shard.core.member(shard.now)


# -------------------------------------------------------------------------------- waiting for room


def test_a_reservation_without_room_waits_and_says_how_much_it_wants() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, C, D, wait_ns=SECOND)
    assert waiting not in shard.replies
    assert report(shard).pressure_bytes == PAGE, "two of the three fit the whole pool, and there is room for one"


def test_a_waiting_reservation_is_served_when_an_order_makes_room() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A, B)
    waiting = shard.reserving(attempt(2), C, wait_ns=SECOND)
    shard.order(1, B)
    assert slots(granted(shard, waiting))
    assert misses(shard.pin(attempt(3), B)) == [MissReason.EVICTED]
    assert pinned(shard.pin(attempt(4), A))


def test_reservations_are_served_in_order_of_arrival() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A, B)
    large = shard.reserving(attempt(2), C, D, wait_ns=SECOND)
    small = shard.reserving(attempt(3), BLOCKS[4], wait_ns=SECOND)
    shard.order(1, A)
    assert large not in shard.replies
    assert small not in shard.replies, "there is room for it, but it came later"
    shard.order(2, B)
    assert slots(granted(shard, large))
    assert small not in shard.replies
    assert end(shard, attempt(2), Abort)
    assert slots(granted(shard, small))


def test_who_waited_long_enough_gets_what_fits_and_full_for_the_rest() -> None:
    shard = LoneShard.joined(pages=2)
    shard.store(attempt(1), A)
    waiting = shard.reserving(attempt(2), A, B, C, wait_ns=SECOND)
    shard.settle()
    shard.later(SECOND - 1)
    assert waiting not in shard.replies
    shard.later(1)
    duplicate, slot, full = granted(shard, waiting)
    assert duplicate is Written.DUPLICATE
    assert isinstance(slot, PageSlot)
    assert full is Written.FULL
    assert counters(shard)["full"] == 1


def test_a_short_wait_ends_behind_a_long_one() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    patient = shard.reserving(attempt(2), B, wait_ns=5 * SECOND)
    hasty = shard.reserving(attempt(3), C, wait_ns=SECOND)
    shard.settle()
    shard.later(SECOND)
    assert granted(shard, hasty) == (Written.FULL,)
    assert patient not in shard.replies
    deadline = shard.core.next_deadline()
    assert deadline is None or deadline > shard.now, "nothing that is over asks for another Tick"


def test_nobody_waits_longer_than_a_lease_runs() -> None:
    shard = LoneShard.joined(pages=1, lease_ttl_ms=1_000)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=3_600 * SECOND)
    shard.settle()
    shard.later(SECOND)
    assert granted(shard, waiting) == (Written.FULL,)


def test_a_bounded_number_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING_WRITES", 1)
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    shard.reserving(attempt(2), B, wait_ns=SECOND)
    assert granted(shard, shard.reserving(attempt(3), C, wait_ns=SECOND)) == (Written.FULL,)


def test_a_writer_that_gives_up_waits_no_more_and_is_answered() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    gives_up = shard.reserving(attempt(2), B, wait_ns=SECOND)
    stays = shard.reserving(attempt(3), C, wait_ns=SECOND)
    assert end(shard, attempt(2), Abort)
    assert granted(shard, gives_up) == (Written.LOST,)
    shard.order(1, A)
    assert slots(granted(shard, stays))


def test_what_somebody_else_writes_meanwhile_is_not_waited_for() -> None:
    shard = LoneShard.joined(pages=2)
    shard.reserve(attempt(1), A)
    shard.reserve(attempt(2), B)
    waiting = shard.reserving(attempt(3), A, C, wait_ns=SECOND)
    shard.commit(attempt(1), 0)
    assert waiting not in shard.replies
    assert end(shard, attempt(2), Abort)
    duplicate, slot = granted(shard, waiting)
    assert duplicate is Written.DUPLICATE
    assert isinstance(slot, PageSlot)


# ------------------------------------------------------------------------------------------------ eviction


def test_a_condemned_page_stays_with_its_reader_and_is_found_by_no_other() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(attempt(1), A)
    [read] = pinned(shard.pin(attempt(2), A))
    shard.order(1, A)
    assert shard.settle() == [GoneEvent(shard.space, key(A), corrupt=False)]
    assert misses(shard.pin(attempt(3), A)) == [MissReason.EVICTED]
    assert shard.core.pool.condemned == 1
    assert shard.reserve(attempt(4), A) == (Written.FULL,), "its bytes are still being read"
    assert end(shard, attempt(4), Abort)
    assert end(shard, attempt(2))
    [written] = slots(shard.reserve(attempt(5), A))
    assert written.offset == read.offset
    assert written.generation > read.generation


def test_an_order_takes_all_parts_of_a_block_and_leaves_what_is_being_written() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), key(B, LEFT), key(B, RIGHT))
    shard.commit(attempt(2), 0, 1)
    shard.settle()
    shard.reserve(attempt(3), C)
    shard.order(1, B, C, D)
    assert shard.settle() == [GoneEvent(shard.space, key(B, part), corrupt=False) for part in (LEFT, RIGHT)]
    assert shard.commit(attempt(3), 0) == (Written.COMMITTED,)
    assert counters(shard)["evicted"] == 2


def test_an_order_for_a_namespace_that_nobody_attached_here_is_carried_out() -> None:
    shard = LoneShard.joined()
    shard.later(SECOND)
    assert shard.sent is not None
    foreign = EvictOrder(1, ((SPEC.namespace(THEIRS), A),))
    shard.answer(acknowledged(shard.sent, shard.coordinator, order=foreign))
    assert report(shard).order == 1


def test_an_order_is_carried_out_once_and_said_at_once() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.order(3, A)
    assert (report(shard).order, report(shard).events) == (3, (GoneEvent(shard.space, key(A), corrupt=False),))
    shard.settle()
    shard.store(attempt(2), A)
    shard.order(3, A)
    assert pinned(shard.pin(attempt(3), A)), "a repeated order is an old one"


# ---------------------------------------------------------------------------------------- membership


def test_without_a_coordinator_nothing_is_pinned_reserved_or_committed() -> None:
    shard = LoneShard()
    shard.attach()
    assert misses(shard.pin(attempt(1), A, B)) == [MissReason.SHARD_LOST] * 2
    assert shard.reserve(attempt(1), A, B) == (Written.LOST,) * 2
    assert not len(shard.core.leases)


def test_the_term_is_counted_from_before_it_asked_less_what_clocks_drift() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.later(SECOND)
    asked_at = shard.now
    shard.later(3 * SECOND)
    shard.answer()
    shard.later(asked_at + MEMBERSHIP_MS * MS * 98 // 100 - 1 - shard.now)
    assert pinned(shard.pin(attempt(3), A))
    shard.later(1)
    assert misses(shard.pin(attempt(4), A)) == [MissReason.SHARD_LOST]
    assert shard.reserve(attempt(4), C) == (Written.LOST,)
    assert shard.commit(attempt(2), 0) == (Written.LOST,)
    assert counters(shard)["late"] == 1


def test_a_pin_granted_before_the_term_ended_may_be_read_to_its_end() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.pin(attempt(2), A)
    shard.later(6 * SECOND)
    assert not shard.core.member(shard.now)
    assert renew(shard, attempt(2))


def test_who_waits_for_room_when_the_term_ends_is_told_that_it_is_lost() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=9 * SECOND)
    shard.fail()
    shard.later(5 * SECOND)
    assert granted(shard, waiting) == (Written.LOST,)
    assert attempt(2) not in shard.core.leases


def test_a_newer_incarnation_ends_this_one() -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    waiting = shard.reserving(attempt(2), B, wait_ns=SECOND)
    flush = shard.call(lambda call: Flush(call, SECOND))
    assert flush in shard.replies
    shard.settle()
    shard.commit(attempt(1), 0)
    shard.pin(attempt(3), A)
    flush = shard.call(lambda call: Flush(call, SECOND))
    later = shard.reserving(attempt(4), C, wait_ns=SECOND)
    shard.answer(ReportAck(Epoch(1), 0, leave=Farewell.REPLACED))
    assert shard.left
    assert shard.revoked == [attempt(3)]
    assert granted(shard, waiting) == granted(shard, later) == (Written.LOST,)
    assert shard.replies[flush] == Done(False)
    assert misses(shard.pin(attempt(5), A)) == [MissReason.SHARD_LOST]
    assert not shard.core.member(shard.now)
    assert end(shard, attempt(3))
    assert (shard.sent, shard.core.next_deadline()) == (None, None), "it has nothing more to say"


def test_a_higher_coordinator_epoch_is_adopted_and_owed_an_inventory() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A, B)
    shard.order(5, B)
    shard.settle()
    shard.later(SECOND)
    shard.coordinator = Epoch(200)
    shard.answer(ReportAck(Epoch(200), 0, inventory=True))
    told = inventory(shard)
    assert (told.coordinator, told.upto, told.chunk, told.last) == (200, 0, 0, True)
    assert [page.key for page in told.pages] == [key(A)]
    shard.settle()
    shard.order(1, A)
    assert misses(shard.pin(attempt(2), A)) == [MissReason.EVICTED], "orders are counted by each coordinator"


def test_a_lower_coordinator_epoch_is_not_heard() -> None:
    shard = LoneShard.joined()
    shard.store(attempt(1), A)
    shard.later(SECOND)
    asked_at = shard.now
    shard.answer(ReportAck(Epoch(99), 10**6, order=EvictOrder(9, ((shard.space, A),))))
    assert shard.sent is None
    assert shard.core.next_deadline() == asked_at + 250 * MS, "the right one may be back by then"
    assert pinned(shard.pin(attempt(2), A))
    shard.later(4 * SECOND)
    assert misses(shard.pin(attempt(3), A)) == [MissReason.SHARD_LOST], "nor does it make this shard a member"


# ------------------------------------------------------------------------------------------- reports


def test_the_first_word_is_an_inventory() -> None:
    shard = LoneShard()
    shard.attach()
    assert (inventory(shard).coordinator, inventory(shard).pages) == (Epoch(0), ())
    shard.answer()
    assert (inventory(shard).coordinator, inventory(shard).last) == (Epoch(100), True), "now it knows to whom"
    shard.answer()
    assert shard.sent is None


def test_every_message_carries_the_specs_of_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 1)
    shard = LoneShard.joined()
    shard.reserve(attempt(1), A, B)
    shard.commit(attempt(1), 0, 1)
    assert report(shard).specs == ((OURS, SPEC),)
    shard.settle()
    shard.later(SECOND)
    assert report(shard).specs == (), "a heartbeat has nothing to explain"
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    for _ in range(2):
        assert inventory(shard).specs == ((OURS, SPEC),)
        shard.answer()


def test_a_page_whose_namespace_is_forgotten_is_told_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = LoneShard.joined()
    shard.later(SECOND)
    commit_one(shard, 1, A)
    shard.order(1, A)
    assert isinstance(shard.attach(OTHER), AttachedShard)
    shard.fail()
    shard.later(SECOND)
    told = report(shard)
    assert [type(event) for event in told.events] == [PageEvent, GoneEvent]
    assert told.specs == ()


def test_an_inventory_lists_what_is_ready_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 2)
    shard = LoneShard.joined()
    shard.store(attempt(1), *BLOCKS[:5])
    shard.reserve(attempt(2), BLOCKS[5])
    shard.order(1, B)
    shard.settle()
    shard.later(SECOND)
    assert report(shard).events == ()
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    chunks: list[tuple[int, bool, list[BlockHash]]] = []
    while isinstance(shard.sent, Inventory):
        chunks.append((shard.sent.chunk, shard.sent.last, [page.key.hash for page in shard.sent.pages]))
        shard.answer()
    assert chunks == [(0, False, [A, C]), (1, True, [D, BLOCKS[4]])]


def test_a_refused_inventory_is_not_repeated_in_haste() -> None:
    shard = LoneShard()
    shard.attach()
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    assert inventory(shard).coordinator == shard.coordinator, "the first answer told it whom to tell"
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    assert shard.sent is None
    assert shard.later(249 * MS) == []
    shard.later(MS)
    assert inventory(shard).chunk == 0


def test_a_report_says_what_the_shard_is_and_has() -> None:
    shard = LoneShard.joined(pages=4)
    shard.store(attempt(1), A)
    shard.reserve(attempt(2), B)
    shard.later(SECOND)
    told = report(shard).info
    assert (told.shard, told.epoch, told.address, told.host) == ("a", 7, "a:1", "here")
    assert (told.capacity_bytes, told.free_bytes, told.pages, told.leases) == (4 * PAGE, 2 * PAGE, 2, 1)
    assert dict(told.counters)["commits"] == 1
    said = report(shard)
    assert (said.events, said.specs, said.pressure_bytes, said.order) == ((), (), 0, 0)


def test_news_are_told_at_once_and_else_a_heartbeat_when_it_is_due() -> None:
    shard = LoneShard.joined()
    assert shard.sent is None
    assert shard.later(499 * MS) == []
    shard.later(MS)
    assert report(shard).events == ()
    shard.settle()
    shard.reserve(attempt(1), A)
    shard.commit(attempt(1), 0)
    assert [event.key for event in report(shard).events] == [key(A)]


def test_what_failed_is_sent_again_no_sooner_than_the_retry_however_urgent() -> None:
    shard = LoneShard.joined()
    shard.reserve(attempt(1), A, B)
    shard.commit(attempt(1), 0)
    first = report(shard)
    shard.fail()
    shard.reserve(attempt(2), B)
    shard.commit(attempt(2), 0)
    assert shard.sent is None
    shard.later(249 * MS)
    assert shard.sent is None
    shard.later(MS)
    assert report(shard).first == first.first
    assert [event.key for event in report(shard).events] == [key(A), key(B)]


@pytest.mark.parametrize("coordinator", ["answers", "fails", "is over", "refuses"])
def test_a_shard_that_is_left_alone_sends_a_bounded_number_of_messages_a_second(coordinator: str) -> None:
    shard = LoneShard.joined(pages=1)
    shard.reserve(attempt(1), A)
    shard.reserving(attempt(2), B, wait_ns=9 * SECOND)
    shard.commit(attempt(1), 0)
    sent = ticks = 0
    until = shard.now + 10 * SECOND
    while shard.now < until:
        if shard.sent is not None:
            sent += 1
            match coordinator:
                case "answers":
                    shard.answer()
                case "fails":
                    shard.fail()
                case "is over":
                    shard.answer(ReportAck(Epoch(99), 0))
                case _:
                    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
            continue
        deadline = shard.core.next_deadline()
        assert deadline is not None
        shard.now = max(shard.now, deadline)
        shard.step(Tick())
        ticks += 1
    assert sent <= 10 * (1_000 // 250) + 3
    assert ticks <= sent + 4, "a Tick for each message, and one for each thing that came to its end"


# --------------------------------------------------------------------------------------------- flushes


def flushing(shard: LoneShard, wait_ns: int = SECOND) -> CallId:
    return shard.call(lambda call: Flush(call, wait_ns))


def commit_one(shard: LoneShard, counter: int, block: BlockHash) -> None:
    shard.reserve(attempt(counter), block)
    shard.commit(attempt(counter), 0)


def test_a_flush_of_nothing_is_done() -> None:
    shard = LoneShard.joined()
    assert shard.replies[flushing(shard)] == Done()


def test_a_flush_is_answered_when_all_that_came_before_is_acknowledged() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    commit_one(shard, 2, B)
    flush = flushing(shard)
    commit_one(shard, 3, C)
    shard.answer()
    assert flush not in shard.replies, "only the first was under way"
    shard.answer()
    assert shard.replies[flush] == Done()


def test_a_flush_that_may_not_wait_says_how_it_stands() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    assert shard.replies[flushing(shard, 0)] == Done(False)
    shard.settle()
    assert shard.replies[flushing(shard, 0)] == Done()


def test_a_flush_ends_when_its_wait_does() -> None:
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    flush = flushing(shard)
    shard.later(SECOND - 1)
    assert flush not in shard.replies
    shard.later(1)
    assert shard.replies[flush] == Done(False)


@pytest.mark.parametrize("coordinator", ["the same", "another"])
def test_a_flush_across_an_inventory_ends_with_it(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 1)
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    commit_one(shard, 2, B)
    flush = flushing(shard)
    if coordinator == "another":
        shard.coordinator = Epoch(200)
    shard.answer(ReportAck(shard.coordinator, 0, inventory=True))
    commit_one(shard, 3, C)
    late = flushing(shard)
    assert inventory(shard).chunk == 0
    shard.answer()
    assert inventory(shard).last
    assert flush not in shard.replies
    shard.answer()
    assert shard.replies[flush] == Done()
    assert late not in shard.replies, "what it waits for is not in the inventory"
    shard.answer()
    assert shard.replies[late] == Done()


def test_more_than_the_backlog_holds_becomes_an_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BACKLOG", 2)
    shard = LoneShard.joined()
    commit_one(shard, 1, A)
    for counter, block in enumerate((B, C, D), 2):
        commit_one(shard, counter, block)
    flush = flushing(shard)
    shard.answer()
    assert [page.key.hash for page in inventory(shard).pages] == [A, B, C, D]
    shard.answer()
    assert shard.replies[flush] == Done()
