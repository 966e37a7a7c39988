"""One shard with two tiers under whatever may happen to it, against a plain account of what it should hold.

What it tells is what it holds; no page was encoded twice; a reader gets nothing that has lost more than he accepts;
and when all has ended, no room is lost.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, Epoch, ShardId
from kvcluster.core.messages import (
    Abort,
    GoneEvent,
    NewPage,
    PageEvent,
    PageKey,
    PageSlot,
    PinGrant,
    PullOrder,
    PurgedEvent,
    ShardAddress,
    StreamEvent,
    Suspect,
    Tier,
    Tombstone,
    Written,
)
from kvcluster.core.reasons import Loss, MissReason
from tests.core.lone_shard import BLOCKS, LoneShard, end
from tests.core.world import CODED, LEFT, OURS, RIGHT, SECOND, WHOLE, attempt, root

NAMES = [PageKey(block, 0, part) for block in BLOCKS[:3] for part in (WHOLE, LEFT, RIGHT)][:7]
SOURCE = ShardAddress(ShardId("b"), Epoch(1), "b:1")

blocks = st.lists(st.sampled_from(BLOCKS[:3]), min_size=1, max_size=3, unique=True)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
losses = st.sampled_from(Loss)


class TwoTiers(RuleBasedStateMachine):
    """The account: what was told of, and how often what lies in a page was encoded, by generation."""

    @initialize(pages=st.integers(1, 4), host_bytes=st.sampled_from([256, 512, 2_048]))
    def begin(self, pages: int, host_bytes: int) -> None:
        self.shard = LoneShard.joined(pages, spec=CODED, extent_bytes=64, host_bytes=host_bytes)
        self.told: dict[tuple[PageKey, Tier], tuple[Loss, Codec]] = {}
        self.encoded: dict[int, int] = {}
        self.open: dict[Attempt, bool] = {}  # with whether it writes
        self.attempts = 0
        self.orders = 0
        self.stones = 0

    def next_attempt(self) -> Attempt:
        self.attempts += 1
        return attempt(self.attempts)

    def heed(self, *events: StreamEvent) -> None:
        for event in events:
            match event:
                case PageEvent():
                    self.told[event.key, event.tier] = (event.loss, event.codec)
                case GoneEvent():
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
                assert best is None or best > loss, "somebody has it, with no more loss"
                assert (page.tier, page.codec, page.loss) == (Tier.DEVICE, Codec.RAW, loss)
        if ends:
            shard.commit(of, *(at for at, page in enumerate(reply) if isinstance(page, PageSlot)))
        else:
            self.open[of] = True
        self.settle()

    @rule(block=st.sampled_from(BLOCKS[:3]), accept=losses)
    def pin(self, block: BlockHash, accept: Loss) -> None:
        of, best = self.next_attempt(), self.best(PageKey(block, 0, WHOLE))
        reply = self.shard.pin(of, block, accept=accept)
        self.open[of] = False
        assert isinstance(reply, PinGrant)
        [page] = reply.pages
        if isinstance(page, PageSlot):
            assert best is not None and page.loss == best <= accept
            assert page.loss >= page.codec.loss
            upper = (page.key, Tier.DEVICE) in self.told
            assert page.tier is (Tier.DEVICE if upper else Tier.HOST), "of twins the upper"
        elif best is not None:
            assert page.reason is MissReason.LOSSY and best > accept

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commits=st.booleans())
    def finish(self, data: st.DataObject, commits: bool) -> None:
        of = data.draw(st.sampled_from(list(self.open)))
        if self.open.pop(of) and commits:
            lease = next((lease for lease in self.shard.core.leases.all() if lease.attempt == of), None)
            held = [at for at, page in enumerate(lease.pages) if page is not None] if lease is not None else []
            self.shard.commit(of, *held)
        else:
            end(self.shard, of, Abort)
        self.settle()

    @rule(keys=names)
    def suspect(self, keys: list[PageKey]) -> None:
        shard = self.shard
        shard.call(lambda call: Suspect(call, OURS, shard.space, shard.epoch, tuple(keys)))

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
    def promote(self, which: list[BlockHash]) -> None:
        self.shard.promote(*which)
        self.settle()

    @precondition(lambda self: self.shard.moving is not None)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        moving = self.shard.moving
        assert moving is not None
        encodes = [at for at, page in enumerate(moving.pages) if page.target.codec is not page.source.codec]
        encodes = [at for at in encodes if moving.pages[at].source.codec is Codec.RAW]
        unfit = data.draw(st.sets(st.sampled_from(encodes))) if encodes else set()
        corrupt = data.draw(st.sets(st.sampled_from(range(len(moving.pages))), max_size=1))
        for at, (_, _, source, target, _) in enumerate(moving.pages):
            before = self.encoded.get(source.generation, 0)
            self.encoded[target.generation] = before + (at in encodes)
        self.shard.move(unfit=sorted(unfit), corrupt=sorted(corrupt))
        self.settle()

    @rule(which=blocks, tier=st.sampled_from(Tier))
    def evict(self, which: list[BlockHash], tier: Tier) -> None:
        self.orders += 1
        self.shard.order(self.orders, *which, tier=tier)
        self.settle()

    @rule(name=st.sampled_from(NAMES), loss=losses, codec=st.sampled_from(Codec), comes=st.booleans())
    def pull(self, name: PageKey, loss: Loss, codec: Codec, comes: bool) -> None:
        self.orders += 1
        new = NewPage(name, root(), 0, max(loss, codec.loss))
        into = Tier.DEVICE if codec is Codec.RAW and comes else Tier.HOST
        self.shard.hear(pull=PullOrder(self.orders, SOURCE, OURS, CODED, (new,), codec, into))
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
    def tell_anew(self) -> None:
        self.shard.hear(inventory=True)
        self.told.clear()
        self.settle()

    @rule(epochs=st.integers(0, 1), seconds=st.sampled_from([1, 6, 12]))
    def time(self, epochs: int, seconds: int) -> None:
        """Some of which ends leases and the membership; and a new coordinator may be there then."""
        self.shard.later(seconds * SECOND)
        if epochs and self.shard.sent is not None:
            self.shard.coordinator = Epoch(self.shard.coordinator + 1)
            self.shard.moves = self.orders = 0
            self.told.clear()
        self.settle()

    # ------------------------------------------------------------------------------------- claims

    def best(self, name: PageKey) -> Loss | None:
        """The least loss with which it is there."""
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
        assert not len(shard.core.leases)
        pool = shard.core.pool
        assert list(pool.everything()) == list(pool.ready())
        for tier, allocator in pool.allocators.items():
            held = sum(allocator.size_class(page.nbytes) for page in pool.ready() if page.tier is tier)
            assert allocator.free_bytes == allocator.capacity_bytes - held


TestTwoTiers = TwoTiers.TestCase
