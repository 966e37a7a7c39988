"""A call has one deadline, however many parts it has: every part gets it, and a side that hangs delays no call beyond
it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.messages import EndTicket, RenewTicket
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import Unreachable
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import CoordinatorPort, GrpcPort
from kvcluster.transfers.deadlines import OTHER_MS
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transfers.transfer import Lookup, Pinned, Stored
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.rpc import Connection
from tests.client.build import BOUND_S, SPEC, Hold, Port, Steps, kv, prompt, room, watched_client

TOKENS = prompt(4)
SHORT_MS = 300
LONG_MS = 3_600_000


# ------------------------------------------------------------------------------------- the same for each part


class Stopwatch:
    """Notes every deadline that the parts of a call are given."""

    def __init__(self, inner: Transport, given: list[Deadline]) -> None:
        self._inner = inner
        self._given = given
        self.name = inner.name
        self.streams = inner.streams

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def noted(*args: Any) -> Any:
            self._given.extend(arg for arg in args if isinstance(arg, Deadline))
            return call(*args)

        return noted


CALLS: dict[str, Callable[[Client], Any]] = {
    "hashes": lambda client: client.hashes(TOKENS, deadline_ms=LONG_MS),
    "lookup": lambda client: client.lookup(TOKENS, deadline_ms=LONG_MS),
    "load": lambda client: client.load(TOKENS, room(4), deadline_ms=LONG_MS),
    "store": lambda client: client.store(prompt(4, seed=1), kv(4), deadline_ms=LONG_MS),
    "flush": lambda client: client.flush(deadline_ms=LONG_MS),
    "explain": lambda client: client.explain(prompt(4, seed=3), deadline_ms=LONG_MS),
    "pin": lambda client: client.pin(TOKENS, 60.0, deadline_ms=LONG_MS),
    "unpin": lambda client: client.unpin(TOKENS, deadline_ms=LONG_MS),
    "clear": lambda client: client.clear(deadline_ms=LONG_MS),
    "purge": lambda client: client.purge(model="other", deadline_ms=LONG_MS),
    "status": lambda client: client.status(deadline_ms=LONG_MS),
}


@pytest.mark.parametrize("named", CALLS)
def test_every_part_of_a_call_has_the_deadline_of_the_call(cluster: MemoryCluster, named: str) -> None:
    storing = cluster.client(SPEC)
    assert storing.store(TOKENS, kv(4)).blocks == 4
    assert storing.flush()
    port, given = Port(cluster), list[Deadline]()
    open_transport = cluster.opener()
    with Client(port, lambda shard: Stopwatch(open_transport(shard), given), SPEC) as client:
        if named == "flush":
            assert client.store(prompt(2, seed=2), kv(2)).blocks == 2
            given.clear()
            port.asked.clear()
            port.deadlines.clear()
        CALLS[named](client)
        given += [
            deadline
            for message, deadline in zip(port.asked, port.deadlines, strict=True)
            if not isinstance(message, (EndTicket, RenewTicket))  # no call waits for these
        ]
        now = time.monotonic_ns()
    (deadline,) = {deadline.at_ns for deadline in given}
    assert now < deadline <= now + LONG_MS * 1_000_000
    assert deadline > now + OTHER_MS * 1_000_000, "the caller's own, not the one by default"


def test_a_part_of_a_deadline_is_earlier_and_never_behind_it() -> None:
    deadline = Deadline.after_ms(LONG_MS)
    assert deadline.share(4).at_ns < deadline.at_ns
    over = Deadline.after_ms(0)
    assert not over.share(4).remaining_s()


# -------------------------------------------------------------------------------------------- those who hang


@contextmanager
def silence() -> Iterator[str]:
    """An address at which connections are accepted and no answer is ever sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def stopped(address: str) -> tuple[CoordinatorPort, OpenTransport]:
    """Ways to a coordinator and to shards of which all hang."""
    return GrpcPort(Connection(address)), lambda shard: GrpcPages(address)


def late(miss: Miss | None) -> bool:
    return miss is not None and miss.reason is MissReason.DEADLINE


def within_bounds(call: Callable[[], Any]) -> Any:
    """Returns what the call returns. Its deadline is a hundredth of this bound, so a call that hangs fails."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(BOUND_S)


def test_a_coordinator_that_hangs_is_a_miss_in_time_for_every_call(cluster: MemoryCluster) -> None:
    with silence() as address:
        port, open_transport = stopped(address)
        with closing(Client(port, open_transport, SPEC, config=ClientConfig(deadline_ms=SHORT_MS))) as client:
            lookup: Lookup = within_bounds(lambda: client.lookup(TOKENS))
            assert late(lookup.reason)
            assert within_bounds(lambda: client.load(TOKENS, room(4))) == 0
            stored: Stored = within_bounds(lambda: client.store(TOKENS, kv(4)))
            assert stored.blocks == 0 and late(stored.miss)
            pinned: Pinned = within_bounds(lambda: client.pin(TOKENS, 60.0))
            assert pinned.blocks == 0 and late(pinned.miss)
            assert all(e.reason is MissReason.DEADLINE for e in within_bounds(lambda: client.explain(TOKENS)))
            for claim in (client.status, client.clear, lambda: client.hashes(TOKENS)):
                with pytest.raises(Unreachable):
                    within_bounds(claim)
            with pytest.raises(Unavailable) as trouble:
                within_bounds(lambda: client.hashes(TOKENS))
            assert late(trouble.value.miss)


@pytest.mark.parametrize("both", [False, True], ids=["the shard", "both"])
def test_a_shard_that_hangs_is_a_miss_in_time_with_and_without_a_coordinator(
    cluster: MemoryCluster, both: bool
) -> None:
    storing = cluster.client(SPEC)
    assert storing.store(TOKENS, kv(4)).blocks == 4
    assert storing.flush()
    with storing.prepare_load(storing.hashes(TOKENS)) as ticket, silence() as address:
        hanging, open_transport = stopped(address)
        port = hanging if both else cluster.port()
        with closing(Client(port, open_transport, SPEC, config=ClientConfig(deadline_ms=SHORT_MS))) as client:
            loaded = within_bounds(lambda: client.begin_load(ticket, room(4)).result())
            assert loaded.blocks == 0 and late(loaded.miss) and list(loaded.failed) == [0, 1, 2, 3]
            stored = within_bounds(lambda: client.store(prompt(2, seed=1), kv(2)))
            assert stored.blocks == 0 and late(stored.miss)
        hanging.close()


def test_closing_waits_for_no_shard_that_hangs(cluster: MemoryCluster) -> None:
    storing = cluster.client(SPEC)
    assert storing.store(TOKENS, kv(4)).blocks == 4
    assert storing.flush()
    with storing.prepare_load(storing.hashes(TOKENS)) as ticket, silence() as address:
        _, open_transport = stopped(address)
        client = Client(cluster.port(), open_transport, SPEC, config=ClientConfig(deadline_ms=LONG_MS))
        transfer = client.begin_load(ticket, room(4))
        cluster.wait_until(lambda: bool(client.status()["transports"]))
        within_bounds(client.close)
        assert late(transfer.result().miss)


def test_a_store_tells_what_it_has_written_when_its_time_is_up(cluster: MemoryCluster) -> None:
    hold, tokens = Hold(), prompt(4, seed=1)
    with watched_client(cluster, Steps(written=hold)) as client:
        transfer = client.begin_store(client.hashes(tokens), kv(4), deadline_ms=SHORT_MS)
        hold.wait_reached()
        stored = transfer.result()
        assert (stored.blocks, late(stored.miss)) == (0, True), "no answer of the shard has come"
        hold.let_go()
    client = cluster.client(SPEC)
    cluster.wait_until(lambda: client.lookup(tokens).blocks == 4)
