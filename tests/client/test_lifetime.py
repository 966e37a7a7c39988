"""How long things of a client live: what is closed keeps nothing, what is dropped is closed when it is collected, and
`close` waits for nothing that hangs."""

from __future__ import annotations

import gc
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import Attempt, BlockHash, Holder, NamespaceId
from kvcluster.core.messages import CoordinatorQuestion, GetStatus, Reply, Status
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, KVClusterError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import CoordinatorClient, GrpcPort
from kvcluster.transfers.lease_keeper import LeaseKeeper
from kvcluster.transport.base import Cancelled, Deadline, Unavailable
from kvcluster.transport.rpc import Connection
from tests.client.build import BOUND_S, SPEC, Port, kv, prompt, room, same
from tests.waiting import eventually

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test drops is collected within it."""
    yield
    gc.collect()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads() -> list[str]:
    ours = ("kvcluster-lease-keeper", "kvcluster-timer", "kvcluster-sequences", "kvcluster-load", "kvcluster-store")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


def with_all_threads(client: Client) -> None:
    assert client.store(prompt(2), kv(2)).miss is None and client.flush()
    with client.prepare_load(client.hashes(prompt(2))) as ticket:
        assert client.begin_load(ticket, room(2)).result().blocks == 2
    client.sequence().close()
    assert threads()


def warned(drop: Callable[[], None], about: str) -> None:
    """Collects what `drop` drops, which warns once."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        drop()

        def texts() -> list[str]:
            gc.collect()  # again: a thread that has just ended a transfer may still refer to it
            return [str(one.message) for one in seen if one.category is ResourceWarning and about in str(one.message)]

        eventually(lambda: bool(texts()))
        assert len(texts()) == 1


# ------------------------------------------------------------------------------------------------- what is closed


def test_a_cluster_keeps_no_client_that_was_closed() -> None:
    with kvcluster.local(ray=False, ram_bytes="1MiB") as cluster:
        client = cluster.client(SPEC)
        known = weakref.ref(client)
        client.close()
        del client
        gc.collect()
        assert known() is None


def test_a_cluster_closes_all_its_clients_if_one_of_them_raises() -> None:
    cluster = kvcluster.local(ray=False, ram_bytes="1MiB")
    clients = [cluster.client(SPEC) for _ in range(3)]
    for client in clients[:2]:
        client.on_close = _raising
    with pytest.raises(RuntimeError, match="by the test"):
        cluster.close()
    assert all(client._closed for client in clients)
    with pytest.raises(kvcluster.KVClusterError):
        kvcluster.connect(cluster.address, SPEC, config=ClientConfig(connect_ms=1))


def _raising(client: Client) -> None:
    raise RuntimeError("by the test")


def test_a_closed_client_frees_its_resident_set(cluster: MemoryCluster) -> None:
    config = ClientConfig(resident_bytes="64MiB", deadline_ms=10_000)
    client = Client(cluster.port(), cluster.opener(), SPEC, config=config)
    sequence = client.sequence()
    page_bytes = client.resident().page_bytes
    sequence.append(0, *_tokens(4))
    assert sequence.attend(0, torch.zeros_like(_tokens(1)[0])).shape[0] == 1  # whose caches are kept with the sequence
    client.prewarm_resident((64 << 20) // page_bytes * SPEC.block_tokens)
    before = resident_bytes()
    client.close()
    assert before - resident_bytes() > 48 << 20
    assert sequence.closed and client.resident().sequences == 0 and client.shipped().loaded_bytes == 0
    for use in (lambda: sequence.resident_pages, lambda: sequence.resident_planes, lambda: sequence.read(0, 0)):
        with pytest.raises(CallerError, match="closed"):
            use()


def _tokens(tokens: int) -> list[torch.Tensor]:
    group, whole = SPEC.groups[0], SPEC.whole(0)
    return [torch.ones(tokens, whole.heads, plane.dim, dtype=getattr(torch, plane.dtype)) for plane in group.planes]


def test_a_view_of_the_resident_set_outlives_its_client(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    sequence = client.sequence()
    for layer in range(SPEC.whole(0).layers):
        sequence.append(layer, *_tokens(4))
    view, page = sequence.resident_pages, int(sequence.block_table[0])
    held = view[page].clone()
    client.close()
    gc.collect()
    assert same(view[page], held) and bool((view[page][:, :, :4] == 1).all())


# ------------------------------------------------------------------------------------------------ what is dropped


def test_a_client_that_is_dropped_is_closed_when_it_is_collected(cluster: MemoryCluster) -> None:
    before = threads()
    held = [Client(cluster.port(), cluster.opener(), SPEC, config=cluster.config.client)]
    with_all_threads(held[0])
    warned(held.clear, "was not closed")
    eventually(lambda: threads() == before)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_sequences_tickets_and_transfers_keep_their_client(cluster: MemoryCluster) -> None:
    before = threads()

    def dropped() -> Client:
        return Client(cluster.port(), cluster.opener(), SPEC, config=cluster.config.client)

    with dropped() as client:
        hashes = client.hashes(prompt(2))
    assert dropped().begin_store(hashes, kv(2)).result().miss is None
    sequence = dropped().sequence()
    fork = sequence.fork()
    sequence.close()
    del sequence
    gc.collect()
    fork.append(0, *_tokens(4))
    assert len(fork.read(0, 0, 4)[0]) == 4
    fork.close()
    ticket = dropped().prepare_load(hashes)
    gc.collect()
    ticket.release()
    del fork, ticket, client
    gc.collect()
    eventually(lambda: threads() == before)


# --------------------------------------------------------------------------------------------- what close ends


class HangingPort(Port):
    """A way to a coordinator that answers nothing while `hangs` is set."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.hangs = False
        self.waiting = threading.Semaphore(0)
        self._cuts = 0
        self._changed = threading.Condition()

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        if not self.hangs:
            return super().ask(question, deadline, namespace)
        with self._changed:
            cuts = self._cuts
            self.waiting.release()
            if self._changed.wait_for(lambda: self._cuts > cuts, deadline.remaining_s()):
                raise Cancelled(Miss(MissReason.SHARD_LOST, "cut off"))
        raise Unavailable(Miss(MissReason.DEADLINE, "the coordinator hangs"))

    def cut_off(self) -> None:
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()


CALLS: dict[str, Callable[[Client, list[BlockHash]], object]] = {
    "begin_store": lambda client, hashes: client.begin_store(hashes, kv(2), deadline_ms=HOUR_MS).result().miss,
    "store": lambda client, _: client.store(prompt(2), kv(2), deadline_ms=HOUR_MS).miss,
    "load": lambda client, _: client.load(prompt(2), room(2), deadline_ms=HOUR_MS) == 0,
    "lookup": lambda client, _: client.lookup(prompt(2), deadline_ms=HOUR_MS).reason,
    "prepare_load": lambda client, hashes: client.prepare_load(hashes, deadline_ms=HOUR_MS).miss,
    "pin": lambda client, _: client.pin(prompt(2), 3.0, deadline_ms=HOUR_MS).miss,
    "status": lambda client, _: client.status(deadline_ms=HOUR_MS),
    "sequence": lambda client, _: _flush_a_sequence(client),
}


def _flush_a_sequence(client: Client) -> bool:
    """Returns once the background store of a sequence has ended without having stored anything."""
    with client.sequence(deadline_ms=HOUR_MS) as sequence:
        for layer in range(SPEC.whole(0).layers):
            sequence.append(layer, *_tokens(2 * SPEC.block_tokens))
        sequence.advance(prompt(2))
        return not sequence.flush(deadline_ms=HOUR_MS)


@pytest.mark.parametrize("name", CALLS)
def test_close_ends_calls_that_hang_at_the_coordinator(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kvcluster.transfers.coordinator_client._CLOSING_MS", 50)
    port, outcomes = HangingPort(cluster), list[object]()
    client = Client(port, cluster.opener(), SPEC, config=ClientConfig(deadline_ms=HOUR_MS))
    hashes = client.hashes(prompt(2))
    port.hangs = name != "sequence"

    def call() -> None:
        try:
            outcomes.append(CALLS[name](client, hashes))
        except KVClusterError as error:
            outcomes.append(error)

    thread = threading.Thread(target=call, daemon=True)
    if name == "sequence":
        client.sequence(deadline_ms=HOUR_MS).close()
        port.hangs = True
    thread.start()
    assert port.waiting.acquire(timeout=BOUND_S)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    for each in (closing, thread):
        each.join(BOUND_S)
        assert not each.is_alive()
    (outcome,) = outcomes
    assert outcome, "it succeeded"


def test_a_question_over_grpc_ends_when_its_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.transfers.coordinator_client._CLOSING_MS", 50)
    outcomes = list[BaseException]()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts connections, and never answers
        connection = Connection(f"127.0.0.1:{listening.getsockname()[1]}")
        control = CoordinatorClient(GrpcPort(connection))

        def ask() -> None:
            try:
                control.request(Status, GetStatus(), Deadline.after_ms(HOUR_MS))
            except Unavailable as error:
                outcomes.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        eventually(lambda: connection._asking == 1)
        control.end_questions()
        thread.join(BOUND_S)
        assert [type(each) for each in outcomes] == [Cancelled] and "closed" in str(outcomes[0])
        ask()
        assert outcomes[1:] and not isinstance(outcomes[1], Cancelled), "there was no time for the last question"
        control.close()


# ------------------------------------------------------------------------------------------ tickets and borrowed blocks


@pytest.fixture
def client(cluster: MemoryCluster) -> Client:
    """A client of the cluster, which has a prompt of two blocks."""
    client = cluster.client(SPEC)
    assert client.store(prompt(2), kv(2)).miss is None and client.flush()
    return client


def test_a_ticket_that_is_dropped_is_released_when_it_is_collected(cluster: MemoryCluster, client: Client) -> None:
    held = [client.prepare_load(client.hashes(prompt(2)))]
    assert not cluster.idle()
    warned(held.clear, "a ticket for 2 blocks was not released")
    cluster.wait_until_idle()


def test_a_ticket_that_was_released_or_holds_nothing_is_dropped_without_a_word(client: Client) -> None:
    hashes = client.hashes(prompt(2))
    held = [client.prepare_load(hashes), client.prepare_load(client.hashes(prompt(2, seed=1)))]
    held.append(client.redeem(bytes(held[0])))
    held[0].release()
    held.clear()
    gc.collect()
    ticket = client.prepare_load(hashes)
    client.close()
    del ticket
    gc.collect()


def test_a_transfer_keeps_its_ticket_until_it_is_dropped(cluster: MemoryCluster, client: Client) -> None:
    held = [client.begin_load(client.prepare_load(client.hashes(prompt(2))), room(2))]
    gc.collect()
    assert held[0].result().blocks == 2 and len(cluster.coordinator_core().state.tickets)
    warned(held.clear, "a ticket for 2 blocks was not released")
    cluster.wait_until_idle()


def test_a_keeper_looks_for_what_was_dropped_while_its_lock_was_held() -> None:
    """The garbage collector runs in any thread, also in one that is within the keeper."""
    ended, done = list[Attempt](), threading.Semaphore(0)

    def end(attempt: Attempt) -> bool:
        ended.append(attempt)
        done.release()
        return True

    keeper, one, two = LeaseKeeper(lambda attempt: True, end), *(Attempt(Holder(b"h" * 16), n) for n in (1, 2))
    keeper.keep(one, 10**15)
    with keeper._changed:
        assert keeper.abandon([one]) and not keeper.abandon([two])
    assert done.acquire(timeout=BOUND_S) and ended == [one]
    keeper.close()
    assert not keeper.abandon([one]) and ended == [one]
