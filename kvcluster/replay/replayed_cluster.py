"""A coordinator and shards on the simulation kernel of the tests: the real state machines on simulated time, no bytes.

The simulated environment is ideal: messages arrive at once, moving or encoding a page takes no time, every page can be
encoded, and nothing fails. No arena is allocated, since the core only counts bytes. What remains is the decisions of
the cores: which blocks are found, where they are written, which are demoted, promoted and evicted, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from kvcluster.config import Config
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.hashing import root
from kvcluster.core.ids import CLUSTER, HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, ShardId, Tenant
from kvcluster.core.messages import (
    Abort,
    Attach,
    Attached,
    AttachShard,
    Commit,
    Decision,
    Effect,
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
    StoreGrant,
    Tier,
    WriteGrant,
)
from kvcluster.core.miss import Loss
from kvcluster.core.placement import run_start
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.shard.shard import Shard
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import Core, CoreProcess, build_request
from kvcluster.replay.kernel import MS, Clock, Kernel

TENANT = Tenant("trace")
_START_NS = 1_000 * MS
_SUMS = b"sums"  # of pages whose bytes are never written or read
_HOLDER = Holder(bytes(HOLDER_BYTES))


class _Replayed(CoreProcess):
    """A process of the replay. All processes read one clock, and a due tick runs without delay."""

    def __init__(self, kernel: Kernel, name: str, core: Core) -> None:
        super().__init__(kernel, name, 0, Clock(0, 0), core, stall_ns=0, spin_ns=0)


class _Coordinator(_Replayed):
    core: Coordinator

    def perform(self, effect: Effect) -> None:
        raise AssertionError(f"{effect} has no place in a replay")


class _Shard(_Replayed):
    core: Shard

    def __init__(self, kernel: Kernel, name: str, core: Shard, coordinator: _Coordinator) -> None:
        super().__init__(kernel, name, core)
        self._coordinator = coordinator

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send(report):
                ack = self._coordinator.ask_now(build_request(report, CLUSTER))
                assert isinstance(ack, ReportAck)
                self._soon(self.step, ReportAnswered(ack))
            case MovePages(attempt, pages):
                self._soon(self.step, Moved(attempt, (_SUMS,) * len(pages)))
            case Fetch(attempt):  # replicas are not what is measured here
                self._soon(self.submit, build_request(Abort(attempt), CLUSTER))
            case Revoke():
                raise AssertionError("a lease ran out, and everything takes no time")
            case _:
                raise AssertionError(f"{effect} has no place in a replay")

    def _soon(self, act: Callable[..., object], argument: object) -> None:
        """Runs `act(argument)` at this simulated instant, after everything scheduled before."""
        self.kernel.at(self.kernel.now, self, act, argument)


class TraceCluster:
    """One worker and its cluster. Times are nanoseconds from the beginning of the trace."""

    def __init__(self, config: Config, spec: KVSpec) -> None:
        """Starts the cluster. When this returns all shards are members, each with the bytes of `config.shard`."""
        self.config = config
        self._kernel = Kernel()
        self._kernel.run(_START_NS)
        self._attempts = count(1)
        ttl_ms = config.membership_ttl_ms
        self.coordinator = Coordinator(
            Epoch(1), config.coordinator, membership_ttl_ms=ttl_ms, expected=config.shards, now=_START_NS
        )
        self._asked = _Coordinator(self._kernel, "coordinator", self.coordinator)
        self._asked.start_driver()
        self._shards: dict[str, _Shard] = {}  # by address
        for number in range(config.shards):
            name, address = ShardId(f"shard-{number}"), f"{number}"
            found = {Tier.GPU: RecoveredPages(config.shard.gpu_bytes, config.shard.extent_bytes)}
            core = Shard(name, Epoch(1), config.shard, membership_ttl_ms=ttl_ms, address=address, host="", found=found)
            self._shards[address] = _Shard(self._kernel, name, core, self._asked)
        self.part = spec.whole(0)
        self._need = Need((self.part,), Loss[config.client.accept.upper()])
        attached = self._asked.ask_now(build_request(Attach(spec), TENANT))
        assert isinstance(attached, Attached)
        self.space = attached.namespace
        self._root = root(self.space)
        for shard in self._shards.values():
            shard.submit(build_request(AttachShard(spec), TENANT))
            self._kernel.settle()
        self.advance(0)
        assert not self.coordinator.rebuilding, "all shards have told what they hold"

    @property
    def shards(self) -> list[Shard]:
        return [shard.core for shard in self._shards.values()]

    def advance(self, to_ns: int) -> None:
        """Advances the time to `to_ns`; every core gets the ticks that are due until then."""
        self._kernel.run(max(self._kernel.now, _START_NS + to_ns))
        self._kernel.settle()

    def load(self, hashes: Sequence[BlockHash]) -> LoadGrant:
        """Returns the grant of a load of this chain. The load takes no time: its ticket ends at once."""
        attempt = self._attempt()
        prepare = PrepareLoad(attempt, tuple(hashes), self._need)
        grant = self._asked.ask_now(build_request(prepare, TENANT, self.space))
        assert isinstance(grant, LoadGrant)
        if grant.hold_ns:
            self._asked.ask_now(build_request(EndTicket(attempt), TENANT))
        return grant

    def store(self, hashes: Sequence[BlockHash], first: int, loss: Loss) -> None:
        """Stores the blocks of this chain from depth `first` on, computed over a prefix of that loss.

        Pages that find no room at once wait as in a client's store, while time passes and other requests arrive.
        """
        attempt = self._attempt()
        prepare = PrepareStore(
            attempt,
            first,
            parent=self._parent(hashes, first),
            run=hashes[run_start(first, self.config.coordinator.run_blocks)],
            hashes=tuple(hashes[first:]),
            parts=((0, self.part),),
            loss=loss,
        )
        grant = self._asked.ask_now(build_request(prepare, TENANT, self.space))
        assert isinstance(grant, StoreGrant)
        by_shard: dict[ShardAddress, list[NewPage]] = {}
        depth = first
        for run in grant.runs:
            if run.decision is Decision.WRITE:
                assert run.shard is not None
                pages = by_shard.setdefault(run.shard, [])
                for at in range(depth, depth + run.count):
                    key = PageKey(hashes[at], 0, self.part)
                    pages.append(NewPage(key, self._parent(hashes, at), at, loss))
            depth += run.count
        writing = list(by_shard)

        def written(address: ShardAddress) -> None:
            writing.remove(address)
            if not writing:
                self._asked.ask_now(build_request(EndTicket(attempt), TENANT))

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
            self._kernel.at(self._kernel.now, shard, shard.submit, build_request(end(indices), TENANT), ended)

        def end(indices: tuple[int, ...]) -> Commit | Abort:
            return Commit(attempt, indices, (_SUMS,) * len(indices)) if indices else Abort(attempt)

        def ended(_: Reply) -> None:
            written(address)

        wait_ns = self.config.client.store_wait_ms * MS
        reserve = Reserve(attempt, address.epoch, pages, wait_ns=wait_ns)
        shard.submit(build_request(reserve, TENANT, self.space), granted)
        self._kernel.settle()

    def _parent(self, hashes: Sequence[BlockHash], depth: int) -> BlockHash:
        return hashes[depth - 1] if depth else self._root

    def _attempt(self) -> Attempt:
        return Attempt(_HOLDER, next(self._attempts))
