"""A coordinator by itself: a test plays its shards and its workers, and every step is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from kvcluster.config import CoordinatorConfig
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.groups import Part
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, CallId, Epoch, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator
from kvcluster.core.messages import (
    Attach,
    Attached,
    BlockFate,
    BlocksPinned,
    CoordinatorMessage,
    CoordinatorQuestion,
    Decision,
    Done,
    Effect,
    EndTicket,
    EvictOrder,
    Explain,
    Explained,
    Findings,
    GetStatus,
    Inventory,
    Leave,
    LoadGrant,
    Move,
    MoveOrder,
    Need,
    Order,
    OrderProgress,
    PageEvent,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    PullOrder,
    RenewTicket,
    Report,
    ReportAck,
    ShardAddress,
    ShardInfo,
    Siblings,
    Status,
    StoreGrant,
    StoreRun,
    StreamEvent,
    Tick,
    Tier,
    TierUse,
    Tombstone,
    UnpinBlocks,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import CoreStepper, build_request
from tests.core.samples import MEMBERSHIP_MS, OURS, SECOND, SPEC, THEIRS, WHOLE, attempt, chain, gone, ours, root, whole

R = TypeVar("R")


class Heard(ReportAck):
    """An answer as the shard reads that it went to: its orders by their kind."""

    __slots__ = ()

    @classmethod
    def of(cls, ack: ReportAck) -> Heard:
        return cls(*(getattr(ack, field.name) for field in fields(ack)))

    @property
    def evict(self) -> EvictOrder | None:
        return self._only(EvictOrder)

    @property
    def move(self) -> MoveOrder | None:
        return self._only(MoveOrder)

    @property
    def pull(self) -> PullOrder | None:
        return self._only(PullOrder)

    def _only(self, kind: type[R]) -> R | None:
        found = [order for order in self.orders if isinstance(order, kind)]
        assert len(found) <= 1, "one order of a kind at a time"
        return found[0] if found else None


class Voice:
    """Plays one incarnation of a shard to a coordinator."""

    def __init__(
        self,
        coordinator: LoneCoordinator,
        shard: str,
        epoch: int,
        host: str,
        capacity_pages: int,
        below: tuple[TierUse, ...],
    ) -> None:
        self._to = coordinator
        self._page_bytes = coordinator.spec.page_bytes(0, WHOLE)
        self.info = ShardInfo(
            shard=ShardId(shard),
            epoch=Epoch(epoch),
            address=f"{shard}:1",
            host=host,
            capacity_bytes=capacity_pages * self._page_bytes,
            free_bytes=capacity_pages * self._page_bytes,
            pages=0,
            leases=0,
            others=below,
        )
        self.coordinator = Epoch(0)
        self.told = 0
        self.orders = OrderProgress()
        """How far it says that it is with its orders. It says nothing of them by itself, so that they are repeated."""
        self.findings: Findings | None = None
        self.tombstones: tuple[Tombstone, ...] = ()
        self.specs: tuple[tuple[Tenant, KVSpec], ...] = ()
        """Other namespaces that its inventory names."""

    @property
    def address(self) -> ShardAddress:
        return ShardAddress(self.info.shard, self.info.epoch, self.info.address, self.info.host)

    def join(self, *pages: StreamEvent) -> None:
        """Learns the coordinator's epoch, tells all that it holds, and reports once more, as a member does."""
        self.coordinator = self.report().epoch
        assert not self.inventory(*pages).inventory
        self.confirm()

    def confirm(self) -> Heard:
        """The report after an inventory. It says that nothing is full, so that nothing is ordered."""
        told = self.info
        empty = tuple(use._replace(free_bytes=use.capacity_bytes) for use in told.others)
        self.info = replace(told, free_bytes=told.capacity_bytes, others=empty)
        heard = self.report()
        self.info = replace(told, draining=self.info.draining)
        return heard

    def report(
        self,
        *events: StreamEvent,
        pressure: int = 0,
        presses: Tenant = OURS,
        first: int | None = None,
        wanted: Sequence[BlockHash] = (),
    ) -> Heard:
        """The next events; given `first`, the number of the first of them. Reservations of the tenant `presses` lack so
        many bytes. Readers on the shard's device have read the blocks `wanted` in RAM."""
        report = Report(
            self.info,
            self.coordinator,
            self.told + 1 if first is None else first,
            events,
            pressure=((presses, pressure),) if pressure else (),
            orders=self.orders,
            findings=self.findings,
            wanted_on_device=tuple((self._to.space, block) for block in wanted),
        )
        ack = self._to.ask(ReportAck, build_request(report, CLUSTER))
        self.told = max(self.told, ack.acked)
        if ack.drain:
            self.info = replace(self.info, draining=True)
        return Heard.of(ack)

    def ends(self, order: Order | None, *running: Order | None) -> None:
        """From now on it says that this order has ended, and all up to it, but for those that run."""
        assert order is not None, "there is no such order"
        numbers = tuple(other.number for other in running if other is not None)
        self.orders = OrderProgress(max(self.orders.accepted, order.number, *numbers), numbers)

    def inventory(self, *pages: StreamEvent, chunk: int = 0, last: bool = True, upto: int | None = None) -> ReportAck:
        held = tuple(page for page in pages if isinstance(page, PageEvent))
        upto = self.told if upto is None else upto
        inventory = Inventory(
            self.info,
            self.coordinator,
            upto,
            chunk,
            last,
            held,
            specs=((OURS, self._to.spec), (THEIRS, self._to.spec), *self.specs),
            tombstones=self.tombstones,
        )
        return self._to.ask(ReportAck, build_request(inventory, CLUSTER))

    def free(self, pages: int) -> None:
        """From now on it says that it has so much room."""
        self.info = replace(self.info, free_bytes=pages * self._page_bytes)

    def free_below(self, nbytes: int) -> None:
        """Likewise, of its one tier below."""
        [use] = self.info.others
        self.info = replace(self.info, others=(use._replace(free_bytes=nbytes),))


class LoneCoordinator(CoreStepper):
    """A coordinator. The test plays its shards (`voice`) and its workers, and moves `now`."""

    core: Coordinator

    def __init__(
        self, *, expected: int | None, epoch: int = 100, spec: KVSpec = SPEC, announces: bool = False, **config: Any
    ) -> None:
        self.now = 50 * SECOND
        self.config = replace(CoordinatorConfig(), **config)
        core = Coordinator(
            Epoch(epoch),
            self.config,
            membership_ttl_ms=MEMBERSHIP_MS,
            expected=expected,
            now=self.now,
            announces=announces,
        )
        super().__init__(core)
        self.listeners: list[Callable[[list[Effect]], object]] = []
        self.spec = spec
        self.space = spec.namespace(OURS)
        self.left = False

    @classmethod
    def serving(
        cls,
        *pages: StreamEvent,
        capacity_pages: int = 100,
        below: tuple[TierUse, ...] = (),
        spec: KVSpec = SPEC,
        **config: Any,
    ) -> tuple[LoneCoordinator, Voice]:
        """One that knows our `spec` and one shard, `a`, which holds these pages."""
        coordinator = cls(expected=1, spec=spec, **config)
        coordinator.ask(Attached, ours(Attach(spec)))
        voice = coordinator.voice("a", capacity_pages=capacity_pages, below=below)
        voice.join(*pages)
        assert not coordinator.core.rebuilding
        return coordinator, voice

    def voice(
        self,
        shard: str,
        epoch: int = 1,
        host: str = "",
        capacity_pages: int = 100,
        below: tuple[TierUse, ...] = (),
    ) -> Voice:
        return Voice(self, shard, epoch, host, capacity_pages, below)

    def read_clock(self) -> int:
        return self.now

    def stepped(self, message: CoordinatorMessage, effects: list[Effect], now: int) -> None:
        check_coordinator(self.core)
        for listen in self.listeners:
            listen(effects)

    def perform(self, effect: Effect) -> None:
        """Keeps whether it has left. Tests read the other effects where `step` returns them."""
        self.left = self.left or isinstance(effect, Leave)

    def ask(self, kind: type[R], build: Callable[[CallId], CoordinatorMessage]) -> R:
        """Every question is answered at once, and once."""
        reply = self.ask_now(build)
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
        self, of: Attempt, hashes: Sequence[BlockHash], need: Need | None = None, *, hold: bool = True, **more: Any
    ) -> LoadGrant:
        asked = need or whole()
        return self.ask(LoadGrant, ours(PrepareLoad(of, tuple(hashes), asked, hold, **more), self.space))

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
        begins = run or hashes[0]
        prepare = PrepareStore(of, first, parent or root(), begins, tuple(hashes), tuple(parts), loss, host)
        return list(self.ask(StoreGrant, ours(prepare, self.space)).runs)

    def explain(self, hashes: Sequence[BlockHash], need: Need | None = None) -> list[BlockFate]:
        asked = need or whole()
        return list(self.ask(Explained, ours(Explain(tuple(hashes), asked), self.space)).fates)

    def status(self) -> Status:
        return self.ask(Status, ours(GetStatus()))

    def counter(self, name: str) -> int:
        return dict(self.status().counters)[name]


BLOCKS = chain(12)
A, B, C, D = BLOCKS[:4]
FORK = chain(12, seed=1)
"""Another conversation that begins with A."""


def reasons(fates: Sequence[BlockFate]) -> list[tuple[int, MissReason | None]]:
    """How many blocks, and why they miss."""
    return [(fate.count, fate.miss.reason if fate.miss else None) for fate in fates]


def decisions(runs: Sequence[StoreRun]) -> list[tuple[int, Decision]]:
    return [(run.count, run.decision) for run in runs]


def why(grant: LoadGrant) -> MissReason | None:
    return grant.miss.reason if grant.miss is not None else None


def served_by(grant: LoadGrant) -> list[tuple[int, list[str]]]:
    """Returns how many blocks each set of shards serves."""
    return [
        (run.count, [source.shard.shard for of_group in run.plan if of_group for source in of_group])
        for run in grant.runs
    ]


def ordered(ack: Heard) -> list[BlockHash]:
    return [block for _, block in ack.evict.blocks] if ack.evict is not None else []


def moves(ack: Heard) -> tuple[Move, ...]:
    return ack.move.moves if ack.move is not None else ()


def moved(ack: Heard, to: Tier) -> list[BlockHash]:
    """The blocks that are to go to that tier."""
    return [move.hash for move in moves(ack) if move.to is to]


def rebuilding(coordinator: LoneCoordinator) -> bool:
    return coordinator.status().state == "rebuilding"


def end_ticket(coordinator: LoneCoordinator, of: Attempt) -> bool:
    return coordinator.ask(Done, ours(EndTicket(of))).ok


def renew_ticket(coordinator: LoneCoordinator, of: Attempt) -> bool:
    return coordinator.ask(Done, ours(RenewTicket(of))).ok


def pin(coordinator: LoneCoordinator, hashes: Sequence[BlockHash], ttl_ns: int = 60 * SECOND) -> int:
    return coordinator.ask(BlocksPinned, ours(PinBlocks(tuple(hashes), ttl_ns), coordinator.space)).blocks


def unpin(coordinator: LoneCoordinator, hashes: Sequence[BlockHash]) -> int:
    return coordinator.ask(BlocksPinned, ours(UnpinBlocks(tuple(hashes)), coordinator.space)).blocks


def carry_out(voice: Voice, ack: Heard) -> Heard:
    """The shard carries out its order and reports it; returns the answer."""
    voice.ends(ack.evict)
    return voice.report(*map(gone, ordered(ack)))


def beat(coordinator: LoneCoordinator, *voices: Voice, until: int) -> None:
    """Time passes while these shards keep talking."""
    while coordinator.now < until:
        coordinator.later(min(SECOND, until - coordinator.now))
        for voice in voices:
            voice.report()


QUESTIONS: dict[str, CoordinatorQuestion] = {
    "load": PrepareLoad(attempt(1), BLOCKS, whole()),
    "store": PrepareStore(attempt(1), 0, root(), A, BLOCKS, ((0, WHOLE),)),
    "explain": Explain(BLOCKS, whole()),
    "siblings": Siblings(),
    "pin": PinBlocks(BLOCKS, SECOND),
    "unpin": UnpinBlocks(BLOCKS),
}
"""One of each kind that is asked about a namespace."""
