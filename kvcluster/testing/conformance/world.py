"""A shard to test a transport on, observed from inside.

A World is one real shard in a running cluster of this process, behind the transport under test. Tests wait until the
shard has reached some state instead of sleeping; they end leases, corrupt bytes, and disconnect the shard. When a test
is over, nothing may be left: no lease, no half-written page, no memory that is not accounted for.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import CLUSTER, HOLDER_BYTES, Attempt, CallId, Epoch, Holder, NamespaceId, Tenant
from kvcluster.core.invariants import check_shard
from kvcluster.core.messages import (
    Move,
    MoveOrder,
    PageKey,
    PageSlot,
    Purge,
    Renew,
    Reply,
    Request,
    ShardQuestion,
    Tier,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.tiers import STAGING
from kvcluster.errors import KVClusterError
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing.cluster import MemoryCluster, flip_bit
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.exchange_summary import ExchangeSummary
from kvcluster.transport.shm_server import SharedPool

T = TypeVar("T")

ONE, TWO = Tenant("one"), Tenant("two")
"""The tenants of a world."""

ARENA_BYTES = 32 * 2**20
HOST_BYTES = 4 * 2**20
"""The sizes of the RAM tier, and of the host tier for pages that a test demotes."""

BOUND_S = 20.0
"""How long any wait may take before a test fails; nothing is expected to take a tenth of it."""

_LOOK_S = 0.02
"""How often a waiting test polls: what a shard does by itself, such as verifying pages, is not announced to the
test."""


def soon() -> Deadline:
    """Returns a deadline that only a hanging test can miss."""
    return Deadline.after_ms(BOUND_S * 1e3)


class ServedShard(Protocol):
    """The serving side of a transport, for one shard."""

    def open(self, tenant: Tenant) -> Transport:
        """Opens a transport to the shard with that tenant's credential."""

    def close(self) -> None:
        """Ends the server and its exchanges at once, as the end of the shard's process would. May be called
        repeatedly."""


class WatchedHost:
    """A shard host that wakes waiting tests whenever it is asked a question or revokes a lease. Implements PageHost and
    ShmHost."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._changed = threading.Condition()
        self._changes = 0
        self._late: list[type] = []
        self.asked: Counter[type[ShardQuestion]] = Counter()
        """How many questions of each kind the core was asked."""

    def ask(
        self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float, decodes_of: Tenant | None = None
    ) -> Reply:
        asked: list[type] = []

        def watched(call: CallId) -> Request[ShardQuestion]:
            request = build(call)
            asked.append(type(request.question))
            self.asked[asked[0]] += 1
            return request

        try:
            reply = self._host.ask(watched, wait_s, decodes_of)
        finally:
            self._note()
        if asked[0] in self._late:
            self._late.remove(asked[0])
            raise Unavailable(Miss(MissReason.DEADLINE))
        return reply

    def decoding(self, tenant: Tenant, wait_s: float) -> AbstractContextManager[None]:
        return self._host.decoding(tenant, wait_s)

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        return self._host.read(slot, start, stop)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        return self._host.fill(slot, start, stop)

    @property
    def region_starts(self) -> Mapping[Tier, int]:
        return self._host.region_starts

    @property
    def pool(self) -> SharedPool | None:
        return self._host.pool

    @property
    def arena_bytes(self) -> int:
        return self._host.arena_bytes

    @property
    def lease_ttl_ns(self) -> int:
        return self._host.lease_ttl_ns

    def open_arena(self, *, writable: bool) -> int:
        return self._host.open_arena(writable=writable)

    def on_revoke(self, attempt: Attempt, stop: Callable[[Miss], object]) -> AbstractContextManager[None]:
        def stop_and_note(why: Miss) -> None:
            stop(why)
            self._note()

        return self._host.on_revoke(attempt, stop_and_note)

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        self._host.exchange_ended(summary)

    def connection_refused(self, path: str, error: KVClusterError) -> None:
        self._host.connection_refused(path, error)

    def answer_late(self, kind: type[ShardQuestion]) -> None:
        """Makes the next answer to a question of that kind too late for its caller, who gets Unavailable(DEADLINE)."""
        self._late.append(kind)

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        """Waits until `holds()` in the core, looking after every change. Raises AssertionError after BOUND_S."""
        deadline = soon()
        changes = self._changes
        while not self._host.inspect(holds):  # without the lock: the core notes changes under its own
            assert deadline.remaining_s(), f"not within {BOUND_S:.0f} s: {what}"
            with self._changed:
                if self._changes == changes:
                    self._changed.wait(_LOOK_S)
                changes = self._changes

    def _note(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()


class World:
    """One shard and two tenants, made by `open_world`."""

    def __init__(
        self,
        cluster: MemoryCluster,
        host: ShardHost,
        watched: WatchedHost,
        served: ServedShard,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.watched = watched
        self.served = served
        self._pool = pool
        self._transports: list[Transport] = []
        self._holder = Holder(random.randbytes(HOLDER_BYTES))
        self._attempts = itertools.count(1)
        self._is_cut = False

    def open(self, tenant: Tenant = ONE) -> Transport:
        """Opens a transport to the shard, which is closed with the world."""
        transport = self.served.open(tenant)
        self._transports.append(transport)
        return transport

    def second_tenant(self) -> Transport:
        """Opens a transport to the shard for the other tenant."""
        return self.open(TWO)

    def attempt(self) -> Attempt:
        """Returns an attempt that was never used."""
        return Attempt(self._holder, next(self._attempts))

    @property
    def epoch(self) -> Epoch:
        return self.host.core.epoch

    def cut(self) -> None:
        """Ends the shard, as if its process had ended."""
        self._is_cut = True
        self.served.close()
        for shard, host in self.cluster.shards.items():
            if host is self.host:
                self.cluster.stop_shard(shard)

    def meanwhile(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on another thread."""
        return self._pool.submit(work)

    def page(self, namespace: NamespaceId, key: PageKey) -> Page | None:
        """Returns the shard's page for a key, ready or being written; None if there is none."""
        return self.host.core.pool.get(namespace, key)

    def memory(self, namespace: NamespaceId, key: PageKey) -> memoryview:
        """Returns the bytes of a page of an addressable tier."""
        return self.host.read(self._slot(namespace, key))

    def spoil(self, namespace: NamespaceId, key: PageKey, at: int) -> None:
        """Flips a bit of that byte of a page."""
        flip_bit(self.host, self._slot(namespace, key), 8 * at)

    def _slot(self, namespace: NamespaceId, key: PageKey) -> PageSlot:
        page = self.page(namespace, key)
        assert page is not None, "the shard does not hold this page"
        return page.slot()

    def demote(self, namespace: NamespaceId, keys: Sequence[PageKey], codec: Codec) -> None:
        """Has the coordinator order these pages down, and waits until they are in the host tier, encoded with
        `codec`."""
        self._order([Move(namespace, key.hash, STAGING, codec) for key in keys])
        pages = [self.page(namespace, key) for key in keys]
        assert all(page is not None and page.tier is STAGING and page.codec is codec for page in pages), "not there"

    def _order(self, moves: Sequence[Move]) -> None:
        """Gives these orders and waits until the shard has carried them out and reported so."""
        coordinator, core = self.cluster.running_coordinator(), self.cluster.coordinator_core()
        (member,) = core.state.members.all()

        def order() -> None:
            core.tiering.order(member, moves)

        coordinator.inspect(order)
        self.cluster.wait_until(lambda: member.orders.of(MoveOrder) is None, BOUND_S)

    def leased(self, attempt: Attempt) -> bool:
        """Whether the lease of this attempt is still running."""
        return self.host.core.leases.running(attempt)

    def lease_expiry(self) -> int | None:
        """Returns when the next lease expires, on the clock of the shard; None if there is no lease."""
        return self.host.core.leases.next_expiry

    def expire_leases(self) -> None:
        """Makes all leases expire now, including those that are renewed meanwhile."""
        leases = self.host.core.leases

        def expired() -> bool:
            for lease in leases.all():
                lease.expires_at = 0
            return leases.next_expiry is None

        self.host.inspect(expired)
        self.host.ask(build_request(Renew(self.attempt()), CLUSTER), BOUND_S)  # the driver sees a deadline after a step
        self.watched.wait_until(expired, "expired leases end")

    def purge(self) -> None:
        """Purges everything of the first tenant, and waits until the shard has revoked the leases of its stores."""
        self.cluster.running_coordinator().ask(build_request(Purge(), ONE), BOUND_S)
        self.watched.wait_until(lambda: self.host.core.leases.next_expiry is None, "the stores are stopped")

    def wait_until_unleased(self) -> None:
        """Waits until no lease is left."""
        self.watched.wait_until(lambda: not len(self.host.core.leases), "every lease is given back")

    def check(self) -> None:
        """Raises AssertionError if the test left anything behind except READY pages."""
        if self._is_cut:
            return
        core = self.host.core

        def unleased() -> bool:
            """Checks only while there is no lease, and in the same look: on an order of the coordinator the shard may
            begin to move pages right after it, and these pages have leases."""
            if len(core.leases):
                return False
            check_shard(core)
            core.pool.allocator.check()
            assert all(page.state is PageState.READY for page in core.pool.everything()), "a page is left half-way"
            return True

        self.watched.wait_until(unleased, "every lease is given back")

    def close(self) -> None:
        """Closes the transports and their server. May be called repeatedly."""
        for transport in self._transports:
            transport.close()
        self.served.close()


@contextmanager
def open_world(serve: Callable[[WatchedHost], ServedShard]) -> Iterator[World]:
    """Opens a world whose shard is served by `serve`; checks it at the end of a test that passes."""
    # Eviction and scrubbing run only when a test asks for room or suspects pages.
    unasked = {
        "coordinator": {"low_free": 0.0, "high_free": 0.0},
        "shard": {"scrub_bytes": 0, "host_bytes": HOST_BYTES},
    }
    with MemoryCluster(ram_bytes=ARENA_BYTES, config=unasked) as cluster, ThreadPoolExecutor(4) as pool:
        (host,) = cluster.shards.values()
        watched = WatchedHost(host)
        world = World(cluster, host, watched, serve(watched), pool)
        try:
            yield world
            world.check()
        finally:
            world.close()


class Pause:
    """Stops a thread at its call number `at`, until another thread releases it."""

    def __init__(self, at: int = 1) -> None:
        self._calls = itertools.count(1)
        self._at = at
        self._reached = threading.Event()
        self._released = threading.Event()

    def __call__(self) -> None:
        if next(self._calls) == self._at:
            self._reached.set()
            assert self._released.wait(BOUND_S), "the pause was not released"

    def wait_reached(self) -> None:
        assert self._reached.wait(BOUND_S), "the pause was not reached"

    def release(self) -> None:
        self._released.set()
