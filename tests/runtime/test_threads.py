"""Threads beside a driver: they run work in order, do not delay it, and report an error before they end."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvcluster.runtime.threads import JobThread
from tests.waiting import eventually

BOUND_S = 20.0


@contextmanager
def running(
    do: Callable[[int], None], *, most: int = 1, niceness: int = 0, failures: list[BaseException] | None = None
) -> Iterator[JobThread[int]]:
    heard: list[BaseException] = [] if failures is None else failures
    thread = JobThread(do, name="test", on_failure=heard.append, most=most, niceness=niceness)
    thread.start()
    try:
        yield thread
    finally:
        thread.close()
    assert heard == [] or failures is not None


def test_jobs_are_done_in_order_on_one_thread() -> None:
    done: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    with running(lambda job: done.put((job, threading.get_ident())), most=100) as thread:
        for job in range(100):
            thread.submit(job)
        seen = [done.get(timeout=BOUND_S) for _ in range(100)]
    assert [job for job, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_one_job_more_than_may_wait_is_a_mistake() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(job: int) -> None:
        begun.set()
        go_on.wait(BOUND_S)

    with running(hold) as thread:
        thread.submit(1)
        assert begun.wait(BOUND_S)
        thread.submit(2)
        with pytest.raises(AssertionError, match="1 jobs waiting already"):
            thread.submit(3)
        go_on.set()


def test_a_job_may_ask_for_the_next_while_it_ends() -> None:
    """As a core does that is answered: the next order comes within the very step."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def do(job: int) -> None:
        done.put(job)
        if job:
            thread.submit(job - 1)

    with running(do) as thread:
        thread.submit(50)
        assert [done.get(timeout=BOUND_S) for _ in range(51)] == list(range(50, -1, -1))


def test_what_waits_when_it_closes_is_dropped_and_what_is_under_way_ends() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()

    def hold(job: int) -> None:
        begun.set()
        go_on.wait(BOUND_S)
        done.append(job)

    with running(hold) as thread:
        thread.submit(1)
        assert begun.wait(BOUND_S)
        thread.submit(2)
        closing = threading.Thread(target=thread.close)
        closing.start()
        eventually(lambda: thread._closing)
        go_on.set()
        closing.join(BOUND_S)
        assert not closing.is_alive()
    assert done == [1]


def test_a_thread_that_was_never_started_closes() -> None:
    JobThread(print, name="test", on_failure=pytest.fail).close()


def test_a_job_that_raises_is_heard_of_and_ends_the_thread() -> None:
    failures: list[BaseException] = []
    mistake = ValueError("a mistake")

    def raise_it(job: int) -> None:
        raise mistake

    with running(raise_it, failures=failures) as thread:
        thread.submit(1)
        eventually(lambda: failures)
    assert failures == [mistake]


@pytest.mark.parametrize("niceness", [0, 5])
def test_a_nice_thread_is_nicer_by_itself_alone(niceness: int) -> None:
    measured: queue.SimpleQueue[int] = queue.SimpleQueue()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with running(lambda job: measured.put(priority()), niceness=niceness) as thread:
        thread.submit(1)
        theirs = measured.get(timeout=BOUND_S)
    assert theirs == (min(19, mine + niceness) if sys.platform == "linux" else mine)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)
