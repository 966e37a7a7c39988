"""What the threads of a simulated shard do with its tiers (runtime/tier_store.py): one moves pages between tiers and
erases what was purged, job after job; others read pages from stores for readers.

Pages are touched under leases of the shard's own, in sessions that a revoked lease stops like any other.
"""

from __future__ import annotations

from typing import Protocol

from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import Erase, Moved, MovePages, PageKey, PageMove, PageSlot, Stage, Staged, Tier, TierLost
from kvcluster.replay.kernel import MS, SECOND, Script
from tests.sim.device_pool import SimulatedDevicePool
from tests.sim.disk import SimulatedStore
from tests.sim.memory import Memory
from tests.sim.serving import SessionBook
from tests.sim.sessions import Session
from tests.sim.shard_storage import ShardStorage
from tests.sim.surroundings import Surroundings

TierPlace = tuple[NamespaceId, PageKey, Tier]
"""A page in one tier of a shard."""


class TieredShard(SessionBook, Protocol):
    """The shard process whose tiers these are. `ready`: the slots of its READY pages, and when each was stored."""

    memory: dict[Tier, Memory]
    storage: ShardStorage
    stores: dict[Tier, SimulatedStore]
    ready: dict[TierPlace, tuple[PageSlot, int]]

    def now(self) -> int: ...

    @property
    def world(self) -> Surroundings: ...

    def start(self, script: Script) -> object:
        """Starts a script of this process."""

    def step(self, message: Moved | Staged | TierLost) -> object:
        """Has the core step a result."""


class SimulatedTierIO:
    """The jobs of one shard. `moves`: what is moved or staged now, or ends now."""

    def __init__(self, shard: TieredShard) -> None:
        self._shard = shard
        self.moves: dict[Attempt, MovePages | Stage] = {}
        self._stored_at: dict[Attempt, list[int]] = {}  # when the pages of each queued MovePages were stored
        self._lost: set[Tier] = set()
        self._queue: list[MovePages | Erase] = []  # the jobs of one thread, in order

    def queue(self, effect: MovePages | Erase) -> None:
        """Queues a job for the thread that moves and erases."""
        if isinstance(effect, MovePages):  # a better copy may replace a page before it is written, or in the same step
            ready, now = self._shard.ready, self._shard.now()
            places = [(page.namespace, page.source.key, page.source.tier) for page in effect.pages]
            self._stored_at[effect.attempt] = [ready[place][1] if place in ready else now for place in places]
        self._queue.append(effect)
        if len(self._queue) == 1:
            self._shard.start(self._work())

    def stage(self, effect: Stage) -> Script:
        """Reads pages from stores into private copies."""
        shard, world = self._shard, self._shard.world
        session = self._began(effect)
        corrupt: list[int] = []
        if world.working and world.rng.random() < 0.05:  # the drive takes longer than a lease runs
            yield None, world.rng.randrange(3 * SECOND)
        for index, page in enumerate(effect.pages):
            yield None, world.rng.randrange(4 * MS)
            data = shard.stores[page.source.tier].read(page.source)
            if data is not None:
                shard.memory[page.target.tier].write(page.target.offset, data)
            if not shard.storage.matches(page.namespace, page.source, data):
                corrupt.append(index)
            world.count("stage", "corrupt" if index in corrupt else "read")
        self._ended(session, Staged(effect.attempt, tuple(corrupt)))

    def _work(self) -> Script:
        """Runs the jobs of the mover's thread."""
        while self._queue:
            effect = self._queue[0]
            yield None, self._shard.world.rng.randrange(2 * MS)
            if isinstance(effect, Erase):
                for store in self._shard.stores.values():
                    store.erase(effect)
            else:
                yield from self._move(effect)
            del self._queue[0]

    def _move(self, effect: MovePages) -> Script:
        """Moves pages in the background, page by page: sound pages are encoded, decoded or copied."""
        session = self._began(effect)
        stored_at = self._stored_at.pop(effect.attempt)
        sums: list[bytes | None] = []
        corrupt: list[int] = []
        for index, page in enumerate(effect.pages):
            yield None, self._shard.world.rng.randrange(2 * MS)
            before = self._shard.storage.bytes_of(page.source)
            sound = self._shard.storage.matches(page.namespace, page.source, before)
            if not page.target.tier.spec.addressable:
                made = (yield from self._write(page, before, stored_at[index])) if sound else None
            else:
                made = self._shard.storage.recode(page, before)
            if not sound:
                corrupt.append(index)
            sums.append(made)
            tiers = f"{page.source.tier.name} to {page.target.tier.name}".lower()
            self._shard.world.count("move", tiers if made is not None else "cannot be")
        self._ended(session, Moved(effect.attempt, tuple(sums), tuple(corrupt)))

    def _began(self, effect: MovePages | Stage) -> Session:
        self.moves[effect.attempt] = effect
        session = Session(effect.attempt, None, None, writes=True)
        slots = (slot for page in effect.pages for slot in (page.source, page.target))
        session.pages = [slot for slot in slots if slot.tier.spec.addressable]
        self._shard.begin(session)
        return session

    def _ended(self, session: Session, message: Moved | Staged) -> None:
        session.moving = False
        self._shard.step(message)
        self._shard.finish(session)
        del self.moves[session.attempt]
        for tier, store in self._shard.stores.items():
            if isinstance(store, SimulatedDevicePool) and store.lost and tier not in self._lost:
                self._lost.add(tier)
                self._shard.step(TierLost(tier, "its device has failed"))

    def _write(self, page: PageMove, before: bytes | None, stored_at: int) -> Script:
        """Writes a page to a store, as it is or encoded. Returns its packed sums; None if it cannot be encoded
        or written."""
        encodes = page.source.codec is not page.target.codec
        encoded = self._shard.storage.encoded(page, before) if encodes else None
        if encodes and encoded is None:
            return None
        store = self._shard.stores[page.target.tier]
        store.begin_write(page)
        yield None, self._shard.world.rng.randrange(2 * MS)  # dying now leaves neither the old page nor the new
        data = self._shard.storage.bytes_of(page.source)
        if encoded is not None:
            data, sums = encoded
            page = page._replace(source=page.source._replace(sums=sums))
        assert data is not None
        return page.source.sums if store.write(page, data, stored_at) else None
