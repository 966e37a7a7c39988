"""The timer of a client: what it calls and in which order, what it keeps alive, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from kvcluster.transfers.deadlines import Timer
from tests.client.build import BOUND_S

FAR_NS = 3_600_000_000_000
"""An hour from now is never, in a test."""


class Woken:
    """Counts its calls, and tells the thread that waits for them."""

    def __init__(self, calls: list[str] | None = None, name: str = "") -> None:
        self.calls = [] if calls is None else calls
        self.threads: list[threading.Thread] = []
        self.called = threading.Event()
        self._name = name

    def wake(self) -> None:
        self.calls.append(self._name)
        self.threads.append(threading.current_thread())
        self.called.set()

    def wait(self) -> None:
        assert self.called.wait(BOUND_S)


class Hold:
    """Keeps the timer's thread until it may go on."""

    def __init__(self, timer: Timer) -> None:
        self.go = threading.Event()
        self.left = False
        self._reached = threading.Event()
        timer.call_at(past(), self.wake)
        assert self._reached.wait(BOUND_S)

    def wake(self) -> None:
        self._reached.set()
        self.left = self.go.wait(BOUND_S)


def past() -> int:
    return time.monotonic_ns() - 1


def far() -> int:
    return time.monotonic_ns() + FAR_NS


def timer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvcluster-timer"]


def test_a_timer_without_plans_has_no_thread() -> None:
    before = timer_threads()
    Timer().close()
    assert timer_threads() == before


def test_what_is_due_is_called_on_the_one_thread_of_the_timer() -> None:
    timer, one, other = Timer(), Woken(), Woken()
    timer.call_at(past(), one.wake)
    one.wait()
    timer.call_at(past(), other.wake)
    other.wait()
    timer.close()
    assert one.threads == other.threads != [threading.current_thread()]
    assert len(one.calls) == len(other.calls) == 1


def test_what_is_due_first_is_called_first_and_at_one_moment_what_was_asked_first() -> None:
    timer, calls = Timer(), list[str]()
    hold, now = Hold(timer), past()
    woken = [Woken(calls, name) for name in ("second", "third", "first")]
    for one, when in zip(woken, (now, now, now - 1), strict=True):
        timer.call_at(when, one.wake)
    hold.go.set()
    woken[1].wait()
    timer.close()
    assert calls == ["first", "second", "third"]


def test_an_earlier_moment_wakes_a_thread_that_waits_for_a_later_one() -> None:
    timer, late, soon = Timer(), Woken(), Woken()
    timer.call_at(far(), late.wake)
    timer.call_at(past(), soon.wake)
    soon.wait()
    timer.close()
    assert late.calls == []


def test_what_is_not_due_is_not_called_when_the_timer_closes() -> None:
    timer, late = Timer(), Woken()
    timer.call_at(far(), late.wake)
    timer.close()
    assert late.calls == [] and timer._thread is not None and not timer._thread.is_alive()


def test_an_object_is_not_kept_until_its_moment() -> None:
    timer, late = Timer(), Woken()
    timer.call_at(far(), late.wake)
    gone = weakref.ref(late)
    del late
    gc.collect()
    assert gone() is None
    timer.close()


def test_an_object_that_is_gone_is_not_called_and_those_behind_it_are() -> None:
    timer, calls = Timer(), list[str]()
    hold = Hold(timer)
    dead, alive = Woken(calls, "dead"), Woken(calls, "alive")
    timer.call_at(past(), dead.wake)
    timer.call_at(past(), alive.wake)
    del dead
    gc.collect()
    hold.go.set()
    alive.wait()
    timer.close()
    assert calls == ["alive"]


def test_an_object_that_was_called_is_not_kept() -> None:
    timer, woken, late, gone = Timer(), Woken(), Woken(), threading.Event()
    timer.call_at(far(), late.wake)
    timer.call_at(past(), woken.wake)
    woken.wait()
    weakref.finalize(woken, gone.set)
    del woken
    assert gone.wait(BOUND_S), "by a thread that waits for the next"
    timer.close()


def test_a_closed_timer_calls_nothing_and_may_be_closed_again() -> None:
    timer, woken = Timer(), Woken()
    timer.call_at(past(), woken.wake)
    woken.wait()
    timer.close()
    timer.call_at(past(), woken.wake)
    timer.close()
    assert len(woken.calls) == 1


def test_a_timer_that_was_closed_before_its_first_plan_starts_no_thread() -> None:
    timer, woken = Timer(), Woken()
    timer.close()
    timer.call_at(past(), woken.wake)
    assert timer._thread is None and woken.calls == []


def test_close_waits_for_the_call_in_hand() -> None:
    timer = Timer()
    hold = Hold(timer)
    thread = timer._thread
    assert thread is not None
    join = thread.join

    def let_go_and_join() -> None:
        hold.go.set()
        join(BOUND_S)

    thread.join = let_go_and_join  # type: ignore[assignment,method-assign]
    timer.close()
    assert hold.left
