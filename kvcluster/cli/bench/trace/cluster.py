"""A coordinator and shards in one thread on one simulated clock: the real state machines, and no bytes.

It is the world around the cores, and the kindest one: a message arrives at once, a page is moved or encoded in no time,
every page can be encoded, and nothing fails. No arena is allocated, since the core only counts bytes. What remains is
what the cores decide: what is found, where it is written, what is demoted, promoted and evicted, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from kvcluster.config import Config
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.hashing import root
from kvcluster.core.ids import HOLDER_BYTES, Attempt, BlockHash, CallId, Epoch, Holder, ShardId, Tenant
from kvcluster.core.messages import (
    Abort,
    Answer,
    Attach,
    Attached,
    AttachShard,
    Commit,
    CoordinatorMessage,
    Decision,
    EndTicket,
    Fetch,
    LoadGrant,
    Moved,
    MovePages,
    Need,
    NewPage,
    PageKey,
    PageSlot,
    PrepareLoad,
    PrepareStore,
    Reply,
    ReportAck,
    ReportAnswered,
    Reserve,
    Revoke,
    Send,
    ShardAddress,
    ShardMessage,
    StoreGrant,
    Tick,
    WriteGrant,
)
from kvcluster.core.placement import run_start
from kvcluster.core.reasons import Loss
from kvcluster.core.shard import Shard
from kvcluster.core.spec import KVSpec

MS = 1_000_000
TENANT = Tenant("trace")
_START_NS = 1_000 * MS
_SUMS = b"sums"  # of pages that nobody writes and nobody reads
_MOST_STEPS = 1_000_000
"""That may follow from one message: the largest order of moves takes a thousand, two for each batch."""

_HOLDER = Holder(bytes(HOLDER_BYTES))


class Cluster:
    """One worker and its cluster. Times are nanoseconds from the beginning of the trace."""

    def __init__(self, config: Config, spec: KVSpec) -> None:
        """All shards are members when this returns; every one has the bytes that `config.shard` says."""
        self.config = config
        self._now = _START_NS
        self._calls = count(1)
        self._attempts = count(1)
        self._replies: dict[CallId, Callable[[Reply], None]] = {}
        self._inbox: deque[tuple[Shard, ShardMessage]] = deque()
        ttl_ms = config.membership_ttl_ms
        self.coordinator = Coordinator(
            Epoch(1), config.coordinator, membership_ttl_ms=ttl_ms, expected=config.shards, now=self._now
        )
        self._shards: dict[str, Shard] = {}  # by address
        for number in range(config.shards):
            shard, address = ShardId(f"shard-{number}"), f"{number}"
            self._shards[address] = Shard(
                shard, Epoch(1), config.shard, membership_ttl_ms=ttl_ms, address=address, host=""
            )
        self._part = spec.whole(0)
        self._need = Need((self._part,), Loss[config.client.accept.upper()])
        attached = self._ask(Attach(self._call(), TENANT, spec))
        assert isinstance(attached, Attached)
        self.space = attached.namespace
        self._root = root(self.space)
        for core in self.shards:
            self._tell(core, AttachShard(self._call(_ignore), TENANT, spec))
        self.advance(0)
        assert not self.coordinator.rebuilding, "all shards have told what they hold"

    @property
    def shards(self) -> list[Shard]:
        return list(self._shards.values())

    def advance(self, to_ns: int) -> None:
        """Time passes, and whoever wanted to be called until then is."""
        until = _START_NS + to_ns
        while True:
            cores: list[Coordinator | Shard] = [self.coordinator, *self.shards]
            due = [(at, core) for core in cores if (at := core.next_deadline()) is not None and at <= until]
            if not due:
                break
            at, core = min(due, key=lambda pair: pair[0])
            self._now = max(self._now, at)
            if isinstance(core, Shard):
                self._tell(core, Tick())
            else:
                self.coordinator.step(Tick(), self._now)
        self._now = max(self._now, until)

    def load(self, hashes: Sequence[BlockHash]) -> LoadGrant:
        """How far this chain can be restored, asked as a load that takes no time: it holds, and its ticket ends."""
        attempt = self._attempt()
        grant = self._ask(PrepareLoad(self._call(), TENANT, self.space, attempt, tuple(hashes), self._need))
        assert isinstance(grant, LoadGrant)
        if grant.hold_ns:
            self._ask(EndTicket(self._call(), attempt))
        return grant

    def store(self, hashes: Sequence[BlockHash], first: int, loss: Loss) -> None:
        """Stores the blocks of this chain from depth `first` on, computed over a prefix of that loss.

        What finds no room at once waits as a client's store does, while time passes and others ask.
        """
        attempt = self._attempt()
        grant = self._ask(
            PrepareStore(
                self._call(),
                TENANT,
                self.space,
                attempt,
                first,
                parent=self._parent(hashes, first),
                run=hashes[run_start(first, self.config.coordinator.run_blocks)],
                hashes=tuple(hashes[first:]),
                parts=((0, self._part),),
                loss=loss,
            )
        )
        assert isinstance(grant, StoreGrant)
        by_shard: dict[ShardAddress, list[NewPage]] = {}
        depth = first
        for run in grant.runs:
            if run.decision is Decision.WRITE:
                assert run.shard is not None
                pages = by_shard.setdefault(run.shard, [])
                for at in range(depth, depth + run.count):
                    key = PageKey(hashes[at], 0, self._part)
                    pages.append(NewPage(key, self._parent(hashes, at), at, loss))
            depth += run.count
        writing = list(by_shard)

        def written(address: ShardAddress) -> None:
            writing.remove(address)
            if not writing:
                self._ask(EndTicket(self._call(), attempt))

        for address, pages in by_shard.items():
            self._write(address, tuple(pages), written)

    # --------------------------------------------------------------------------------------------- writing

    def _write(
        self, address: ShardAddress, pages: tuple[NewPage, ...], written: Callable[[ShardAddress], None]
    ) -> None:
        shard, attempt = self._shards[address.address], self._attempt()

        def granted(reply: Reply) -> None:
            assert isinstance(reply, WriteGrant), f"a reservation was answered by {reply}"
            indices = tuple(at for at, page in enumerate(reply.pages) if isinstance(page, PageSlot))
            if indices:
                self._inbox.append((shard, Commit(self._call(ended), attempt, indices, (_SUMS,) * len(indices))))
            else:
                self._inbox.append((shard, Abort(self._call(ended), attempt)))

        def ended(_: Reply) -> None:
            written(address)

        wait_ns = self.config.client.store_wait_ms * MS
        self._tell(
            shard, Reserve(self._call(granted), TENANT, self.space, attempt, address.epoch, pages, wait_ns=wait_ns)
        )

    def _parent(self, hashes: Sequence[BlockHash], depth: int) -> BlockHash:
        return hashes[depth - 1] if depth else self._root

    # -------------------------------------------------------------------------------------- who asks whom

    def _call(self, then: Callable[[Reply], None] | None = None) -> CallId:
        call = CallId(next(self._calls))
        if then is not None:
            self._replies[call] = then
        return call

    def _attempt(self) -> Attempt:
        return Attempt(_HOLDER, next(self._attempts))

    def _ask(self, message: CoordinatorMessage) -> Reply:
        """The coordinator answers at once."""
        replies = [effect.reply for effect in self.coordinator.step(message, self._now) if isinstance(effect, Answer)]
        assert len(replies) == 1, "a question is answered at once, and once"
        return replies[0]

    def _tell(self, shard: Shard, message: ShardMessage) -> None:
        """Steps a shard, and what follows from it until nothing more does."""
        self._inbox.append((shard, message))
        for _ in range(_MOST_STEPS):
            if not self._inbox:
                return
            core, next_message = self._inbox.popleft()
            for effect in core.step(next_message, self._now):
                match effect:
                    case Answer(call, reply):
                        self._replies.pop(call)(reply)
                    case Send(report):
                        ack = self._ask(replace(report, call=self._call()))
                        assert isinstance(ack, ReportAck)
                        self._inbox.append((core, ReportAnswered(ack)))
                    case MovePages(attempt, pages):
                        self._inbox.append((core, Moved(attempt, (_SUMS,) * len(pages))))
                    case Fetch(attempt):  # replicas are not what is measured here
                        self._inbox.append((core, Abort(self._call(_ignore), attempt)))
                    case Revoke():
                        raise AssertionError("a lease ran out, and everything takes no time")
                    case _:
                        raise AssertionError(f"{effect} has no place in a replay")
        raise AssertionError("one message is followed by others without end")


def _ignore(_: Reply) -> None:
    """Nothing follows from the answer."""
