"""The lease keeper renews the tickets that are kept, ends those that are released, and makes no caller wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, Holder, NamespaceId
from kvcluster.core.messages import Need, RenewTicket, TicketBody
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.runtime.auth import DEFAULT_TENANT
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.lease_keeper import LeaseKeeper
from kvcluster.transfers.tickets import TicketSeal
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Unavailable
from tests.client.build import BOUND_S, SPEC, Hold, Port, kv, prompt, room, watched_client
from tests.client.conftest import Start

SHORT_NS = 3_000_000
LONG_NS = 3_600_000_000_000
ONE, TWO, THREE = (Attempt(Holder(b"h" * 16), number) for number in (1, 2, 3))


class Coordinator:
    """The coordinator of a keeper: records its questions, and answers as the test says."""

    def __init__(self) -> None:
        self.renewed: list[Attempt] = []
        self.ended: list[Attempt] = []
        self.knows = True
        self.hears = True
        self.hold: Hold | None = None
        self._told = threading.Condition()

    def renew(self, attempt: Attempt) -> bool:
        with self._told:
            self.renewed.append(attempt)
            self._told.notify_all()
            return self.knows

    def end(self, attempt: Attempt) -> bool:
        if self.hold is not None:
            self.hold()
        with self._told:
            self.ended.append(attempt)
            self._told.notify_all()
            return self.hears

    def wait_renewed(self, attempt: Attempt, times: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: self.renewed.count(attempt) >= times, BOUND_S)

    def wait_ended(self, attempt: Attempt) -> None:
        with self._told:
            assert self._told.wait_for(lambda: attempt in self.ended, BOUND_S)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@contextmanager
def keeping(coordinator: Coordinator) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(coordinator.renew, coordinator.end)
    try:
        yield keeper
    finally:
        keeper.close()


def test_a_kept_ticket_is_renewed_again_and_again(coordinator: Coordinator) -> None:
    with keeping(coordinator) as keeper:
        keeper.keep(ONE, SHORT_NS)
        coordinator.wait_renewed(ONE, 3)


def test_tickets_are_renewed_each_in_its_own_time(coordinator: Coordinator) -> None:
    with keeping(coordinator) as keeper:
        keeper.keep(ONE, LONG_NS)
        keeper.keep(TWO, SHORT_NS)
        coordinator.wait_renewed(TWO, 3)
    assert ONE not in coordinator.renewed


def test_a_ticket_that_is_gone_is_let_go_and_not_ended(coordinator: Coordinator) -> None:
    coordinator.knows = False
    with keeping(coordinator) as keeper:
        keeper.keep(ONE, SHORT_NS)
        coordinator.wait_renewed(ONE, 1)
        coordinator.knows = True
        keeper.keep(TWO, SHORT_NS)
        coordinator.wait_renewed(TWO, 3)
    assert coordinator.renewed.count(ONE) == 1
    assert coordinator.ended == [TWO]


def test_a_released_ticket_is_ended_once_and_renewed_no_more(coordinator: Coordinator) -> None:
    with keeping(coordinator) as keeper:
        keeper.keep(ONE, SHORT_NS)
        coordinator.wait_renewed(ONE, 1)
        keeper.release(ONE)
        keeper.release(ONE)
        coordinator.wait_ended(ONE)
        renewed = coordinator.renewed.count(ONE)
        keeper.keep(TWO, SHORT_NS)
        coordinator.wait_renewed(TWO, 3)
        assert coordinator.renewed.count(ONE) == renewed
    assert coordinator.ended == [ONE, TWO]


def test_what_was_never_kept_is_not_ended(coordinator: Coordinator) -> None:
    with keeping(coordinator) as keeper:
        keeper.release(THREE)
        keeper.keep(ONE, LONG_NS)
    assert coordinator.ended == [ONE]


def test_a_release_returns_while_the_coordinator_hangs(coordinator: Coordinator) -> None:
    coordinator.hold = hold = Hold()
    with keeping(coordinator) as keeper:
        keeper.keep(ONE, LONG_NS)
        keeper.keep(TWO, LONG_NS)
        keeper.release(ONE)
        hold.wait_reached()
        keeper.release(TWO)
        assert coordinator.ended == []
        hold.let_go()
    assert coordinator.ended == [ONE, TWO]


def test_after_an_end_that_is_not_delivered_the_waiting_ones_are_dropped(coordinator: Coordinator) -> None:
    coordinator.hears = False
    with keeping(coordinator) as keeper:
        for attempt in (ONE, TWO, THREE):
            keeper.keep(attempt, LONG_NS)
    assert coordinator.ended == [ONE]


def test_a_keeper_of_nothing_closes(coordinator: Coordinator) -> None:
    with keeping(coordinator):
        pass
    assert (coordinator.renewed, coordinator.ended) == ([], [])


# ------------------------------------------------------------------------------------- within a client


def test_a_ticket_lives_on_beyond_its_time_while_its_client_keeps_it(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB", config={"coordinator": {"ticket_ttl_ms": 600, "hold_ms": 600}})
    client, tokens = cluster.client(SPEC), prompt(2)
    client.store(tokens, kv(2))
    client.flush()
    with client.prepare_load(client.hashes(tokens)) as ticket:
        name = DEFAULT_TENANT, ticket.body.attempt
        granted = cluster.coordinator_core().state.tickets.get(name)
        assert granted is not None
        first_expiry = granted.expires_at
        cluster.wait_until(lambda: granted.expires_at >= first_expiry + 600_000_000)
        assert cluster.coordinator_core().state.tickets.get(name) is granted
    cluster.wait_until_idle()
    assert client.status()["tickets"] == 0


def test_a_renewal_that_is_not_heard_is_tried_again(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB", config={"coordinator": {"ticket_ttl_ms": 60_000, "hold_ms": 30}})
    port, tokens = Port(cluster), prompt(2)

    def lose_two(message: object) -> None:
        if isinstance(message, RenewTicket) and len(renewals()) <= 2:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "lost"))

    def renewals() -> list[Attempt]:
        return [message.attempt for message in port.asked if isinstance(message, RenewTicket)]

    port.after = lose_two
    with watched_client(cluster, port=port) as client:
        client.store(tokens, kv(2))
        client.flush()
        with client.prepare_load(client.hashes(tokens)) as ticket:
            cluster.wait_until(lambda: len(renewals()) >= 4)
            assert set(renewals()) == {ticket.body.attempt}


def test_a_ticket_that_is_released_twice_or_in_a_with_block_is_ended_once(cluster: MemoryCluster) -> None:
    client, tokens = cluster.client(SPEC), prompt(2)
    client.store(tokens, kv(2))
    client.flush()
    with client.prepare_load(client.hashes(tokens)) as ticket:
        assert client.status()["tickets"] == 1
        ticket.release()
    cluster.wait_until_idle()
    assert client.status()["counters"]["late"] == 0


def test_beyond_as_many_tickets_as_one_may_hold_loads_go_on_without_a_promise(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TICKETS_PER_HOLDER", 2)
    cluster = start(shards=1, ram_bytes="1MiB")
    client, tokens = cluster.client(SPEC), prompt(2)
    client.store(tokens, kv(2))
    client.flush()
    tickets = [client.prepare_load(client.hashes(tokens)) for _ in range(3)]
    assert client.status()["tickets"] == 2
    for ticket in tickets:
        assert client.begin_load(ticket, room(2)).result().blocks == 2
    full = Miss(MissReason.FULL, "the limit of held tickets is reached; end some")
    assert client.store(prompt(2, seed=1), kv(2)) == Stored(0, 0, 0, 0, full)
    for ticket in tickets:
        ticket.release()
    cluster.wait_until_idle()
    assert client.store(prompt(2, seed=1), kv(2)).blocks == 2


def test_a_ticket_for_nothing_is_no_ticket(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    for hashes in ([], client.hashes(prompt(2))):
        with client.prepare_load(hashes) as ticket:
            assert ticket.blocks == 0
            assert client.status()["tickets"] == 0


# ------------------------------------------------------------------------------------- tickets of other processes


def test_a_ticket_with_any_bit_flipped_is_refused(cluster: MemoryCluster) -> None:
    client, tokens = cluster.client(SPEC), prompt(2)
    client.store(tokens, kv(2))
    client.flush()
    with client.prepare_load(client.hashes(tokens)) as ticket:
        data = bytes(ticket)
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ProtocolError):
                client.redeem(bytes(flipped))
        assert client.redeem(data).hashes == ticket.hashes


@pytest.mark.parametrize("token", [None, "", "yours"])
def test_a_ticket_of_another_credential_is_refused(token: str | None) -> None:
    body = TicketBody(NamespaceId(bytes(32)), Attempt(Holder(bytes(16)), 1), (), Need((None,)), ())
    data = TicketSeal("mine").encode(body)
    assert TicketSeal("mine").decode(data) == body
    with pytest.raises(ProtocolError, match="was made with another token"):
        TicketSeal(token).decode(data)
