"""A shard by itself: a test plays its workers and its coordinator, and every step is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import ALIGN_BYTES
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, ShardId, Tenant
from kvcluster.core.invariants import check_shard
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachShard,
    Commit,
    CommitGrant,
    Done,
    Effect,
    Erase,
    EvictOrder,
    Fetch,
    Inventory,
    Leave,
    Move,
    Moved,
    MoveOrder,
    MovePages,
    NewPage,
    Order,
    OrderProgress,
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
    Stage,
    StreamEvent,
    Tick,
    Tier,
    Unpin,
    Verified,
    Verify,
    WriteGrant,
    Written,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPages
from kvcluster.core.shard.shard import Shard
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import CoreStepper, build_request
from tests.core.samples import MEMBERSHIP_MS, OURS, PAGE, SECOND, SPEC, SUMS, WHOLE, chain, key, ours, root

OTHER = replace(SPEC, weights="sha256:other")
R = TypeVar("R")


def acknowledged(message: Report | Inventory, coordinator: Epoch) -> ReportAck:
    """Returns the answer of a coordinator that has received everything."""
    if isinstance(message, Inventory):
        return ReportAck(coordinator, message.upto if message.last else 0)
    return ReportAck(coordinator, message.first + len(message.events) - 1)


class LoneShard(CoreStepper):
    """A shard. The test plays its workers, and its coordinator by `answer` and `fail`; it moves `now`."""

    core: Shard

    def __init__(
        self,
        pages: int = 8,
        epoch: int = 7,
        *,
        host_pages: int = 0,
        gpu_pages: int = 0,
        found: RecoveredPages = NO_STORE,
        spec: KVSpec = SPEC,
        **config: int,
    ) -> None:
        """With room for so many raw pages of `spec`, for so many in its host tier and on a GPU, and with a disk tier
        where its shell has `found` one."""
        page_bytes = spec.page_bytes(0, WHOLE)
        self.now = 10 * SECOND
        self.epoch = Epoch(epoch)
        self.coordinator = Epoch(100)
        core = Shard(
            ShardId("a"),
            self.epoch,
            ShardConfig(
                ram_bytes=pages * page_bytes,
                disk_dir="",  # its shell has looked there, and tells what it has `found`
                **({"host_bytes": host_pages * page_bytes, "extent_bytes": PAGE, "scrub_bytes": 0} | config),
            ),
            membership_ttl_ms=MEMBERSHIP_MS,
            address="a:1",
            host="here",
            found={Tier.GPU: RecoveredPages(gpu_pages * page_bytes, ALIGN_BYTES), Tier.DISK: found},
        )
        super().__init__(core)
        self.spec = spec
        self.space = spec.namespace(OURS)
        self.sent: Report | Inventory | None = None
        self.replies: dict[CallId, Reply] = {}
        self.revoked: list[Attempt] = []
        self.reading: Verify | None = None
        self.fetching: list[Fetch] = []
        self.moving: MovePages | None = None
        self.staging: Stage | None = None
        """The last."""
        self.erased: list[Erase] = []
        self.left = False
        self.ordered = 0
        """The number of the last order."""

    @classmethod
    def joined(
        cls,
        pages: int = 8,
        *,
        host_pages: int = 0,
        gpu_pages: int = 0,
        found: RecoveredPages = NO_STORE,
        spec: KVSpec = SPEC,
        **config: int,
    ) -> LoneShard:
        """One that a coordinator knows, with our `spec` attached and reported."""
        shard = cls(pages, host_pages=host_pages, gpu_pages=gpu_pages, found=found, spec=spec, **config)
        shard.attach(spec)
        shard.settle()
        assert shard.core.state.member(shard.now)
        return shard

    def read_clock(self) -> int:
        return self.now

    def step(self, message: ShardMessage) -> list[Effect]:
        effects = super().step(message)
        check_shard(self.core)
        return effects

    def answering(self, message: ShardMessage, answer: Answer) -> None:
        self.replies[answer.call] = answer.reply

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send(report):
                assert self.sent is None, "two messages under way"
                self.sent = report
            case Revoke(revoked, _):
                self.revoked.append(revoked)
            case Verify():
                assert self.reading is None, "two batches are read"
                self.reading = effect
            case Fetch():
                self.fetching.append(effect)
            case MovePages():
                assert self.moving is None, "two batches are moved"
                self.moving = effect
            case Stage():
                self.staging = effect
            case Erase():
                self.erased.append(effect)
            case Leave():
                self.left = True

    def call(self, build: Callable[[CallId], ShardMessage]) -> CallId:
        """Asks a question that may be answered later: `replies` will have the answer."""
        return self.submit(build)

    def ask(self, kind: type[R], build: Callable[[CallId], ShardMessage]) -> R:
        """Asks a question that is answered at once, by a reply of that kind."""
        reply = self.ask_now(build)
        assert isinstance(reply, kind)
        return reply

    def later(self, passed_ns: int) -> list[Effect]:
        """Time passes, and the Tick comes if one is due."""
        self.now += passed_ns
        deadline = self.core.next_deadline()
        return self.step(Tick()) if deadline is not None and deadline <= self.now else []

    # ------------------------------------------------------------------------------ as its coordinator

    def answer(self, ack: ReportAck | None = None) -> list[Effect]:
        """Answers the message under way; by default everything is acknowledged."""
        message, self.sent = self.sent, None
        assert message is not None, "nothing was sent"
        return self.step(ReportAnswered(ack or acknowledged(message, self.coordinator)))

    def fail(self) -> list[Effect]:
        assert self.sent is not None, "nothing was sent"
        self.sent = None
        return self.step(ReportFailed())

    def settle(self) -> list[StreamEvent]:
        """Answers until no message is under way; returns the events and pages that were reported."""
        told: list[StreamEvent] = []
        while self.sent is not None:
            told += self.sent.pages if isinstance(self.sent, Inventory) else self.sent.events
            self.answer()
        return told

    def hear(self, **said: Any) -> list[Effect]:
        """Answers the next heartbeat, with these fields of ReportAck."""
        if self.sent is None:
            self.later(SECOND)
        assert self.sent is not None
        return self.answer(replace(acknowledged(self.sent, self.coordinator), **said))

    def order(self, make: Callable[[int], Order], **said: Any) -> list[Effect]:
        """The same, and the answer brings one more order, which `make` makes from its number."""
        self.ordered += 1
        return self.hear(orders=(make(self.ordered),), **said)

    def evict(self, *blocks: BlockHash, tier: Tier = Tier.RAM) -> list[Effect]:
        """Lets the next heartbeat bring back the order to evict these."""
        named = tuple((self.space, block) for block in blocks)
        return self.order(lambda number: EvictOrder(number, named, tier))

    def demote(
        self, *blocks: BlockHash, codec: Codec = Codec.Q8, to: Tier = Tier.HOST, keeps: bool = False
    ) -> list[Effect]:
        """Lets the next heartbeat bring back the order to move these down, to that tier."""
        return self.order(moves(*[Move(self.space, block, to, codec, keeps) for block in blocks]))

    def promote(self, *blocks: BlockHash, to: Tier = Tier.RAM) -> list[Effect]:
        return self.order(moves(*[Move(self.space, block, to, up=True) for block in blocks]))

    def move(self, *, unfit: Sequence[int] = (), corrupt: Sequence[int] = ()) -> list[Effect]:
        """What was to move has moved, but for the pages at the indices `unfit`, which cannot be encoded or written;
        those at the indices `corrupt` were other bytes than they should be."""
        moving, self.moving = self.moving, None
        assert moving is not None, "nothing moves"
        sums = tuple(
            None if at in unfit else page.source.sums if page.target.tier is Tier.DISK else SUMS
            for at, page in enumerate(moving.pages)
        )
        return self.step(Moved(moving.attempt, sums, tuple(corrupt)))

    def move_all(self) -> None:
        """Batch after batch, until nothing moves any more."""
        while self.moving is not None:
            self.move()

    def verdict(self, *corrupt: int) -> list[Effect]:
        """What was to be read again is read; those of it are corrupt."""
        reading, self.reading = self.reading, None
        assert reading is not None, "nothing is read"
        return self.step(Verified(reading.attempt, corrupt))

    # -------------------------------------------------------------------------------- as its workers

    def attach(self, spec: KVSpec = SPEC, tenant: Tenant = OURS) -> Reply:
        return self.ask_now(build_request(AttachShard(spec), tenant))

    def pin(
        self,
        of: Attempt,
        *blocks: BlockHash,
        tenant: Tenant = OURS,
        epoch: int | None = None,
        accept: Loss = Loss.EXACT,
        on_device: bool = False,
    ) -> Reply:
        keys = tuple(key(block) for block in blocks)
        at = self.epoch if epoch is None else Epoch(epoch)
        return self.ask_now(build_request(Pin(of, at, keys, accept, on_device), tenant, self.space))

    def pinning(self, of: Attempt, *blocks: BlockHash, accept: Loss = Loss.EXACT) -> CallId:
        """Asks for a pin that is answered when its pages have been read from a store."""
        keys = tuple(key(block) for block in blocks)
        return self.call(build_request(Pin(of, self.epoch, keys, accept), OURS, self.space))

    def reserving(self, of: Attempt, *pages: PageKey | BlockHash, wait_ns: int = 0, loss: Loss = Loss.EXACT) -> CallId:
        """A Reserve that may wait."""
        keys = [page if isinstance(page, PageKey) else key(page) for page in pages]
        new = tuple(NewPage(page, root(), 0, loss) for page in keys)
        return self.call(ours(Reserve(of, self.epoch, new, wait_ns), self.space))

    def reserve(
        self, of: Attempt, *pages: PageKey | BlockHash, loss: Loss = Loss.EXACT
    ) -> Sequence[PageSlot | Written]:
        reply = self.replies[self.reserving(of, *pages, loss=loss)]
        assert isinstance(reply, WriteGrant)
        return reply.pages

    def commit(self, of: Attempt, *indices: int) -> Sequence[Written]:
        sums = (SUMS,) * len(indices)
        return self.ask(CommitGrant, ours(Commit(of, indices, sums))).pages

    def store(self, of: Attempt, *pages: PageKey | BlockHash, loss: Loss = Loss.EXACT) -> None:
        """Reserves and commits new blocks, and has the coordinator know of them."""
        assert all(isinstance(page, PageSlot) for page in self.reserve(of, *pages, loss=loss))
        assert self.commit(of, *range(len(pages))) == (Written.COMMITTED,) * len(pages)
        self.settle()


BLOCKS = chain(12)
A, B, C, D = BLOCKS[:4]


def moves(*what: Move) -> Callable[[int], MoveOrder]:
    """The order to make these moves, by its number."""
    return partial(MoveOrder, moves=what)


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
    """Returns the answer to a Reserve that waited."""
    reply = shard.replies[call]
    assert isinstance(reply, WriteGrant)
    return reply.pages


def report(shard: LoneShard) -> Report:
    """The report under way."""
    assert isinstance(shard.sent, Report)
    return shard.sent


def is_done(shard: LoneShard) -> bool:
    """Does the report under way say that all that was ordered has ended?"""
    return report(shard).orders == OrderProgress(shard.ordered)


def running(shard: LoneShard) -> tuple[int, ...]:
    """The orders that run, as the next heartbeat tells them; all that came were accepted."""
    shard.settle()
    shard.later(SECOND)
    accepted, numbers = report(shard).orders
    shard.settle()
    assert accepted == shard.ordered
    return numbers


def inventory(shard: LoneShard) -> Inventory:
    """The chunk under way."""
    assert isinstance(shard.sent, Inventory)
    return shard.sent


def end(shard: LoneShard, of: Attempt, kind: type[Unpin | Abort] = Unpin) -> bool:
    return shard.ask(Done, ours(kind(of))).ok


def renew(shard: LoneShard, of: Attempt) -> bool:
    return shard.ask(Done, ours(Renew(of))).ok


def counters(shard: LoneShard) -> dict[str, int]:
    """Returns the counters of the next heartbeat."""
    shard.settle()
    shard.later(SECOND)
    assert shard.sent is not None
    told = dict(shard.sent.info.counters)
    shard.settle()
    return told
