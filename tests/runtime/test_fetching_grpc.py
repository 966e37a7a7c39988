"""Pulls over the network, as shards of a real cluster make them: with their secret, and over connections that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from kvcluster.core.ids import Attempt, CallId, ShardId
from kvcluster.core.messages import PageSlot, PullOrder, Reply, Request, ShardAddress, ShardQuestion
from kvcluster.core.miss import Miss
from kvcluster.errors import KVClusterError
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.exchange_summary import ExchangeSummary
from kvcluster.transport.grpc_pages import GrpcPages, page_handlers
from kvcluster.wire.methods import SHARD
from tests.runtime.hosts import (
    BOUND_S,
    EPOCH,
    ME,
    SPEC,
    Coordinator,
    acknowledge,
    content,
    counted,
    flip,
    held,
    new_page,
    shard,
    store,
)
from tests.transport.peers import SECRET, of_a_shard
from tests.waiting import eventually


class Hanging:
    """A page host that stops before it hands out a page, until it is let go."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self.hang_at: int | None = None
        self.hangs = threading.Event()
        self.released = threading.Event()

    def ask(self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float) -> Reply:
        return self._host.ask(build, wait_s)

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        if slot.key.hash == (new_page(self.hang_at).key.hash if self.hang_at is not None else None):
            self.hangs.set()
            assert self.released.wait(BOUND_S)
        return self._host.read(slot, start, stop)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        return self._host.fill(slot, start, stop)

    def on_revoke(self, attempt: Attempt, stop: Callable[[Miss], object]) -> AbstractContextManager[None]:
        return self._host.on_revoke(attempt, stop)

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        self._host.exchange_ended(summary)

    def connection_refused(self, path: str, error: KVClusterError) -> None:
        self._host.connection_refused(path, error)


class Served:
    """A source behind its server, and a target that is told to pull from it."""

    def __init__(self, source: ShardHost, target: ShardHost, told: Coordinator, hanging: Hanging, address: str) -> None:
        self.source = source
        self.target = target
        self.told = told
        self.hanging = hanging
        self._source = ShardAddress(ShardId("source"), EPOCH, address)
        self._orders = 0

    def order(self, *numbers: int) -> int:
        """Tells the target to pull these."""
        self._orders += 1
        order = PullOrder(self._orders, self._source, ME, SPEC, tuple(map(new_page, numbers)))
        self.told.say(lambda message: replace(acknowledge(message), orders=(order,)))
        return self._orders

    def pull(self, *numbers: int) -> None:
        """Returns when the target says that it has ended."""
        number = self.order(*numbers)
        self.told.wait_until(lambda report: report.orders.ended(number))


@contextmanager
def served(**config: object) -> Iterator[Served]:
    others, told = Coordinator(), Coordinator()
    with shard(others, name="source") as source:
        hanging = Hanging(source)
        auth = Authenticator({}, "", epoch_of=of_a_shard)
        handlers = unary_handlers(SHARD, source.ask, shared=frozenset({"Suspect"}))
        handlers |= page_handlers(hanging)
        server = GrpcServer(handlers, auth, "127.0.0.1", 0, threads=4)
        server.start()

        def open_source(address: ShardAddress) -> GrpcPages:
            return GrpcPages(address.address, Credentials(SECRET))

        try:
            with shard(told, name="target", open_source=open_source, **config) as target:
                others.wait_for(3)
                told.wait_for(3)
                yield Served(source, target, told, hanging, server.address)
        finally:
            hanging.released.set()
            server.close(grace_s=0)


def test_the_secret_of_the_cluster_opens_every_namespace_of_another_shard() -> None:
    with served() as pair:
        store(pair.source, range(1, 9))
        pair.pull(*range(1, 9))
        assert held(pair.target) == {number: content(number) for number in range(1, 9)}


def test_a_page_that_came_wrong_is_reported_and_read_again() -> None:
    with served() as pair:
        store(pair.source, [1, 2, 3])
        flip(pair.source, 2, bit=99)
        pair.pull(1, 2, 3)
        assert sorted(held(pair.target)) == [1, 3]
        eventually(lambda: counted(pair.source)["corrupt"] == 1)
        assert sorted(held(pair.source)) == [1, 3]


def test_a_source_that_stops_in_the_middle_is_waited_for_no_longer_than_a_lease_runs() -> None:
    """The lease ends under the lock of the driver, for which the reader of the connection may be waiting."""
    with served(lease_ttl_ms=300) as pair:
        store(pair.source, [1, 2, 3])
        pair.hanging.hang_at = 2
        pair.pull(1, 2, 3)
        assert pair.hanging.hangs.is_set()
        assert held(pair.target) == {}, "pages that arrived before the lease ended were too late to be kept"
        assert counted(pair.target)["revoked"] == 1
        pair.hanging.hang_at = None
        pair.hanging.released.set()
        pair.pull(1, 2, 3)
        assert sorted(held(pair.target)) == [1, 2, 3]


def test_a_shard_ends_at_once_while_its_source_hangs() -> None:
    with served() as pair:
        store(pair.source, [1])
        pair.hanging.hang_at = 1
        pair.order(1)
        assert pair.hanging.hangs.wait(BOUND_S)
        pair.target.close()
        assert not pair.hanging.released.is_set()
