"""Computes of tenants at one shard: who computes when, and how jobs end. Time is the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.runtime.compute_pool import ComputePool, ComputeTurns
from kvcluster.transport.base import ComputeBusy, ComputeTurn, Deadline, Unavailable
from tests.waiting import eventually

A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


def soon() -> Deadline:
    return Deadline.after_ms(60_000)


def nothing() -> None:
    """Looks after nothing."""


class Callers:
    """Threads that have a pool run something, and what came of it."""

    def __init__(self, pool: ComputePool) -> None:
        self.pool = pool
        self.outcomes: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def run(
        self, name: str, tenant: Tenant, work: Callable[[ComputeTurn], Any], deadline: Deadline | None = None
    ) -> None:
        def call() -> None:
            try:
                self.outcomes[name] = self.pool.run(tenant, work, deadline or soon())
            except Exception as error:
                self.outcomes[name] = error

        self._threads.append(threading.Thread(target=call))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


class Clock:
    """A clock that the jobs move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def callers(clock: Clock) -> Iterator[Callers]:
    """Of a pool in which one thread computes."""
    pool = ComputePool(1, "test", clock)
    pool.start()
    callers = Callers(pool)
    yield callers
    pool.close()
    callers.join()


class Pieces:
    """A job of so many pieces, each of which takes a second; it appends its name to `done` after each. `begun` is set
    in the first, which goes on once `go_on` is set."""

    def __init__(self, name: str, pieces: int, clock: Clock, done: list[str]) -> None:
        self.name, self.pieces, self.clock, self.done = name, pieces, clock, done
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, turn: ComputeTurn) -> str:
        self.begun.set()
        assert self.go_on.wait(60)
        for _ in range(self.pieces):
            turn.give_way(nothing)
            self.clock.now += 1
            self.done.append(self.name)
        return self.name


def test_a_tenant_is_served_after_the_piece_that_another_is_in(callers: Callers, clock: Clock) -> None:
    done: list[str] = []
    flood = [Pieces("a", 50, clock, done) for _ in range(3)]
    for number, job in enumerate(flood):
        job.go_on.set()
        if not number:
            job.go_on.clear()
        callers.run(f"a{number}", A, job)
    assert eventually(flood[0].begun.is_set) and eventually(lambda: callers.pool.waiting == 2)
    mine = Pieces("b", 2, clock, done)
    mine.go_on.set()
    callers.run("b", B, mine)
    assert eventually(lambda: callers.pool.waiting == 3)
    flood[0].go_on.set()
    callers.join()
    assert done.index("b") <= 1, "not behind all that had come before"
    assert done[:6].count("b") == 2, "and then in turns"
    assert callers.outcomes == {"a0": "a", "a1": "a", "a2": "a", "b": "b"}


def test_a_tenant_that_is_alone_never_pauses(callers: Callers, clock: Clock) -> None:
    done: list[str] = []
    jobs = {name: Pieces(name, 3, clock, done) for name in ("first", "second")}
    for name, job in jobs.items():
        job.go_on.set()
        callers.run(name, A, job)
    callers.join()
    assert len(done) == 6 and len(set(done[:3])) == 1, "one job after the other"


def test_a_job_that_waits_ends_at_its_deadline_though_no_thread_is_free(callers: Callers) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(turn: ComputeTurn) -> None:
        begun.set()
        assert go_on.wait(60)

    callers.run("holder", A, hold)
    assert eventually(begun.is_set)
    ran: list[int] = []
    with pytest.raises(Unavailable) as late:
        callers.pool.run(A, lambda turn: ran.append(1), Deadline.after_ms(1))
    assert late.value.miss.reason is MissReason.DEADLINE
    assert not go_on.is_set() and callers.pool.waiting == 0
    go_on.set()
    callers.join()
    assert not ran and callers.pool.run(B, lambda turn: 5, soon()) == 5


def test_a_job_that_pauses_looks_after_its_lease_and_may_end(callers: Callers, clock: Clock) -> None:
    begun, other, go_on = threading.Event(), threading.Event(), threading.Event()

    def ends() -> None:
        raise Unavailable(Miss(MissReason.DEADLINE, "mine"))

    def pauses(turn: ComputeTurn) -> None:
        begun.set()
        clock.now += 1
        assert eventually(lambda: callers.pool.waiting == 1)
        turn.give_way(ends)

    def hold(turn: ComputeTurn) -> str:
        other.set()
        assert go_on.wait(60)
        return "done"

    callers.run("a", A, pauses)
    assert eventually(begun.is_set)
    callers.run("b", B, hold)
    assert eventually(lambda: "a" in callers.outcomes), "it does not wait for the other to end"
    assert callers.outcomes["a"].miss.detail == "mine"
    go_on.set()
    callers.join()
    assert callers.outcomes["b"] == "done"
    assert callers.pool.run(A, lambda turn: 5, soon()) == 5, "the place that it had is free"


def test_a_pool_that_closes_ends_jobs_at_their_next_piece(clock: Clock) -> None:
    pool = ComputePool(1, "ends", clock)
    pool.start()
    callers, begun, closing = Callers(pool), threading.Event(), threading.Event()

    def endless(turn: ComputeTurn) -> None:
        begun.set()
        assert closing.wait(60)
        while True:
            turn.give_way(nothing)

    callers.run("under way", A, endless)
    assert eventually(begun.is_set)
    callers.run("waiting", A, endless)
    assert eventually(lambda: pool.waiting == 1)
    closing.set()
    pool.close()
    callers.join()
    assert [error.miss.reason for error in callers.outcomes.values()] == [MissReason.SHARD_LOST] * 2
    with pytest.raises(Unavailable):
        pool.run(A, lambda turn: 5, soon())


def test_jobs_under_way_count_towards_a_tenants_share(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTENDS_WAITING", 2)  # of which a tenant alone may have one
    pool, go_on, begun = ComputePool(1, "small"), threading.Event(), threading.Event()
    pool.start()
    small = Callers(pool)

    def hold(turn: ComputeTurn) -> None:
        begun.set()
        assert go_on.wait(60)

    small.run("holder", A, hold)
    assert eventually(begun.is_set)
    with pytest.raises(ComputeBusy):
        pool.run(A, lambda turn: None, soon())
    go_on.set()
    small.join()
    pool.close()


# ------------------------------------------------------------------------------------------------ turns


def test_the_tenant_that_has_computed_least_is_next() -> None:
    turns = ComputeTurns()
    for tenant in (A, B):
        turns.enter(tenant)
    turns.spent(A, 2.0)
    turns.spent(B, 1.0)
    assert turns.next_of([A, B]) == B and turns.next_of([]) is None
    assert turns.due_before(A, [A, B]) and not turns.due_before(B, [A, B])


def test_a_tenant_saves_up_no_time_while_it_computes_nothing() -> None:
    turns = ComputeTurns()
    turns.enter(A)
    turns.spent(A, 100.0)
    turns.enter(B)
    assert not turns.due_before(A, [B]), "as if it had computed as much as the others"
    turns.spent(A, 1.0)
    assert turns.due_before(A, [B])


def test_a_tenant_that_comes_back_still_owes_what_it_has_computed() -> None:
    turns = ComputeTurns()
    for tenant in (A, B):
        turns.enter(tenant)
    turns.spent(A, 100.0)
    turns.leave(A)
    turns.enter(A)
    assert turns.next_of([A, B]) == B


def test_without_room_for_a_thread_a_job_is_declined_and_the_next_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ComputePool(1, "full")
    pool.start()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ComputeBusy, match="no room for another thread"):
            pool.run(A, lambda turn: 1, soon())
    assert pool.run(A, lambda turn: 2, soon()) == 2
    pool.close()
