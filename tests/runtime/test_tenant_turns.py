"""Turns of tenants at a core: who waits for whom, and for how long. Time is the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcluster.core.ids import CLUSTER, Tenant
from kvcluster.core.miss import MissReason
from kvcluster.runtime.tenant_turns import ACTIVE_S, REST, FairLock, TenantTurns
from kvcluster.transport.base import Unavailable
from tests.waiting import eventually

CALL_S = 0.001
A, B, C = Tenant("a"), Tenant("b"), Tenant("c")
LONG_S = 60.0


class Time:
    """A clock that moves only when a tenant rests, or the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.rests: list[float] = []

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def turns(time: Time) -> TenantTurns:
    return TenantTurns(CALL_S, lambda: time.now, time.rest)


def call(turns: TenantTurns, time: Time, tenant: Tenant, step_s: float = 0.0, wait_s: float = LONG_S) -> None:
    with turns.of(tenant, wait_s):
        time.now += step_s
        turns.spent(tenant, step_s)


def test_a_tenant_that_is_alone_never_rests(turns: TenantTurns, time: Time) -> None:
    for _ in range(3):
        call(turns, time, A, 1.0)
    assert time.rests == []


def test_a_tenant_rests_after_a_long_step_while_another_calls(turns: TenantTurns, time: Time) -> None:
    call(turns, time, A, 0.1)
    call(turns, time, B)
    assert time.rests == [], "the other does not wait"
    call(turns, time, A)
    assert time.rests == [pytest.approx(REST * (0.1 + CALL_S))]
    call(turns, time, C)
    call(turns, time, A)
    assert time.rests[1:] == [pytest.approx(REST * CALL_S)], "short steps cost short rests"


def test_time_that_has_passed_by_itself_is_rest_too(turns: TenantTurns, time: Time) -> None:
    call(turns, time, A, 0.1)
    call(turns, time, B)
    time.now += REST * (0.1 + CALL_S)
    call(turns, time, A)
    assert time.rests == []


def test_a_tenant_that_called_long_ago_lets_others_go_on(turns: TenantTurns, time: Time) -> None:
    call(turns, time, B)
    call(turns, time, A, 10 * ACTIVE_S)
    call(turns, time, A)
    assert time.rests == []


def test_a_rest_that_is_longer_than_the_call_may_take_is_a_miss(turns: TenantTurns, time: Time) -> None:
    call(turns, time, A, 1.0)
    call(turns, time, B)
    with pytest.raises(Unavailable) as late:
        call(turns, time, A, wait_s=0.5)
    assert late.value.miss.reason is MissReason.DEADLINE
    assert time.rests == [0.5], "it waited no longer than it may"


def decode(turns: TenantTurns, time: Time, seconds: float, step_s: float | None = None) -> None:
    """Decodes a message of A in its turn, and steps it if that took anything."""
    with turns.of(A, LONG_S):
        with turns.decoding(A):
            time.now += seconds
        if step_s is not None:
            time.now += step_s
            turns.spent(A, step_s)


def test_what_is_decoded_is_spent_like_a_step_be_it_sound_or_not(turns: TenantTurns, time: Time) -> None:
    call(turns, time, B)
    with pytest.raises(ValueError, match="malformed"), turns.of(A, LONG_S), turns.decoding(A):
        time.now += 0.1
        raise ValueError("malformed")
    call(turns, time, B)
    decode(turns, time, 0.0)
    assert time.rests == [pytest.approx(REST * 0.1)]
    call(turns, time, A)
    assert len(time.rests) == 1, "nothing was spent in the meantime"


def test_a_message_that_is_decoded_and_stepped_in_one_turn_is_spent_as_both(turns: TenantTurns, time: Time) -> None:
    call(turns, time, B)
    decode(turns, time, 0.1, step_s=0.2)
    call(turns, time, B)
    call(turns, time, A)
    call(turns, time, B)
    call(turns, time, A)
    of_both = REST * (0.1 + 0.2 + CALL_S)
    assert time.rests == [pytest.approx(of_both), pytest.approx(REST * CALL_S)], "the second was not decoded"


def test_the_shards_of_the_cluster_never_rest_and_are_no_reason_to(turns: TenantTurns, time: Time) -> None:
    for tenant in (CLUSTER, A, CLUSTER, A):
        call(turns, time, tenant, 1.0)
    assert time.rests == []


def test_one_call_of_a_tenant_at_a_time_and_another_tenants_beside_it(turns: TenantTurns) -> None:
    with turns.of(A, LONG_S):
        with pytest.raises(Unavailable), turns.of(A, 0.0):
            raise AssertionError("two at once")
        with turns.of(B, 0.0):
            pass
    with turns.of(A, 0.0):
        pass


# ------------------------------------------------------------------------------------------ the fair lock


@contextmanager
def waiters(lock: FairLock, order: list[int], count: int) -> Iterator[None]:
    """Threads that wait for the lock, in this order, and note when they have it."""

    def wait(number: int) -> None:
        with lock:
            order.append(number)

    threads = []
    for number in range(count):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        eventually(lambda number=number: len(lock._waiting) == number + 1)  # type: ignore[misc]
    yield
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_lock_is_passed_on_in_order_of_arrival() -> None:
    lock, order = FairLock(), list[int]()
    lock.acquire()
    with waiters(lock, order, 5):
        lock.release()
        lock.acquire()
        order.append(-1)
        lock.release()
    assert order == [0, 1, 2, 3, 4, -1], "who released it waited behind all others"


def test_a_lock_that_is_held_is_not_had_without_waiting() -> None:
    lock = FairLock()
    assert lock.acquire(blocking=False)
    assert not lock.acquire(blocking=False)
    lock.release()
    assert lock.acquire(blocking=False)
