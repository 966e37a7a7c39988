"""The threads that run plans: no more than the work needs, and no work that waits is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvcluster.transfers.worker_pool import WorkerPool
from tests.client.build import BOUND_S, Hold


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(3, "pool")
    yield pool
    pool.close()


def threads() -> int:
    return sum(thread.name.startswith("pool_") for thread in threading.enumerate())


def test_work_runs_on_threads_that_began(pool: WorkerPool) -> None:
    begun: list[str] = []
    named = WorkerPool(1, "named", lambda: begun.append(threading.current_thread().name))
    done = threading.Event()
    named.submit(done.set)
    assert done.wait(BOUND_S)
    named.close()
    assert begun == ["named_0"]


def test_no_more_threads_run_than_may_and_all_work_is_done(pool: WorkerPool) -> None:
    hold, done = Hold(), threading.Semaphore(0)

    def work() -> None:
        hold()
        done.release()

    for _ in range(10):
        pool.submit(work)
    hold.wait_reached()
    assert threads() <= 3
    hold.let_go()
    assert all(done.acquire(timeout=BOUND_S) for _ in range(10))


def test_what_is_submitted_while_a_thread_is_about_to_idle_waits_for_it(pool: WorkerPool) -> None:
    told, submitted, done = threading.Event(), threading.Event(), threading.Event()
    names: list[str] = []

    def first() -> None:
        with pool.about_to_idle():
            told.set()
            assert submitted.wait(BOUND_S)

    def second() -> None:
        names.append(threading.current_thread().name)
        done.set()

    pool.submit(first)
    assert told.wait(BOUND_S)
    pool.submit(second)
    submitted.set()
    assert done.wait(BOUND_S)
    assert names == ["pool_0"] and threads() == 1


def test_what_was_left_for_a_thread_that_goes_on_gets_another(pool: WorkerPool) -> None:
    told, submitted, done = threading.Event(), threading.Event(), threading.Event()

    def goes_on() -> None:
        with pool.about_to_idle():
            told.set()
            assert submitted.wait(BOUND_S)
        pool.start_thread_if_needed()
        assert done.wait(BOUND_S), "the other work is done meanwhile"

    pool.submit(goes_on)
    assert told.wait(BOUND_S)
    pool.submit(done.set)
    submitted.set()
    assert done.wait(BOUND_S)


def test_closing_runs_what_was_submitted_and_takes_no_more() -> None:
    pool, hold, ran = WorkerPool(1, "pool"), Hold(), []
    pool.submit(hold)
    hold.wait_reached()
    pool.submit(lambda: ran.append(1))
    closing = threading.Thread(target=pool.close)
    closing.start()
    hold.let_go()
    closing.join(BOUND_S)
    assert ran == [1] and not closing.is_alive() and threads() == 0
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: None)
    pool.close()
