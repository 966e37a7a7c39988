"""Which connection to a shard is kept when tickets name two incarnations of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcluster.core.ids import Attempt, Epoch, Holder, ShardId, Tenant
from kvcluster.core.messages import AttachedShard, ReadRequest, ShardAddress
from kvcluster.core.miss import Loss, MissReason
from kvcluster.errors import VersionError
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transport.base import Deadline, Unavailable, run_to_completion
from tests.client.build import SPEC

BEFORE = ShardAddress(ShardId("a"), Epoch(1), "one")
AFTER = ShardAddress(ShardId("a"), Epoch(2), "two")
NAMESPACE = SPEC.namespace("default")


class Connection:
    """A transport that serves reads without pages, one step each, until it is closed."""

    name = "test"

    def __init__(self, shard: ShardAddress) -> None:
        self.shard = shard
        self.closed = False

    def attach(self, spec: object, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        return AttachedShard(NAMESPACE, self.shard.epoch, 1)

    def read(self, request: ReadRequest, sink: object, deadline: Deadline) -> Any:
        yield
        assert not self.closed
        return []

    def close(self) -> None:
        self.closed = True


class Opened:
    """Connections of a client, and all that it has opened."""

    def __init__(self) -> None:
        self.all: list[Connection] = []
        policy = ShardHealth(breaker_failures=3, breaker_ms=1)
        self.connections = ShardConnections(self.open, policy, threading.RLock())

    def open(self, shard: ShardAddress) -> Any:
        self.all.append(Connection(shard))
        return self.all[-1]

    def read(self, shard: ShardAddress) -> Any:
        request = ReadRequest(NAMESPACE, Attempt(Holder(bytes(16)), 1), shard.epoch, (), Loss.EXACT)
        nothing: Any = None
        return self.connections.read(shard, SPEC, request, nothing, Deadline.after_ms(60_000))

    def now(self) -> list[tuple[str, bool]]:
        return [(connection.shard.address, connection.closed) for connection in self.all]


@pytest.fixture
def opened() -> Opened:
    return Opened()


def test_the_next_incarnation_ends_the_exchanges_with_the_one_before(opened: Opened) -> None:
    under_way = opened.read(BEFORE)
    next(under_way)
    run_to_completion(opened.read(AFTER))
    assert opened.now() == [("one", True), ("two", False)]
    under_way.close()


def test_an_old_ticket_cuts_no_exchange_with_the_newer_incarnation(opened: Opened) -> None:
    under_way = opened.read(AFTER)
    next(under_way)
    for _ in range(2):
        run_to_completion(opened.read(BEFORE))
    run_to_completion(under_way)
    assert opened.now() == [("two", False), ("one", False)]
    run_to_completion(opened.read(AFTER))
    assert opened.now() == [("two", False), ("one", False)]


def test_two_incarnations_have_a_connection_and_all_are_closed_in_the_end(opened: Opened) -> None:
    for epoch in (9, 8, 7, 6):
        run_to_completion(opened.read(ShardAddress(BEFORE.shard, Epoch(epoch), f"at {epoch}")))
    assert [closed for _, closed in opened.now()] == [True, True, False, False]
    opened.connections.close()
    assert [closed for _, closed in opened.now()] == [True] * 4


def test_a_shard_that_speaks_no_common_version_is_lost_to_this_worker_with_the_reason(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*_: object) -> AttachedShard:
        raise VersionError("upgrade the server")

    monkeypatch.setattr(Connection, "attach", attach)
    with pytest.raises(Unavailable, match="upgrade the server") as trouble:
        run_to_completion(opened.read(BEFORE))
    assert trouble.value.miss.reason is MissReason.SHARD_LOST
