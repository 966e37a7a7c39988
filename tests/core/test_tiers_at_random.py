"""One shard with two or three tiers under whatever may happen to it, against a plain account of what it should hold.

It reports exactly what it holds; no page is encoded twice; a reader gets no page with more loss than it accepts, and
only pages that are pinned for it; pages on disk are found again after a restart; and when everything has ended, no
room is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, ShardId
from kvcluster.core.messages import (
    Abort,
    MovePages,
    NewPage,
    PageEvent,
    PageKey,
    PageMove,
    PageSlot,
    PinGrant,
    PurgedEvent,
    RemovedEvent,
    ShardAddress,
    StreamEvent,
    Suspect,
    Tier,
    Tombstone,
    Written,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPages
from kvcluster.core.shard.pin_handler import ROOM_NS
from tests.core.lone_shard import BLOCKS, end
from tests.core.moving import one_page
from tests.core.samples import CODED, LEFT, OURS, RIGHT, SECOND, WHOLE, attempt, ours, root
from tests.core.test_disk_recovery import DiskShard, found, lying, on_disk

NAMES = [PageKey(block, 0, part) for block in BLOCKS[:3] for part in (WHOLE, LEFT, RIGHT)][:7]
SOURCE = ShardAddress(ShardId("b"), Epoch(1), "b:1")

REASONS = (
    *(MissReason.EVICTED, MissReason.PENDING, MissReason.LOSSY, MissReason.CORRUPT),
    *(MissReason.FULL, MissReason.DEADLINE, MissReason.SHARD_LOST),
)
"""Why a reader or writer that has waited may get nothing."""

blocks = st.lists(st.sampled_from(BLOCKS[:3]), min_size=1, max_size=3, unique=True)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
losses = st.sampled_from(Loss)


def encodes(moving: MovePages) -> list[int]:
    """The indices of the pages that are encoded on their way."""
    codecs = [(page.source.codec, page.target.codec) for page in moving.pages]
    return [at for at, (before, after) in enumerate(codecs) if before is Codec.RAW and after is not Codec.RAW]


def is_to_disk(page: PageMove) -> bool:
    return page.target.tier is Tier.DISK


class TiersOfAShard(RuleBasedStateMachine):
    """The account: what was told of, and how often what lies in a page was encoded, by generation."""

    @initialize(
        pages=st.integers(1, 4),
        host_bytes=st.sampled_from([256, 512, 2_048]),
        files=st.integers(0, 2),
        there=blocks,
    )
    def begin(self, pages: int, host_bytes: int, files: int, there: list[BlockHash]) -> None:
        self.config = {"pages": pages, "host_bytes": host_bytes}
        self.files = files
        self.shard = self.started(found(*lying(*there), files=files) if files else NO_STORE)
        self.told: dict[tuple[PageKey, Tier], tuple[Loss, Codec]] = {}
        self.send_new_inventory()
        self.encoded: dict[int, int] = {}
        self.open: dict[Attempt, bool] = {}  # with whether it writes
        self.unanswered: dict[CallId, tuple[Attempt, Loss]] = {}  # pins
        self.attempts = 0
        self.stones = 0

    def started(self, with_found: RecoveredPages) -> DiskShard:
        return DiskShard.knowing(with_found, spec=CODED, **self.config)

    def next_attempt(self) -> Attempt:
        self.attempts += 1
        return attempt(self.attempts)

    def heed(self, *events: StreamEvent) -> None:
        for event in events:
            match event:
                case PageEvent():
                    self.told[event.key, event.tier] = (event.loss, event.codec)
                case RemovedEvent():
                    del self.told[event.key, event.tier]  # it was told of, and is told once
                case PurgedEvent():
                    self.told.clear()

    def settle(self) -> None:
        self.heed(*self.shard.settle())

    # ------------------------------------------------------------------------------------- workers

    @rule(keys=names, loss=losses, ends=st.booleans())
    def store(self, keys: list[PageKey], loss: Loss, ends: bool) -> None:
        shard, of = self.shard, self.next_attempt()
        before = {name: self.best(name) for name in keys}
        reply = shard.reserve(of, *keys, loss=loss)
        for name, page in zip(keys, reply, strict=True):
            best = before[name]
            if page is Written.DUPLICATE:
                assert best is not None and best <= loss
            elif isinstance(page, PageSlot):
                assert best is None or best > loss, "a page of no more loss is there or on its way"
                assert (page.tier, page.codec, page.loss) == (Tier.RAM, Codec.RAW, loss)
        if ends:
            shard.commit(of, *(at for at, page in enumerate(reply) if isinstance(page, PageSlot)))
        else:
            self.open[of] = True
        self.settle()

    @rule(block=st.sampled_from(BLOCKS[:3]), accept=losses)
    def pin(self, block: BlockHash, accept: Loss) -> None:
        of, best, there = self.next_attempt(), self.best(PageKey(block, 0, WHOLE)), self.lies(block)
        call = self.shard.pinning(of, block, accept=accept)
        self.open[of] = False
        self.unanswered[call] = of, accept
        if call not in self.shard.replies:
            assert self.lies_on_disk_alone(block), "a page in memory is granted without a wait"
            assert best is not None and best <= accept, "a page that is not accepted is refused without a wait"
            return
        page = self.answer_of(call)
        if isinstance(page, PageSlot):
            assert best is not None and page.loss == best <= accept
            assert page.tier is min(there), "the upper one of twins"
        elif best is not None:
            assert page.reason is MissReason.LOSSY and best > accept

    @precondition(lambda self: any(self.lies_on_disk_alone(block) for block in BLOCKS[:3]))
    @rule(data=st.data())
    def pin_what_is_to_be_read(self, data: st.DataObject) -> None:
        self.pin(data.draw(st.sampled_from([block for block in BLOCKS[:3] if self.lies_on_disk_alone(block)])), Loss.Q4)

    @rule(block=st.sampled_from(BLOCKS[:3]), loss=losses)
    def bring_down_to_disk(self, block: BlockHash, loss: Loss) -> None:
        """So that readers find something there."""
        self.store([PageKey(block, 0, WHOLE)], loss, ends=True)
        for tier in (Tier.HOST, Tier.DISK):
            self.shard.order_moves(tier, block)
            self.settle()
            while self.shard.moving is not None:
                self.end_batch(self.shard.moving)

    @precondition(lambda self: self.shard.stages)
    @rule(data=st.data(), sound=st.booleans())
    def read(self, data: st.DataObject, sound: bool) -> None:
        """The drive is done with what one of the readers wants."""
        shard = self.shard
        member = shard.core.state.member(shard.now)
        running = {of for of in self.open if shard.core.leases.running(of)} if member else set()
        before = dict(shard.replies)
        corrupt = () if sound else (0,)
        shard.read(*corrupt, which=data.draw(st.sampled_from(range(len(shard.stages)))))
        answered = [call for call in self.unanswered if call in shard.replies and call not in before]
        assert answered, "a reader that waits for it gets an answer"
        if len(answered) == 1:  # the room that this made may have been another's
            of, _ = self.unanswered[answered[0]]
            page = self.answer_of(answered[0])
            if of not in running:
                assert isinstance(page, Miss) and page.reason is MissReason.DEADLINE
            elif sound:
                assert isinstance(page, PageSlot) and page.tier is Tier.HOST
            else:
                assert isinstance(page, Miss) and page.reason is MissReason.CORRUPT
        self.settle()

    def answer_of(self, call: CallId) -> PageSlot | Miss:
        """Returns the answer to a reader of one page."""
        of, accept = self.unanswered.pop(call)
        reply = self.shard.replies[call]
        assert isinstance(reply, PinGrant)
        [page] = reply.pages
        if isinstance(page, PageSlot):
            assert page.codec.loss <= page.loss <= accept
            assert page.tier is not Tier.DISK, "readers are shown memory and nothing else"
            held = [lease.pages for lease in self.shard.core.leases.all() if lease.attempt == of]
            assert [mine.generation for pages in held for mine in pages if mine is not None] == [page.generation]
        return page

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commits=st.booleans())
    def finish(self, data: st.DataObject, commits: bool) -> None:
        of = data.draw(st.sampled_from(list(self.open)))
        if self.open.pop(of) and commits:
            lease = next((lease for lease in self.shard.core.leases.all() if lease.attempt == of), None)
            pages = enumerate(lease.pages) if lease is not None else ()
            held = [at for at, page in pages if page is not None]
            self.shard.commit(of, *held)
        else:
            end(self.shard, of, Abort)
        self.settle()

    @rule(keys=names)
    def suspect(self, keys: list[PageKey]) -> None:
        shard = self.shard
        shard.call(ours(Suspect(shard.epoch, tuple(keys)), shard.space))

    @precondition(lambda self: self.shard.reading is not None)
    @rule(data=st.data())
    def judge(self, data: st.DataObject) -> None:
        reading = self.shard.reading
        assert reading is not None
        self.shard.verdict(*data.draw(st.sets(st.sampled_from(range(len(reading.slots))))))
        self.settle()

    # ------------------------------------------------------------------------------------- orders

    @rule(which=blocks, codec=st.sampled_from(Codec))
    def demote(self, which: list[BlockHash], codec: Codec) -> None:
        self.shard.demote(*which, codec=codec)
        self.settle()

    @rule(which=blocks)
    def demote_to_disk(self, which: list[BlockHash]) -> None:
        self.shard.order_moves(Tier.DISK, *which)
        self.settle()

    @rule(which=blocks)
    def promote(self, which: list[BlockHash]) -> None:
        self.shard.promote(*which)
        self.settle()

    @precondition(lambda self: self.shard.moving is not None)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        moving = self.shard.moving
        assert moving is not None
        may_fail = [at for at in range(len(moving.pages)) if at in encodes(moving) or is_to_disk(moving.pages[at])]
        unfit = data.draw(st.sets(st.sampled_from(may_fail))) if may_fail else set()
        corrupt = data.draw(st.sets(st.sampled_from(range(len(moving.pages))), max_size=1))
        self.end_batch(moving, sorted(unfit), sorted(corrupt))

    def end_batch(self, moving: MovePages, unfit: Sequence[int] = (), corrupt: Sequence[int] = ()) -> None:
        for at, page in enumerate(moving.pages):
            assert not is_to_disk(page) or page.target.codec is page.source.codec, "as it is"
            before = self.encoded.get(page.source.generation, 0)
            self.encoded[page.target.generation] = before + (at in encodes(moving))
        self.shard.move(unfit=unfit, corrupt=corrupt)
        self.settle()

    @rule(which=blocks, tier=st.sampled_from(Tier))
    def evict(self, which: list[BlockHash], tier: Tier) -> None:
        self.shard.evict(*which, tier=tier)
        self.settle()

    @rule(name=st.sampled_from(NAMES), loss=losses, codec=st.sampled_from(Codec), comes=st.booleans())
    def pull(self, name: PageKey, loss: Loss, codec: Codec, comes: bool) -> None:
        new = NewPage(name, root(), 0, max(loss, codec.loss))
        into = Tier.RAM if codec is Codec.RAW and comes else Tier.HOST
        self.shard.order(one_page(new, codec, into))
        self.settle()
        for fetch in self.shard.fetching:
            if comes:
                self.shard.commit(fetch.attempt, 0)
            else:
                end(self.shard, fetch.attempt, Abort)
        self.shard.fetching.clear()
        self.settle()

    @rule()
    def purge(self) -> None:
        self.stones += 1
        self.shard.hear(tombstones=(Tombstone(self.stones, OURS),))
        self.settle()

    @rule()
    def send_new_inventory(self) -> None:
        self.shard.hear(inventory=True)
        self.told.clear()
        self.settle()

    @rule(epochs=st.integers(0, 1), passed=st.sampled_from([ROOM_NS, SECOND, 6 * SECOND, 12 * SECOND]))
    def time(self, epochs: int, passed: int) -> None:
        """Some of which ends leases and the membership; and a new coordinator may be there then."""
        self.shard.later(passed)
        if epochs and self.shard.sent is not None:
            self.shard.coordinator = Epoch(self.shard.coordinator + 1)
            self.shard.ordered = 0
            self.told.clear()
        self.settle()

    @rule()
    def restart(self) -> None:
        """It dies, and another has its folder. What was being written is none."""
        if not self.files:
            return
        ready = [page for page in self.shard.core.pool.ready() if page.tier is Tier.DISK]
        encoded = {page.offset: self.encoded.get(page.generation, 0) for page in ready}
        stones = [Tombstone(self.stones, OURS)] if self.stones else []
        self.shard = self.started(found(*on_disk(self.shard), files=self.files, tombstones=stones))
        self.encoded = {page.generation: encoded[page.offset] for page in self.shard.core.pool.ready()}
        self.told = {(key, tier): page for (key, tier), page in self.told.items() if tier is Tier.DISK}
        self.open.clear()
        self.unanswered.clear()

    # ------------------------------------------------------------------------------------- claims

    def lies(self, block: BlockHash) -> list[Tier]:
        """Returns the tiers that have the whole block in one page."""
        return [tier for (key, tier) in self.told if key == PageKey(block, 0, WHOLE)]

    def lies_on_disk_alone(self, block: BlockHash) -> bool:
        return self.lies(block) == [Tier.DISK]

    def best(self, name: PageKey) -> Loss | None:
        """Returns the least loss among the copies of the page."""
        return min((loss for (key, _), (loss, _) in self.told.items() if key == name), default=None)

    @invariant()
    def what_was_told_is_what_is_there(self) -> None:
        ready = {(page.key, page.tier): (page.loss, page.codec) for page in self.shard.core.pool.ready()}
        assert ready == self.told

    @invariant()
    def twins_have_lost_equally_much(self) -> None:
        for name in NAMES:
            there = [loss for (key, _), (loss, _) in self.told.items() if key == name]
            assert len(dict.fromkeys(there)) <= 1

    @invariant()
    def nothing_was_encoded_twice(self) -> None:
        for page in self.shard.core.pool.ready():
            assert self.encoded.get(page.generation, 0) <= 1

    @invariant()
    def who_is_answered_gets_what_he_accepts_or_a_reason(self) -> None:
        for call in [call for call in self.unanswered if call in self.shard.replies]:
            page = self.answer_of(call)
            assert isinstance(page, PageSlot) or page.reason in REASONS

    def teardown(self) -> None:
        if not hasattr(self, "shard"):
            return
        shard = self.shard
        for of in list(self.open):
            end(shard, of, Abort)
        if shard.reading is not None:
            shard.verdict()
        shard.move_all()
        while shard.reading is not None:
            shard.verdict()
        self.settle()
        while shard.stages:
            shard.read()
        self.settle()
        assert all(call in shard.replies for call in self.unanswered)
        assert not len(shard.core.leases) and not shard.core.own_attempts
        pool = shard.core.pool
        assert list(pool.everything()) == list(pool.ready())
        for tier, allocator in pool.allocators.items():
            held = sum(allocator.size_class(page.nbytes) for page in pool.ready() if page.tier is tier)
            assert allocator.used_bytes == held
            allocator.check()


TestTiersOfAShard = TiersOfAShard.TestCase
