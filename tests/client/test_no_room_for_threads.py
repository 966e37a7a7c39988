"""A process that has no room for another thread, as under a limit of processes or of address space: calls end with a
miss or an error of ours, and everything works again when there is room."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import kvcluster
from kvcluster.client.bounded_calls import BoundedCalls, Call, CallPolicy
from kvcluster.client.client import Client
from kvcluster.core.ids import Attempt, Holder
from kvcluster.core.miss import MissReason
from kvcluster.errors import KVClusterError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.deadlines import Timer
from kvcluster.transfers.lease_keeper import LeaseKeeper
from kvcluster.transfers.worker_pool import WorkerPool
from tests.client.build import BOUND_S, SPEC, Hold, kv, prompt, room

LONG_NS = 3_600_000_000_000
ONE, TWO = (Attempt(Holder(b"h" * 16), number) for number in (1, 2))


class Room:
    """Whether the process has room for another thread."""

    def __init__(self) -> None:
        self.free = True
        self.refused: list[str] = []


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """Starts no thread of ours while a test says so, with the error that Python raises then."""
    room, start = Room(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not room.free and thread.name.startswith(("kvcluster", "pool")):
            room.refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    yield room
    room.free = True


def client_of(cluster: MemoryCluster) -> Client:
    client = cluster.client(SPEC)
    client.attach(client._call(None))
    return client


def test_a_store_and_a_load_are_misses_and_work_again_later(cluster: MemoryCluster, threads: Room) -> None:
    client, tokens, blocks = client_of(cluster), prompt(3), kv(3)
    threads.free = False
    stored = client.store(tokens, blocks)
    assert stored.miss is not None and stored.miss.reason is MissReason.FULL and "thread" in stored.miss.detail
    threads.free = True
    assert client.store(tokens, blocks).miss is None
    assert not client.flush() and client.flush()  # the first one says that a store has missed
    other = client_of(cluster)
    threads.free = False
    assert other.load(tokens, room(3)) == 0
    with other.prepare_load(other.hashes(tokens)) as ticket:
        loaded = other.begin_load(ticket, room(3)).result()
    assert loaded.miss is not None and loaded.miss.reason is MissReason.FULL and "thread" in loaded.miss.detail
    threads.free = True
    assert other.load(tokens, room(3)) == len(tokens)
    other.close()
    client.close()


@pytest.mark.parametrize("refused", ["kvcluster-load", "kvcluster-store", "kvcluster-timer", "kvcluster-lease-keeper"])
def test_each_thread_of_a_client_may_be_the_one_without_room(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    tokens, blocks, start = prompt(3), kv(3), threading.Thread.start
    with cluster.client(SPEC) as first:
        assert first.store(tokens, blocks).miss is None and first.flush()

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        client = client_of(cluster)
        client.load(tokens, room(3))
        client.store(prompt(2, seed=1), kv(2))
    assert client.load(tokens, room(3)) == len(tokens)
    client.close()


def test_a_client_without_any_thread_is_closed_and_ends_its_tickets(cluster: MemoryCluster, threads: Room) -> None:
    with client_of(cluster) as first:
        assert first.store(prompt(2), kv(2)).miss is None and first.flush()
    client = client_of(cluster)
    threads.free = False
    ticket = client.prepare_load(client.hashes(prompt(2)))
    assert ticket.blocks == 2
    client.close()
    cluster.wait_until_idle()


def test_a_lease_keeper_starts_its_thread_when_there_is_room(threads: Room) -> None:
    ended, done = list[Attempt](), threading.Semaphore(0)

    def end(attempt: Attempt) -> bool:
        ended.append(attempt)
        done.release()
        return True

    keeper = LeaseKeeper(lambda attempt: True, end)
    threads.free = False
    keeper.keep(ONE, LONG_NS)
    keeper.release(ONE)
    assert threads.refused == ["kvcluster-lease-keeper"] * 2
    threads.free = True
    keeper.keep(TWO, LONG_NS)
    assert done.acquire(timeout=BOUND_S) and ended == [ONE]
    keeper.close()
    assert ended == [ONE, TWO]


def test_a_timer_and_a_pool_that_could_not_start_are_closed(threads: Room) -> None:
    timer, pool = Timer(), WorkerPool(2, "pool")
    threads.free = False
    for start in (timer.start, pool.start):
        with pytest.raises(KVClusterError, match="thread"):
            start()
    timer.close()
    pool.close()


def test_the_first_thread_takes_work_that_is_submitted_before_it_runs() -> None:
    hold, done = Hold(), threading.Event()
    pool = WorkerPool(3, "pool-first", begin=hold)
    pool.start()
    hold.wait_reached()
    pool.submit(done.set)
    hold.let_go()
    assert done.wait(BOUND_S)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("pool-first")] == ["pool-first_0"]
    pool.close()


def test_work_waits_for_the_threads_that_a_pool_has(threads: Room) -> None:
    pool, hold, done = WorkerPool(3, "pool"), Hold(), threading.Semaphore(0)
    pool.start()
    pool.submit(lambda: (hold(), done.release())[1])
    hold.wait_reached()
    threads.free = False
    for _ in range(3):
        pool.submit(done.release)
    hold.let_go()
    assert all(done.acquire(timeout=BOUND_S) for _ in range(4))
    pool.close()


def test_a_sequence_that_gets_no_thread_is_not_opened(cluster: MemoryCluster, threads: Room) -> None:
    client = client_of(cluster)
    threads.free = False
    with pytest.raises(KVClusterError, match="thread"):
        client.sequence()
    assert client.resident().sequences == 0
    threads.free = True
    with client.sequence() as sequence:
        assert sequence.is_empty
    client.close()


def test_a_bounded_call_without_a_thread_is_not_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CallPolicy(patience_ns=LONG_NS, probe_patiences=1, limit=1)
    calls = BoundedCalls[int]("bounded", policy, threads=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refused)
        assert calls.start(lambda call: 1, now=0) is None
    call = calls.start(lambda call: 2, now=0)
    assert isinstance(call, Call) and call.done.result(BOUND_S) is None and call.result == 2
    calls.close()


def test_a_cluster_of_this_process_that_gets_too_few_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread is the one for which there is no room."""
    start, before = threading.Thread.start, threading.enumerate()
    for room_for in range(100):
        left = room_for

        def limited(thread: threading.Thread) -> None:
            nonlocal left
            left -= 1
            (start if left >= 0 else _refused)(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        try:
            kvcluster.local(ray=False, ram_bytes="1MiB").close()
        except KVClusterError as error:
            assert "thread" in str(error)
            assert [thread for thread in threading.enumerate() if thread not in before] == []
        else:
            break
    assert 3 < room_for < 100


def _refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
