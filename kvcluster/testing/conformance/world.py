"""A shard to try a transport on, watched from inside.

A World is one real shard in a running cluster of this process, behind the transport that is tried. Tests wait until
the shard has come to some state instead of sleeping, end leases at will, spoil bytes, and cut the shard off. When a
test is over, nothing may be left: no lease, no half-written page, no room that nobody accounts for.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
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
    Renew,
    Reply,
    Request,
    ShardQuestion,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.pool import Page, PageState
from kvcluster.core.tiers import FASTEST, STAGING
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing.cluster import MemoryCluster
from kvcluster.testing.core_stepper import build_request
from kvcluster.transport.base import Deadline, Transport, Unavailable

T = TypeVar("T")

ONE, TWO = Tenant("one"), Tenant("two")
"""The tenants of a world."""

ARENA_BYTES = 32 * 2**20
HOST_BYTES = 4 * 2**20
"""The device tier, and the host tier for what a test has demoted."""

BOUND_S = 20.0
"""How long anything may take before a test fails; nothing is expected to take a tenth of it."""

_LOOK_S = 0.02
"""How often a test looks that waits: what a shard does of its own accord, such as verifying pages, it tells nobody."""


def soon() -> Deadline:
    """A deadline that only a test that hangs can miss."""
    return Deadline.after_ms(BOUND_S * 1e3)


class ServedShard(Protocol):
    """The serving side of a transport, before one shard."""

    def open(self, tenant: Tenant) -> Transport:
        """A way to the shard with that tenant's credential."""

    def close(self) -> None:
        """Ends it at once, and with it what is under way, as the end of the shard's process would. May be repeated."""


class WatchedHost:
    """A shard host that tells whenever it was asked something or has revoked a lease. Implements PageHost
    and ShmHost."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._changed = threading.Condition()
        self._changes = 0
        self._late: list[type] = []

    def ask(self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float) -> Reply:
        asked: list[type] = []

        def watched(call: CallId) -> Request[ShardQuestion]:
            request = build(call)
            asked.append(type(request.question))
            return request

        try:
            reply = self._host.ask(watched, wait_s)
        finally:
            self._note()
        if asked[0] in self._late:
            self._late.remove(asked[0])
            raise Unavailable(Miss(MissReason.DEADLINE))
        return reply

    def view(self, slot: PageSlot) -> memoryview:
        return self._host.view(slot)

    @property
    def arena_bytes(self) -> int:
        return self._host.arena_bytes

    @property
    def lease_ttl_ns(self) -> int:
        return self._host.lease_ttl_ns

    def open_arena(self, *, writable: bool) -> int:
        return self._host.open_arena(writable=writable)

    def on_revoke(self, attempt: Attempt, stop: Callable[[], object]) -> AbstractContextManager[None]:
        def stop_and_note() -> None:
            stop()
            self._note()

        return self._host.on_revoke(attempt, stop_and_note)

    def answer_late(self, kind: type[ShardQuestion]) -> None:
        """The next answer to a question of that kind comes too late for whoever asked."""
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
    """One shard and two tenants. Made by `open_world`."""

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
        """A way to the shard, closed with the world."""
        transport = self.served.open(tenant)
        self._transports.append(transport)
        return transport

    def second_tenant(self) -> Transport:
        """A way to the shard for somebody else."""
        return self.open(TWO)

    def attempt(self) -> Attempt:
        """One that nobody had."""
        return Attempt(self._holder, next(self._attempts))

    @property
    def epoch(self) -> Epoch:
        return self.host.core.epoch

    def cut(self) -> None:
        """The shard is gone, as if its process had ended."""
        self._is_cut = True
        self.served.close()
        for shard, host in self.cluster.shards.items():
            if host is self.host:
                self.cluster.stop_shard(shard)

    def meanwhile(self, work: Callable[[], T]) -> Future[T]:
        """Does it on a thread of its own."""
        return self._pool.submit(work)

    def page(self, namespace: NamespaceId, key: PageKey) -> Page | None:
        """What the shard has for a key, ready or being written."""
        return self.host.core.pool.get(namespace, key)

    def memory(self, namespace: NamespaceId, key: PageKey) -> memoryview:
        """The bytes of a page in the arena, to spoil them."""
        page = self.page(namespace, key)
        assert page is not None, "no such page"
        return self.host.view(page.slot())

    def demote(self, namespace: NamespaceId, keys: Sequence[PageKey], codec: Codec) -> None:
        """Has the coordinator order these pages down, and waits until they lie in the host tier, encoded so."""
        self._order([Move(namespace, key.hash, STAGING, codec) for key in keys])
        pages = [self.page(namespace, key) for key in keys]
        assert all(page is not None and page.tier is STAGING and page.codec is codec for page in pages), "not there"

    def promote(self, namespace: NamespaceId, keys: Sequence[PageKey]) -> None:
        """Has it order them up again, and waits until they lie above as well."""
        self._order([Move(namespace, key.hash, FASTEST) for key in keys])
        pages = [self.page(namespace, key) for key in keys]
        assert all(page is not None and page.tier is FASTEST for page in pages), "not there"

    def _order(self, moves: Sequence[Move]) -> None:
        """Waits until the shard has carried it out, and has said so."""
        coordinator, core = self.cluster.running_coordinator(), self.cluster.coordinator_core()
        (member,) = core.members.all()

        def order() -> None:
            core.tiering.order(member, moves)

        coordinator.inspect(order)
        self.cluster.wait_until(lambda: member.orders.of(MoveOrder) is None, BOUND_S)

    def leased(self, attempt: Attempt) -> bool:
        """Does the lease of this attempt still run?"""
        return self.host.core.leases.running(attempt)

    def lease_expiry(self) -> int | None:
        """When the next lease runs out, on the clock of the shard."""
        return self.host.core.leases.next_expiry

    def expire_leases(self) -> None:
        """All leases run out at this moment, and those that are renewed meanwhile too."""
        leases = self.host.core.leases

        def expired() -> bool:
            for lease in leases.all():
                lease.expires_at = 0
            return leases.next_expiry is None

        self.host.inspect(expired)
        self.host.ask(build_request(Renew(self.attempt()), CLUSTER), BOUND_S)  # the driver sees a deadline after a step
        self.watched.wait_until(expired, "leases that have run out end")

    def wait_until_unleased(self) -> None:
        """Waits until nothing is read or written."""
        self.watched.wait_until(lambda: not len(self.host.core.leases), "every lease is given back")

    def check(self) -> None:
        """Raises AssertionError where anything is left of what the test did, but for READY pages."""
        if self._is_cut:
            return
        self.wait_until_unleased()
        core = self.host.core

        def check() -> None:
            check_shard(core)
            core.pool.allocator.check()
            assert all(page.state is PageState.READY for page in core.pool.everything()), "a page is left half-way"

        self.host.inspect(check)

    def close(self) -> None:
        """Ends the transports and what serves them. May be called again."""
        for transport in self._transports:
            transport.close()
        self.served.close()


@contextmanager
def open_world(serve: Callable[[WatchedHost], ServedShard]) -> Iterator[World]:
    """A world whose shard is reached by what `serve` puts before it; checked at the end of a test that passes."""
    # Room is made when a test asks for it, and pages are verified when somebody suspects them; not before.
    unasked = {
        "coordinator": {"low_free": 0.0, "high_free": 0.0},
        "shard": {"scrub_bytes": 0, "host_bytes": HOST_BYTES},
    }
    with MemoryCluster(device_bytes=ARENA_BYTES, config=unasked) as cluster, ThreadPoolExecutor(4) as pool:
        (host,) = cluster.shards.values()
        watched = WatchedHost(host)
        world = World(cluster, host, watched, serve(watched), pool)
        try:
            yield world
            world.check()
        finally:
            world.close()


class Pause:
    """Where one thread stops, at call number `at`, until another lets it go on."""

    def __init__(self, at: int = 1) -> None:
        self._calls = itertools.count(1)
        self._at = at
        self._reached = threading.Event()
        self._released = threading.Event()

    def __call__(self) -> None:
        if next(self._calls) == self._at:
            self._reached.set()
            assert self._released.wait(BOUND_S), "nobody let it go on"

    def wait_reached(self) -> None:
        assert self._reached.wait(BOUND_S), "it never came there"

    def release(self) -> None:
        self._released.set()
