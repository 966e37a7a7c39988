"""A shard by itself: a test plays its workers and its coordinator, and every step is checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvcluster.config import ShardConfig
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
    EvictOrder,
    Fetch,
    Inventory,
    Leave,
    NewPage,
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
    StreamEvent,
    Tick,
    Unpin,
    Verified,
    Verify,
    WriteGrant,
    Written,
)
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.shard import Shard
from kvcluster.core.spec import KVSpec
from tests.core.world import (
    MEMBERSHIP_MS,
    OURS,
    PAGE,
    SECOND,
    SPEC,
    SUMS,
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
            ShardConfig(device_bytes=pages * PAGE, extent_bytes=PAGE, **({"scrub_bytes": 0} | config)),
            membership_ttl_ms=MEMBERSHIP_MS,
            address="a:1",
            host="here",
        )
        self.space = SPEC.namespace(OURS)
        self.sent: Report | Inventory | None = None
        self.replies: dict[CallId, Reply] = {}
        self.revoked: list[Attempt] = []
        self.reading: Verify | None = None
        self.fetching: list[Fetch] = []
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
                case Verify():
                    assert self.reading is None, "two batches are read"
                    self.reading = effect
                case Fetch():
                    self.fetching.append(effect)
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

    def hear(self, **said: Any) -> list[Effect]:
        """The next heartbeat is answered, and the answer says this too (the fields of ReportAck)."""
        if self.sent is None:
            self.later(SECOND)
        assert self.sent is not None
        return self.answer(replace(acknowledged(self.sent, self.coordinator), **said))

    def order(self, number: int, *blocks: BlockHash) -> list[Effect]:
        """Lets the next heartbeat bring an order back."""
        return self.hear(order=EvictOrder(number, tuple((self.space, block) for block in blocks)))

    def verdict(self, *corrupt: int) -> list[Effect]:
        """What was to be read again is read; those of it are corrupt."""
        reading, self.reading = self.reading, None
        assert reading is not None, "nothing is read"
        return self.step(Verified(reading.attempt, corrupt))

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
