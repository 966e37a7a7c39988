"""A shard's process: what runtime/shard_host.py does, on simulated time and memory.

Effects end here. One script at a time carries reports to the coordinator, and a revoked lease stops its session. Pages
are verified in the background, page by page, and moved between tiers and read from disk by tier_store.py. A Fetch
brings pages from another shard, and Leave ends the process.
"""

from __future__ import annotations

import random
from typing import Protocol

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import CLUSTER, Attempt, Caller, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import (
    Abort,
    Commit,
    Done,
    Effect,
    Erase,
    Fetch,
    Inventory,
    Leave,
    MovePages,
    PageKey,
    PageSlot,
    PagesSaved,
    PageWant,
    ReadRequest,
    Renew,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Revoke,
    SavePages,
    Send,
    ShardAddress,
    Stage,
    Suspect,
    Tier,
    Verified,
    Verify,
)
from kvcluster.core.shard.disk_recovery import RecoveredPages, applied_tombstones
from kvcluster.core.shard.page import Page
from kvcluster.core.shard.shard import Shard
from kvcluster.core.tiers import STORED
from kvcluster.replay.core_stepper import build_request
from kvcluster.replay.kernel import MS, SECOND, Clock, Process, Script
from tests.sim import serving
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.device_pool import SimulatedDevicePool
from tests.sim.disk import Disk, SimulatedStore
from tests.sim.driver import SimulatedCore
from tests.sim.memory import Memory
from tests.sim.network import Line, Pipe
from tests.sim.order_oracle import HeardOrders
from tests.sim.sessions import ArrivedSums, Layer, Session, SessionRequest
from tests.sim.shard_storage import ShardStorage
from tests.sim.surroundings import Supervisor, Surroundings
from tests.sim.tier_io import SimulatedTierIO, TierPlace

FETCH_NS = 2 * SECOND
"""The longest time that a fetch from another shard may take."""


class Addresses(Protocol):
    """Finds processes by name or address."""

    def coordinator_seen_by(self, process: Process) -> CoordinatorProcess:
        """Returns the coordinator that its name points to on the node of this process: perhaps not the newest."""

    def shard_at(self, address: str) -> ShardProcess | None:
        """Returns the newest process that listened at that address."""


class ShardJudge(Protocol):
    """What a shard shows to the oracle (oracle.py)."""

    def shard_stepped(self, shard: ShardProcess, message: object, effects: list[Effect], now: int) -> None:
        """Judges a step of a shard, before its effects are performed."""


class ShardSurroundings(Surroundings, Supervisor, Addresses, Protocol):
    """`disks`: by shard, node and tier; they outlive the processes."""

    disks: dict[tuple[ShardId, int, Tier], Disk]
    revoke_rng: random.Random

    @property
    def oracle(self) -> ShardJudge: ...


class ShardProcess(SimulatedCore):
    """One shard incarnation. Only its sessions read or write its memory."""

    core: Shard
    world: ShardSurroundings

    def __init__(self, world: ShardSurroundings, shard: ShardId, node: int, clock: Clock, epoch: Epoch) -> None:
        config = world.scenario.config
        # As with a fixed port: the next incarnation on this node has the address of the last one.
        self.address = ShardAddress(shard, epoch, f"{shard}@{node}", f"node-{node}")
        self.stores: dict[Tier, SimulatedStore] = {}
        found: dict[Tier, RecoveredPages] = {}
        for tier in STORED:
            nbytes = tier.spec.nbytes(config.shard)
            if tier.spec.durable:
                self.stores[tier] = disk = world.disks.setdefault((shard, node, tier), Disk())
                if nbytes:
                    found[tier] = disk.open(self, config.shard, nbytes)
            elif nbytes:
                self.stores[tier] = SimulatedDevicePool(self, nbytes)
                found[tier] = RecoveredPages(nbytes, config.shard.extent_bytes)
        core = Shard(
            shard,
            epoch,
            config.shard,
            membership_ttl_ms=config.membership_ttl_ms,
            address=self.address.address,
            host=self.address.host,
            found=found,
        )
        super().__init__(world, str(shard), node, clock, core)
        self.shard = shard
        self.memory = {tier: Memory(nbytes) for tier, nbytes in core.pool.memory_bytes.items()}
        self.storage = ShardStorage(world, self.memory, self.stores)
        self.sessions: dict[Attempt, Session] = {}
        self.coordinator: CoordinatorProcess | None = None  # the one whose epoch it has adopted
        self.adopted = Epoch(0)
        self.ready: dict[TierPlace, tuple[PageSlot, int]] = {}  # the oracle's own list
        for page in core.pool.ready():
            stored_at = self.stores[page.tier].stored_at(page.offset)
            self.ready[page.space, page.key, page.tier] = page.slot(), stored_at
        self.tier_io = SimulatedTierIO(self)
        self.heard = HeardOrders()
        # The oracle's own number too: that of the last tombstone that this shard has carried out.
        self.purged = max((stone.number for stone in applied_tombstones(found.values())), default=0)
        self.told_to_leave = False
        self._leaving = False

    def stored_at(self, space: NamespaceId, key: PageKey) -> int | None:
        """Returns when that page was stored; None if this shard does not hold it."""
        return next((self.ready[space, key, tier][1] for tier in Tier if (space, key, tier) in self.ready), None)

    # ------------------------------------------------------------------------------------------- sessions

    def serve(self, opening: SessionRequest, up: Pipe, down: Pipe) -> None:
        """Serves a worker's connection."""
        self.start(serving.serve(self, opening, up, down))

    def begin(self, session: Session) -> bool:
        """Registers a session for the revocation of its lease. One for each attempt: the end of a second one would end
        the first one's lease."""
        return self.sessions.setdefault(session.attempt, session) is session

    def finish(self, session: Session) -> None:
        """Removes a session, which moves nothing any more."""
        del self.sessions[session.attempt]

    # ------------------------------------------------------------------------------------------- stopping

    def save_and_end(self, within_ns: int) -> None:
        """Has the shard save its pages; when it says that it has, its process ends, perhaps in the middle of a
        write."""
        until, policy = self.now() + within_ns, self.world.scenario.config.coordinator
        codec, raw_blocks = Codec[policy.host_codec.upper()], policy.host_raw_blocks
        self.submit(lambda call: SavePages(call, until, codec, raw_blocks), self._saved)

    def _save_and_leave(self) -> Script:
        """As `save_and_end`, because the shard has been drained: it is not started again."""
        yield None, 0
        self._leaving = True
        self.save_and_end(self.world.rng.choice((0, 20, 200)) * MS)

    def _saved(self, reply: Reply) -> None:
        assert isinstance(reply, PagesSaved)
        self.world.count("save", "all" if not reply.left_pages else "some" if reply.pages else "none")
        if self._leaving:
            self.world.left(self, for_good=True)
        else:
            self.world.kill(self)

    # --------------------------------------------------------------------------------------------- memory

    def rot(self) -> bool:
        """Flips a bit of a page in memory or on disk. False if there is none."""
        stores = list(self.stores.values())
        store = self.world.rng.choice(stores) if len(stores) > 1 else stores[0]
        if self.world.rng.random() < 0.5 and store.owner is self and store.rot(self.world.rng):
            return True
        pages: list[Page] = [page for page in self.core.pool.everything() if page.tier.spec.addressable]
        if not pages:
            return False
        page = self.world.rng.choice(pages)
        self.memory[page.tier].flip(self.world.rng, page.offset, page.nbytes)
        return True

    # -------------------------------------------------------------------------------------------- effects

    def judge(self, message: object, effects: list[Effect], now: int) -> None:
        self.world.oracle.shard_stepped(self, message, effects, now)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self.start(self._report(message))
            case Revoke(attempt, why):
                session = self.sessions.get(attempt)
                if session is not None:
                    session.revoke(why)
                    self._interrupt(session)
            case Verify():
                self.start(self._verify(effect))
            case Fetch():
                self.start(self._fetch(effect))
            case MovePages() | Erase():
                self.tier_io.queue(effect)
            case Stage():
                self.start(self.tier_io.stage(effect))
            case Leave(for_good=True) if any(
                self.stores[tier].owner is self for tier in self.stores if tier.spec.durable
            ):
                self.start(self._save_and_leave())
            case Leave():
                self.world.left(self, for_good=effect.for_good)
            case _:
                raise AssertionError(f"a shard does not perform {effect}")

    def _interrupt(self, session: Session) -> None:
        late_ns = self.world.scenario.revoke_ns
        if late_ns:
            self.kernel.at(self.kernel.now + int(late_ns * self.world.revoke_rng.random()), self, session.interrupt)
        else:
            session.interrupt()

    def _report(self, message: Report | Inventory) -> Script:
        coordinator = self.world.coordinator_seen_by(self)
        promise = self.world.network.ask(self, coordinator, build_request(message, CLUSTER))
        reply = yield promise, self.world.scenario.config.membership_ttl_ms * MS
        if not isinstance(reply, ReportAck):
            self.step(ReportFailed())
            return
        if reply.epoch > self.adopted:
            self.adopted, self.coordinator = reply.epoch, coordinator
        self.step(ReportAnswered(reply))

    def _verify(self, effect: Verify) -> Script:
        """Verifies pages in the background, page by page."""
        session = Session(effect.attempt, None, None, writes=False)
        session.pages = list(effect.slots)
        self.begin(session)
        corrupt: list[int] = []
        for index, (namespace, slot) in enumerate(zip(effect.namespaces, effect.slots, strict=True)):
            yield None, self.world.rng.randrange(2 * MS)
            if not self.storage.matches(namespace, slot, self.storage.bytes_of(slot)):
                corrupt.append(index)
        self.finish(session)
        self.step(Verified(effect.attempt, tuple(corrupt)))

    def _fetch(self, effect: Fetch) -> Script:
        """Fetches pages as a worker would, under the cluster's own credential, straight into this shard's pages."""
        request = self._request_for(effect)
        give_up = self.now() + FETCH_NS
        source = self.world.shard_at(effect.source.address)
        line = None
        if source is not None:
            opening = SessionRequest(Caller(CLUSTER, internal=True), request, FETCH_NS)
            line = self.world.network.connect(self, source, source.serve, opening)
        session = Session(effect.attempt, effect.namespace, line.down if line else None, writes=True)
        session.pages = list(effect.slots)
        for slot in effect.slots:
            known = source.stored_at(effect.namespace, slot.key) if source is not None else None
            session.stored_at[slot.key] = known or 0
        self.begin(session)
        arrived = ArrivedSums()
        if line is not None:
            yield from self._receive(effect, session, line, give_up, arrived)
        verified, suspects = self.storage.verify_copies(effect, arrived)
        if line is not None:
            line.up.hang_up()
        session.moving = False
        if verified:
            commit = Commit(effect.attempt, tuple(verified), tuple(verified.values()))
            self.ask_now(build_request(commit, CLUSTER))
        else:
            self.ask_now(build_request(Abort(effect.attempt), CLUSTER))
        self.finish(session)
        if suspects and source is not None:
            keys = tuple(effect.slots[item].key for item in suspects)
            suspect = build_request(Suspect(effect.source.epoch, keys), CLUSTER, effect.namespace)
            self.world.network.ask(self, source, suspect)

    def _request_for(self, effect: Fetch) -> ReadRequest:
        wants = tuple(PageWant(slot.key, 0, slot.key.part.layers) for slot in effect.slots)
        reader = Attempt(Holder(self.world.rng.randbytes(16)), 1)
        return ReadRequest(
            effect.namespace, reader, effect.source.epoch, wants, max(slot.loss for slot in effect.slots)
        )

    def _receive(self, effect: Fetch, session: Session, line: Line, give_up: int, arrived: ArrivedSums) -> Script:
        """Writes each layer to its page as it comes, until the source has ended, time is up, or the lease has ended."""
        while True:
            heard = yield line.down.next(), max(1, give_up - self.now())
            if isinstance(heard, list) and (not heard or not isinstance(heard[0], Layer)):
                continue  # the head: the source says for each page whether it comes
            if not isinstance(heard, list) or session.revoked:
                return
            if self.ask_now(build_request(Renew(effect.attempt), CLUSTER)) != Done(True):
                return
            for layer in heard:
                if layer.codec is effect.slots[layer.item].codec:
                    self.storage.store_layer(effect.slots[layer.item], layer)
                    arrived.add(layer)
